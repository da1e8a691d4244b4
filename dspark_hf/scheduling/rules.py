# SPDX-License-Identifier: Apache-2.0
"""Rules that choose how many drafts of each request are verified (paper section 3.2). Imports no model code.

Legend: R requests, g slots per block, N = R * g, B tokens in a verification pass (one anchor per request, plus
drafts). a is the prefix survival: the chance that a draft and all before it are accepted.

Every scheduler is causal. Whether slot k of a request is sent depends on its c_0..c_k, on the other requests and on
earlier rounds, never on x_k or anything after it: this keeps sampled text exact (paper Appendix A).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np  # sorts and interpolates thousands of requests several times faster than torch does on a CPU
import torch

from .curve import SPSCurve


@dataclass(frozen=True)
class RoundOutlook:
    """The inputs of a scheduler besides the confidences of the round: the past, and the machine.

    Args:
        curve (`SPSCurve`): Round times.
        expected_survival (`tuple[float, ...]`): Mean prefix survival of slots 0 to g - 1 in earlier rounds.
        request_weights (`tuple[float, ...]`, *optional*):
            Value of one more token for each request, from [`request_weights`]; equal for all requests by default.
        other_tokens (`int`, *optional*, defaults to 0):
            Tokens that the pass verifies besides: copies, and the anchors of requests without a block.
        other_gain (`float`, *optional*, defaults to 0.0): Tokens that these are expected to bring.
    """

    curve: SPSCurve
    expected_survival: tuple[float, ...]
    request_weights: tuple[float, ...] | None = None
    other_tokens: int = 0
    other_gain: float = 0.0


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


def prefix_survival(
    confidence: torch.Tensor,  # [*b, g], c_k, in [0, 1]
) -> torch.Tensor:  # [*b, g], non-increasing along the slots
    """a_k = c_0 * ... * c_k (section 3.2.1)."""
    return confidence.cumprod(dim=-1)


@dataclass(frozen=True)
class FixedScheduler:
    """Always sends the same number of drafts.

    Args:
        num_tokens (`int`): Drafts per request.
    """

    num_tokens: int

    def verify_lengths(self, confidence: torch.Tensor, outlook: RoundOutlook) -> torch.Tensor:  # noqa: ARG002
        """See [`Scheduler.verify_lengths`]."""
        return torch.full((confidence.shape[0],), min(self.num_tokens, confidence.shape[1]))


@dataclass(frozen=True)
class ThresholdScheduler:
    """Sends drafts up to the first slot whose own confidence is below a threshold.

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

    The time of a round includes drafting if the curve has it. Without it, rounds look shorter than they are and too
    few drafts are sent.
    """

    def verify_lengths(self, confidence: torch.Tensor, outlook: RoundOutlook) -> torch.Tensor:
        """See [`Scheduler.verify_lengths`]."""
        survival = _survival(confidence)
        rates = _rates(_descending(survival), len(survival), outlook)
        return lengths_of_likeliest(survival, _num_leading(rates[1:] > rates[:-1]))


class CapacityScheduler:
    """Section 5.2: the number of drafts is computed from the confidences of two rounds earlier, their choice from the
    current ones.

    The capacity is a search over all counts, so a step in the curve does not stop it; it reads the past only, so it
    is causal. The first two rounds follow Algorithm 1. If the number of requests changes, it scales with it.
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
        rates = _rates(_descending(earlier), len(earlier), outlook)
        count = round(int(rates.argmax()) * len(survival) / len(earlier))
        return lengths_of_likeliest(survival, min(count, survival.size))  # blocks are shorter where a text ends


@dataclass(frozen=True)
class LookaheadScheduler:
    """Algorithm 1 with two changes: it charges for time, and uses past acceptance to look beyond a step in the curve.

    Time is worth the tokens per second of the best fixed length, by the survival of earlier rounds, or those of plain
    steps. Drafts are taken by descending survival; the next one is sent if it, or it together with some number of
    those after it, is expected to bring more tokens than its time is worth. The survival of the drafts after it is
    not read (that would leak x_k into the decision about slot k): it is the survival of the current draft, decreasing
    as it did on average in earlier rounds.

    A price, instead of the rate of the current round, lets a good round run longer and ends a bad one sooner: the
    tokens per second of a text are a ratio of sums, not a mean of ratios. Tokens count by `request_weights`.
    """

    def verify_lengths(self, confidence: torch.Tensor, outlook: RoundOutlook) -> torch.Tensor:
        """See [`Scheduler.verify_lengths`]."""
        survival = _weighted_survival(confidence, outlook)
        num_requests, num_slots = survival.shape
        expected = _expected(outlook, num_requests, num_slots)
        tokens = np.concatenate([[0.0], expected.cumsum()])  # [N + 1]: tokens gained by n drafts in the past
        first = num_requests + outlook.other_tokens
        seconds = outlook.curve.verify_table(first, first + len(expected))  # [N + 1]
        price = _price(num_requests + outlook.other_gain + tokens, seconds, outlook.curve.draft_s)
        descending = _descending(survival)
        sent = descending > price * np.diff(seconds)
        # If the next draft alone does not pay off, a later end of the round may: a measured point beyond a step.
        knots = {b - first for b in outlook.curve.batch_tokens if 0 < b - first < len(expected)}
        ends = np.array([*knots, len(expected)])[:, None]
        scale = descending / expected  # how much better than usual the next draft is
        unpaid = np.nonzero(~sent)[0]
        for start in range(0, len(unpaid), 256):  # usually the first few decide
            counts = unpaid[start : start + 256]
            gains = scale[counts] * (tokens[ends] - tokens[counts]) - price * (seconds[ends] - seconds[counts])
            sent[counts] = ((ends > counts) & (gains > 0)).any(axis=0)
            if not sent[counts].all():
                break
        return lengths_of_likeliest(survival, _num_leading(sent))


def all_rules(num_slots: int) -> dict[str, Callable[[], Scheduler]]:  # name -> maker: some rules learn
    """Every rule, by the name that tables give it."""
    fixed = {f"fixed {n}": functools.partial(FixedScheduler, n) for n in range(1, num_slots + 1)}
    return fixed | {
        "threshold 0.5": functools.partial(ThresholdScheduler, 0.5),
        "Algorithm 1": PrefixScheduler,
        "capacity": CapacityScheduler,
        "look-ahead": LookaheadScheduler,
    }


def _expected(outlook: RoundOutlook, num_requests: int, num_slots: int) -> np.ndarray:
    """Expected survival of all drafts from the past, descending, [N]."""
    return np.repeat(np.maximum(outlook.expected_survival[:num_slots], 1e-9), num_requests)


def _price(tokens: np.ndarray, seconds: np.ndarray, draft_s: float) -> float:
    """Tokens per second that time is worth: those of the best fixed count of drafts, or of a round without blocks."""
    return max(float((tokens / (draft_s + seconds)).max()), float(tokens[0] / seconds[0]))


def _survival(confidence: torch.Tensor) -> np.ndarray:
    return prefix_survival(confidence.float()).cpu().numpy()


def _weighted_survival(confidence: torch.Tensor, outlook: RoundOutlook) -> np.ndarray:
    """Expected weighted tokens of each draft; never increases along a request's slots."""
    survival = _survival(confidence)
    return survival if outlook.request_weights is None else survival * np.asarray(outlook.request_weights)[:, None]


def _descending(survival: np.ndarray) -> np.ndarray:
    return -np.sort(-survival, axis=None)


def _rates(survival: np.ndarray, num_requests: int, outlook: RoundOutlook) -> np.ndarray:
    """Tokens per second with the first n of the sorted drafts sent, n = 0 to N."""
    first, curve = num_requests + outlook.other_tokens, outlook.curve
    tokens = num_requests + outlook.other_gain + np.concatenate([[0.0], survival.cumsum(dtype=np.float64)])
    return tokens / (curve.draft_s + curve.verify_table(first, first + len(survival)))


def _num_leading(flags: np.ndarray) -> int:
    """Number of leading flags that are true."""
    return len(flags) if flags.all() else int(flags.argmin())


def lengths_of_likeliest(
    survival: np.ndarray,  # [R, g], non-increasing along the slots
    count: int,  # drafts to send, 0 to R * g
) -> torch.Tensor:  # [R]
    """Drafts per request when the `count` likeliest are sent; among equals the first request's first slot."""
    if count == 0:
        return torch.zeros(len(survival), dtype=torch.long)
    least = np.partition(survival, survival.size - count, axis=None)[survival.size - count]
    lengths = (survival > least).sum(axis=1)
    rows = np.nonzero(survival == least)[0][: count - lengths.sum()]
    return torch.from_numpy(lengths + np.bincount(rows, minlength=len(survival)))


def mean_survival(conditional_acceptance: Sequence[float]) -> tuple[float, ...]:
    """Prefix survival from the acceptance of each slot given those before it."""
    survival, product = [], 1.0
    for rate in conditional_acceptance:
        product *= rate
        survival.append(product)
    return tuple(survival)
