# SPDX-License-Identifier: Apache-2.0
"""Confidences with the outcomes of their drafts, the input of calibration and reliability."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..common.records import RoundRecord
from .rules import prefix_survival


# A confidence of 1.0 in fp32 still has a finite logit (13.8).
SMALLEST_PROBABILITY = 1e-6


@dataclass(frozen=True, eq=False)
class ConfidenceObservations:
    """The confidences of N full blocks, and how many drafts of each were accepted.

    A full block had all its g slots sent, so `num_accepted` determines for every slot whether its prefix was accepted.
    """

    confidence_logits: torch.Tensor  # [N, g], before the sigmoid, uncalibrated
    num_accepted: torch.Tensor  # [N], leading drafts that the target accepted, 0 to g

    def __post_init__(self) -> None:
        logits, accepted = self.confidence_logits, self.num_accepted
        if logits.ndim != 2 or accepted.shape != logits.shape[:1]:
            raise ValueError(
                "`confidence_logits` must have the shape (N, g) and `num_accepted` (N,), got "
                f"{tuple(logits.shape)} and {tuple(accepted.shape)}."
            )
        if not torch.isfinite(logits).all():
            raise ValueError("`confidence_logits` must be finite. Clamp the confidences away from 0 and 1 first.")
        if ((accepted < 0) | (accepted > logits.shape[1])).any():
            raise ValueError(f"`num_accepted` must lie in [0, {logits.shape[1]}], got {accepted.tolist()}.")

    @classmethod
    def from_rounds(cls, rounds: Iterable[RoundRecord], num_draft_slots: int) -> ConfidenceObservations:
        """Take the full blocks out of recorded rounds; their confidences must be uncalibrated.

        Left out are rounds that sent fewer drafts than the block has slots (the text's length limit, a drafted end of
        sequence, a threshold), those without a confidence for every slot, and those whose text ended before the last
        slot was judged. A round of which fewer tokens were committed than accepted is judged in full, and counts.
        """
        rounds = list(rounds)
        full = [record for record in rounds if record.is_full_block(num_draft_slots)]
        if not full:
            with_confidence = sum(len(record.confidence) == num_draft_slots for record in rounds)
            longest = max((record.verify_length for record in rounds), default=0)
            raise ValueError(
                f"Calibration needs rounds that send all {num_draft_slots} drafts of a block, got none among "
                f"{len(rounds)} rounds (most drafts sent: {longest}; with a confidence for every slot: "
                f'{with_confidence}). Use a draft with a confidence head and the schedule "constant", leave '
                "`num_assistant_tokens` and `assistant_confidence_threshold` unset, and generate longer texts."
            )
        confidence = torch.tensor([record.confidence for record in full], dtype=torch.float64)
        logits = torch.logit(confidence, eps=SMALLEST_PROBABILITY).float()
        return cls(logits, torch.tensor([record.num_accepted for record in full]))

    @property
    def num_rounds(self) -> int:
        """`int`: N."""
        return self.confidence_logits.shape[0]

    @property
    def num_slots(self) -> int:
        """`int`: g."""
        return self.confidence_logits.shape[1]

    @property
    def prefix_accepted(self) -> torch.Tensor:  # [N, g]
        """Whether slots 0 to k were all accepted."""
        return self.num_accepted[:, None] > torch.arange(self.num_slots)

    @property
    def conditional_acceptance(self) -> tuple[float, ...]:
        """`tuple[float, ...]`: P(slot k accepted | all before it were); NaN for a slot that no round reached."""
        accepted = self.prefix_accepted.sum(dim=0).tolist()
        reached = [self.num_rounds, *accepted[:-1]]
        return tuple(a / r if r else math.nan for a, r in zip(accepted, reached, strict=True))

    def survival(self, temperatures: Sequence[float] | None = None) -> torch.Tensor:  # [N, g], fp64
        """a_k after Sequential Temperature Scaling."""
        divisor = torch.tensor(temperatures or [1.0] * self.num_slots, dtype=torch.float64)
        if divisor.shape[0] != self.num_slots:
            raise ValueError(f"There must be one temperature for each of {self.num_slots} slots, got {temperatures}.")
        return prefix_survival(torch.sigmoid(self.confidence_logits.double() / divisor))
