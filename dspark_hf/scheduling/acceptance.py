# SPDX-License-Identifier: Apache-2.0
"""Tracks how often each slot of a request's blocks is accepted. Imports no model code."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..common.records import RoundRecord


class AcceptanceHistory:
    """Tracks how often slot k was accepted when all before it were, and its ratio to the confidence.

    Both are means of the recent rounds, with a few pseudo-rounds of a prior: P(accept k) as measured when the draft
    was calibrated, or `PRIOR_ACCEPTANCE`, which is low enough to detect a useless draft in two rounds.
    """

    DECAY = 0.97  # the kind of a text changes within some tens of rounds
    PRIOR_ROUNDS = 4.0
    PRIOR_ACCEPTANCE, PRIOR_ACCEPTANCE_ROUNDS = 0.6, 2.0

    def __init__(self, num_slots: int, prior: Sequence[float] | None = None):
        self._prior = np.asarray(prior if prior is not None else [self.PRIOR_ACCEPTANCE] * num_slots)
        self._prior_rounds = self.PRIOR_ROUNDS if prior is not None else self.PRIOR_ACCEPTANCE_ROUNDS
        self._accepted, self._reached, self._expected = np.zeros((3, num_slots))

    def observe(self, record: RoundRecord) -> None:
        """Learn from a round that drafted."""
        for sums in (self._accepted, self._reached, self._expected):
            sums *= self.DECAY
        judged = min(record.num_accepted + 1, record.num_drawn)
        self._reached[:judged] += 1
        self._accepted[: min(record.num_accepted, record.num_drawn)] += 1
        self._expected[:judged] += record.confidence[:judged] if record.confidence else 1.0

    @property
    def conditional_acceptance(self) -> tuple[float, ...]:
        """`tuple[float, ...]`: P(slot k accepted | all before it were)."""
        weight = self._prior_rounds
        return tuple(((self._accepted + weight * self._prior) / (self._reached + weight)).tolist())

    def corrected(
        self,
        confidence: torch.Tensor,  # [R, k], in [0, 1]
    ) -> torch.Tensor:  # [R, k], in [0, 1]
        """Confidences scaled by how often such slots were accepted recently."""
        weight = self.PRIOR_ROUNDS
        factors = (self._accepted + weight) / (self._expected + weight)
        return (confidence * confidence.new_tensor(factors[: confidence.shape[-1]])).clamp(max=1.0)
