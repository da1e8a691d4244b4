# SPDX-License-Identifier: Apache-2.0
"""Versions to keep beside a result."""

from __future__ import annotations

import torch
import transformers

from .._version import __version__


def library_versions() -> dict[str, str]:
    """The library versions of a result."""
    return {"dspark_hf": __version__, "transformers": transformers.__version__, "torch": torch.__version__}
