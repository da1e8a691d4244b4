# SPDX-License-Identifier: Apache-2.0
"""What a model is called where others read it."""

from __future__ import annotations

from pathlib import Path


def shown_name(name: str) -> str:
    """A folder's own name without the path to it, which is nobody else's business; any other name as it is.

    Args:
        name (`str`): Folder or Hub id.

    Returns:
        `str`
    """
    return Path(name).name if Path(name).is_dir() else name
