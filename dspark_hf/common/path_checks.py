# SPDX-License-Identifier: Apache-2.0
"""Checks before the work that files can be read and locations written to. Imports the standard library only."""

from __future__ import annotations

import os
from pathlib import Path


def check_output_folder(path: str | os.PathLike | None, option: str) -> None:
    """Refuse a folder that cannot be made or written to; nothing is made."""
    if path is None:
        return
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise NotADirectoryError(
            f"`{option}` cannot be written to {str(path)!r}: {str(place)!r} is a file, no folder."
        )
    if not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(f"`{option}` must be a place that can be written to, got {str(path)!r}. Choose another.")


def check_output_file(path: str | os.PathLike | None, option: str) -> None:
    """Refuse a file that cannot be made or replaced; nothing is made."""
    if path is None:
        return
    if Path(path).is_dir():
        raise IsADirectoryError(f"`{option}` must be a file, got the folder {str(path)!r}. Name a file in it.")
    check_output_folder(Path(path).parent, option)


def check_input_file(path: str | os.PathLike | None, option: str) -> None:
    """Refuse a file that is not there."""
    if path is None:
        return
    if Path(path).is_dir():
        raise IsADirectoryError(f"`{option}` must be a file, got the folder {str(path)!r}. Name a file in it.")
    if not Path(path).exists():
        raise FileNotFoundError(f"`{option}` must be a file that exists, got {str(path)!r}. Check the path.")
