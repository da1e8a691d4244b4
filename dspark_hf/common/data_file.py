# SPDX-License-Identifier: Apache-2.0
"""JSON Lines files that grow row by row; a run that was killed continues them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import transformers

from .._version import __version__
from .files import write_text
from .jsonl import parse_row, shortened


class RowFile:
    """A JSON Lines file of rows with a `key`."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.keys = {row["key"] for row in self._repaired_rows()}

    def append(self, row: dict[str, Any]) -> None:
        """Add a row and flush it."""
        with self.path.open("ab") as file:
            file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
        self.keys.add(row["key"])

    def _repaired_rows(self) -> Iterator[dict[str, Any]]:
        """Rows so far; a last line that a kill cut in half is removed from the file."""
        if not self.path.exists():
            return
        complete = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                text = line.decode("utf-8", errors="backslashreplace")
                row = parse_row(number, text)
                if row.value is None or not isinstance(row.value.get("key"), str):
                    raise ValueError(
                        f"{self.path} has a line that is no recorded run (line {number}: {shortened(text)}). Remove "
                        "the line, which is then made again, or choose another output."
                    )
                yield row.value
                complete += len(line)
        os.truncate(self.path, complete)


class DataFile(RowFile):
    """A file of rows with the settings that they are made with beside it."""

    def __init__(self, path: Path, settings: Any):
        self.settings_path = Path(path).with_suffix(".settings.json")
        self._check_settings(Path(path), asdict(settings))
        super().__init__(path)

    def _check_settings(self, path: Path, wanted: dict[str, Any]) -> None:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            versions = {"dspark_hf": __version__, "transformers": transformers.__version__}
            write_text(self.settings_path, json.dumps({"settings": wanted, "versions": versions}, indent=2))
            return
        if not self.settings_path.exists():
            raise ValueError(
                f"{path} exists, but {self.settings_path.name} beside it does not: it is not a file that can be "
                "continued. Choose another output."
            )
        found = _read_settings(self.settings_path)
        if found != wanted:
            different = sorted(name for name in wanted if found.get(name) != wanted[name])
            raise ValueError(
                f"{path} was made with other settings ({', '.join(different)}): "
                f"{ {name: found.get(name) for name in different} }, got "
                f"{ {name: wanted[name] for name in different} }. Rows of two kinds must not mix; choose another "
                "output."
            )


class RefusedFile(RowFile):
    """Prompts that a server refused, `NAME.refused.jsonl` beside the output: a resumed run does not ask them again."""

    def __init__(self, output: DataFile, ask_again: bool = False):
        path = output.path.with_suffix(".refused.jsonl")
        if ask_again or not output.keys:
            path.unlink(missing_ok=True)
        super().__init__(path)


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} must hold the settings of a run, and cannot be read. Choose another output."
        ) from error
    return found if isinstance(found, dict) else {}
