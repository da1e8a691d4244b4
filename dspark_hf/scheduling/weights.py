# SPDX-License-Identifier: Apache-2.0
"""The value of a token of each request to a batch, and the share of a faster pace that the batch keeps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np  # sorts and interpolates thousands of requests several times faster than torch does on a CPU

from .curve import SPSCurve


# How much more the rounds ahead of the slowest text count than those of the others: high enough to speed it up, low
# enough to tolerate that texts end unexpectedly.
URGENCY = 4.0


def token_weights(
    curve: SPSCurve, tokens_per_round: Sequence[float], tokens_left: Sequence[int] | None = None
) -> tuple[float, ...]:
    """The value of one more token for each request, in time saved; about 1 on average.

    A token saves a request 1 / `tokens_per_round` rounds, so it is worth more to a slow one. Part of a round's cost
    disappears when a request finishes; the rest is paid until the last one does. Only speeding up the request with
    most rounds ahead saves the latter.

    Args:
        curve (`SPSCurve`): Round times.
        tokens_per_round (`Sequence[float]` of length R): Of each request, in its recent rounds that drafted.
        tokens_left (`Sequence[int]` of length R, *optional*):
            Tokens that each may still grow by; `None` if other texts take the places of those that end.

    Returns:
        `tuple[float, ...]` of length R.
    """
    count, pace = len(tokens_per_round), np.asarray(tokens_per_round, dtype=np.float64)
    if count == 1:
        return (1.0,)
    own_share, shares = _own_share(curve, count), np.ones(count)
    if tokens_left is not None:
        rounds_left = np.maximum(tokens_left, 1) / pace
        shares = (rounds_left / rounds_left.max()) ** URGENCY
        shares /= shares.mean()
    return tuple((pace.mean() / pace * (own_share + (1 - own_share) * shares)).tolist())


def kept_pace(curve: SPSCurve, tokens_per_round: Sequence[float], tokens_left: Sequence[int] | None = None) -> float:
    """The share of the mean pace of its requests that a call keeps, since it ends with the slowest of them.

    The time to the end at their paces against that at one token a round, by the two parts of the time of a round (see
    [`token_weights`]): one depends on the most rounds that a request has ahead, the other on the rounds of all.

    Args:
        curve (`SPSCurve`): Round times.
        tokens_per_round (`Sequence[float]` of length R): Of each request.
        tokens_left (`Sequence[int]` of length R, *optional*):
            Tokens that each may still grow by; `None` if other texts take the places of those that end.

    Returns:
        `float`: 1 if all are equally fast, or none delays the others.
    """
    count = len(tokens_per_round)
    if count == 1 or tokens_left is None:
        return 1.0
    own_share, pace = _own_share(curve, count), np.asarray(tokens_per_round, dtype=np.float64)
    left = np.maximum(tokens_left, 1)
    plain, drafted = ((1 - own_share) * rounds.max() + own_share * rounds.mean() for rounds in (left, left / pace))
    return min(1.0, float(plain / drafted / pace.mean()))


def _own_share(curve: SPSCurve, num_requests: int) -> float:
    """The part of a round's time that belongs to single requests and disappears when they end."""
    alone_s, all_s = curve.round_s(1), curve.for_requests(num_requests).round_s(num_requests)
    return min(1.0, (all_s - alone_s) / all_s * num_requests / (num_requests - 1))
