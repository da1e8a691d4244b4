# SPDX-License-Identifier: Apache-2.0
"""The round-time curve, and what each scheduler sends: by hand, and against brute force.

That no scheduler looks ahead is in `tests/losslessness/test_schedulers_causal.py`.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from dspark_hf.scheduling import (
    CapacityScheduler,
    FixedScheduler,
    LookaheadScheduler,
    PrefixScheduler,
    RoundOutlook,
    Scheduler,
    SPSCurve,
    ThresholdScheduler,
    batch_speedup_share,
    mean_survival,
    prefix_survival,
    request_weights,
)
from tests.support.closeness import assert_close


UNUSED = RoundOutlook(SPSCurve.linear(0.1), ())  # for the two that read no outlook


def send(scheduler: Scheduler, confidence: list[list[float]], curve: SPSCurve, expected=()) -> list[int]:
    lengths = scheduler.verify_lengths(torch.tensor(confidence), RoundOutlook(curve, tuple(expected)))
    assert lengths.dtype == torch.long
    return lengths.tolist()


def num_tokens(survival: torch.Tensor, lengths: tuple[int, ...]) -> float:
    """Expected tokens of a round, summed draft by draft."""
    drafts = (row[:length].double().sum() for row, length in zip(survival, lengths, strict=True))
    return len(lengths) + float(sum(drafts))


def rate(survival: torch.Tensor, lengths: tuple[int, ...], curve: SPSCurve) -> float:
    return num_tokens(survival, lengths) / curve.round_s(len(lengths) + sum(lengths))


def surplus(survival: torch.Tensor, lengths: tuple[int, ...], curve: SPSCurve, price: float) -> float:
    return num_tokens(survival, lengths) - price * curve.round_s(len(lengths) + sum(lengths))


def splits(num_requests: int, num_slots: int):
    return itertools.product(range(num_slots + 1), repeat=num_requests)


def random_confidence(rng: random.Random, num_requests: int, num_slots: int, coarse: bool = False) -> torch.Tensor:
    """Uniform, mostly high; `coarse` ones are full of ties."""
    values = [[rng.random() ** rng.choice((0.2, 1)) for _ in range(num_slots)] for _ in range(num_requests)]
    table = torch.tensor(values)
    return (table * 4).round() / 4 if coarse else table


def jagged_curve(rng: random.Random, most_tokens: int) -> SPSCurve:
    points = sorted(rng.sample(range(1, most_tokens + 1), rng.randint(1, most_tokens)))
    return SPSCurve(tuple(points), tuple(rng.uniform(0.5, 4.0) for _ in points), rng.choice((0.0, rng.random())))


# The curve.


def test_curve_by_hand():
    """Flat at 1 below 2 tokens, 0.25 a token from 2 to 4, 0.5 a token from there on."""
    curve = SPSCurve((2, 4, 8), (1.0, 1.5, 3.5), draft_s=0.25)
    expected = [1.0, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5]
    assert [curve.verify(b) for b in range(1, 11)] == expected
    assert curve.verify_table(1, 10).tolist() == expected
    assert curve.verify_table(3, 5).tolist() == [1.25, 1.5, 2.0]
    assert curve.verify_table(20, 21).tolist() == [9.5, 10.0]
    assert (curve.plain_s, curve.round_s(6)) == (1.0, 2.75)


def test_a_single_point_is_a_flat_curve():
    curve = SPSCurve((4,), (2.0,))
    assert [curve.verify(b) for b in (1, 4, 100)] == [2.0, 2.0, 2.0]


def test_time_never_falls_beyond_the_last_point():
    curve = SPSCurve((1, 2), (2.0, 1.5))
    assert [curve.verify(b) for b in (1, 2, 3, 100)] == [2.0, 1.5, 1.5, 1.5]


def test_linear_curve_is_in_plain_steps():
    curve = SPSCurve.linear(0.25, draft_cost=0.5)
    assert (curve.plain_s, curve.verify(5), curve.round_s(5)) == (1.0, 2.0, 2.5)


@pytest.mark.parametrize(
    ("points", "seconds", "draft_s", "message"),
    [
        ((), (), 0.0, r"`batch_tokens` must be ascending.* got \(\) and 0 times"),
        ((1, 2), (1.0,), 0.0, r"one time each, got \(1, 2\) and 1 times"),
        ((0, 2), (1.0, 1.0), 0.0, r"start at 1 or more .* got \(0, 2\)"),
        ((2, 2), (1.0, 1.0), 0.0, r"must be ascending.* got \(2, 2\)"),
        ((3, 2), (1.0, 1.0), 0.0, r"must be ascending.* got \(3, 2\)"),
        ((1, 2), (1.0, 0.0), 0.0, r"`verify_s` must be positive and finite, got \(1.0, 0.0\)"),
        ((1, 2), (1.0, float("nan")), 0.0, "`verify_s` must be positive and finite"),
        ((1, 2), (float("inf"), 1.0), 0.0, "`verify_s` must be positive and finite"),
        ((1,), (1.0,), -0.1, "`draft_s` must be >= 0 and finite, got -0.1"),
        ((1,), (1.0,), float("nan"), "`draft_s` must be >= 0 and finite"),
    ],
)
def test_curves_that_cannot_be(points, seconds, draft_s, message):
    with pytest.raises(ValueError, match=message):
        SPSCurve(points, seconds, draft_s)


def test_survival_is_the_running_product():
    survival = prefix_survival(torch.tensor([[0.5, 0.5, 1.0], [1.0, 0.25, 0.0]]))
    assert survival.tolist() == [[0.5, 0.25, 0.25], [1.0, 0.25, 0.0]]
    assert mean_survival((0.5, 0.5, 0.0, 1.0)) == (0.5, 0.25, 0.0, 0.0)


# Fixed lengths and thresholds.


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (2, 2), (3, 3), (9, 3)])
def test_fixed(num_tokens, expected):
    lengths = FixedScheduler(num_tokens).verify_lengths(torch.rand(4, 3), UNUSED)
    assert lengths.tolist() == [expected] * 4
    assert lengths.dtype == torch.long


@pytest.mark.parametrize(
    ("threshold", "expected"), [(0.0, [4, 4]), (0.3, [4, 0]), (0.5, [2, 0]), (0.9, [1, 0]), (0.91, [0, 0])]
)
def test_threshold_judges_each_slot_alone(threshold, expected):
    confidence = torch.tensor([[0.9, 0.5, 0.3, 0.95], [0.2, 1.0, 1.0, 1.0]])
    assert ThresholdScheduler(threshold).verify_lengths(confidence, UNUSED).tolist() == expected


# Algorithm 1.


@pytest.mark.parametrize(
    ("confidence", "slot_cost", "draft_cost", "expected"),
    [
        # 1, 1.8 / 1.5 = 1.2, 2.44 / 2 = 1.22, 2.504 / 2.5 = 1.0016: a drop.
        ([0.8, 0.8, 0.1, 1.0], 0.5, 0.0, 2),
        # 1, 1.4 / 1.5: a drop at once, whatever follows.
        ([0.4, 1.0, 1.0, 1.0], 0.5, 0.0, 0),
        # 1, 1.8 / 1.5 = 1.2, 2.12 / 2 = 1.06. Drafting that takes 2: 1 / 3, 1.8 / 3.5 = 0.514, 2.12 / 4 = 0.53.
        ([0.8, 0.4], 0.5, 0.0, 1),
        ([0.8, 0.4], 0.5, 2.0, 2),
        # 1.5 / 1.5 is no rise.
        ([0.5, 1.0], 0.5, 0.0, 0),
        # Time that costs nothing: all that has any chance.
        ([0.5, 0.01, 0.0, 1.0], 0.0, 0.0, 2),
    ],
)
def test_algorithm_1_for_one_request(confidence, slot_cost, draft_cost, expected):
    assert send(PrefixScheduler(), [confidence], SPSCurve.linear(slot_cost, draft_cost)) == [expected]


@pytest.mark.parametrize(
    ("slot_cost", "expected"),
    [
        # Survival 0.9, 0.45 and 0.6, 0.54. Tokens 2, 2.9, 3.5, 4.04, 4.49 over 1, 1.3, 1.6: 2, 2.231, 2.1875.
        (0.3, [1, 0]),
        # Over 1, 1.2, 1.4, 1.6, 1.8: 2, 2.417, 2.5, 2.525, 2.494.
        (0.2, [1, 2]),
        # Over 1, 1.15, 1.3, 1.45, 1.6: the last is 4.49 / 1.6 = 2.806 after 4.04 / 1.45 = 2.786.
        (0.15, [2, 2]),
    ],
)
def test_algorithm_1_for_two_requests(slot_cost, expected):
    assert send(PrefixScheduler(), [[0.9, 0.5], [0.6, 0.9]], SPSCurve((2, 3), (1.0, 1.0 + slot_cost))) == expected


def test_algorithm_1_for_three_requests():
    """Sorted survival 0.9, 0.81 (request 1), 0.8 (2), 0.5, 0.25 (0), 0.2 (2); tokens per second 3, 3.25, 3.364, 3.444,
    then 6.01 / 1.8 = 3.339."""
    confidence = [[0.5, 0.5], [0.9, 0.9], [0.8, 0.25]]
    assert send(PrefixScheduler(), confidence, SPSCurve((3, 4), (1.0, 1.2))) == [0, 2, 1]


def test_algorithm_1_is_trapped_before_a_cliff():
    """0.95 tokens per second with one draft, 2.9 with five: it never gets there."""
    curve = SPSCurve((1, 2, 6), (1.0, 2.0, 2.0))
    assert send(PrefixScheduler(), [[0.9, 1.0, 1.0, 1.0, 1.0]], curve) == [0]


def test_among_equals_the_first_request_goes_first():
    """Two of four equal drafts are free, a third costs more than it brings."""
    curve = SPSCurve((2, 4, 5), (1.0, 1.0, 5.0))
    assert send(PrefixScheduler(), [[0.5, 1.0], [0.5, 1.0]], curve) == [2, 0]
    assert send(PrefixScheduler(), [[0.5, 0.5], [0.5, 1.0]], curve) == [1, 1]
    assert send(PrefixScheduler(), [[0.25, 1.0], [0.5, 1.0]], curve) == [0, 2]
    assert send(PrefixScheduler(), [[1.0, 1.0], [1.0, 1.0]], curve) == [2, 0]


@pytest.mark.parametrize(("num_requests", "num_slots"), [(1, 7), (2, 3), (3, 3)])
@pytest.mark.parametrize("coarse", [False, True])
def test_algorithm_1_is_the_best_split_where_time_is_convex(num_requests, num_slots, coarse):
    """Rates then rise to one peak, so that the first drop is the last."""
    rng = random.Random(num_requests)
    counts = set()
    for _ in range(40):
        confidence = random_confidence(rng, num_requests, num_slots, coarse)
        steps = sorted(rng.uniform(0.0, 0.5) for _ in range(num_requests * num_slots))
        seconds = tuple(itertools.accumulate(steps, initial=1.0))
        points = tuple(range(num_requests, num_requests + len(seconds)))
        curve = SPSCurve(points, seconds, rng.choice((0.0, 0.5)))
        lengths = send(PrefixScheduler(), confidence.tolist(), curve)
        survival = prefix_survival(confidence)
        best = max(rate(survival, split, curve) for split in splits(num_requests, num_slots))
        assert_close(rate(survival, tuple(lengths), curve), best)
        counts.add(sum(lengths))
    assert len(counts) > 3


# Section 5.2.


def test_capacity_comes_from_two_rounds_earlier():
    """Cost 0.5: confidences of 0.9 send 3 (1, 1.267, 1.355, 1.376 tokens per plain step); those that begin with 0.4
    send none (1.4 / 1.5 < 1), nor does any longer prefix pay."""
    curve, scheduler = SPSCurve.linear(0.5), CapacityScheduler()
    high, low = [[0.9, 0.9, 0.9]], [[0.4, 0.9, 0.9]]
    assert send(scheduler, high, curve) == [3]  # the first two rounds: Algorithm 1
    assert send(scheduler, low, curve) == [0]
    assert send(scheduler, low, curve) == [3]  # as many as paid in the first round
    assert send(scheduler, high, curve) == [0]  # as in the second
    assert send(scheduler, high, curve) == [0]  # as in the third


def test_capacity_goes_to_the_likeliest_of_now():
    curve, scheduler = SPSCurve((2, 4, 5), (1.0, 1.0, 9.0)), CapacityScheduler()  # two drafts are free
    for _ in range(2):
        assert send(scheduler, [[0.9, 0.5], [0.8, 0.5]], curve) == [1, 1]
    assert send(scheduler, [[0.3, 0.9], [0.9, 0.5]], curve) == [0, 2]
    assert send(scheduler, [[0.9, 0.9], [0.8, 0.5]], curve) == [2, 0]


def test_capacity_passes_a_cliff():
    """Algorithm 1 in the first two rounds stops before it; the search of the third does not."""
    curve, scheduler = SPSCurve((1, 2, 6), (1.0, 2.0, 2.0)), CapacityScheduler()
    confidence = [[0.9, 1.0, 1.0, 1.0, 1.0]]
    assert [send(scheduler, confidence, curve) for _ in range(3)] == [[0], [0], [5]]


@pytest.mark.parametrize(("num_later", "expected"), [(1, [2]), (2, [2, 2]), (4, [2, 2, 2, 2])])
def test_capacity_grows_with_the_requests(num_later, expected):
    """Two requests had room for 4 drafts: 2 each."""
    curve, scheduler = SPSCurve((2, 6, 7), (1.0, 1.0, 9.0)), CapacityScheduler()
    for _ in range(2):
        send(scheduler, [[0.9, 0.9, 0.1]] * 2, curve)
    assert send(scheduler, [[0.9, 0.9, 0.1]] * num_later, curve) == expected


def test_capacity_is_at_most_what_there_is():
    """A block is shorter where a text ends."""
    curve, scheduler = SPSCurve.linear(0.01), CapacityScheduler()
    assert [send(scheduler, [[0.9] * num_slots], curve) for num_slots in (7, 7, 3)] == [[7], [7], [3]]


# The look-ahead.


def test_lookahead_passes_a_cliff():
    """At 0.9 a slot, all five drafts bring 4.69 tokens in 2 s; one brings 1.9."""
    curve, expected = SPSCurve((1, 2, 6), (1.0, 2.0, 2.0)), mean_survival([0.9] * 5)
    confidence = [[0.9, 1.0, 1.0, 1.0, 1.0]]
    assert send(PrefixScheduler(), confidence, curve) == [0]
    assert send(LookaheadScheduler(), confidence, curve, expected) == [5]
    # What counts behind the first slot is the past: with a past like that nothing is worth a second.
    assert send(LookaheadScheduler(), confidence, curve, mean_survival([0.9, 0.1, 0.1, 0.1, 0.1])) == [0]
    assert send(LookaheadScheduler(), [[0.1, 1.0, 1.0, 1.0, 1.0]], curve, expected) == [0]


def test_lookahead_ends_a_bad_round_sooner_and_a_good_one_later():
    """Cost 0.3. By the past, 0.9 a slot: 7 drafts bring 5.695 tokens in 3.1, a price of 1.837, so that a draft must
    survive with 0.551. The bad round's own rate is 1.0, and 1.35 / 1.3 is a rise."""
    curve, expected = SPSCurve.linear(0.3), mean_survival([0.9] * 7)
    bad = [[0.35, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]]
    assert send(PrefixScheduler(), bad, curve) == [1]
    assert send(LookaheadScheduler(), bad, curve, expected) == [0]
    # By the past, 0.5 a slot: one draft brings 1.5 in 1.3, so that a draft must survive with 0.346. Survival 0.9,
    # 0.81, 0.729, 0.583, 0.408: rates 1.46, 1.69, 1.81, 1.828, 4.43 / 2.5 = 1.772.
    good = [[0.9, 0.9, 0.9, 0.8, 0.7, 0.5, 0.5]]
    assert send(PrefixScheduler(), good, curve) == [4]
    assert send(LookaheadScheduler(), good, curve, mean_survival([0.5] * 7)) == [5]


def test_lookahead_prices_time_by_plain_steps_where_drafting_does_not_pay():
    """Drafting takes 3 plain steps, and the best length brings 1.5 tokens in 4.3: time is worth 1, not 0.35."""
    curve, expected = SPSCurve.linear(0.3, draft_cost=3.0), mean_survival([0.5, 0.1])
    assert send(LookaheadScheduler(), [[0.25, 1.0]], curve, expected) == [0]
    assert send(PrefixScheduler(), [[0.25, 1.0]], curve) == [2]
    assert send(LookaheadScheduler(), [[0.35, 0.5]], curve, expected) == [1]


@pytest.mark.parametrize("num_requests", [1, 3])
def test_lookahead_is_the_best_fixed_length_in_a_round_like_the_past(num_requests):
    rng = random.Random(num_requests)
    lengths_seen = set()
    for _ in range(200):
        acceptance = [rng.uniform(0.2, 1.0) for _ in range(5)]
        curve = SPSCurve.linear(rng.uniform(0.02, 0.9), rng.choice((0.0, 0.1)))
        confidence = torch.tensor([acceptance] * num_requests)
        survival = prefix_survival(confidence)
        fixed = [rate(survival, (length,) * num_requests, curve) for length in range(6)]
        if max(fixed) < num_requests / curve.verify(num_requests):
            continue  # drafting does not pay: priced by plain steps
        lengths = send(LookaheadScheduler(), confidence.tolist(), curve, mean_survival(acceptance))
        reached = rate(survival, tuple(lengths), curve)
        assert reached >= max(fixed) * (1 - 1e-6)
        if num_requests == 1:
            assert_close(reached, max(fixed))
        lengths_seen.add(tuple(lengths))
    assert len(lengths_seen) >= 5


def looked_ahead(confidence: torch.Tensor, curve: SPSCurve, expected: tuple[float, ...]) -> int:
    """Drafts sent, one decision at a time: the next draft and those after it, up to each measured point."""
    num_requests = len(confidence)
    drafts = prefix_survival(confidence).flatten().double().sort(descending=True).values.tolist()
    past = sorted(expected * num_requests, reverse=True)
    tokens, seconds = [0.0, *itertools.accumulate(past)], curve.verify_table(num_requests, num_requests + len(drafts))
    price = max((num_requests + t) / (curve.draft_s + s) for t, s in zip(tokens, seconds, strict=True))
    price = max(price, num_requests / seconds[0])
    points = [b - num_requests for b in curve.batch_tokens if b - num_requests < len(drafts)] + [len(drafts)]
    for n, survival in enumerate(drafts):
        ends = [m for m in points if m > n]
        gains = [survival / past[n] * (tokens[m] - tokens[n]) - price * (seconds[m] - seconds[n]) for m in ends]
        if max(survival - price * (seconds[n + 1] - seconds[n]), *gains) <= 0:
            return n
    return len(drafts)


@pytest.mark.parametrize("most_requests", [1, 4, 200])
def test_lookahead_against_one_decision_at_a_time(most_requests):
    rng = random.Random(most_requests)
    counts = set()
    for _ in range(60):
        num_requests, num_slots = rng.randint(max(1, most_requests - 3), most_requests), rng.randint(2, 6)
        confidence = random_confidence(rng, num_requests, num_slots)
        points = sorted({rng.randint(1, num_requests * (num_slots + 1)) for _ in range(6)})
        seconds = tuple(itertools.accumulate(rng.choice((0.0, 0.1, rng.random())) for _ in points[1:]))
        curve = SPSCurve(tuple(points), (1.0, *(1 + second for second in seconds)), rng.choice((0.0, 0.2)))
        expected = mean_survival([rng.uniform(0.3, 1.0) for _ in range(num_slots)])
        lengths = send(LookaheadScheduler(), confidence.tolist(), curve, expected)
        assert sum(lengths) == looked_ahead(confidence, curve, expected)
        counts.add(sum(lengths))
    assert len(counts) > 4


@pytest.mark.parametrize("num_good", [400, 280, 100])
def test_lookahead_past_a_long_rise(num_good):
    """400 requests with one draft of 0.9 each: time rises for 300 drafts and is flat from there. All 400 bring 760
    tokens in 1.69 s, so that time is worth 449.7, and a draft on the rise costs 1.03: alone none pays, all together
    they do (360 against 310). It ends where the good ones do."""
    curve = SPSCurve((400, 700, 800), (1.0, 1.69, 1.69))
    confidence = [[0.9 if request < num_good else 0.0] for request in range(400)]
    assert sum(send(LookaheadScheduler(), confidence, curve, [0.9])) == num_good


def test_lookahead_expects_of_later_slots_what_the_past_says():
    """A cliff of 1 s, then flat. The past has 0.9 a slot, so that 2 s are worth 4.69 tokens, and the cliff 2.343: bad
    slots behind a good first one are sent, good ones behind a bad one are not."""
    curve, expected = SPSCurve((1, 2, 6), (1.0, 2.0, 2.0)), mean_survival([0.9] * 5)
    assert send(LookaheadScheduler(), [[0.5, 1.0, 1.0, 1.0, 1.0]], curve, expected) == [0]  # 0.5 / 0.9 * 3.686
    assert send(LookaheadScheduler(), [[0.9, 0.5, 0.5, 0.5, 0.5]], curve, expected) == [5]


@pytest.mark.parametrize("expected", [(0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (0.5, 0.0, 0.0)])
def test_lookahead_bears_any_past(expected):
    assert send(LookaheadScheduler(), [[0.0, 0.0, 0.0]], SPSCurve.linear(0.1), expected) == [0]
    assert send(LookaheadScheduler(), [[1.0, 1.0, 1.0]], SPSCurve.linear(0.1), expected) == [3]


# What a token is worth to each request.


def test_a_token_is_worth_the_rounds_that_it_saves():
    flat = SPSCurve((1, 2), (1.0, 1.0))
    assert request_weights(flat, [1.7], [9]) == (1.0,)
    assert request_weights(flat, [2.0, 2.0]) == request_weights(flat, [2.0, 2.0], [7, 7]) == (1.0, 1.0)
    assert request_weights(flat, [1.0, 2.0]) == pytest.approx((1.5, 0.75))


def test_the_time_that_all_rounds_have_is_saved_by_the_slowest_text_alone():
    """Eight rounds ahead against four, and 16 against one to the fourth power: 32 / 17 and 2 / 17 of the mean."""
    flat = SPSCurve((1, 2), (1.0, 1.0))
    assert request_weights(flat, [2.0, 2.0], [16, 8]) == pytest.approx((32 / 17, 2 / 17))
    assert request_weights(flat, [1.0, 2.0], [8, 8]) == pytest.approx((1.5 * 32 / 17, 0.75 * 2 / 17))
    # Rounds that cost twice as much with a second text: all of it leaves with a text that ends.
    assert request_weights(SPSCurve((1, 2), (1.0, 2.0)), [2.0, 2.0], [16, 8]) == pytest.approx((1.0, 1.0))
    # Drafting counts, too: 1 + 1 s alone, 2 + 2 s for two, so that a third of 3 s stays; shares are 2/3 + 1/3 * ...
    curve = SPSCurve((1, 2), (1.0, 1.0), draft_s=1.0, draft_request_s=1.0)
    assert request_weights(curve, [2.0, 2.0], [16, 8]) == pytest.approx((2 / 3 + 32 / 51, 2 / 3 + 2 / 51))


def test_what_a_call_keeps_of_the_mean_pace():
    """Paces 1 and 3, 12 tokens each: 12 rounds instead of 12 in the part that all have, 8 instead of 12 in the own."""
    flat, own = SPSCurve((1, 2), (1.0, 1.0)), SPSCurve((1, 2), (1.0, 2.0))
    assert batch_speedup_share(flat, [1.0, 3.0], [12, 12]) == pytest.approx(1 / 2)
    assert batch_speedup_share(own, [1.0, 3.0], [12, 12]) == pytest.approx(12 / 8 / 2)
    between = SPSCurve((1, 2), (1.0, 4 / 3))  # half of each
    assert batch_speedup_share(between, [1.0, 3.0], [12, 12]) == pytest.approx(12 / 10 / 2)
    # The fast one has more to do: the call gains more than the mean, which is all that is counted.
    assert batch_speedup_share(flat, [1.0, 3.0], [12, 36]) == 1.0


def test_nothing_is_lost_where_none_holds_up_the_others():
    flat = SPSCurve((1, 2), (1.0, 1.0))
    assert (
        batch_speedup_share(flat, [1.0, 3.0])
        == batch_speedup_share(flat, [1.2], [9])
        == batch_speedup_share(flat, [2.0, 2.0], [5, 9])
        == 1.0
    )


def test_a_text_that_is_about_to_end_has_a_weight():
    weights = request_weights(SPSCurve((1, 2), (1.0, 1.0)), [1.0, 1.0], [0, 1])
    assert weights == pytest.approx((1.0, 1.0))


def test_drafts_go_where_tokens_are_worth_most():
    confidence, curve, expected = torch.full((2, 4), 0.8), SPSCurve.linear(0.25), mean_survival([0.8] * 4)
    lengths = {}
    for weights in (None, (1.0, 1.0), (1.5, 0.5), (0.4, 0.4), (3.0, 0.0)):
        outlook = RoundOutlook(curve, expected, weights)
        lengths[weights] = LookaheadScheduler().verify_lengths(confidence, outlook).tolist()
    assert lengths[None] == lengths[1.0, 1.0]
    assert lengths[1.5, 0.5][0] > lengths[None][0] > lengths[1.5, 0.5][1]
    assert sum(lengths[0.4, 0.4]) < sum(lengths[None])
    assert lengths[3.0, 0.0] == [4, 0]


# What all that rank have in common.


@pytest.mark.parametrize("make", [PrefixScheduler, CapacityScheduler, LookaheadScheduler])
@pytest.mark.parametrize("coarse", [False, True])
def test_the_likeliest_drafts_are_sent(make, coarse):
    """No draft is left out for one that is less likely, of the same request or of another."""
    rng = random.Random(0)
    counts = set()
    for _ in range(150):
        num_requests, num_slots = rng.randint(1, 5), rng.randint(1, 4)
        curve = jagged_curve(rng, num_requests * (num_slots + 1))
        expected = mean_survival([rng.uniform(0.3, 1.0) for _ in range(num_slots)])
        scheduler = make()
        for _ in range(3):
            confidence = random_confidence(rng, num_requests, num_slots, coarse)
            lengths = send(scheduler, confidence.tolist(), curve, expected)
        survival = prefix_survival(confidence)
        assert all(0 <= length <= num_slots for length in lengths)
        sent = [float(row[n - 1]) for row, n in zip(survival, lengths, strict=True) if n > 0]
        unsent = [float(row[n]) for row, n in zip(survival, lengths, strict=True) if n < num_slots]
        assert not sent or not unsent or min(sent) >= max(unsent)
        counts.add(sum(lengths))
    assert len(counts) > 5
