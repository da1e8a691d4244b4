# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from dspark_hf.common.records import RoundRecord
from dspark_hf.scheduling import (
    CapacityScheduler,
    FixedScheduler,
    LookaheadScheduler,
    PrefixScheduler,
    RoundOutlook,
    SearchScheduler,
    SPSCurve,
    ThresholdScheduler,
    mean_survival,
)
from dspark_hf.scheduling.simulation import LoadReport, full_blocks, simulate_load, sweep
from tests.support.closeness import assert_close


POLICIES = {
    "plain": lambda: None,
    "fixed": lambda: FixedScheduler(3),
    "threshold": lambda: ThresholdScheduler(0.5),
    "algorithm_1": PrefixScheduler,
    "capacity": CapacityScheduler,
    "lookahead": LookaheadScheduler,
    "search": SearchScheduler,
}


def record(num_accepted: int, confidence: tuple[float, ...], bonus_token: int | None = 9) -> RoundRecord:
    return RoundRecord(
        anchor_id=1,
        token_ids=tuple(range(len(confidence))),
        confidence=confidence,
        num_accepted=num_accepted,
        bonus_token=bonus_token,
        num_committed=num_accepted + 1,
    )


def random_rounds(seed: int = 0, num_slots: int = 4) -> list[list[RoundRecord]]:
    """Texts of several lengths whose confidences are right: slot k is accepted with chance c_k."""
    rng, texts = random.Random(seed), []
    for length in (7, 1, 12, 20):
        texts.append([])
        for _ in range(length):
            confidence = tuple(rng.random() ** 0.4 for _ in range(num_slots))
            num_accepted = next((k for k, c in enumerate(confidence) if rng.random() > c), num_slots)
            texts[-1].append(record(num_accepted, confidence))
    return texts


class Watching:
    """Sends what it is told and keeps what it was shown."""

    def __init__(self, lengths: list[list[int]]) -> None:
        self.lengths, self.confidences, self.outlooks = iter(lengths), [], []

    def verify_lengths(self, confidence: torch.Tensor, outlook: RoundOutlook) -> torch.Tensor:
        self.confidences.append(confidence.tolist())
        self.outlooks.append(outlook)
        return torch.tensor(next(self.lengths))


A, B, C = record(2, (0.9, 0.8)), record(0, (0.5, 0.4)), record(1, (0.7, 0.25))


def test_two_requests_by_hand():
    """Three records on a ring; request 0 begins at the first, request 1 at the second (half of 3, rounded down).

    Round 1: A with 1 draft of 2 that would pass commits 2, B with 2 commits 1; 2 + 3 tokens take 0.5 + 5.
    Round 2: B with 0 commits 1, C with 2 commits 2; 4 tokens take 4.5.
    Round 3: C with 2 commits 2, A with 2 commits 3; 6 tokens take 6.5.
    """
    scheduler = Watching([[1, 2], [0, 2], [2, 2]])
    curve = SPSCurve((1, 8), (1.0, 8.0), draft_s=0.5)
    report = simulate_load([[A, B], [C]], curve, scheduler, num_requests=2, policy="told")
    assert report == LoadReport("told", 2, 3, num_tokens=11, num_verified=15, seconds=16.5)
    shown = [[list(first.confidence), list(second.confidence)] for first, second in ((A, B), (B, C), (C, A))]
    assert_close(torch.tensor(scheduler.confidences), torch.tensor(shown))
    assert all(outlook.curve is curve for outlook in scheduler.outlooks)


@pytest.mark.parametrize(("num_requests", "starts"), [(1, [0]), (2, [0, 2]), (3, [0, 1, 3]), (6, [0, 0, 1, 2, 3, 4])])
def test_requests_start_at_equal_distances(num_requests, starts):
    """Of five records: at 0, 2.5; at 0, 1.67, 3.33; at 0, 0.83, 1.67, ..., rounded down."""
    records = [record(0, (0.125 * k,)) for k in range(5)]
    scheduler = Watching([[0] * num_requests])
    simulate_load([records], SPSCurve.linear(0.1), scheduler, num_requests, num_rounds=1)
    assert scheduler.confidences == [[[0.125 * start] for start in starts]]


def test_what_the_scheduler_learns_by_hand():
    """Two pseudo-rounds at 0.6. Round 1 judges slot 0 twice, accepted once (B fails at it); slot 1 never: A sent one.
    Round 2 adds slot 0 of C, accepted, and slot 1 of C, rejected. B sent nothing."""
    scheduler = Watching([[1, 2], [0, 2], [2, 2]])
    simulate_load([[A, B], [C]], SPSCurve.linear(0.1), scheduler, num_requests=2)
    expected = [mean_survival(rates) for rates in ((0.6, 0.6), (2.2 / 4, 0.6), (3.2 / 5, 1.2 / 3))]
    for outlook, survival in zip(scheduler.outlooks, expected, strict=True):
        assert outlook.expected_survival == pytest.approx(survival)


def test_plain_decoding_commits_one_token_each():
    report = simulate_load([[A, B, C]], SPSCurve((1, 2), (1.0, 1.5), draft_s=9.0), None, num_requests=4)
    assert report == LoadReport("plain", 4, 3, num_tokens=12, num_verified=12, seconds=7.5)  # no drafting in it


def test_figures_of_a_report():
    report = LoadReport("any", num_requests=4, num_rounds=10, num_tokens=80, num_verified=120, seconds=5.0)
    assert (report.tokens_per_s, report.user_tokens_per_s) == (16.0, 4.0)
    assert (report.accepted_length, report.verify_length) == (2.0, 2.0)
    assert (report.verified_per_round, report.verified_per_token) == (12.0, 1.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.seconds = 1.0


@pytest.mark.parametrize("num_requests", [1, 2, 3, 40, 95])
def test_every_request_meets_every_record_once(num_requests):
    """So that all slots sent commit what was recorded, times the requests: none is lost, none counted twice."""
    rounds = random_rounds()
    records = [record for text in rounds for record in text]
    curve = SPSCurve.linear(0.1, draft_cost=0.2)
    report = simulate_load(rounds, curve, FixedScheduler(4), num_requests)
    assert report.num_rounds == len(records) == 40
    assert report.num_tokens == num_requests * sum(record.num_accepted + 1 for record in records)
    assert report.num_verified == num_requests * 40 * 5
    assert report.seconds == pytest.approx(40 * curve.round_s(5 * num_requests))
    assert report.policy == "FixedScheduler"


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_tokens_are_bounded_by_what_is_verified_and_what_was_accepted(make):
    rounds = random_rounds()
    most = sum(record.num_accepted + 1 for text in rounds for record in text)
    report = simulate_load(rounds, SPSCurve((1, 20, 60), (1.0, 1.1, 4.0), 0.1), make(), num_requests=10)
    assert 10 * report.num_rounds <= report.num_tokens <= min(10 * most, report.num_verified)
    assert report.verified_per_token >= 1


def test_longer_blocks_commit_and_verify_more():
    reports = [simulate_load(random_rounds(), SPSCurve.linear(0.1), FixedScheduler(n), 5) for n in range(5)]
    for shorter, longer in zip(reports, reports[1:], strict=False):
        assert longer.num_tokens > shorter.num_tokens
        assert longer.num_verified - shorter.num_verified == 5 * 40
    assert reports[0].num_tokens == 5 * 40


def test_load_costs_each_user_speed_and_raises_throughput():
    """Where a token more costs less than a pass: up to the point where it costs as much."""
    curve = SPSCurve((1, 64, 128), (1.0, 1.5, 4.0))
    reports = [simulate_load(random_rounds(), curve, FixedScheduler(2), n) for n in (1, 2, 4, 8, 16)]
    for fewer, more in zip(reports, reports[1:], strict=False):
        assert more.user_tokens_per_s < fewer.user_tokens_per_s
        assert more.tokens_per_s > fewer.tokens_per_s


def test_schedulers_send_less_under_load_and_beat_a_fixed_length():
    """Flat up to 32 tokens, then every token costs: with one request all is sent, with many little."""
    curve, rounds = SPSCurve((1, 32, 64), (1.0, 1.0, 2.0), 0.05), random_rounds(3)
    for make in (PrefixScheduler, CapacityScheduler, LookaheadScheduler):
        alone, loaded = (simulate_load(rounds, curve, make(), n) for n in (1, 24))
        assert alone.verify_length > 3.9
        assert loaded.verify_length < 2
        assert loaded.tokens_per_s > simulate_load(rounds, curve, FixedScheduler(4), 24).tokens_per_s


def test_sweep_covers_policies_and_counts_with_fresh_schedulers():
    rounds, curve = random_rounds(), SPSCurve.linear(0.3)
    reports = sweep(rounds, curve, POLICIES, (1, 3), num_rounds=15)
    assert [(r.policy, r.num_requests) for r in reports] == [(policy, n) for policy in POLICIES for n in (1, 3)]
    assert {r.num_rounds for r in reports} == {15}
    # The capacity scheduler remembers two rounds: a used one would begin otherwise.
    alone = simulate_load(rounds, curve, CapacityScheduler(), 3, 15, "capacity")
    assert alone in reports
    used = CapacityScheduler()
    simulate_load(random_rounds(1), curve, used, 1)
    assert simulate_load(rounds, curve, used, 3, 15, "capacity") != alone


def test_replay_goes_round():
    once = simulate_load([[A, B, C]], SPSCurve.linear(0.1), FixedScheduler(2), 2)
    twice = simulate_load([[A, B, C]], SPSCurve.linear(0.1), FixedScheduler(2), 2, num_rounds=6)
    assert (twice.num_tokens, twice.num_verified) == (2 * once.num_tokens, 2 * once.num_verified)


CUT = dataclasses.replace(A, token_ids=(0,), num_accepted=1)  # one of two drafts sent
SHORT = record(1, (0.9,))
UNJUDGED = record(1, (0.9, 0.8), bonus_token=None)  # a stop string ended the text at the first draft
BARE = dataclasses.replace(A, confidence=())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (CUT, 'record 2 sent 1 of 2 drafts, and what became of the others is not known. .* schedule "constant"'),
        (SHORT, "record 2 has 1 slots instead of 2. Take the `full_blocks`"),
        (UNJUDGED, "record 2 is of a text that ended at draft 1, before the next was judged"),
        (BARE, "record 2 has no confidences. Record .* with a draft that has a confidence head"),
    ],
)
def test_records_that_do_not_answer_for_every_length_are_refused(bad, message):
    with pytest.raises(ValueError, match=f"Every record must be of a full block; {message}"):
        simulate_load([[A, B], [bad, C]], SPSCurve.linear(0.1), FixedScheduler(1), 1)
    assert full_blocks([A, bad, B], 2) == [A, B]


def test_a_text_that_ended_in_an_accepted_block_is_a_full_one():
    ended = record(2, (0.9, 0.8), bonus_token=None)
    assert full_blocks([ended], 2) == [ended]
    assert simulate_load([[ended]], SPSCurve.linear(0.1), FixedScheduler(2), 1).num_tokens == 3


@pytest.mark.parametrize("rounds", [[], [[], []]])
def test_nothing_recorded(rounds):
    with pytest.raises(ValueError, match="`rounds` must hold at least one record, got none"):
        simulate_load(rounds, SPSCurve.linear(0.1), None, 1)


@pytest.mark.parametrize(("name", "counts"), [("num_requests", (0, 5)), ("num_rounds", (1, 0))])
def test_counts_below_one(name, counts):
    with pytest.raises(ValueError, match=f"`{name}` must be >= 1, got 0"):
        simulate_load([[A]], SPSCurve.linear(0.1), FixedScheduler(1), *counts)
