# SPDX-License-Identifier: Apache-2.0
"""Confidence intervals of pooled figures: the bootstrap over questions. Imports no model code.

A figure is a function of sums, such as tokens over rounds. The rounds of one text are correlated, so whole questions
are resampled, with all their sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np


LEVEL = 0.95
NUM_RESAMPLES = 4000
# Of fewer, all lie on one side of the truth more often than one time in twenty, and no draw can go beyond them.
MIN_QUESTIONS = 6
MOST_CELLS = 4_000_000


@dataclass(frozen=True)
class Interval:
    """A figure and where it may lie."""

    value: float  # the figure over all questions; NaN where there is none
    low: float = math.nan  # lower end; NaN for fewer than six questions, which allow no interval
    high: float = math.nan  # upper end; likewise


def ratio(
    sums: np.ndarray,  # [..., 2]
) -> np.ndarray:  # [...], NaN where the second is 0
    """First sum over the second."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(sums[..., 1] != 0, sums[..., 0] / sums[..., 1], np.nan)


def ratio_of_ratios(
    sums: np.ndarray,  # [..., 4]
) -> np.ndarray:  # [...], NaN where one of the last three is 0
    """First over second, over third over fourth: a speed-up, from tokens and seconds of both sides."""
    return ratio(np.stack([ratio(sums[..., :2]), ratio(sums[..., 2:])], axis=-1))


def bootstrap(
    sums: np.ndarray,  # [n, k]
    statistic: Callable[[np.ndarray], np.ndarray] = ratio,  # [..., k] -> [...]
    level: float = LEVEL,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """A figure of pooled sums with its bootstrap interval.

    The percentiles are those of the expanded percentile interval, which allows for few questions as Student's t does:
    an ordinary percentile interval of ten questions is too narrow.
    """
    sums = np.asarray(sums, dtype=np.float64)
    num_questions = len(sums)
    if not num_questions:
        return Interval(math.nan)
    value = float(statistic(sums.sum(axis=0)))
    if num_questions < MIN_QUESTIONS:
        return Interval(value)
    parts = [statistic(counts.astype(np.float64) @ sums) for counts in _draws(num_questions, num_resamples, seed)]
    drawn = np.concatenate(parts)
    drawn = drawn[~np.isnan(drawn)]  # a draw may leave out every question that has the figure
    if not len(drawn):
        return Interval(value)
    tail = expanded_tail((1 - level) / 2, num_questions)
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Interval(value, float(low), float(high))


def expanded_tail(tail: float, num_questions: int) -> float:
    """Share of the draws to leave out at either end, so that few questions get intervals that are wide enough."""
    from scipy.stats import t  # takes a second to import

    freedom = num_questions - 1
    return NormalDist().cdf(t.ppf(tail, freedom) * math.sqrt(num_questions / freedom))


@lru_cache(maxsize=2)  # the figures of a task have as many questions
def _draws(num_questions: int, num_resamples: int, seed: int) -> list[np.ndarray]:
    """Counts of each question in each draw, `(draws, n)`, in parts that fit into memory with their products."""
    rng, shares = np.random.default_rng(seed), np.full(num_questions, 1 / num_questions)
    rows = max(1, MOST_CELLS // num_questions)
    sizes = [min(rows, num_resamples - start) for start in range(0, num_resamples, rows)]
    return [rng.multinomial(num_questions, shares, size).astype(np.int16) for size in sizes]
