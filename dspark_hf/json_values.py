# SPDX-License-Identifier: Apache-2.0
"""Figures as JSON has them. Imports the standard library only."""

from __future__ import annotations

import math
from typing import Any


def json_values(value: Any) -> Any:
    """Put `None` in the place of infinity and of what is not a number: JSON has no word for them.

    Args:
        value (`Any`): Dicts, lists and tuples of plain values, at any depth.

    Returns:
        `Any`: the same, with lists for tuples.

    Example:
        >>> json_values({"rate": float("nan"), "counts": (1, 2)})
        {'rate': None, 'counts': [1, 2]}
    """
    if isinstance(value, dict):
        return {name: json_values(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
