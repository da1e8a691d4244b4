# SPDX-License-Identifier: Apache-2.0
"""What a token of each request is worth to a batch, and how much of a faster pace the batch keeps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np  # sorts and interpolates thousands of requests several times faster than torch does on a CPU

from .curve import SPSCurve


# How much more the rounds ahead of the slowest text count than those of the others: high enough to bring it forward,
# low enough to bear that texts end unforeseen.
URGENCY = 4.0


def token_weights(
    curve: SPSCurve, tokens_per_round: Sequence[float], tokens_left: Sequence[int] | None = None
) -> tuple[float, ...]:
    """What a token more is worth to each request, in time saved; about 1 on average.

    A token saves a request 1 / `tokens_per_round` rounds, so it is worth more to one that is slow. Of the time of a
    round a part leaves with each request that ends, and a part stays until the last one does: what brings forward
    the request with most rounds ahead saves the latter, what brings forward others does not.

    Args:
        curve (`SPSCurve`): Round times.
        tokens_per_round (`Sequence[float]` of length R): Of each request, of late, where it drafted.
        tokens_left (`Sequence[int]` of length R, *optional*):
            Tokens that each may still grow by; `None` where other texts take the places of those that end.

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
    """What a call keeps of the mean pace of its requests, since it ends with the slowest of them.

    The time to the end at their paces against that at one token a round, by the two parts of the time of a round (see
    [`token_weights`]): one goes by the most rounds that a request has ahead, the other by the rounds of all.

    Args:
        curve (`SPSCurve`): Round times.
        tokens_per_round (`Sequence[float]` of length R): Of each request.
        tokens_left (`Sequence[int]` of length R, *optional*):
            Tokens that each may still grow by; `None` where other texts take the places of those that end.

    Returns:
        `float`: 1 where all are equally fast, or none holds up the others.
    """
    count = len(tokens_per_round)
    if count == 1 or tokens_left is None:
        return 1.0
    own_share, pace = _own_share(curve, count), np.asarray(tokens_per_round, dtype=np.float64)
    left = np.maximum(tokens_left, 1)
    plain, drafted = ((1 - own_share) * rounds.max() + own_share * rounds.mean() for rounds in (left, left / pace))
    return min(1.0, float(plain / drafted / pace.mean()))


def _own_share(curve: SPSCurve, num_requests: int) -> float:
    """The part of a round's time that is the requests' own: that leaves with those that end."""
    alone_s, all_s = curve.round_s(1), curve.for_requests(num_requests).round_s(num_requests)
    return min(1.0, (all_s - alone_s) / all_s * num_requests / (num_requests - 1))
