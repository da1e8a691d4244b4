# SPDX-License-Identifier: Apache-2.0
"""What a chat template makes of prompts and answers: the text that the target reads, and the text that it writes."""

import pytest

from dspark_hf.common.chat import template_hash, template_text
from dspark_hf.common.chat_tokens import encode_conversation, encode_messages, end_token_ids, user_turn
from tests.support.chat import (
    BRACKETS,
    CALL,
    CLOSED,
    DEFAULT_SYSTEM,
    FORGETFUL,
    FRAMED,
    HEADED,
    LATE_SYSTEM,
    NO_END,
    NO_SWITCH,
    NO_SYSTEM,
    OPENED,
    PADDED_END,
    SPECIAL_TOKENS,
    TEXT_TOOLS,
    THINKING,
    TOOL,
    TOOLS,
    TRIMMED,
    TWO_ENDS,
    assistant,
    byte_tokenizer,
    tool_result,
    user,
)
from tests.support.models import tiny_target
from tests.support.training import word_tokenizer


SYSTEM = {"role": "system", "content": "Be brief."}


def prompt_of(template, *messages, **switches):
    tokenizer = byte_tokenizer(template)
    return tokenizer.decode(encode_messages(tokenizer, messages, **switches))


def answer_of(template, *messages, **switches):
    """Prompt and answer as texts."""
    tokenizer = byte_tokenizer(template)
    return tuple(tokenizer.decode(ids) for ids in encode_conversation(tokenizer, messages, **switches))


def refused(function, template, *messages, **switches):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the callers look at the whole message
        function(template, *messages, **switches)
    return str(caught.value)


def id_of(token):
    return byte_tokenizer().convert_tokens_to_ids(token)


# Prompts


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (HEADED, "<|head|>user\nhi<|end|>\n<|head|>assistant\n"),
        (DEFAULT_SYSTEM, "<|head|>system\nBe kind.<|end|>\n<|head|>user\nhi<|end|>\n<|head|>assistant\n"),
        (BRACKETS, "<s>[ASK] hi [/ASK]"),
        (TWO_ENDS, "<|head|>user\nhi<|end|>\n<|head|>assistant\n"),
        (OPENED, "<|head|>user\nhi<|end|>\n<|head|>assistant\n<think>\n"),
    ],
)
def test_prompt_ends_where_the_answer_begins(template, expected):
    assert prompt_of(template, user()) == expected


def test_prompt_of_a_later_turn_has_the_earlier_answers_as_the_template_keeps_them():
    turns = (user("a"), assistant("b", reasoning_content="because"), user("c"))
    begin = "<|head|>user\na<|end|>\n<|head|>assistant\nb<|end|>\n<|head|>user\nc<|end|>\n<|head|>assistant\n"
    assert prompt_of(THINKING, *turns) == begin
    assert prompt_of(THINKING, *turns, enable_thinking=False) == begin + "<think>\n\n</think>\n\n"
    assert prompt_of(BRACKETS, *turns) == "<s>[ASK] a [/ASK] b</s>[ASK] c [/ASK]"


def test_answer_with_a_header_needs_a_generation_prompt():
    message = refused(prompt_of, NO_SWITCH, user())
    assert "ignores `add_generation_prompt`, but begins an answer with '<|head|>assistant\\n'" in message
    assert "Use a template with a generation prompt" in message


def test_answer_that_does_not_follow_the_prompt_is_refused():
    changes_the_prompt = "{% for m in messages %}{% if loop.last %}!{% endif %}{{ m.content }}{% endfor %}"
    assert "ignores `add_generation_prompt`" in refused(prompt_of, changes_the_prompt, user())


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (NO_SYSTEM, (SYSTEM, user()), "TemplateError: No system turn"),
        (BRACKETS, (user(), user()), "TemplateError: Roles must alternate"),
        ("{{ messages[0].content + 1 }}", (user(),), "TypeError"),
        ("{{ messages[0].nothing.more }}", (user(),), "UndefinedError"),
        ("{{ messages[9].content }}", (user(),), "UndefinedError"),
        ("{{ 1 // 0 }}", (user(),), "ZeroDivisionError"),
        ("{% if %}", (user(),), "TemplateSyntaxError"),
    ],
)
def test_template_that_fails_says_how(template, messages, reason):
    message = refused(prompt_of, template, *messages)
    assert message.startswith("The chat template refuses the conversation (")
    assert reason in message


def test_template_is_needed():
    assert "has no chat template" in refused(prompt_of, None, user())
    assert "has no chat template" in refused(prompt_of, {}, user())


def test_prompt_without_tokens_is_refused():
    nothing = "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
    assert "at least one token, got none" in refused(prompt_of, nothing, user())


def test_named_templates():
    named = {"default": HEADED, "tool_use": TOOLS, "rag": "x"}
    assert prompt_of(named, user()) == prompt_of(HEADED, user())
    assert prompt_of(named, user(), tools=[TOOL]) == prompt_of(TOOLS, user(), tools=[TOOL])
    del named["default"]
    assert prompt_of(named, user(), tools=[TOOL]) == prompt_of(TOOLS, user(), tools=[TOOL])
    message = refused(prompt_of, named, user())
    assert "several chat templates (rag, tool_use), and none of them is called 'default'" in message


def test_hash_is_that_of_the_template_in_use():
    """SHA-256 of the empty text and of "x"."""
    assert template_hash(word_tokenizer(template=None)).startswith("e3b0c44298fc1c14")
    assert template_hash(word_tokenizer(template="x")).startswith("2d711642b726b044")
    assert template_hash(byte_tokenizer({"default": "x", "tool_use": "y"})).startswith("2d711642b726b044")
    others = [template_hash(byte_tokenizer({"rag": text, "tool_use": "y"})) for text in "xz"]
    assert others[0] != others[1]


def test_text_of_all_templates():
    assert template_text(byte_tokenizer({"b": "<|say|>", "a": "x"})) == "x<|say|>"
    assert template_text(byte_tokenizer("x")) == "x"
    assert template_text(byte_tokenizer(None)) == ""


# Tools


def test_tools_and_calls_are_in_the_prompt():
    begin = '<|head|>tools\n[{"type": "function", "function": {"name": "weather", "parameters": {}}}]<|end|>\n'
    turns = (user(), assistant("", tool_calls=[CALL]), tool_result())
    said = '<|head|>user\nhi<|end|>\n<|head|>assistant\n<|call|>weather{"town": "Rome"}<|end|>\n'
    said += "<|head|>tool\nsunny<|end|>\n<|head|>assistant\n"
    assert prompt_of(TOOLS, *turns, tools=[TOOL]) == begin + said
    as_text = {"function": {"name": "weather", "arguments": '{"town":"Rome"}'}, "id": "1"}
    assert prompt_of(TOOLS, user(), assistant("", tool_calls=[as_text]), tool_result()) == said


def test_arguments_as_the_template_takes_them():
    """As text where it needs that, whatever the row has."""
    as_text = {"function": {"name": "weather", "arguments": '{"town": "Rome"}'}}
    for call in (CALL, as_text):
        turns = (user(), assistant("", tool_calls=[call]), tool_result())
        assert '<|call|>weather({"town": "Rome"})<|end|>' in prompt_of(TEXT_TOOLS, *turns)
        assert answer_of(TEXT_TOOLS, *turns[:2])[1] == '<|call|>weather({"town": "Rome"})<|end|>'
    assert prompt_of(TEXT_TOOLS, *turns) == prompt_of(TEXT_TOOLS, user(), assistant("", tool_calls=[CALL]), turns[2])


def test_what_a_template_ignores_is_named():
    assert "ignores `tools`" in refused(prompt_of, HEADED, user(), tools=[TOOL])
    assert "ignores `tools`" in refused(prompt_of, {"default": HEADED, "tool_use": HEADED}, user(), tools=[TOOL])
    calls = (user(), assistant("", tool_calls=[CALL]), tool_result())
    assert "ignores `tool_calls`" in refused(prompt_of, HEADED, *calls)
    only_speech = TOOLS.replace("{{ m.content }}", "{% if m.role != 'tool' %}{{ m.content }}{% endif %}")
    assert "ignores the result of a tool" in refused(prompt_of, only_speech, *calls)


def test_arguments_that_are_no_json_are_named():
    call = {"function": {"name": "weather", "arguments": '{"town": '}}
    message = refused(prompt_of, TOOLS, user(), assistant("", tool_calls=[call]), tool_result())
    assert "The arguments of a call must be JSON" in message


# Answers


@pytest.mark.parametrize(
    ("template", "text", "expected"),
    [
        (HEADED, "yes", "yes<|end|>"),
        (HEADED, " yes\n", " yes\n<|end|>"),
        (TRIMMED, " yes\n", " yes\n<|end|>"),  # what was written, not what a later prompt keeps of it
        (DEFAULT_SYSTEM, "yes", "yes<|end|>"),
        (BRACKETS, "yes", " yes</s>"),
        (BRACKETS, " yes", " yes</s>"),
        (PADDED_END, "yes ", " yes </s>"),
        (TWO_ENDS, "yes", "yes<|end|>"),
        (FRAMED, "yes", "<|say|>yes<|said|>"),
        (NO_SYSTEM, "yes", "yes<|end|>"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "yes", "yes</s>"),  # no end in the template
    ],
)
def test_answer_is_what_the_target_writes(template, text, expected):
    prompt, answer = answer_of(template, user(), assistant(text))
    assert prompt == prompt_of(template, user())
    assert answer == expected


def test_prompt_that_reads_otherwise_once_it_is_answered():
    turns = (SYSTEM, user("a"), assistant("b"), user("c"), assistant("d"))
    prompt = "[ASK] a [/ASK] b</s>[ASK] Be brief.\n\nc [/ASK]"
    assert prompt_of(LATE_SYSTEM, *turns[:-1]) == prompt
    assert answer_of(LATE_SYSTEM, *turns) == (prompt, " d</s>")
    reminder = "{{ m.content }}{% if loop.last and m.role == 'user' %} (Think!){% endif %}"
    prompt, answer = answer_of(HEADED.replace("{{ m.content }}", reminder), user("c"), assistant("d"))
    assert prompt == "<|head|>user\nc (Think!)<|end|>\n<|head|>assistant\n"
    assert answer == "d<|end|>"


def test_end_is_the_first_token_that_generation_stops_at():
    end, framed = id_of("<|end|>"), [user(), assistant()]
    assert answer_of(FRAMED, *framed, end_ids=[id_of("</s>"), end])[1] == "<|say|>yes<|said|><|end|>"
    assert answer_of(TWO_ENDS, *framed, end_ids=[end, id_of("</s>")])[1] == "yes<|end|>"


def test_end_that_is_the_begin_of_the_next_turn():
    """Of the user, or of the result of a tool; the end token where generation stops at neither."""
    ends = [id_of("<|head|>"), id_of("<|call|>")]
    assert answer_of(NO_END, user(), assistant(), end_ids=ends)[1] == "yes<|head|>"
    assert answer_of(NO_END, user(), assistant("", tool_calls=[CALL]), end_ids=ends)[1] == "(weather)<|call|>"
    assert answer_of(NO_END, user(), assistant())[1] == "yes</s>"
    assert answer_of(NO_END, user(), assistant(), end_ids=[id_of("</s>")])[1] == "yes</s>"


@pytest.mark.parametrize("reason", ["length", "abort", "content_filter"])
def test_answer_that_was_cut_has_no_end(reason):
    assert answer_of(HEADED, user(), assistant(), finish_reason=reason)[1] == "yes"
    assert answer_of(BRACKETS, user(), assistant(), finish_reason=reason)[1] == " yes"
    thought = assistant("", reasoning_content="so")
    assert answer_of(THINKING, user(), thought, finish_reason=reason)[1] == "<think>\nso"
    thought = assistant("ye", reasoning_content="so")
    assert answer_of(THINKING, user(), thought, finish_reason=reason)[1] == "<think>\nso\n</think>\n\nye"


def test_only_the_last_answer_is_an_answer():
    prompt, answer = answer_of(HEADED, user("a"), assistant("b"), user("c"), assistant("d"))
    assert prompt.endswith("b<|end|>\n<|head|>user\nc<|end|>\n<|head|>assistant\n")
    assert answer == "d<|end|>"


def test_text_of_the_user_that_looks_like_a_mark_or_an_end():
    prompt, answer = answer_of(HEADED, user("\u241f \u241e <|end|>"), assistant("\u241e<|end|> yes"))
    assert prompt == "<|head|>user\n\u241f \u241e <|end|><|end|>\n<|head|>assistant\n"
    assert answer == "\u241e<|end|> yes<|end|>"


# Reasoning


@pytest.mark.parametrize("thought", ["so", "so\n"])
@pytest.mark.parametrize("text", ["yes", "\n\nyes"])
def test_reasoning_stands_in_the_markup_of_the_template(thought, text):
    answered = assistant(text, reasoning_content=thought)
    assert answer_of(THINKING, user(), answered)[1] == "<think>\nso\n</think>\n\nyes<|end|>"
    prompt, answer = answer_of(OPENED, user(), answered)
    assert prompt.endswith("<think>\n")
    assert answer == "so\n</think>\n\nyes<|end|>"


def test_reasoning_in_the_text_is_the_same():
    written = assistant("<think>\nso\n</think>\n\nyes")
    assert answer_of(THINKING, user(), written)[1] == "<think>\nso\n</think>\n\nyes<|end|>"
    for template in (OPENED, FORGETFUL):  # their prompt has opened it
        assert answer_of(template, user(), assistant("so\n</think>\n\nyes"))[1] == "so\n</think>\n\nyes<|end|>"


def test_answer_without_reasoning():
    assert answer_of(THINKING, user(), assistant())[1] == "<think>\n\n</think>\n\nyes<|end|>"
    prompt, answer = answer_of(THINKING, user(), assistant(), enable_thinking=False)
    assert prompt.endswith("<think>\n\n</think>\n\n")
    assert answer == "yes<|end|>"
    assert answer_of(OPENED, user(), assistant())[1] == "\n</think>\n\nyes<|end|>"


def test_reasoning_that_the_template_ignores_is_named():
    answered = assistant(reasoning_content="so")
    for template in (HEADED, FORGETFUL, BRACKETS):
        message = refused(answer_of, template, user(), answered)
        assert "ignores `reasoning_content`" in message
        assert "put the reasoning into `content`" in message


def test_reasoning_that_is_missing_is_named():
    message = refused(answer_of, FORGETFUL, user(), assistant())
    assert "The prompt ends with '<think>\\n', but the answer has no '</think>'" in message
    assert answer_of(FORGETFUL, user(), assistant("so"), finish_reason="length")[1] == "so"  # cut while it thought


def test_prompt_that_closes_or_opens_the_reasoning():
    assert answer_of(CLOSED, user(), assistant()) == ("<|head|>userhi<|end|><|head|>assistant</think>", "yes<|end|>")
    prompt, answer = answer_of(CLOSED, user(), assistant("so</think>yes"), enable_thinking=True)
    assert prompt.endswith("<think>")
    assert answer == "so</think>yes<|end|>"
    message = refused(answer_of, CLOSED, user(), assistant(), enable_thinking=True)
    assert "The prompt ends with '<think>', but the answer has no '</think>'" in message


def test_reasoning_and_a_prompt_that_says_there_is_none():
    message = refused(answer_of, THINKING, user(), assistant(reasoning_content="so"), enable_thinking=False)
    assert "ends the prompt with " in message
    assert "Set the thinking switch that the answer was made with" in message


# Answers that are calls


def test_answer_that_is_a_call():
    answered = assistant("", tool_calls=[CALL])
    for reason in ("stop", "tool_calls"):
        assert answer_of(TOOLS, user(), answered, tools=[TOOL], finish_reason=reason)[1] == (
            '<|call|>weather{"town": "Rome"}<|end|>'
        )
    both = assistant("One moment.", tool_calls=[CALL, CALL])
    assert answer_of(TOOLS, user(), both)[1] == "One moment." + '<|call|>weather{"town": "Rome"}' * 2 + "<|end|>"
    after = (user(), answered, tool_result(), assistant("Sunny."))
    assert answer_of(TOOLS, *after)[1] == "Sunny.<|end|>"


def test_calls_that_the_template_ignores_are_named():
    assert "ignores `tool_calls`" in refused(answer_of, HEADED, user(), assistant("", tool_calls=[CALL]))
    or_text = TOOLS.replace("{{ m.content }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}")
    assert "ignores `content` beside" in refused(answer_of, or_text, user(), assistant("Wait", tool_calls=[CALL]))
    thought = assistant("", tool_calls=[CALL], reasoning_content="so")
    assert "ignores `reasoning_content` beside" in refused(answer_of, TOOLS, user(), thought)


def test_call_that_was_cut_is_refused():
    message = refused(answer_of, TOOLS, user(), assistant("", tool_calls=[CALL]), finish_reason="length")
    assert "must have ended, got one that was cut off" in message


# Ends


@pytest.mark.parametrize(
    ("template", "generation", "expected"),
    [
        (HEADED, None, {"</s>", "<|end|>"}),
        (HEADED, ["<|call|>", "<|end|>"], {"</s>", "<|call|>", "<|end|>"}),
        (FRAMED, ["<|end|>"], {"</s>", "<|end|>"}),
        (BRACKETS, "</s>", {"</s>"}),
        (None, "<|call|>", {"</s>", "<|call|>"}),
        ("{{ raise_exception('no') }}", None, {"</s>"}),
    ],
)
def test_all_ends_of_an_answer(template, generation, expected):
    target, tokenizer = tiny_target(vocab_size=272), byte_tokenizer(template)
    target.generation_config.eos_token_id = None if generation is None else tokenizer.convert_tokens_to_ids(generation)
    assert end_token_ids(target, tokenizer) == set(tokenizer.convert_tokens_to_ids(sorted(expected)))


def test_turn_of_the_user():
    target = tiny_target(vocab_size=272)
    head, ends = user_turn(target, byte_tokenizer(DEFAULT_SYSTEM))
    assert head == "<|head|>system\nBe kind.<|end|>\n<|head|>user\n"
    assert ends == {id_of("</s>"), id_of("<|end|>")}
    closing = BRACKETS.replace("[/ASK]", "<|said|>")
    assert user_turn(target, byte_tokenizer(closing))[1] == {id_of("</s>"), id_of("<|said|>")}
    with pytest.raises(ValueError, match="Without a chat template the target cannot write prompts. Pass prompts"):
        user_turn(target, byte_tokenizer(None))
    with pytest.raises(ValueError, match="ignores a user's turn"):
        user_turn(target, byte_tokenizer("x"))


def test_tokens_of_the_fixture_are_what_the_tests_take_them_for():
    tokenizer = byte_tokenizer()
    assert len({id_of(token) for token in SPECIAL_TOKENS}) == len(SPECIAL_TOKENS)
    assert tokenizer.decode(tokenizer("a <|end|>\n")["input_ids"]) == "a <|end|>\n"
