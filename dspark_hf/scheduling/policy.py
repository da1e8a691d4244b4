# SPDX-License-Identifier: Apache-2.0
"""Decides whether requests draft, and how many of their drafts are sent: a scheduler with what it has to know.

Lossless under sampling because whether slot k is sent depends only on c_0..c_k and on earlier rounds, never on x_k or
anything after it (paper section 3.2.2, Appendix A).

Legend: R requests, g slots per block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..common.records import RoundRecord
from .acceptance import AcceptanceHistory
from .curve import SPSCurve
from .gate import DraftingGate
from .live_curve import LiveRoundTimes
from .rules import RoundOutlook, Scheduler, ThresholdScheduler, mean_survival
from .weights import batch_speedup_share, request_weights


# Used without measured round times: one more verified token costs 5 % of a plain step, drafting 10 %.
UNMEASURED = SPSCurve.linear(slot_cost=0.05, draft_cost=0.1)


class DraftingPolicy:
    """Ends a block at the slot where further drafts no longer pay off, and skips drafting where it does not pay off.

    A scheduler decides, on confidences corrected by the acceptance of the rounds so far and on the round times of the
    machine. Each request has its own history, which the caller keeps; the round times are those of the call.

    Args:
        scheduler (`Scheduler`): Decides how many drafts are sent.
        num_slots (`int`): g.
        acceptance_prior (`Sequence[float]`, *optional*): P(slot k accepted | all before it were), from calibration.
        curve (`SPSCurve`, *optional*): Round times of the machine; defaults to those of a typical accelerator.
        learn_times (`bool`, *optional*, defaults to `True`): Whether to adapt to measured round times.
        may_skip (`bool`, *optional*, defaults to `False`): Whether rounds may skip drafting where it does not pay off.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        num_slots: int,
        acceptance_prior: Sequence[float] | None = None,
        curve: SPSCurve | None = None,
        learn_times: bool = True,
        may_skip: bool = False,
    ):
        self.scheduler, self.num_slots = scheduler, num_slots
        self._acceptance_prior, self._learn_times = acceptance_prior, learn_times
        self.use_curve(curve if curve is not None else UNMEASURED)
        self._gate = DraftingGate() if may_skip else None

    @property
    def needs_curve(self) -> bool:
        """`bool`: Whether round times make a difference."""
        return not isinstance(self.scheduler, ThresholdScheduler)

    @property
    def curve(self) -> SPSCurve:
        """`SPSCurve`: Round times as of now."""
        return self._times.curve

    def use_curve(self, curve: SPSCurve) -> None:
        """Start from measured round times.

        Args:
            curve (`SPSCurve`): Round times of the pair on this machine.
        """
        self._times = LiveRoundTimes(curve, self._learn_times)

    def new_history(self) -> AcceptanceHistory:
        """The history of a request that begins.

        Returns:
            [`AcceptanceHistory`]
        """
        return AcceptanceHistory(self.num_slots, self._acceptance_prior)

    def should_draft(self, histories: Sequence[AcceptanceHistory], tokens_left: Sequence[int] | None = None) -> bool:
        """Decide whether to draft in the next round; called once per round.

        Args:
            histories (`Sequence[AcceptanceHistory]` of length R): Of the requests of the round.
            tokens_left (`Sequence[int]` of length R, *optional*):
                Tokens that each text may still grow by, where the call ends with the last of them.

        Returns:
            `bool`
        """
        if self._gate is None:
            return True
        speedup_share = batch_speedup_share(self.curve, _paces(histories), tokens_left)
        return self._gate.should_draft(self._outlook(histories), len(histories), speedup_share)

    def verify_lengths(
        self,
        histories: Sequence[AcceptanceHistory],
        confidence: torch.Tensor,
        tokens_left: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Choose how many drafts to send, from the confidences of a whole block.

        Args:
            histories (`Sequence[AcceptanceHistory]` of length R): Of the requests of the round.
            confidence (`torch.Tensor` of shape `(R, g)`): c_k, in [0, 1].
            tokens_left (`Sequence[int]` of length R, *optional*):
                Tokens that each text may still grow by, where the call ends with the last of them.

        Returns:
            `torch.LongTensor` of shape `(R,)`, values 0 to g.
        """
        if self.needs_curve:  # the user's threshold applies to the uncorrected confidence
            rows = zip(histories, confidence.split(1), strict=True)
            confidence = torch.cat([history.corrected(row) for history, row in rows])
        weights = request_weights(self.curve, _paces(histories), tokens_left)
        return self.scheduler.verify_lengths(confidence, self._outlook(histories, weights))

    def observe(self, histories: Sequence[AcceptanceHistory], records: Sequence[RoundRecord]) -> None:
        """Learn from a finished round.

        Args:
            histories (`Sequence[AcceptanceHistory]` of length R): Of the requests of the round.
            records (`Sequence[RoundRecord]` of length R): The round of each request.
        """
        self._times.observe(records)
        for history, record in zip(histories, records, strict=True):
            if record.drafted:
                history.observe(record)
        if self._gate is not None and any(record.drafted for record in records):
            self._gate.observe(records, self.curve)

    def _outlook(
        self, histories: Sequence[AcceptanceHistory], weights: tuple[float, ...] | None = None
    ) -> RoundOutlook:
        survival = [mean_survival(history.conditional_acceptance) for history in histories]
        return RoundOutlook(
            self.curve.for_requests(len(survival)),
            tuple(sum(slot) / len(survival) for slot in zip(*survival, strict=True)),
            weights,
        )


def _paces(histories: Sequence[AcceptanceHistory]) -> list[float]:
    return [history.tokens_per_round for history in histories]
