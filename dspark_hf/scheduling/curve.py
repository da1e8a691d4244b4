# SPDX-License-Identifier: Apache-2.0
"""The round-time curve SPS(B) of the paper: seconds of a round by the tokens that it verifies."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np  # sorts and interpolates thousands of requests several times faster than torch does on a CPU


@dataclass(frozen=True)
class SPSCurve:
    """Round time against the tokens verified, of one target, draft and machine; SPS(B) = 1 / `round_s(B)`.

    Between two measured points the time is linear; beyond the last it continues with the slope of the last two; below
    the first it is constant.

    Args:
        batch_tokens (`tuple[int, ...]`): B at which the time is known, ascending, from 1 up.
        verify_s (`tuple[float, ...]`): Seconds of a verification pass of B tokens.
        draft_s (`float`, *optional*, defaults to 0.0):
            Seconds of drafting for one request, paid in every round that drafts.
        draft_request_s (`float`, *optional*, defaults to 0.0): Seconds that drafting for each further request adds.

    Raises:
        ValueError: If the points are not ascending, or a time is not positive and finite.

    Example:
        >>> curve = SPSCurve(batch_tokens=(1, 3), verify_s=(1.0, 2.0), draft_s=0.5)
        >>> curve.verify(2), curve.round_s(2), curve.plain_s
        (1.5, 2.0, 1.0)
    """

    batch_tokens: tuple[int, ...]
    verify_s: tuple[float, ...]
    draft_s: float = 0.0
    draft_request_s: float = 0.0

    def __post_init__(self) -> None:
        points = self.batch_tokens
        ascending = all(a < b for a, b in zip(points, points[1:], strict=False))
        if not points or len(points) != len(self.verify_s) or points[0] < 1 or not ascending:
            raise ValueError(
                "`batch_tokens` must be ascending, start at 1 or more and have one time each, got "
                f"{points} and {len(self.verify_s)} times."
            )
        if not all(math.isfinite(seconds) and seconds > 0 for seconds in self.verify_s):
            raise ValueError(f"`verify_s` must be positive and finite, got {self.verify_s}.")
        for name in ("draft_s", "draft_request_s"):
            seconds = getattr(self, name)
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ValueError(f"`{name}` must be >= 0 and finite, got {seconds}.")

    @classmethod
    def linear(cls, slot_cost: float, draft_cost: float = 0.0) -> SPSCurve:
        """The curve of a machine that was not measured, in units of a plain step.

        Args:
            slot_cost (`float`): Cost of one more verified token, in plain steps.
            draft_cost (`float`, *optional*, defaults to 0.0): Cost of drafting, in plain steps.

        Returns:
            [`SPSCurve`]
        """
        return cls((1, 2), (1.0, 1.0 + slot_cost), draft_cost)

    def for_requests(self, num_requests: int) -> SPSCurve:
        """The curve of rounds of this many requests: the same verification, and all their drafting in `draft_s`.

        Args:
            num_requests (`int`): R.

        Returns:
            [`SPSCurve`]
        """
        if not self.draft_request_s:
            return self
        draft_s = self.draft_s + (num_requests - 1) * self.draft_request_s
        return SPSCurve(self.batch_tokens, self.verify_s, draft_s)

    @property
    def plain_s(self) -> float:
        """`float`: Seconds of a step of one request without drafts."""
        return self.verify(1)

    def verify(self, batch_tokens: int) -> float:
        """Seconds of a verification pass.

        Args:
            batch_tokens (`int`): B.

        Returns:
            `float`
        """
        return float(self.verify_table(batch_tokens, batch_tokens)[0])

    def round_s(self, batch_tokens: int) -> float:
        """Seconds of a round that drafts.

        Args:
            batch_tokens (`int`): B.

        Returns:
            `float`
        """
        return self.draft_s + self.verify(batch_tokens)

    def verify_table(self, first: int, last: int) -> np.ndarray:
        """Seconds of verification passes of `first` to `last` tokens.

        Args:
            first (`int`): Fewest tokens.
            last (`int`): Most tokens, included.

        Returns:
            `np.ndarray` of shape `(last - first + 1,)`, fp64.
        """
        points, seconds = self.batch_tokens, self.verify_s
        if last > points[-1] and len(points) > 1:  # more tokens never take less time
            slope = max(0.0, (seconds[-1] - seconds[-2]) / (points[-1] - points[-2]))
            points, seconds = (*points, last), (*seconds, seconds[-1] + slope * (last - points[-1]))
        return np.interp(np.arange(first, last + 1), points, seconds)
