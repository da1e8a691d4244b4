# SPDX-License-Identifier: Apache-2.0
"""What the rounds of a request teach: how often each slot is accepted, what a round costs, and whether drafting pays.

Never sees a model. Slots are 0-based.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from .metrics import RoundRecord
from .scheduling import RoundOutlook, SPSCurve


class AcceptanceHistory:
    """How often slot k was accepted when all before it were, how that compares with its confidence, and the tokens
    that a round brought.

    All are means of the recent rounds, with a few pseudo-rounds of a prior: P(accept k) as measured when the draft
    was calibrated, or `PRIOR_ACCEPTANCE`, which is low enough for a useless draft to be found out in two rounds.

    Args:
        num_slots (`int`): g.
        prior (`Sequence[float]`, *optional*): P(slot k accepted | all before it were), from calibration.
    """

    DECAY = 0.97  # a text changes its kind within some tens of rounds
    PRIOR_ROUNDS = 4.0
    PRIOR_ACCEPTANCE, PRIOR_ACCEPTANCE_ROUNDS = 0.6, 2.0

    def __init__(self, num_slots: int, prior: Sequence[float] | None = None):
        self._prior = np.asarray(prior if prior is not None else [self.PRIOR_ACCEPTANCE] * num_slots)
        self._prior_rounds = self.PRIOR_ROUNDS if prior is not None else self.PRIOR_ACCEPTANCE_ROUNDS
        self._accepted, self._reached, self._expected = np.zeros((3, num_slots))
        self._rounds = self.PRIOR_ROUNDS
        self._tokens = self.PRIOR_ROUNDS * (1 + float(self._prior[0]))

    def observe(self, record: RoundRecord) -> None:
        """Learn from a round that drafted.

        Args:
            record (`RoundRecord`): The round.
        """
        self._rounds = self.DECAY * self._rounds + 1
        self._tokens = self.DECAY * self._tokens + record.accepted_length
        for sums in (self._accepted, self._reached, self._expected):
            sums *= self.DECAY
        judged = min(record.num_accepted + 1, record.verify_length)
        self._reached[:judged] += 1
        self._accepted[: record.num_accepted] += 1
        self._expected[:judged] += record.confidence[:judged] if record.confidence else 1.0

    @property
    def tokens_per_round(self) -> float:
        """`float`: Tokens of a round that drafted, of late."""
        return self._tokens / self._rounds

    @property
    def conditional_acceptance(self) -> tuple[float, ...]:
        """`tuple[float, ...]`: P(slot k accepted | all before it were)."""
        weight = self._prior_rounds
        return tuple(((self._accepted + weight * self._prior) / (self._reached + weight)).tolist())

    def corrected(self, confidence: torch.Tensor) -> torch.Tensor:
        """Confidences scaled by how often such slots were accepted of late.

        Args:
            confidence (`torch.Tensor` of shape `(R, k)`): In [0, 1].

        Returns:
            `torch.Tensor` of shape `(R, k)`, in [0, 1].
        """
        weight = self.PRIOR_ROUNDS
        factors = (self._accepted + weight) / (self._expected + weight)
        factors = confidence.new_tensor(factors[: confidence.shape[-1]])
        return (confidence * factors).clamp(max=1.0)


class RoundTimes:
    """The round-time curve of the machine as it is now: a prior curve, bent to the rounds seen.

    The seconds of verification are fitted, by decayed least squares, as a part that every pass has and a part that
    grows as the prior curve does; how fast it grows is shrunk towards the prior. Drafting is a decayed mean. The unit
    of the prior does not matter, only its shape.

    Args:
        curve (`SPSCurve`): Measured, or [`SPSCurve.linear`].
        learn (`bool`): Whether to follow the clock at all. Under sampling it must not: how many drafts are sent steers
            the random stream, and the same seed has to give the same text.
    """

    DECAY = 0.95
    PRIOR_TOKEN_SPREAD = (
        8.0  # variance of the tokens verified, summed over rounds, at which data and prior weigh alike
    )
    PRIOR_DRAFTS = 2.0

    def __init__(self, curve: SPSCurve, learn: bool):
        self.curve = curve
        self._prior = curve
        self._learn = learn
        self._sums = np.zeros(5)  # rounds, growth, seconds, growth^2, growth * seconds
        self._drafting = np.zeros(2)  # rounds that drafted, their drafting seconds

    def observe(self, records: Sequence[RoundRecord]) -> None:
        """Learn from a round.

        Args:
            records (`Sequence[RoundRecord]` of length R): The round; each request's share of its seconds.
        """
        verify_s, draft_s = (sum(getattr(record, name) for record in records) for name in ("verify_s", "draft_s"))
        if not self._learn or verify_s <= 0 or draft_s < 0:  # an engine without a clock, or a clock that jumped
            return
        growth = self._prior.verify(sum(1 + record.verify_length for record in records)) - self._prior.plain_s
        seconds = _without_stall(verify_s, self._sums[0], self._sums[2])
        self._sums = self.DECAY * self._sums + [1, growth, seconds, growth * growth, growth * seconds]
        if any(record.drafted for record in records):
            # In units of what the prior says of so many requests, which come and go.
            draft_s = _without_stall(draft_s * self._drafting_share(len(records)), *self._drafting)
            self._drafting = self.DECAY * self._drafting + [1, draft_s]
        self.curve = self._fit()

    def _drafting_share(self, num_requests: int) -> float:
        """The part of drafting for so many requests that drafting for one would take, by the prior."""
        several = self._prior.for_requests(num_requests).draft_s
        return self._prior.draft_s / several if several else 1.0

    def _fit(self) -> SPSCurve:
        prior = self._prior
        count, growth, seconds, growth_2, product = self._sums
        mean_growth, mean_s = growth / count, seconds / count
        prior_scale = mean_s / (prior.plain_s + mean_growth)  # the prior curve through the mean round
        tokens = prior.batch_tokens[-1] - prior.batch_tokens[0]
        per_token = (prior.verify_s[-1] - prior.verify_s[0]) / tokens if tokens else 0.0
        weight = self.PRIOR_TOKEN_SPREAD * per_token * per_token
        spread, covariance = growth_2 - growth * mean_growth, product - growth * mean_s
        scale = max(0.0, (covariance + weight * prior_scale) / (spread + weight)) if weight else prior_scale
        base_s = max(mean_s - scale * mean_growth, 0.1 * mean_s)
        drafts, draft_s = self._drafting
        draft_s = (draft_s + self.PRIOR_DRAFTS * prior_scale * prior.draft_s) / (drafts + self.PRIOR_DRAFTS)
        verify_s = tuple(max(base_s + scale * (y - prior.plain_s), 0.1 * mean_s) for y in prior.verify_s)
        request_s = prior.draft_request_s / prior.draft_s * float(draft_s) if prior.draft_s else 0.0
        return SPSCurve(prior.batch_tokens, verify_s, float(draft_s), request_s)


class DraftingGate:
    """Whether the next round drafts at all: only while rounds that draft bring more tokens per second than plain ones.

    What drafting brings is a decayed mean over the rounds that drafted, with a few pseudo-rounds of what the past
    lets expect; their time is the curve's, so that it does not depend on the clock. Where it does not pay, a round is
    drafted now and then to see whether it does again, each time after twice as long a wait.
    """

    # Long enough for chance not to close it: a round brings 1 token more or less than its mean, drafting a quarter.
    DECAY = 0.97
    PRIOR_ROUNDS = 8.0
    # The mean of so few rounds is off by as much, that of R requests by sqrt(R) less; stopping by chance costs more
    # than a small loss.
    TOLERANCE = 0.06
    FIRST_WAIT, LONGEST_WAIT = 8, 64

    def __init__(self) -> None:
        self._tokens = self._steps = 0.0
        self._wait = self._rounds_left = self.FIRST_WAIT

    def opens(self, outlook: RoundOutlook, num_requests: int = 1, kept_pace: float = 1.0) -> bool:
        """Decide about the next round.

        Args:
            outlook (`RoundOutlook`): The past, and the machine.
            num_requests (`int`, *optional*, defaults to 1): R.
            kept_pace (`float`, *optional*, defaults to 1.0): Part of what drafting brings that shortens the call.

        Returns:
            `bool`: Whether to draft.
        """
        if self._pays(outlook, num_requests, kept_pace):
            self._wait = self._rounds_left = self.FIRST_WAIT
            return True
        if self._rounds_left > 0:
            self._rounds_left -= 1
            return False
        self._wait = self._rounds_left = min(2 * self._wait, self.LONGEST_WAIT)
        return True

    def observe(self, records: Sequence[RoundRecord], curve: SPSCurve) -> None:
        """Learn from a round that drafted.

        Args:
            records (`Sequence[RoundRecord]` of length R): The round.
            curve (`SPSCurve`): Round times.
        """
        tokens = sum(record.accepted_length for record in records)
        batch_tokens = sum(1 + record.verify_length for record in records)
        # In plain steps, which bring R tokens: the machine may change, and requests come and go.
        steps = curve.for_requests(len(records)).round_s(batch_tokens) / curve.verify(len(records))
        self._tokens = self.DECAY * self._tokens + tokens / len(records)
        self._steps = self.DECAY * self._steps + steps
        if tokens > steps * len(records):  # a probe that paid is followed by another one
            self._wait, self._rounds_left = self.FIRST_WAIT, 0

    def _pays(self, outlook: RoundOutlook, num_requests: int, kept_pace: float) -> bool:
        tokens, seconds = best_fixed_length(outlook, num_requests)
        tokens = self._tokens + self.PRIOR_ROUNDS * tokens / num_requests
        steps = self._steps + self.PRIOR_ROUNDS * seconds / outlook.curve.verify(num_requests)
        return kept_pace * tokens > (1 - self.TOLERANCE / math.sqrt(num_requests)) * steps


class DraftingPause:
    """Rounds in which a request does not draft, because its first slot was of no use twice in a row.

    Numbers that are not finite rarely get better: those of the context stay in the draft's cache. One token alone may
    be the cause, so the first failure costs nothing; then the pauses double for as long as it goes on.
    """

    FIRST_PAUSE = 8

    def __init__(self) -> None:
        self._failures = self._rounds_left = 0

    def passes(self) -> bool:
        """Whether the request may draft in the next round; asked once per round.

        Returns:
            `bool`
        """
        if self._rounds_left == 0:
            return True
        self._rounds_left -= 1
        return False

    def observe(self, failed: bool) -> None:
        """Learn from a round that drafted.

        Args:
            failed (`bool`): Whether not even the first slot could be used.
        """
        self._failures = self._failures + 1 if failed else 0
        if self._failures > 1:
            self._rounds_left = self.FIRST_PAUSE << (self._failures - 2)


def best_fixed_length(outlook: RoundOutlook, num_requests: int = 1) -> tuple[float, float]:
    """Tokens and seconds of a round, at the fixed number of drafts that is fastest by the past.

    Args:
        outlook (`RoundOutlook`): The past, and the machine.
        num_requests (`int`, *optional*, defaults to 1): R, with as many drafts each.

    Returns:
        `tuple[float, float]`: expected tokens of all requests, bonus tokens included, and seconds of a round.
    """
    tokens = num_requests * (1 + np.cumsum(outlook.expected_survival))
    batch_tokens = num_requests * (2 + np.arange(len(tokens)))
    verify_s = outlook.curve.verify_table(int(batch_tokens[0]), int(batch_tokens[-1]))
    seconds = outlook.curve.draft_s + verify_s[batch_tokens - batch_tokens[0]]
    best = int((tokens / seconds).argmax())
    return float(tokens[best]), float(seconds[best])


def _without_stall(seconds: float, rounds: float, total: float) -> float:
    """At most twice the mean so far: a stall of the machine says nothing about the cost of a token."""
    return min(seconds, 2 * total / rounds) if rounds > 1 else seconds
