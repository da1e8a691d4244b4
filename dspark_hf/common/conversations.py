# SPDX-License-Identifier: Apache-2.0
"""Conversations of rows: which turns and tools there may be, and what is wrong with others.

Imports the standard library only.
"""

from __future__ import annotations

from typing import Any

from .jsonl import kind, shortened


# Servers and data sets have three names for what a model thinks before it answers; templates read the first.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
PROMPT_ROLES = ("user", "tool")


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """The turns of a row, with the fields that chat templates read."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(f"`messages` must be a list of at least one turn, got {shortened(messages)}.")
    return [_read_turn(turn, number) for number, turn in enumerate(messages, start=1)]


def read_tools(tools: Any) -> tuple[dict[str, Any], ...]:  # empty if there are none
    """The tools that a row offers."""
    if tools is None:
        return ()
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"`tools` must be a list of JSON objects, got {shortened(tools)}.")
    return tuple(tools)


def is_answer(turn: Any) -> bool:
    """Whether a turn is the assistant's."""
    return isinstance(turn, dict) and turn.get("role") == "assistant"


def check_prompt(messages: list[dict[str, Any]]) -> None:
    """Reject turns that have no answer."""
    if not any(turn["role"] == "user" for turn in messages):
        raise ValueError("The turns before the answer must have one of the user, got none.")
    if messages[-1]["role"] not in PROMPT_ROLES:
        raise ValueError(
            "The turn before the answer must be the user's or the result of a tool, got the role "
            f"{messages[-1]['role']!r}."
        )


def answer_fields(message: dict[str, Any]) -> dict[str, Any]:
    """The fields of an assistant's turn besides its text."""
    said = {"reasoning_content": next((message[name] for name in REASONING_FIELDS if message.get(name)), None)}
    said["tool_calls"] = message.get("tool_calls")
    return {name: value for name, value in said.items() if value}


def _read_turn(turn: Any, number: int) -> dict[str, Any]:
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise ValueError(f"Turn {number} must be an object with a `role`, got {shortened(turn)}.")
    said = answer_fields(turn)
    content = turn.get("content")
    if content is None and said:
        content = ""
    _check_text("content", content, number)
    _check_text("reasoning_content", said.get("reasoning_content", ""), number)
    calls = said.get("tool_calls", [])
    if not isinstance(calls, (list, tuple)) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"`tool_calls` of turn {number} must be a list of JSON objects, got {shortened(calls)}.")
    if turn["role"] in ("user", "assistant") and not (content or "").strip() and not said:
        raise ValueError(f"`content` of turn {number} must not be blank, got {content!r}.")
    named = {name: turn[name] for name in ("name", "tool_call_id") if turn.get(name)}
    return {"role": turn["role"], "content": content} | said | named


def _check_text(name: str, value: Any, number: int) -> None:
    if not isinstance(value, str):
        raise ValueError(f"`{name}` of turn {number} must be a text, got {kind(value)}.")
