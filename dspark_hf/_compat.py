# SPDX-License-Identifier: Apache-2.0
"""The names that changed between the supported transformers releases (5.18 to 5.x), resolved once.

Remove an entry when the oldest supported release no longer needs it.
"""

from __future__ import annotations

import inspect
from typing import Any

from transformers.generation import GenerationConfig, GenerationMixin


# `past_key_values` became `cache` in 5.24, in keyword arguments and in outputs alike.
CACHE_KEY = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)

# What transformers merges into every call's generation config where nobody chose a value.
LIBRARY_DEFAULTS: dict[str, Any] = GenerationConfig._get_default_generation_params()
