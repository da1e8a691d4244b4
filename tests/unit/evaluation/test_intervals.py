# SPDX-License-Identifier: Apache-2.0

import math

import numpy as np
import pytest
from scipy.stats import norm, t

from dspark_hf.evaluation import intervals
from dspark_hf.evaluation.intervals import MIN_QUESTIONS, Interval, bootstrap, expanded_tail, ratio, ratio_of_ratios


def test_the_figure_is_that_of_the_sums():
    interval = bootstrap(np.array([[7.0, 2.0], [4.0, 3.0]]))
    assert interval.value == pytest.approx(11 / 5)
    speed = bootstrap(np.array([[8.0, 4.0, 8.0, 8.0], [5.0, 5.0, 5.0, 5.0]]), ratio_of_ratios)
    assert speed.value == pytest.approx((13 / 9) / (13 / 13))


def test_ends_lie_around_the_figure_and_closer_with_more_questions():
    rng = np.random.default_rng(1)

    def width(num_questions):
        interval = bootstrap(np.stack([rng.normal(20, 6, num_questions), np.full(num_questions, 10.0)], axis=1))
        assert interval.low < interval.value < interval.high
        return interval.high - interval.low

    assert width(400) < width(100) < width(20)


def test_equal_questions_leave_no_doubt():
    interval = bootstrap(np.array([[6.0, 3.0]] * 10))
    assert (interval.low, interval.high) == (2.0, 2.0)


def test_the_same_sums_give_the_same_interval():
    sums = np.random.default_rng(2).uniform(1, 5, (12, 2))
    assert bootstrap(sums) == bootstrap(sums)
    assert bootstrap(sums) != bootstrap(sums, seed=1)


def test_too_few_questions_allow_no_interval():
    for count in (0, 1, MIN_QUESTIONS - 1):
        interval = bootstrap(np.array([[3.0, 2.0]] * count).reshape(count, 2))
        assert math.isnan(interval.low)
        assert math.isnan(interval.high)
        assert math.isnan(interval.value) == (count == 0)
    assert not math.isnan(bootstrap(np.array([[3.0, 2.0]] * MIN_QUESTIONS)).low)
    # All questions on one side of the truth, by chance: more often than one time in twenty below that number.
    assert 2 * 0.5 ** (MIN_QUESTIONS - 1) > 0.05 > 2 * 0.5**MIN_QUESTIONS


def test_a_figure_that_no_question_has_is_none():
    interval = bootstrap(np.zeros((8, 2)))
    assert all(math.isnan(value) for value in (interval.value, interval.low, interval.high))
    one_question = bootstrap(np.array([[1.0, 2.0]] + [[0.0, 0.0]] * 9))  # draws without it are left out
    assert one_question == Interval(0.5, 0.5, 0.5)
    assert math.isnan(ratio_of_ratios(np.array([1.0, 2.0, 3.0, 0.0])))


@pytest.mark.parametrize("num_questions", [6, 10, 30, 1000])
def test_the_tail_is_that_of_students_t(num_questions):
    exact = norm.cdf(t.ppf(0.025, num_questions - 1) * math.sqrt(num_questions / (num_questions - 1)))
    assert expanded_tail(0.025, num_questions) == pytest.approx(exact, rel=0.04)


def pooled_ratio_questions(rng, num_questions):
    """Tokens and rounds of texts that are easier or harder, and longer or shorter, as wholes."""
    rounds = rng.integers(5, 60, num_questions)
    ease = rng.gamma(4, 0.35, num_questions)
    return np.stack([rounds + rng.poisson(ease * rounds), rounds], axis=1).astype(float)


@pytest.mark.parametrize(("num_questions", "least"), [(8, 0.88), (40, 0.92)])  # 95 % is what many questions reach
def test_intervals_cover(num_questions, least):
    rng = np.random.default_rng(num_questions)
    truth, trials = 1 + 4 * 0.35, 300
    found = [
        bootstrap(pooled_ratio_questions(rng, num_questions), num_resamples=800, seed=trial) for trial in range(trials)
    ]
    covered = sum(interval.low <= truth <= interval.high for interval in found) / trials
    assert least < covered < 0.985
    # Half as wide they would not: what the test rests on.
    halves = [(i.value + (i.low - i.value) / 2, i.value + (i.high - i.value) / 2) for i in found]
    assert sum(low <= truth <= high for low, high in halves) / trials < 0.8


def test_speedup_intervals_cover():
    rng, truth, trials = np.random.default_rng(7), 1.3, 200
    covered = 0
    for trial in range(trials):
        tokens = rng.integers(20, 200, 25)
        plain = tokens * 0.06 * rng.lognormal(0, 0.1, 25)
        ours = tokens * 0.06 / truth * rng.lognormal(0, 0.2, 25) / math.exp((0.2**2 - 0.1**2) / 2)
        sums = np.stack([tokens, ours, tokens, plain], axis=1)
        interval = bootstrap(sums, ratio_of_ratios, num_resamples=800, seed=trial)
        covered += interval.low <= truth <= interval.high
    assert 0.91 < covered / trials < 0.985


def test_many_questions_are_drawn_in_parts(monkeypatch):
    sums = np.random.default_rng(3).uniform(1, 5, (20, 2))
    whole = bootstrap(sums, num_resamples=50, seed=5)
    monkeypatch.setattr(intervals, "MOST_CELLS", 7 * 20)
    intervals._draws.cache_clear()
    parts = intervals._draws(20, 50, 5)
    assert [len(part) for part in parts] == [7] * 7 + [1]
    assert all((part.sum(axis=1) == 20).all() for part in parts)
    assert bootstrap(sums, num_resamples=50, seed=5) == whole
    intervals._draws.cache_clear()


def test_ratio_of_nothing_is_nan():
    assert ratio(np.array([[1.0, 2.0], [3.0, 0.0]]))[0] == 0.5
    assert math.isnan(ratio(np.array([[1.0, 2.0], [3.0, 0.0]]))[1])
