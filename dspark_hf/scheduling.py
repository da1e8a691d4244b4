# SPDX-License-Identifier: Apache-2.0
"""How many drafts of each request go to verification (paper section 3.2). Never sees a model.

Legend: R requests, g slots per block, N = R * g, B tokens in a verification pass (one anchor per request, plus
drafts). a is the prefix survival: the chance that a draft and all before it are accepted.

Every scheduler is causal. Whether slot k of a request is sent depends on its c_0..c_k, on the other requests and on
earlier rounds, never on x_k or anything after it: that is what keeps sampled text exact (paper Appendix A).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np  # sorts and interpolates thousands of requests several times faster than torch does on a CPU
import torch


@dataclass(frozen=True)
class SPSCurve:
    """Round time against the tokens verified, of one target, draft and machine; SPS(B) = 1 / `round_s(B)`.

    Between two measured points the time is linear; beyond the last it goes on with the slope of the last two; below
    the first it is the first.

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
        """The curve of rounds of so many requests: the same verification, and all their drafting in `draft_s`.

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


@dataclass(frozen=True)
class RoundOutlook:
    """What a scheduler may know besides the confidences of the round: the past, and the machine.

    Args:
        curve (`SPSCurve`): Round times.
        expected_survival (`tuple[float, ...]`): Mean prefix survival of slots 0 to g - 1 in earlier rounds.
        token_weights (`tuple[float, ...]`, *optional*):
            What a token more is worth to each request, of [`token_weights`]; the same to all of them without it.
    """

    curve: SPSCurve
    expected_survival: tuple[float, ...]
    token_weights: tuple[float, ...] | None = None


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


class Scheduler(Protocol):
    """Decides how many drafts of each request are verified."""

    def verify_lengths(self, confidence: torch.Tensor, outlook: RoundOutlook) -> torch.Tensor:
        """Drafts to send.

        Args:
            confidence (`torch.Tensor` of shape `(R, g)`): c_k, in [0, 1].
            outlook (`RoundOutlook`): The past, and the machine.

        Returns:
            `torch.LongTensor` of shape `(R,)`, values 0 to g.
        """
        ...


def prefix_survival(confidence: torch.Tensor) -> torch.Tensor:
    """a_k = c_0 * ... * c_k (section 3.2.1).

    Args:
        confidence (`torch.Tensor` of shape `(*b, g)`): c_k, in [0, 1].

    Returns:
        `torch.Tensor` of shape `(*b, g)`, non-increasing along the slots.
    """
    return confidence.cumprod(dim=-1)


@dataclass(frozen=True)
class FixedScheduler:
    """Always the same number of drafts.

    Args:
        num_tokens (`int`): Drafts per request.
    """

    num_tokens: int

    def verify_lengths(self, confidence: torch.Tensor, outlook: RoundOutlook) -> torch.Tensor:  # noqa: ARG002
        """See [`Scheduler.verify_lengths`]."""
        return torch.full((confidence.shape[0],), min(self.num_tokens, confidence.shape[1]))


@dataclass(frozen=True)
class ThresholdScheduler:
    """Up to the first slot whose own confidence is below a threshold.

    Args:
        threshold (`float`): In [0, 1].
    """

    threshold: float

    def verify_lengths(self, confidence: torch.Tensor, outlook: RoundOutlook) -> torch.Tensor:  # noqa: ARG002
        """See [`Scheduler.verify_lengths`]."""
        return (confidence >= self.threshold).long().cumprod(dim=-1).sum(dim=-1)


@dataclass(frozen=True)
class PrefixScheduler:
    """The paper's Algorithm 1: admit drafts by descending survival while tokens per second rise; stop at the first
    that does not raise them.

    The time of a round includes drafting where the curve has it: without it, rounds look shorter than they are and
    too few drafts are sent.
    """

    def verify_lengths(self, confidence: torch.Tensor, outlook: RoundOutlook) -> torch.Tensor:
        """See [`Scheduler.verify_lengths`]."""
        survival = _survival(confidence)
        rates = _rates(_descending(survival), len(survival), outlook.curve)
        return _lengths(survival, _num_leading(rates[1:] > rates[:-1]))


class CapacityScheduler:
    """Section 5.2: how many drafts fit comes from the confidences of two rounds earlier, which of them from the
    current ones.

    The capacity is a search over all counts, so a cliff in the curve does not stop it; it reads the past only, so it
    is causal. The first two rounds follow Algorithm 1. Where requests came or went, it grows with their number.
    """

    DELAY = 2

    def __init__(self) -> None:
        self._earlier: deque[np.ndarray] = deque(maxlen=self.DELAY)

    def verify_lengths(self, confidence: torch.Tensor, outlook: RoundOutlook) -> torch.Tensor:
        """See [`Scheduler.verify_lengths`]."""
        survival = _survival(confidence)
        earlier = self._earlier[0] if len(self._earlier) == self.DELAY else None
        self._earlier.append(survival)
        if earlier is None:
            return PrefixScheduler().verify_lengths(confidence, outlook)
        rates = _rates(_descending(earlier), len(earlier), outlook.curve)
        count = round(int(rates.argmax()) * len(survival) / len(earlier))
        return _lengths(survival, min(count, survival.size))  # blocks are shorter where a text ends


@dataclass(frozen=True)
class LookaheadScheduler:
    """Algorithm 1 with two changes: it prices time, and it looks past a cliff with the eyes of the past.

    Time is worth the tokens per second of the best fixed length, by the survival of earlier rounds, or those of plain
    steps. Drafts are taken by descending survival; the next one is sent if it, or it together with some number of
    those after it, is expected to bring more tokens than its time is worth. The survival of the drafts after it is
    not read (that would leak x_k into the decision about slot k): it is the survival at hand, falling as it fell on
    average in earlier rounds.

    A price, instead of the rate of the round at hand, lets a good round run longer and ends a bad one sooner: the
    tokens per second of a text are a ratio of sums, not a mean of ratios. Tokens count by `token_weights`.
    """

    def verify_lengths(self, confidence: torch.Tensor, outlook: RoundOutlook) -> torch.Tensor:
        """See [`Scheduler.verify_lengths`]."""
        survival = _weighted_survival(confidence, outlook)
        num_requests, num_slots = survival.shape
        expected = _expected(outlook, num_requests, num_slots)
        tokens = np.concatenate([[0.0], expected.cumsum()])  # [N + 1]: what n drafts brought in the past
        seconds = outlook.curve.verify_table(num_requests, num_requests + len(expected))  # [N + 1]
        price = _price(tokens, seconds, num_requests, outlook.curve)
        descending = _descending(survival)
        sent = descending > price * np.diff(seconds)
        # Where the next draft alone does not pay, a later end of the round may: a measured point past a cliff.
        knots = {b - num_requests for b in outlook.curve.batch_tokens if 0 < b - num_requests < len(expected)}
        ends = np.array([*knots, len(expected)])[:, None]
        scale = descending / expected  # how much better than usual the next draft is
        unpaid = np.nonzero(~sent)[0]
        for start in range(0, len(unpaid), 256):  # the first few decide as a rule
            counts = unpaid[start : start + 256]
            gains = scale[counts] * (tokens[ends] - tokens[counts]) - price * (seconds[ends] - seconds[counts])
            sent[counts] = ((ends > counts) & (gains > 0)).any(axis=0)
            if not sent[counts].all():
                break
        return _lengths(survival, _num_leading(sent))


@dataclass(frozen=True)
class SearchScheduler:
    """All counts are tried, with time priced as in [`LookaheadScheduler`]. NOT causal: for greedy decoding only.

    Whether slot k is sent depends on c_{k+1}, which depends on x_k. A greedy text is the target's argmax whatever is
    sent, so there, and only there, knowing more is free.
    """

    def verify_lengths(self, confidence: torch.Tensor, outlook: RoundOutlook) -> torch.Tensor:
        """See [`Scheduler.verify_lengths`]."""
        survival = _weighted_survival(confidence, outlook)
        num_requests, num_slots = survival.shape
        past = np.concatenate([[0.0], _expected(outlook, num_requests, num_slots).cumsum()])
        tokens = np.concatenate([[0.0], _descending(survival).cumsum(dtype=np.float64)])
        seconds = outlook.curve.verify_table(num_requests, num_requests + survival.size)
        price = _price(past, seconds, num_requests, outlook.curve)
        return _lengths(survival, int((tokens - price * seconds).argmax()))


def _expected(outlook: RoundOutlook, num_requests: int, num_slots: int) -> np.ndarray:
    """Survival of all drafts by the past, descending, [N]."""
    return np.repeat(np.maximum(outlook.expected_survival[:num_slots], 1e-9), num_requests)


def _price(tokens: np.ndarray, seconds: np.ndarray, num_requests: int, curve: SPSCurve) -> float:
    """Tokens per second that time is worth: those of the best fixed count of drafts, or of plain steps."""
    drafting = ((num_requests + tokens) / (curve.draft_s + seconds)).max()
    return max(float(drafting), num_requests / float(seconds[0]))


def _survival(confidence: torch.Tensor) -> np.ndarray:
    return prefix_survival(confidence.float()).cpu().numpy()


def _weighted_survival(confidence: torch.Tensor, outlook: RoundOutlook) -> np.ndarray:
    """What each draft is expected to bring, in tokens as they count; along a request's slots it never rises."""
    survival = _survival(confidence)
    return survival if outlook.token_weights is None else survival * np.asarray(outlook.token_weights)[:, None]


def _descending(survival: np.ndarray) -> np.ndarray:
    return -np.sort(-survival, axis=None)


def _rates(survival: np.ndarray, num_requests: int, curve: SPSCurve) -> np.ndarray:
    """Tokens per second with the first n of the sorted drafts sent, n = 0 to N."""
    tokens = num_requests + np.concatenate([[0.0], survival.cumsum(dtype=np.float64)])
    return tokens / (curve.draft_s + curve.verify_table(num_requests, num_requests + len(survival)))


def _num_leading(flags: np.ndarray) -> int:
    """How many flags hold before the first that does not."""
    return len(flags) if flags.all() else int(flags.argmin())


def _lengths(survival: np.ndarray, count: int) -> torch.Tensor:
    """Drafts per request when the `count` likeliest are sent; among equals the first request's first slot."""
    if count == 0:
        return torch.zeros(len(survival), dtype=torch.long)
    least = np.partition(survival, survival.size - count, axis=None)[survival.size - count]
    lengths = (survival > least).sum(axis=1)
    rows = np.nonzero(survival == least)[0][: count - lengths.sum()]
    return torch.from_numpy(lengths + np.bincount(rows, minlength=len(survival)))


def mean_survival(conditional_acceptance: Sequence[float]) -> tuple[float, ...]:
    """Prefix survival from the acceptance of each slot given those before it.

    Args:
        conditional_acceptance (`Sequence[float]`): P(slot k accepted | all before it were).

    Returns:
        `tuple[float, ...]`
    """
    survival, product = [], 1.0
    for rate in conditional_acceptance:
        product *= rate
        survival.append(product)
    return tuple(survival)
