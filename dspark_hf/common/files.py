# SPDX-License-Identifier: Apache-2.0
"""Small files that are written completely or not at all, and their values. Imports the standard library only."""

from __future__ import annotations

import math
import os
import uuid
from pathlib import Path
from typing import Any


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a file in one step: a reader finds the old contents or the new, whoever else writes at the same time."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def json_values(value: Any) -> Any:
    """Replace NaN and infinity by `None`: JSON cannot represent them."""
    if isinstance(value, dict):
        return {name: json_values(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def shown_name(name: str) -> str:
    """Base name of a local folder, so that reports do not leak paths; any other name unchanged."""
    return Path(name).name if Path(name).is_dir() else name
