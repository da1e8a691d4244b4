# SPDX-License-Identifier: Apache-2.0
"""A tokenizer of bytes, and small chat templates: one for each thing that the templates of models do."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|head|>", "<|end|>", "<|call|>", "<|say|>", "<|said|>")

HEADED = (
    "{% for m in messages %}<|head|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant\n{% endif %}"
)
TRIMMED = HEADED.replace("m.content", "m.content | trim")
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<|head|>system\nBe kind.<|end|>\n{% endif %}" + HEADED
# No generation prompt: the answer follows the user's turn. Turns must alternate.
BRACKETS = (
    "<s>{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[ASK] {{ m.content }} [/ASK]{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"
)
# The system turn stands before the user's last one, as long as that is not answered.
LATE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'user' %}[ASK] "
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}{{ m.content }} [/ASK]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
PADDED_END = BRACKETS.replace("</s>", " </s>")
# The same header, without the switch that writes it where the answer begins.
NO_SWITCH = HEADED.split("{% if add_generation_prompt %}")[0]
# An end of the whole conversation behind the end of its last turn.
TWO_ENDS = HEADED.replace("{% endif %}", "{% else %}</s>{% endif %}")
# Tokens around the text that the target writes itself.
FRAMED = (
    "{% for m in messages %}<|head|>{{ m.role }}\n{% if m.role == 'assistant' %}<|say|>{{ m.content }}<|said|>"
    "{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant\n{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('No system turn') }}{% endif %}" + TRIMMED
# Reasoning of the last turn stands in markup, that of earlier ones is dropped; a switch closes the markup at once.
_THOUGHT = (
    "{% for m in messages %}<|head|>{{ m.role }}\n"
    "{% set text = m.content %}{% set thought = m.reasoning_content or '' %}"
    "{% if m.role == 'assistant' %}{% if not thought and '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].split('<think>')[-1] %}{% set text = text.split('</think>')[-1] %}"
    "{% endif %}{% set text = text | trim %}{% if loop.last %}<think>\n{{ thought | trim }}\n</think>\n\n{% endif %}"
    "{% endif %}{{ text }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|head|>assistant\n"
)
THINKING = (
    _THOUGHT
    + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# The generation prompt opens the markup.
OPENED = _THOUGHT + "<think>\n{% endif %}"
# It opens the markup too, but no answer is rendered with its reasoning.
FORGETFUL = (
    "{% for m in messages %}<|head|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant\n<think>\n{% endif %}"
)
TOOLS = (
    "{% if tools %}<|head|>tools\n{{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for m in messages %}<|head|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<|call|>{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|head|>assistant\n{% endif %}"
)
# Calls need their arguments as text.
TEXT_TOOLS = TOOLS.replace("call.function.arguments | tojson", "'(' + call.function.arguments + ')'")
# A turn ends where the next one begins.
NO_END = (
    "{% for m in messages %}{{ {'user': '<|head|>', 'assistant': '<|say|>', 'tool': '<|call|>'}[m.role] }}\n"
    "{{ m.content }}{% for call in m.tool_calls or [] %}({{ call.function.name }}){% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|say|>\n{% endif %}"
)
# The markup of reasoning is opened or closed by the prompt; answers are rendered without it.
CLOSED = (
    "{% for m in messages %}<|head|>{{ m.role }}{% if m.role == 'assistant' %}</think>"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant{{ '<think>' if enable_thinking else '</think>' }}{% endif %}"
)

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Rome"}}}


def byte_tokenizer(template: Any = HEADED) -> PreTrainedTokenizerFast:
    """A token per byte, and the special ones; `</s>` is the end token."""
    alphabet = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template
    return fast


def user(text: str = "hi") -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str = "yes", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | fields


def tool_result(text: str = "sunny") -> dict[str, Any]:
    return {"role": "tool", "content": text}
