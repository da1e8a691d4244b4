# SPDX-License-Identifier: Apache-2.0
"""Which source each request gets, by hand."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from dspark_hf.common.records import RoundRecord
from dspark_hf.scheduling import (
    CopyOptions,
    DraftingPolicy,
    FixedScheduler,
    LookaheadScheduler,
    PrefixScheduler,
    SPSCurve,
)
from dspark_hf.scheduling.choice import DraftPlan, choose, extensions


NOTHING = np.zeros(0)
CURVE = SPSCurve((1, 2, 3, 4, 5), (1.0, 1.1, 1.2, 1.3, 1.4), draft_s=0.5)


def one(copy, block, curve=CURVE) -> tuple[int, bool]:
    plan = choose([np.asarray(copy, dtype=float)], [block], [1.0], curve)
    return plan.copy_lengths[0], plan.drafts_block[0]


@pytest.mark.parametrize(
    ("copy", "block", "expected"),
    [
        ([], [], (0, False)),
        ([0.9, 0.9], [], (2, False)),  # 1, 1.9 / 1.1, 2.71 / 1.2
        ([0.5, 0.1], [], (1, False)),  # 1, 1.5 / 1.1, 1.55 / 1.2
        ([0.05], [], (0, False)),  # 1, 1.05 / 1.1
        ([], [0.1], (0, True)),  # the gate's question
        ([0.9], [0.9], (1, False)),  # 1.9 / 1.1 against 1.9 / 1.6
        ([0.3], [0.9, 0.8, 0.7], (0, True)),  # 1.3 / 1.1 against 3.4 / 1.8
        ([0.6], [0.9, 0.8, 0.7], (0, True)),  # 1.45 against 1.89
        ([0.6, 0.9, 0.9, 0.9], [0.9, 0.8, 0.7], (4, False)),  # 1 + 0.6 + 0.54 + 0.486 + 0.437 = 3.06 / 1.4 = 2.19
        ([0.05], [0.1], (0, True)),  # neither pays: what a request that may draft does is the gate's question
    ],
)
def test_one_request(copy, block, expected):
    assert one(copy, block) == expected


def test_more_drafts_where_they_cost_less_than_fewer():
    """As in float32: three tokens take longer than five."""
    dip = SPSCurve((1, 2, 3, 4, 5), (1.0, 1.9, 2.2, 1.9, 1.5))
    assert one([0.5, 0.2, 0.2, 0.2], [], dip) == (4, False)  # 1 + 0.5 + 0.1 + 0.02 + 0.004 in 1.5
    assert one([0.5, 0.2, 0.2], [], dip) == (0, False)


def rate_of(lengths, drafting, rows, curve) -> float:
    """Tokens per second of a round, with so many drafts of each request."""
    tokens = len(rows) + sum(sum(row[:n]) for row, n in zip(rows, lengths, strict=True))
    draft_s = curve.for_requests(drafting).draft_s if drafting else 0.0
    return tokens / (draft_s + curve.verify(len(rows) + sum(lengths)))


def test_copies_of_several_requests_are_the_best_of_all():
    rng = random.Random(0)
    for _ in range(60):
        points = sorted(rng.sample(range(2, 12), 4))
        curve = SPSCurve((1, *points), tuple(np.cumsum([1.0, *(rng.random() for _ in points)]).tolist()))
        rates = [np.array([rng.random() for _ in range(rng.randint(0, 3))]) for _ in range(3)]
        plan = choose(rates, [[]] * 3, [1.0] * 3, curve)
        survival = [row.cumprod().tolist() for row in rates]
        every = itertools.product(*(range(len(row) + 1) for row in rates))
        best = max(rate_of(lengths, 0, survival, curve) for lengths in every)
        assert rate_of(plan.copy_lengths, 0, survival, curve) == pytest.approx(best)
        assert not any(plan.drafts_block)


def test_each_request_of_a_batch_chooses_for_itself():
    """The first has a good copy, the second none; the third's is worse than a block."""
    curve = SPSCurve((1, 30), (1.0, 1.3), draft_s=0.1)
    copies = [np.array([0.95] * 4), NOTHING, np.array([0.2])]
    plan = choose(copies, [[0.7, 0.5]] * 3, [1.0] * 3, curve)
    assert plan.copy_lengths == (4, 0, 0)
    assert plan.drafts_block == (False, True, True)
    assert plan.other_tokens == 5
    assert plan.other_gain == pytest.approx(1 + 0.95 + 0.95**2 + 0.95**3 + 0.95**4)


def test_all_copy_where_the_pass_of_the_draft_costs_more_than_it_brings():
    curve = SPSCurve((1, 30), (1.0, 1.3), draft_s=5.0)
    plan = choose([np.array([0.6])] * 2, [[0.7, 0.5]] * 2, [1.0] * 2, curve)
    assert plan.copy_lengths == (1, 1)
    assert plan.drafts_block == (False, False)


def test_a_token_that_is_worth_more_is_copied_first():
    curve = SPSCurve((2, 3, 4), (1.0, 1.25, 2.0))
    rates = [np.array([0.6]), np.array([0.6])]
    assert choose(rates, [[], []], [0.5, 1.5], curve).copy_lengths == (0, 1)


def test_extensions():
    """Two tokens sent: 0.9 * 0.8 more for the third, then 0.36."""
    flat, steep = SPSCurve((1, 8), (1.0, 1.1)), SPSCurve.linear(2.0)
    tails = [np.array([0.72, 0.36]), NOTHING]
    assert extensions(tails, flat, 0.5, num_tokens=4, gain=3.6) == (2, 0)
    assert extensions(tails, steep, 0.5, num_tokens=4, gain=3.6) == (0, 0)


# The policy


def policy(scheduler=None, **options) -> DraftingPolicy:
    options = {"copies": CopyOptions(), "curve": CURVE, "learn_times": False} | options
    return DraftingPolicy(scheduler or PrefixScheduler(), 3, **options)


def history_of(own: DraftingPolicy, text):
    history = own.new_history()
    if history.copies is not None:
        history.copies.read(text)
    return history


TEXT = [5, 6, 7, 8, 9, 10, 11, 12, 5, 6, 7, 8, 9]  # an ending of five tokens that occurred before


@pytest.mark.parametrize("scheduler", [PrefixScheduler(), LookaheadScheduler()])
def test_a_long_match_is_copied_and_a_short_one_not(scheduler):
    own = policy(scheduler, acceptance_prior=[0.6, 0.6, 0.6])
    plan = own.plan([history_of(own, TEXT)], [3], [3])
    assert (plan.copy_lengths, plan.drafts_block) == ((3,), (False,))
    plan = own.plan([history_of(own, [5, 6, 7, 8, 5])], [3], [3])  # one token agrees: 0.2
    assert (plan.copy_lengths, plan.drafts_block) == ((0,), (True,))


def test_copies_are_limited():
    for limit, most, expected in ((2, 16, 2), (16, 4, 4), (16, 16, 16), (0, 16, 0)):
        own = policy(curve=SPSCurve.linear(0.001), copies=CopyOptions(num_tokens=most, prior=[0.99] * 7))
        assert own.plan([history_of(own, TEXT)], [limit], [0]).copy_lengths == (expected,)


def test_without_a_price_every_match_of_two_is_copied():
    own = policy(FixedScheduler(3), copies=CopyOptions(num_tokens=5, shortest_match=2))
    assert own.plan([history_of(own, [5, 6, 7, 5, 6])], [9], [3]).copy_lengths == (5,)
    plan = own.plan([history_of(own, [5, 6, 7, 5])], [9], [3])
    assert (plan.copy_lengths, plan.drafts_block) == ((0,), (True,))


def test_nothing_is_copied_without_options():
    own = policy(copies=None)
    plan = own.plan([history_of(own, TEXT)], [3], [3])
    assert (plan.copy_lengths, plan.drafts_block) == ((0,), (True,))


def test_copies_that_fail_are_given_up_and_tried_again_when_they_would_have_been_right():
    own = policy(acceptance_prior=[0.5, 0.5, 0.5])
    history = own.new_history()
    history.copies.read([5, 6])
    wrong, copied = 100, []
    for _ in range(30):
        copied.append(own.plan([history], [3], [3]).copy_lengths[0])
        history.copies.read([wrong, 5, 6])  # always another continuation
        wrong += 1
    assert any(copied[:5])
    assert not any(copied[-10:])
    for _ in range(30):
        copied.append(own.plan([history], [3], [3]).copy_lengths[0])
        history.copies.read([wrong, 5, 6])  # now always the same, though nothing is copied at first
    assert all(copied[-10:])


def test_the_gate_judges_blocks_by_their_own_rounds():
    """Rounds that copy say nothing about the draft: a draft that is never right is left alone nevertheless."""
    own = policy(LookaheadScheduler(), may_skip=True)
    history, drafted = own.new_history(), []
    history.copies.read([5, 6, 7])
    for _ in range(20):
        plan = own.plan([history], [3], [3])
        drafted.append(plan.drafts_block[0])
        if plan.drafts_block[0]:
            own.observe([history], [RoundRecord(7, (1, 2, 3), (0.9, 0.9, 0.9), 0, 8, 1)])
        good = RoundRecord(7, (1, 2, 3), (), 3, 8, 4, drafted=False, num_copied=3)
        own.observe([history], [good])
    assert drafted[0]
    assert sum(drafted) < 10


def test_blocks_are_cut_by_the_pass_that_copies_lengthen():
    """Beside a copy of five tokens the pass stands before a step of the curve, alone it does not."""
    step = SPSCurve((1, 7, 8, 30), (1.0, 1.0, 9.0, 9.5), draft_s=0.1)
    own = policy(PrefixScheduler(), curve=step, acceptance_prior=[0.5] * 3)
    history = history_of(own, [1, 2, 3])
    confidence = torch.tensor([[0.9, 0.9, 0.9]])
    alone = own.verify_lengths([history], confidence)
    beside = DraftPlan((5, 0), (False, True), (np.full(5, 0.9), NOTHING))
    assert int(alone) == 3
    assert int(own.verify_lengths([history], confidence, plan=beside)) == 0
