# SPDX-License-Identifier: Apache-2.0
"""Learns the time of a round from the rounds of this call. Imports no model code."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..common.records import RoundRecord
from .curve import SPSCurve


class LiveRoundTimes:
    """The current round-time curve of the machine: a prior curve, fitted to the rounds seen.

    The seconds of verification are fitted, by decayed least squares, as a part that every pass has and a part that
    grows as the prior curve does; how fast it grows is shrunk towards the prior. Drafting is a decayed mean. The unit
    of the prior does not matter, only its shape.
    """

    DECAY = 0.95
    PRIOR_TOKEN_SPREAD = (
        8.0  # variance of the tokens verified, summed over rounds, at which data and prior have equal weight
    )
    PRIOR_DRAFTS = 2.0

    def __init__(self, curve: SPSCurve, learn: bool):
        self.curve = curve
        self._prior = curve
        self._learn = learn
        self._sums = np.zeros(5)  # rounds, growth, seconds, growth^2, growth * seconds
        self._drafting = np.zeros(2)  # rounds that drafted, their drafting seconds

    def observe(self, records: Sequence[RoundRecord]) -> None:
        """Learn from a round."""
        verify_s, draft_s = (sum(getattr(record, name) for record in records) for name in ("verify_s", "draft_s"))
        if not self._learn or verify_s <= 0 or draft_s < 0:  # an engine without a clock, or a clock that jumped
            return
        growth = self._prior.verify(sum(1 + record.verify_length for record in records)) - self._prior.plain_s
        seconds = _without_stall(verify_s, self._sums[0], self._sums[2])
        self._sums = self.DECAY * self._sums + [1, growth, seconds, growth * growth, growth * seconds]
        if any(record.drafted for record in records):
            # In units of the prior for this number of requests, which changes.
            draft_s = _without_stall(draft_s * self._drafting_share(len(records)), *self._drafting)
            self._drafting = self.DECAY * self._drafting + [1, draft_s]
        self.curve = self._fit()

    def _drafting_share(self, num_requests: int) -> float:
        """The share of one request in the drafting time of this many, by the prior."""
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


def _without_stall(seconds: float, rounds: float, total: float) -> float:
    """Limit seconds to twice the mean so far: a stall of the machine is not the cost of a token."""
    return min(seconds, 2 * total / rounds) if rounds > 1 else seconds
