# SPDX-License-Identifier: Apache-2.0
"""Tokens of chats: prompts, answers, and the tokens that end a turn."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .chat import TEXT_MARK, Chat


ENDED = ("stop", "tool_calls")  # finish reasons of an answer that the target ended itself


def encode_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    enable_thinking: bool | None = None,
    tools: Sequence[dict[str, Any]] = (),
) -> tuple[int, ...]:
    """Tokens of a conversation up to where the answer begins."""
    ids = _tokens(tokenizer, Chat(tokenizer, enable_thinking, tools).prompt(list(messages)))
    if not ids:
        raise ValueError("The chat template must give a prompt at least one token, got none.")
    return ids


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    finish_reason: str = "stop",
    enable_thinking: bool | None = None,
    tools: Sequence[dict[str, Any]] = (),
    end_ids: Collection[int] = (),
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens of a prompt, and those that the target writes after it."""
    chat = Chat(tokenizer, enable_thinking, tools)
    prompt, ended = chat.prompt(messages[:-1]), finish_reason in ENDED
    text, tail = chat.answer(messages, prompt, ended)
    prompt_ids, together = _tokens(tokenizer, prompt), _tokens(tokenizer, prompt + text)
    # A token across the border is one that generation does not write.
    is_split = together[: len(prompt_ids)] == prompt_ids
    answer_ids = together[len(prompt_ids) :] if is_split else _tokens(tokenizer, text)
    if not ended:
        return prompt_ids, answer_ids
    calls = messages[-1].get("tool_calls")
    end = _answer_end(chat, messages[:-1], "tool" if calls else "user", end_ids)
    ends, one_end = {end, *end_ids}, () if end is None else (end,)
    if calls:  # their markup and the end are one text
        return prompt_ids, _through(answer_ids, ends) or answer_ids + one_end
    return prompt_ids, answer_ids + (_through(_tokens(tokenizer, tail), ends) or one_end)


def generation_end_ids(target: PreTrainedModel) -> frozenset[int]:
    """Tokens that `generate` stops at."""
    ids = target.generation_config.eos_token_id
    return frozenset(i for i in (ids if isinstance(ids, (list, tuple)) else [ids]) if i is not None)


def end_token_ids(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end an answer: those that `generate` stops at, and the one that ends a turn in the chat template."""
    ends = {tokenizer.eos_token_id, *generation_end_ids(target)}
    # Without a template, or with one that asks for other turns, there is no other end.
    with contextlib.suppress(ValueError):
        ends.add(_answer_end(Chat(tokenizer), [{"role": "user", "content": "a"}], "user", generation_end_ids(target)))
    return frozenset(ends - {None})


def user_turn(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[str, frozenset[int]]:
    """Beginning and end of a user's turn in the chat template, with which an instruct target writes its own turn."""
    if not tokenizer.chat_template:
        raise ValueError("Without a chat template the target cannot write prompts. Pass prompts in a file.")
    head, mark, tail = Chat(tokenizer).render([{"role": "user", "content": TEXT_MARK}]).partition(TEXT_MARK)
    if not mark:
        raise ValueError("The chat template ignores a user's turn. Use another template, or pass prompts in a file.")
    end = _turn_end(tokenizer, tail, generation_end_ids(target))
    return head, end_token_ids(target, tokenizer) | (set() if end is None else {end})


def _answer_end(chat: Chat, messages: Sequence[dict[str, Any]], next_role: str, stops: Collection[int]) -> int | None:
    """The token that ends an answer to a conversation: behind its text, or else where the next turn begins."""
    answered = [*messages, {"role": "assistant", "content": TEXT_MARK}]
    tail = chat.render(answered).rpartition(TEXT_MARK)[2]
    end = _turn_end(chat.tokenizer, tail, stops)
    if end is None and stops:
        with contextlib.suppress(ValueError):  # not every template knows the results of tools
            text = chat.render([*answered, {"role": next_role, "content": "a"}])
            found = _through(_tokens(chat.tokenizer, text.rpartition(TEXT_MARK)[2]), stops)
            end = found[-1] if found else None
    return chat.tokenizer.eos_token_id if end is None else end


def _turn_end(tokenizer: PreTrainedTokenizerBase, tail: str, stops: Collection[int]) -> int | None:
    """The token that ends a turn, of what a template puts behind its text; `None` if none does."""
    ids = _tokens(tokenizer, tail)
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if not token.content.isspace()}
    found = _through(ids, stops) or _through(ids, added | set(tokenizer.all_special_ids))
    return found[-1] if found else None


def _through(ids: tuple[int, ...], ends: Collection[int | None]) -> tuple[int, ...]:
    """Tokens up to the first that is an end; empty if none is."""
    return next((ids[: index + 1] for index, token in enumerate(ids) if token in ends), ())


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, text: str, raw: bool = False
) -> dict[str, torch.Tensor]:  # `input_ids` and `attention_mask`, [1, s] each
    """Model inputs of one prompt, through the chat template where the tokenizer has one."""
    if raw or not tokenizer.chat_template:
        inputs = tokenizer(text, return_tensors="pt")
    else:
        inputs = _in_chat_template(tokenizer, text)
    if inputs["input_ids"].shape[1] == 0:
        raise ValueError(f"A prompt must have at least one token, got {text!r}.")
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


def _in_chat_template(tokenizer: PreTrainedTokenizerBase, text: str) -> Mapping[str, torch.Tensor]:
    from jinja2 import TemplateError  # installed wherever chat templates are

    messages = [{"role": "user", "content": text}]
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    except TemplateError as error:
        raise ValueError(
            f"The chat template of this tokenizer cannot build the prompt ({error}). Correct the template, or prompt "
            "without it (`raw`)."
        ) from error
