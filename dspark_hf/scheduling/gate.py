# SPDX-License-Identifier: Apache-2.0
"""Decides round by round whether drafting pays off, from tokens and times of earlier rounds. Imports no model code."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..common.records import RoundRecord
from .curve import SPSCurve
from .rules import RoundOutlook


class DraftingGate:
    """Lets rounds draft only while rounds that draft yield more tokens per second than plain ones.

    The gain of drafting is a decayed mean over the rounds that drafted, with a few pseudo-rounds of the gain expected
    from the past. Their time is taken from the curve, so it does not depend on the clock. While drafting does not pay
    off, a round is drafted occasionally to test whether it does again, each time after twice as long a wait.
    """

    # Long enough that chance does not close it: a round varies by 1 token around its mean, drafting gains a quarter.
    DECAY = 0.97
    PRIOR_ROUNDS = 8.0
    # Standard error of a mean over this many rounds (divide by sqrt(R) for R requests). Stopping by chance costs more
    # than tolerating a small loss.
    TOLERANCE = 0.08
    FIRST_WAIT, LONGEST_WAIT = 8, 64

    def __init__(self) -> None:
        self._tokens = self._steps = 0.0
        self._wait = self._rounds_left = self.FIRST_WAIT

    def should_draft(self, outlook: RoundOutlook, num_requests: int = 1, speedup_share: float = 1.0) -> bool:
        """Decide about the next round."""
        if self._pays(outlook, num_requests, speedup_share):
            self._wait = self._rounds_left = self.FIRST_WAIT
            return True
        if self._rounds_left > 0:
            self._rounds_left -= 1
            return False
        self._wait = self._rounds_left = min(2 * self._wait, self.LONGEST_WAIT)
        return True

    def observe(self, records: Sequence[RoundRecord], curve: SPSCurve) -> None:
        """Learn from a round that drafted."""
        tokens = sum(record.accepted_length for record in records)
        batch_tokens = sum(1 + record.verify_length for record in records)
        # In plain steps, which bring R tokens: the machine may change, and requests come and go.
        steps = curve.for_requests(len(records)).round_s(batch_tokens) / curve.verify(len(records))
        self._tokens = self.DECAY * self._tokens + tokens / len(records)
        self._steps = self.DECAY * self._steps + steps
        if tokens > steps * len(records):  # a probe that paid off is followed by another one
            self._wait, self._rounds_left = self.FIRST_WAIT, 0

    def _pays(self, outlook: RoundOutlook, num_requests: int, speedup_share: float) -> bool:
        tokens, seconds = best_fixed_length(outlook, num_requests)
        tokens = self._tokens + self.PRIOR_ROUNDS * tokens / num_requests
        steps = self._steps + self.PRIOR_ROUNDS * seconds / outlook.curve.verify(num_requests)
        return speedup_share * tokens > (1 - self.TOLERANCE / math.sqrt(num_requests)) * steps


class DraftingPause:
    """Rounds in which a request does not draft, because its first slot was unusable twice in a row.

    Values that are not finite rarely recover: those of the context stay in the draft's cache. A single token may be
    the cause, so the first failure has no effect; after that the pauses double while failures continue.
    """

    FIRST_PAUSE = 8

    def __init__(self) -> None:
        self._failures = self._rounds_left = 0

    def passes(self) -> bool:
        """Whether the request may draft in the next round; called once per round."""
        if self._rounds_left == 0:
            return True
        self._rounds_left -= 1
        return False

    def observe(self, failed: bool) -> None:
        """Learn from a round that drafted."""
        self._failures = self._failures + 1 if failed else 0
        if self._failures > 1:
            self._rounds_left = self.FIRST_PAUSE << (self._failures - 2)


def best_fixed_length(outlook: RoundOutlook, num_requests: int = 1) -> tuple[float, float]:
    """Tokens and seconds of a round, at the fixed number of drafts that was fastest in the past."""
    tokens = num_requests * (1 + np.cumsum(outlook.expected_survival))
    batch_tokens = num_requests * (2 + np.arange(len(tokens)))
    verify_s = outlook.curve.verify_table(int(batch_tokens[0]), int(batch_tokens[-1]))
    seconds = outlook.curve.draft_s + verify_s[batch_tokens - batch_tokens[0]]
    best = int((tokens / seconds).argmax())
    return float(tokens[best]), float(seconds[best])
