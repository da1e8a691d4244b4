# SPDX-License-Identifier: Apache-2.0
"""Chat templates: the text of a prompt, and of the answer that a target would write after it.

A template is probed by rendering: the text with and without a part of a conversation shows how it treats that part.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase


# Characters that stand for the parts of a conversation; no template contains them.
TEXT_MARK, REASONING_MARK, PROMPT_MARK = "\u241f", "\u241e", "\u241d"
Turn = dict[str, Any]


@dataclass(frozen=True)
class Chat:
    """A target's chat template with its switches, for one row."""

    tokenizer: PreTrainedTokenizerBase
    enable_thinking: bool | None = None  # the template's thinking switch; None leaves it to the template
    tools: Sequence[dict[str, Any]] = ()  # tools that the row offers

    def render(self, messages: Sequence[Turn], add_generation_prompt: bool = False) -> str:
        """The text of a conversation."""
        template = self.tokenizer.chat_template
        if not template:
            raise ValueError(
                "The target's tokenizer has no chat template, so nothing says where an answer begins. Set "
                "`tokenizer.chat_template`, or save one with the target."
            )
        names = sorted(template) if isinstance(template, dict) else ["default"]
        if "default" not in names and not (self.tools and "tool_use" in names):
            raise ValueError(
                f"The target's tokenizer has several chat templates ({', '.join(names)}), and none of them is called "
                "'default'. Set `tokenizer.chat_template` to the one to use, and save the tokenizer."
            )
        switch = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        # Most templates take the arguments of calls as objects, some as the text that OpenAI's format has.
        forms = [[_with_arguments(turn, str, _parsed) for turn in messages]]
        if any(turn.get("tool_calls") for turn in messages):
            forms.append([_with_arguments(turn, dict, json.dumps) for turn in messages])
        failures = []
        for turns in forms:
            try:
                return self.tokenizer.apply_chat_template(
                    turns,
                    tools=list(self.tools) or None,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **switch,
                )
            except Exception as error:  # a template is a program: it can fail in any way
                failures.append(error)
        said = " ".join(str(failures[0]).split())
        raise ValueError(
            f"The chat template refuses the conversation ({type(failures[0]).__name__}: {said})."
        ) from failures[0]

    def prompt(self, messages: Sequence[Turn]) -> str:
        """The text up to where the answer begins."""
        text = self.render(messages, add_generation_prompt=True)
        if text == self.render(messages):
            self._check_answer_follows(messages, text)
        if self.tools and Chat(self.tokenizer, self.enable_thinking)._gives(text, messages):
            raise ValueError(_ignored("`tools`"))
        for index, turn in enumerate(messages):
            before, after = messages[:index], messages[index + 1 :]
            if turn.get("tool_calls") and self._gives(text, [*before, _without(turn, "tool_calls"), *after]):
                raise ValueError(_ignored("`tool_calls`"))
            if turn["role"] == "tool" and self._gives(text, [*before, turn | {"content": TEXT_MARK}, *after]):
                raise ValueError(_ignored("the result of a tool"))
        return text

    def answer(self, messages: Sequence[Turn], prompt: str, ended: bool = True) -> tuple[str, str]:
        """The target's text after a prompt: its reasoning, text and calls, in the template's markup."""
        if messages[-1].get("tool_calls"):
            if not ended:
                raise ValueError("An answer with `tool_calls` must have ended, got one that was cut off.")
            return self._calls(messages, prompt), ""
        return self._text(messages, prompt, ended)

    def _gives(self, prompt: str, messages: Sequence[Turn]) -> bool:
        """Whether other turns give the same prompt; not if the template refuses them."""
        try:
            return self.render(messages, add_generation_prompt=True) == prompt
        except ValueError:
            return False

    def _behind(self, messages: Sequence[Turn], prompt: str) -> tuple[str, str]:
        """What an answered conversation has behind the prompt; first, what the prompt ends with that it lacks."""
        *before, turn = messages
        text = self.render(messages)
        if not text.startswith(prompt):
            # Earlier turns may read otherwise once they are answered: compare what stands behind the last of them.
            marked = [*before[:-1], before[-1] | {"content": PROMPT_MARK}]
            ends = self.render(marked, add_generation_prompt=True), self.render([*marked, turn])
            if all(PROMPT_MARK in end for end in ends):
                prompt, text = (end.rpartition(PROMPT_MARK)[2] for end in ends)
        same = _num_equal(prompt, text)
        tag = prompt.rfind("<", 0, same)
        if same < len(prompt) and ">" not in prompt[tag:same] and tag >= 0:
            same = tag  # not inside a tag: "<think>" and "</think>" begin alike
        return prompt[same:], text[same:]

    def _check_answer_follows(self, messages: Sequence[Turn], prompt: str) -> None:
        """No generation prompt is needed if only white space separates a prompt and its answer."""
        missing, behind = self._behind([*messages, {"role": "assistant", "content": TEXT_MARK}], prompt)
        begin = behind.partition(TEXT_MARK)[0]
        if missing or begin.strip():
            raise ValueError(
                f"The chat template ignores `add_generation_prompt`, but begins an answer with {begin!r}. Use a "
                "template with a generation prompt."
            )

    def _text(self, messages: Sequence[Turn], prompt: str, ended: bool) -> tuple[str, str]:
        *before, turn = messages
        text, reasoning = turn["content"], turn.get("reasoning_content")
        marks = {"content": TEXT_MARK} | ({"reasoning_content": REASONING_MARK} if reasoning else {})
        missing, behind = self._behind([*before, turn | marks], prompt)
        head, mark, tail = behind.rpartition(TEXT_MARK)
        if not mark:
            raise ValueError(_ignored("the text of an answer"))
        if not reasoning:
            if missing:
                _check_closed(missing, text, ended)
                return text, tail
            if head.strip() and not _is_around(self._behind(messages, prompt)[1], head, text, tail):
                return text, tail  # the template takes the text apart: it holds the reasoning and its markup itself
            return _joined(head, text, tail), tail
        if REASONING_MARK not in head:
            raise ValueError(
                f"{_ignored('`reasoning_content`')} Or put the reasoning into `content`, in the markup that the "
                "target writes; a server without a reasoning parser does."
            )
        _check_nothing_missing(missing, head)
        lead, _, between = head.rpartition(REASONING_MARK)
        thought = _joined(lead, reasoning, between)
        if not ended and not text:
            return thought, tail
        return _joined(thought + between, text, tail), tail

    def _calls(self, messages: Sequence[Turn], prompt: str) -> str:
        *before, turn = messages
        missing, answer = self._behind(messages, prompt)
        if (missing, answer) == self._behind([*before, _without(turn, "tool_calls")], prompt):
            raise ValueError(_ignored("`tool_calls`"))
        _check_nothing_missing(missing, answer)
        for name in ("reasoning_content", "content"):
            if turn.get(name, "").strip() not in answer:
                raise ValueError(_ignored(f"`{name}` beside `tool_calls`"))
        return answer


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:  # empty where there is none
    """The text of all chat templates of a tokenizer."""
    template = tokenizer.chat_template or ""
    return template if isinstance(template, str) else "".join(template[name] for name in sorted(template))


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str:  # SHA-256 in hex
    """Hash of a chat template: a draft fits only the template it was trained with."""
    template = tokenizer.chat_template
    default = template.get("default") if isinstance(template, dict) else None
    return hashlib.sha256((default or template_text(tokenizer)).encode()).hexdigest()


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError as error:
        raise ValueError(f"The arguments of a call must be JSON, got {arguments!r}.") from error


def _with_arguments(turn: Turn, kind: type, change: Callable[[Any], Any]) -> Turn:
    """A turn whose calls have their arguments of one kind changed to the other."""

    def changed(call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        found = {name: changed(value) if name == "function" else value for name, value in call.items()}
        if isinstance(found.get("arguments"), kind):
            found["arguments"] = change(found["arguments"])
        return found

    return turn | {"tool_calls": [changed(call) for call in turn["tool_calls"]]} if turn.get("tool_calls") else turn


def _without(turn: Turn, name: str) -> Turn:
    return {key: value for key, value in turn.items() if key != name}


def _ignored(what: str) -> str:
    return f"The chat template ignores {what}: the target would not see it. Take it out, or use another template."


def _num_equal(ours: str, theirs: str) -> int:
    """Characters that two texts begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def _check_nothing_missing(missing: str, behind: str) -> None:
    if missing:
        raise ValueError(
            f"The chat template ends the prompt with {missing!r}, but begins this answer with {behind[:40]!r}: "
            "nothing says what the target writes. Set the thinking switch that the answer was made with."
        )


def _check_closed(begun: str, text: str, ended: bool) -> None:
    """Refuse an answer without its reasoning: the prompt has opened the markup, and the answer does not close it."""
    for tag in re.findall(r"<(\w+)>", begun):
        if ended and f"</{tag}>" not in begun + text:
            raise ValueError(
                f"The prompt ends with {begun!r}, but the answer has no '</{tag}>': its reasoning is missing. Keep "
                "the reasoning, or set the thinking switch that the answer was made with."
            )


def _is_around(rendered: str, head: str, text: str, tail: str) -> bool:
    """Whether a conversation is `head`, the text as it is, and `tail`, but for white space at the text's ends."""
    inner = rendered[len(head) : len(rendered) - len(tail)]
    return rendered.startswith(head) and rendered.endswith(tail) and inner.strip() == text.strip()


def _joined(before: str, text: str, after: str) -> str:
    """Markup and a text; white space of the markup takes the place of the text's own."""
    text = text.lstrip() if before[-1:].isspace() else text
    return before + (text.rstrip() if after[:1].isspace() else text)
