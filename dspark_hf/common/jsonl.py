# SPDX-License-Identifier: Apache-2.0
"""Lenient JSON Lines reader: each row becomes an object, or a sentence that states its fault.

Imports the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from .files import json_values


logger = logging.getLogger("transformers.dspark_hf.common.jsonl")


@dataclass(frozen=True)
class TextLine:
    """A line of a text file, or what is wrong with its bytes."""

    number: int  # from 1
    text: str  # the line without its end; empty where there is a problem
    problem: str = ""  # rule, value received and remedy


@dataclass(frozen=True)
class JsonRow:
    """A row of a file, or what is wrong with it."""

    number: int  # its line, from 1; in a file that is one JSON array, its place there
    value: dict[str, Any] | None  # the object; None where there is a problem
    problem: str = ""  # rule, value received and remedy
    unit: str = "line"  # what `number` counts; `"row"` in an array
    is_repaired: bool = False  # whether NaN or infinity was read as None


def shortened(value: Any, limit: int = 80) -> str:
    """A value as a message quotes it."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")


def kind(value: Any) -> str:
    """The JSON name of a value's type."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def read_lines(path: Path) -> Iterator[TextLine]:
    """Lines of a file in UTF-8, or in UTF-16 or UTF-32 with a byte order mark; a bad byte spoils its own line only."""
    with Path(path).open("rb") as file:
        encoding = json.detect_encoding(file.read(4))
        file.seek(0)
        if not encoding.startswith("utf-8"):
            # A bad byte becomes a backslash and its value, which JSON refuses.
            text = file.read().decode(encoding, errors="backslashreplace")
            for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
                yield TextLine(number, _trimmed(line))
            return
        # Only "\n" ends a line: U+2028 and the like may stand inside a string.
        for number, data in enumerate(file, start=1):
            try:
                yield TextLine(number, _trimmed(data.decode("utf-8")))
            except UnicodeDecodeError as error:
                problem = f"the file must be UTF-8, got the byte 0x{data[error.start]:02x} ({error.reason})"
                yield TextLine(number, "", f"{problem}. Save it as UTF-8.")


def parse_json(text: str) -> Any:
    """A JSON text as a value, more strictly than Python reads it."""
    try:
        value = json.loads(text, object_pairs_hook=_unique)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise ValueError(f"half a surrogate pair, \\u{half:04x}, stands alone in a text") from error
    return value


def parse_row(number: int, text: str) -> JsonRow:
    """A line as a row."""
    try:
        return _as_row(number, parse_json(text))
    except ValueError as error:
        detail = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        problem = f"each line must be one JSON object, got {shortened(text)} ({detail}). Correct the line."
        return JsonRow(number, None, problem)


def read_json_lines(path: Path) -> Iterator[JsonRow]:
    """Rows of a file with an object a line; a file that is one JSON array gives its entries. Blank lines are skipped.

    NaN and infinity, which JSON does not have, are read as `None`; the log says in how many rows.
    """
    return _counted(path, _line_rows(path))


def read_json_array(path: Path) -> Iterator[JsonRow]:
    """Rows of a file that must be one JSON array; otherwise as [`read_json_lines`]."""
    return _counted(path, _array_rows(path))


def _counted(path: Path, rows: Iterator[JsonRow]) -> Iterator[JsonRow]:
    repaired = []
    try:
        for row in rows:
            if row.is_repaired:
                repaired.append(f"{row.unit} {row.number}")
            yield row
    finally:
        if repaired:
            logger.warning(
                f"{path}: NaN or infinity, which JSON does not have, was read as null in {len(repaired)} rows, the "
                f"first being {repaired[0]}."
            )


def _line_rows(path: Path) -> Iterator[JsonRow]:
    lines = (line for line in read_lines(path) if line.problem or line.text)
    first = next(lines, None)
    if first is None:
        return
    found: Iterable[TextLine] = chain([first], lines)
    if first.text.startswith("["):
        found = list(found)
        if len(found) == 1 or not first.text.endswith("]"):  # else a line that is a list of its own
            with contextlib.suppress(json.JSONDecodeError):
                yield from _entries(found)
                return
    for line in found:
        yield JsonRow(line.number, None, line.problem) if line.problem else parse_row(line.number, line.text)


def _array_rows(path: Path) -> Iterator[JsonRow]:
    lines = list(read_lines(path))
    if not any(line.problem or line.text for line in lines):
        return
    try:
        yield from _entries(lines)
    except json.JSONDecodeError as error:
        got = shortened(lines[error.lineno - 1].text)
        problem = f"the file must be valid JSON, got {got} ({error.msg}, column {error.colno})"
        hint = "Correct the line, or name the file .jsonl if each line is an object of its own."
        yield JsonRow(error.lineno, None, f"{problem}. {hint}")


def _entries(lines: list[TextLine]) -> list[JsonRow]:
    """The rows of a file that is one JSON array; the fault where it has one, other than of syntax."""
    bad = [JsonRow(line.number, None, line.problem) for line in lines if line.problem]
    if bad:
        return bad
    try:
        value = parse_json("\n".join(line.text for line in lines))
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        return [JsonRow(1, None, f"the file must be a list of JSON objects, but {error}. Correct it.")]
    if not isinstance(value, list):
        problem = f"the file must be a list of JSON objects, got {kind(value)}. Put [ and ] around the rows."
        return [JsonRow(1, None, problem)]
    return [_as_row(number, entry, "row") for number, entry in enumerate(value, start=1)]


def _as_row(number: int, value: Any, unit: str = "line") -> JsonRow:
    if not isinstance(value, dict):
        return JsonRow(number, None, f"each row must be a JSON object, got {kind(value)}. Correct the row.", unit)
    finite = json_values(value)
    return JsonRow(number, finite, unit=unit, is_repaired=finite != value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return value


def _trimmed(line: str) -> str:
    # Files joined together have a byte order mark inside.
    return line.strip().removeprefix("\ufeff").strip()
