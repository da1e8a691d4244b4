# SPDX-License-Identifier: Apache-2.0
"""Small files that are written whole or not at all. Imports the standard library only."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a file in one step: a reader finds the old contents or the new ones, whoever else writes at the same time.

    Args:
        path (`str` or `os.PathLike`): File, in a folder that exists.
        text (`str`): Its contents, written as UTF-8.

    Raises:
        OSError: If it cannot be written; nothing is left behind.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
