# SPDX-License-Identifier: Apache-2.0
"""Decides what requests draft, and how many of their drafts are sent: a scheduler with what it has to know.

Lossless under sampling because whether slot k is sent depends only on c_0..c_k and on earlier rounds, never on x_k or
anything after it (paper section 3.2.2, Appendix A). The source of the drafts depends on earlier rounds and the text.

Legend: R requests, g slots per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..common.records import RoundRecord
from .acceptance import AcceptanceHistory
from .choice import DraftPlan, choose, extensions
from .copying import MOST_COPIES, CopySource
from .curve import SPSCurve
from .gate import DraftingGate
from .live_curve import LiveRoundTimes
from .request_history import RequestHistory
from .rules import FixedScheduler, RoundOutlook, Scheduler, ThresholdScheduler, mean_survival
from .text_index import LONGEST_MATCH
from .weights import batch_speedup_share, request_weights


# Used without measured round times: one more verified token costs 5 % of a plain step, drafting 10 %.
UNMEASURED = SPSCurve.linear(slot_cost=0.05, draft_cost=0.1)


@dataclass(frozen=True)
class CopyOptions:
    """How drafts are copied from the text.

    Args:
        num_tokens (`int`, *optional*, defaults to 16): Most tokens copied in a round.
        longest_match (`int`, *optional*, defaults to 32): Most tokens of the text's ending that are looked up.
        shortest_match (`int`, *optional*):
            Copy whenever at least so many tokens agree, instead of where it makes the most expected tokens per second.
        prior (`Sequence[float]`, *optional*): Acceptance by the length of the match, from calibration.
    """

    num_tokens: int = MOST_COPIES
    longest_match: int = LONGEST_MATCH
    shortest_match: int | None = None
    prior: Sequence[float] | None = None


class DraftingPolicy:
    """Chooses the source of drafts, ends a block where further drafts no longer pay off, and skips drafting where it
    does not pay off.

    A scheduler decides, on confidences corrected by the acceptance of the rounds so far and on the round times of the
    machine. Each request has its own history, which the caller keeps; the round times are those of the call.

    Args:
        scheduler (`Scheduler`): Decides how many drafts of a block are sent.
        num_slots (`int`): g.
        acceptance_prior (`Sequence[float]`, *optional*): P(slot k accepted | all before it were), from calibration.
        curve (`SPSCurve`, *optional*): Round times of the machine; defaults to those of a typical accelerator.
        learn_times (`bool`, *optional*, defaults to `True`): Whether to adapt to measured round times.
        may_skip (`bool`, *optional*, defaults to `False`): Whether rounds may skip drafting where it does not pay off.
        copies (`CopyOptions`, *optional*): Whether and how drafts are copied from the text; not at all by default.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        num_slots: int,
        acceptance_prior: Sequence[float] | None = None,
        curve: SPSCurve | None = None,
        learn_times: bool = True,
        may_skip: bool = False,
        copies: CopyOptions | None = None,
    ):
        self.scheduler, self.num_slots, self.copies = scheduler, num_slots, copies
        self._acceptance_prior, self._learn_times = acceptance_prior, learn_times
        self.use_curve(curve if curve is not None else UNMEASURED)
        self._gate = DraftingGate() if may_skip else None

    @property
    def needs_curve(self) -> bool:
        """`bool`: Whether round times make a difference."""
        return not isinstance(self.scheduler, (FixedScheduler, ThresholdScheduler))

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

    def new_history(self) -> RequestHistory:
        """The history of a request that begins.

        Returns:
            [`RequestHistory`]
        """
        options, blocks = self.copies, AcceptanceHistory(self.num_slots, self._acceptance_prior)
        return RequestHistory(blocks, CopySource(options.prior, options.longest_match) if options else None)

    def plan(
        self,
        histories: Sequence[RequestHistory],
        copy_limits: Sequence[int],
        slots: Sequence[int],
        tokens_left: Sequence[int] | None = None,
    ) -> DraftPlan:
        """Choose what each request drafts in the next round; called once per round.

        Args:
            histories (`Sequence[RequestHistory]` of length R): Of the requests of the round, which have read the text.
            copy_limits (`Sequence[int]` of length R): Most tokens that each may copy.
            slots (`Sequence[int]` of length R): Most slots that each may draft; 0 for none.
            tokens_left (`Sequence[int]` of length R, *optional*):
                Tokens that each text may still grow by, where the call ends with the last of them.

        Returns:
            [`DraftPlan`]
        """
        rates = [self._copy_acceptance(*pair) for pair in zip(histories, copy_limits, strict=True)]
        if not self._should_draft(histories, slots, tokens_left):
            slots = [0] * len(histories)
        if self._is_unpriced:
            lengths = tuple(len(own) for own in rates)
            return DraftPlan(
                lengths, tuple(n > 0 and not k for n, k in zip(slots, lengths, strict=True)), tuple(rates)
            )
        survival = [mean_survival(history.blocks.conditional_acceptance) for history in histories]
        blocks = [own[:count] for own, count in zip(survival, slots, strict=True)]
        weights = request_weights(self.curve, _paces(histories), tokens_left)
        return choose(rates, blocks, weights, self.curve)

    def _copy_acceptance(
        self, history: RequestHistory, limit: int
    ) -> np.ndarray:  # of as many tokens as may be copied
        source, options = history.copies, self.copies
        if source is None or options is None or limit < 1 or source.match_length < (options.shortest_match or 1):
            return np.zeros(0)
        return source.acceptance(min(limit, options.num_tokens))

    @property
    def _is_unpriced(self) -> bool:
        """Whether there is nothing to choose by price: every match is copied, or none."""
        return self.copies is None or self.copies.shortest_match is not None

    def _should_draft(
        self, histories: Sequence[RequestHistory], slots: Sequence[int], tokens_left: Sequence[int] | None
    ) -> bool:
        if max(slots) < 1:
            return False
        if self._gate is None:
            return True
        speedup_share = batch_speedup_share(self.curve, _paces(histories), tokens_left)
        return self._gate.should_draft(self._outlook(histories), len(histories), speedup_share)

    def verify_lengths(
        self,
        histories: Sequence[RequestHistory],
        confidence: torch.Tensor,
        tokens_left: Sequence[int] | None = None,
        plan: DraftPlan | None = None,
    ) -> torch.Tensor:
        """Choose how many drafts to send, from the confidences of whole blocks.

        Args:
            histories (`Sequence[RequestHistory]` of length R): Of the requests that have a block.
            confidence (`torch.Tensor` of shape `(R, g)`): c_k, in [0, 1].
            tokens_left (`Sequence[int]` of length R, *optional*):
                Tokens that each text may still grow by, where the call ends with the last of them.
            plan (`DraftPlan`, *optional*): That of the round, if there are requests without a block as well.

        Returns:
            `torch.LongTensor` of shape `(R,)`, values 0 to g.
        """
        if self.needs_curve:  # the user's threshold applies to the uncorrected confidence
            rows = zip(histories, confidence.split(1), strict=True)
            confidence = torch.cat([history.blocks.corrected(row) for history, row in rows])
        weights = request_weights(self.curve, _paces(histories), tokens_left)
        others = (plan.other_tokens, plan.other_gain) if plan is not None else (0, 0.0)
        return self.scheduler.verify_lengths(confidence, self._outlook(histories, weights, *others))

    def copied_tokens(
        self, histories: Sequence[RequestHistory], plan: DraftPlan, blocks: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """The tokens that each request copies: as planned, or beyond a block that agrees with a copy.

        Args:
            histories (`Sequence[RequestHistory]` of length R): Of the requests of the round.
            plan (`DraftPlan`): That of the round.
            blocks (`Sequence[Sequence[int]]` of length R): Drafts that each block sends; empty ones without a block.

        Returns:
            `list[list[int]]` of length R, empty where nothing is copied.
        """
        pairs = zip(histories, plan.copy_acceptance, strict=True)
        copies = [own.copies.tokens(len(rates)).tolist() if own.copies and len(rates) else [] for own, rates in pairs]
        lengths = [len(block) for block in blocks]
        agree = [
            0 < n < len(copy) and copy[:n] == list(block)
            for n, copy, block in zip(lengths, copies, blocks, strict=True)
        ]
        beyond = self.copies_beyond(histories, plan, lengths, agree) if any(agree) else [0] * len(lengths)
        counts = [max(pair) for pair in zip(plan.copy_lengths, beyond, strict=True)]  # one of them is 0
        return [copy[n : n + count] for copy, n, count in zip(copies, lengths, counts, strict=True)]

    def copies_beyond(
        self, histories: Sequence[RequestHistory], plan: DraftPlan, lengths: Sequence[int], agree: Sequence[bool]
    ) -> tuple[int, ...]:
        """Choose how many tokens to copy after blocks whose drafts are those that a copy would have begun with.

        Lossless as well: what a copy holds after slot k is known before x_k is judged, and depends on no later draft.

        Args:
            histories (`Sequence[RequestHistory]` of length R): Of the requests of the round.
            plan (`DraftPlan`): That of the round.
            lengths (`Sequence[int]` of length R): Drafts that each block sends.
            agree (`Sequence[bool]` of length R): Whether it sends any, and a copy begins with the same tokens.

        Returns:
            `tuple[int, ...]` of length R.
        """
        tails, gain = [], plan.other_gain
        parts = zip(histories, plan.copy_acceptance, lengths, agree, plan.drafts_block, strict=True)
        for history, rates, length, agrees, drafts in parts:
            block = np.cumprod(history.blocks.conditional_acceptance[:length])
            gain += (1 + block.sum()) if drafts else 0.0
            survives = max(block[-1], rates[:length].prod()) if agrees else 0.0  # two sources say the same
            tails.append(survives * rates[length:].cumprod() if agrees else np.zeros(0))
        if self._is_unpriced:
            return tuple(len(tail) for tail in tails)
        num_tokens, num_drafting = plan.other_tokens + sum(lengths), sum(plan.drafts_block)
        draft_s = self.curve.for_requests(num_drafting).draft_s
        return extensions(tails, self.curve, draft_s, num_tokens + num_drafting, gain)

    def observe(self, histories: Sequence[RequestHistory], records: Sequence[RoundRecord]) -> None:
        """Learn from a finished round.

        Args:
            histories (`Sequence[RequestHistory]` of length R): Of the requests of the round.
            records (`Sequence[RoundRecord]` of length R): The round of each request.
        """
        self._times.observe(records)
        for history, record in zip(histories, records, strict=True):
            history.observe(record)
        drafted = [record for record in records if record.drafted]
        if self._gate is not None and drafted:
            self._gate.observe(drafted, self.curve)

    def _outlook(
        self,
        histories: Sequence[RequestHistory],
        weights: tuple[float, ...] | None = None,
        other_tokens: int = 0,
        other_gain: float = 0.0,
    ) -> RoundOutlook:
        survival = [mean_survival(history.blocks.conditional_acceptance) for history in histories]
        return RoundOutlook(
            self.curve.for_requests(len(survival)),
            tuple(sum(slot) / len(survival) for slot in zip(*survival, strict=True)),
            weights,
            other_tokens,
            other_gain,
        )


def _paces(histories: Sequence[RequestHistory]) -> list[float]:
    return [history.tokens_per_round for history in histories]
