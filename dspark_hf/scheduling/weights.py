# SPDX-License-Identifier: Apache-2.0
"""What the speed of single requests is worth to a batch, which ends with its slowest request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np  # sorts and interpolates thousands of requests several times faster than torch does on a CPU

from .curve import SPSCurve


# Weight of a request by its rounds ahead, relative to the most of any: to this power. High enough to speed up the
# slowest request, low enough to tolerate that texts end unexpectedly.
SLOWEST_REQUEST_POWER = 4.0


def request_weights(
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
    per_request, shares = _per_request_share(curve, count), np.ones(count)
    if tokens_left is not None:
        rounds_left = np.maximum(tokens_left, 1) / pace
        shares = (rounds_left / rounds_left.max()) ** SLOWEST_REQUEST_POWER
        shares /= shares.mean()
    return tuple((pace.mean() / pace * (per_request + (1 - per_request) * shares)).tolist())


def batch_speedup_share(
    curve: SPSCurve, tokens_per_round: Sequence[float], tokens_left: Sequence[int] | None = None
) -> float:
    """The share of its requests' mean speed-up that shortens a call, since it ends with the slowest of them.

    The time to the end at their paces against that at one token a round, by the two parts of the time of a round (see
    [`request_weights`]): one depends on the most rounds that a request has ahead, the other on the rounds of all.

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
    per_request, pace = _per_request_share(curve, count), np.asarray(tokens_per_round, dtype=np.float64)
    left = np.maximum(tokens_left, 1)
    plain, drafted = ((1 - per_request) * rounds.max() + per_request * rounds.mean() for rounds in (left, left / pace))
    return min(1.0, float(plain / drafted / pace.mean()))


def _per_request_share(curve: SPSCurve, num_requests: int) -> float:
    """The part of a round's time that belongs to single requests and disappears when they end."""
    alone_s, all_s = curve.round_s(1), curve.for_requests(num_requests).round_s(num_requests)
    return min(1.0, (all_s - alone_s) / all_s * num_requests / (num_requests - 1))
