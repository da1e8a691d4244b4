# SPDX-License-Identifier: Apache-2.0
"""Prompts to measure and to show a pair with: a few built-in ones, and a reader for a user's own file."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


__all__ = ["BUILTIN_PROMPTS", "Prompt", "read_prompts"]

DEFAULT_DOMAIN = "general"


@dataclass(frozen=True)
class Prompt:
    """One user message and the kind of text it asks for.

    Args:
        domain (`str`):
            Kind of prompt, by which results are grouped: `"math"`, `"code"`, `"chat"` or a user's own word.
        text (`str`):
            The user's message, without any chat template.
    """

    domain: str
    text: str


BUILTIN_PROMPTS: tuple[Prompt, ...] = (
    Prompt(
        "math",
        "A baker makes 18 loaves of bread in the morning and twice as many in the afternoon. She sells each loaf for "
        "$3. How much money does she earn if she sells all of them? Explain each step.",
    ),
    Prompt(
        "math",
        "Omar has 45 stickers. He gives 9 of them to his sister and shares the rest equally among 4 friends. How many "
        "stickers does each friend get? Think step by step.",
    ),
    Prompt(
        "math",
        "A train leaves at 9:00 and travels 60 miles in every hour. How many miles has it travelled by 12:30? Show "
        "your work.",
    ),
    Prompt(
        "math",
        "A rectangular garden is 12 meters long and 7 meters wide. A fence around it costs $5 per meter. What is the "
        "total cost of the fence? Explain how you found it.",
    ),
    Prompt(
        "code",
        "Write a Python function `count_vowels(text)` that returns how many vowels a string contains. Add a short "
        "docstring and one example call.",
    ),
    Prompt(
        "code",
        "Write a Python function that takes a list of numbers and returns a new list with only the even ones, in the "
        "same order.",
    ),
    Prompt(
        "code",
        "Write a Python class `Stack` with the methods push, pop and is_empty. Store the items in a list.",
    ),
    Prompt(
        "code",
        "Explain what this Python code prints, then rewrite it with a for loop:\n\n"
        "i = 0\nwhile i < 3:\n    print(i * i)\n    i += 1",
    ),
    Prompt("chat", "Explain to a ten-year-old why the sky is blue."),
    Prompt("chat", "Give me five tips for getting a better night's sleep. One sentence for each tip."),
    Prompt("chat", "Write a short, friendly email to my neighbour to thank her for watering my plants."),
    Prompt("chat", "Tell a short story about a lighthouse keeper who finds a message in a bottle."),
)


def read_prompts(path: str | os.PathLike) -> list[Prompt]:
    """Read prompts from a user's file.

    `.txt` holds one prompt a line (blank lines are skipped). `.jsonl` holds one JSON object a line, `.json` a list of
    such objects. An object gives its prompt as `prompt` (a string), `messages` (a conversation, of which the first
    user message counts) or `turns` (user messages, of which the first counts), and optionally its `domain` or
    `category`.

    Args:
        path (`str` or `os.PathLike`):
            The file, in UTF-8.

    Returns:
        `list[Prompt]`: the prompts in the order of the file, at least one. The domain is `"general"` where none is
        given.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file has another ending, is not UTF-8, holds no prompt, or has a malformed row.
    """
    path = Path(path)
    readers = {".txt": _read_txt, ".json": _read_json, ".jsonl": _read_jsonl}
    if path.suffix.lower() not in readers:
        raise ValueError(
            f"A prompt file must end in .txt, .json or .jsonl, got {str(path)!r}. Rename it after what it holds."
        )
    if not path.is_file():
        raise FileNotFoundError(f"A prompt file must exist, got {str(path)!r}. Check the path.")
    prompts = list(readers[path.suffix.lower()](path, _read_text(path)))
    if not prompts:
        raise ValueError(f"{path}: a prompt file must hold at least one prompt, got none. Add one prompt a line.")
    return prompts


def _read_text(path: Path) -> str:
    data = path.read_bytes()
    try:
        # "-sig", since Windows editors begin a UTF-8 file with a byte order mark.
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {line}: a prompt file must be UTF-8, got the byte 0x{data[error.start]:02x} "
            f"({error.reason}). Save it as UTF-8."
        ) from error


def _numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, numbered from 1."""
    # Not `splitlines`: it also cuts at U+2028 and the like, which may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line.strip()


def _read_txt(_path: Path, text: str) -> Iterator[Prompt]:
    return (Prompt(DEFAULT_DOMAIN, line) for _, line in _numbered_lines(text))


def _read_jsonl(path: Path, text: str) -> Iterator[Prompt]:
    for number, line in _numbered_lines(text):
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{where}: each line must be one JSON object, got {_shortened(line)} ({error.msg}, column "
                f"{error.colno}). Correct the line, or name the file .txt if it holds plain text."
            ) from error
        yield _row_prompt(where, row)


def _read_json(path: Path, text: str) -> Iterator[Prompt]:
    try:
        rows = json.loads(text) if text.strip() else []
    except json.JSONDecodeError as error:
        got = _shortened(text.split("\n")[error.lineno - 1].strip())
        raise ValueError(
            f"{path}, line {error.lineno}: the file must be valid JSON, got {got} ({error.msg}, column "
            f"{error.colno}). Correct the line, or name the file .jsonl if each line is an object of its own."
        ) from error
    if not isinstance(rows, list):
        raise ValueError(
            f"{path}, line 1: the file must be a list of JSON objects, got {_kind(rows)}. Put [ and ] around the rows."
        )
    for number, row in enumerate(rows, start=1):
        yield _row_prompt(f"{path}, row {number}", row)


def _row_prompt(where: str, row: Any) -> Prompt:
    if not isinstance(row, dict):
        raise ValueError(
            f"{where}: each row must be a JSON object, got {_kind(row)}. Write a prompt as "
            f'{{"prompt": "..."}}, or name the file .txt if it holds plain text.'
        )
    text = _row_text(row)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(
            f"{where}: a row must have a `prompt` string, `messages` with a user message, or `turns`, got "
            f'{_shortened(json.dumps(row, ensure_ascii=False))}. Write it as {{"prompt": "..."}}.'
        )
    domain = row.get("domain") or row.get("category") or DEFAULT_DOMAIN
    if not isinstance(domain, str):
        raise ValueError(f"{where}: `domain` must be a string, got {domain!r}. Put it in quotes.")
    return Prompt(domain, text)


def _row_text(row: dict) -> Any:
    """The first user message of a row, unchecked; None if the row has none where it should be."""
    if "prompt" in row:
        return row["prompt"]
    if isinstance(row.get("messages"), list):
        messages = (message for message in row["messages"] if isinstance(message, dict))
        return next((message.get("content") for message in messages if message.get("role") == "user"), None)
    turns = row.get("turns")
    return turns[0] if isinstance(turns, list) and turns else None


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _shortened(text: str, limit: int = 80) -> str:
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")
