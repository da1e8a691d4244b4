# SPDX-License-Identifier: Apache-2.0
"""Runs commands of `dspark-hf` in the process of the tests, and reads and writes JSON Lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from dspark_hf.cli import app


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, *rows: Any) -> Path:
    """Strings as they are, everything else as JSON."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path
