# SPDX-License-Identifier: Apache-2.0
"""The names that changed between the supported transformers releases (5.18 to 5.x), resolved once.

Remove an entry when the oldest supported release no longer needs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from transformers import cache_utils
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.utils import output_capturing


# `past_key_values` became `cache` in 5.24, in keyword arguments and in outputs alike.
CACHE_KEY = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)

# Values that transformers fills into every call's generation config when the user sets none.
LIBRARY_DEFAULTS: dict[str, Any] = GenerationConfig._get_default_generation_params()

# Releases before 5.24 say of these layers that they can be cropped, and crop what is not quantised yet alone.
QuantizedLayer = getattr(cache_utils, "BaseQuantizedLayer", cache_utils.QuantizedLayer)

# `output_hidden_states=[i]` names an entry of `hidden_states` since 5.23. Before it named a layer, one less, in models
# that capture by hooks, and was no selection at all in others.
CAN_SELECT_HIDDEN_STATES = hasattr(output_capturing, "resolve_hidden_states_indices")


def hidden_states_of(
    layer_ids: Sequence[int],  # 0-based layers; -1 is the embedding output
) -> list[int] | bool:
    """The value of `output_hidden_states` with which layer i's output is `hidden_states[i + 1]` in every release."""
    return [i + 1 for i in layer_ids] if CAN_SELECT_HIDDEN_STATES else True
