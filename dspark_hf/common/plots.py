# SPDX-License-Identifier: Apache-2.0
"""Plots as files: checked before the work, written completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")


def check_can_plot(path: str | os.PathLike, what: str = "picture") -> Path:
    """Check that a plot can be drawn and written to `path`; call it before the work."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"A {what} must be a .png or .svg file, got {str(path)!r}.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            f'A {what} needs matplotlib, which is not installed: pip install "dspark-hf[eval]".'
        ) from error
    return path


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.tmp{path.suffix}")
    try:
        figure.savefig(temporary, dpi=150)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
