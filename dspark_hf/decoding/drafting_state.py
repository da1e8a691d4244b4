# SPDX-License-Identifier: Apache-2.0
"""What drafting knows of one request, but for the keys and values in the draft's cache.

Legend: c context tokens, m captured layers, d hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import LogitsProcessorList

from ..scheduling.gate import DraftingPause
from ..scheduling.request_history import RequestHistory


@dataclass
class DraftingState:
    """Owned by the request, filled by the drafter of its call."""

    processors: LogitsProcessorList  # mirrored
    history: RequestHistory | None = None  # None where nothing is ever drafted
    pause: DraftingPause = field(default_factory=DraftingPause)
    # Of committed tokens that the draft has not read yet, in parts; padding is left out.
    context: list[torch.Tensor] = field(default_factory=list)  # each [1, c, m * d]
    positions: list[torch.Tensor] = field(default_factory=list)  # each [1, c]
    anchor_position: torch.Tensor | None = None  # [1, 1]; None before the prompt was read

    @property
    def num_waiting(self) -> int:
        """Context tokens the draft has not read yet."""
        return sum(part.shape[1] for part in self.context)
