# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from dspark_hf.common.records import RoundRecord
from dspark_hf.scheduling import (
    CapacityScheduler,
    CopyOptions,
    DraftingPolicy,
    FixedScheduler,
    LookaheadScheduler,
    PrefixScheduler,
    RoundOutlook,
    SPSCurve,
    all_rules,
    mean_survival,
)
from dspark_hf.scheduling.choice import DraftPlan
from dspark_hf.scheduling.simulation import LoadReport, RecordedBlock, RecordedText, full_blocks, replay
from tests.support.closeness import assert_close


POLICIES = {"plain": lambda: None} | all_rules(num_slots=4)


def record(num_accepted: int, confidence: tuple[float, ...], bonus_token: int | None = 9) -> RoundRecord:
    return RoundRecord(
        anchor_id=1,
        token_ids=tuple(range(len(confidence))),
        confidence=confidence,
        num_accepted=num_accepted,
        bonus_token=bonus_token,
        num_committed=num_accepted + 1,
    )


def text(*rounds: RoundRecord) -> RecordedText:
    return RecordedText.from_rounds(rounds)


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


def random_texts(seed: int = 0) -> list[RecordedText]:
    return [text(*rounds) for rounds in random_rounds(seed)]


class Watching:
    """Sends what it is told and keeps what it was shown."""

    def __init__(self, lengths: list[list[int]]) -> None:
        self.lengths, self.confidences, self.outlooks = iter(lengths), [], []

    def verify_lengths(self, confidence: torch.Tensor, outlook: RoundOutlook) -> torch.Tensor:
        self.confidences.append(confidence.tolist())
        self.outlooks.append(outlook)
        return torch.tensor(next(self.lengths))


A, B, C = record(2, (0.9, 0.8)), record(0, (0.5, 0.4)), record(1, (0.7, 0.25))


def policy_of(scheduler, num_slots: int = 2, **options) -> DraftingPolicy:
    return DraftingPolicy(scheduler, num_slots, learn_times=False, **options)


def test_two_requests_by_hand():
    """A, then C, is one text, B the other.

    Round 1: A with 1 draft of 2 that would pass commits 2, B with 2 commits 1 and ends; 2 + 3 tokens take 0.5 + 5.
    Round 2: the first text stands inside A's three tokens, so A is met again; 0 drafts commit 1; 1 token takes 1.5.
    Round 3: C with 2 drafts commits 2 and ends; 3 tokens take 3.5.
    """
    scheduler = Watching([[1, 2], [0], [2]])
    curve = SPSCurve((1, 8), (1.0, 8.0), draft_s=0.5)
    report = replay(
        [text(A, C), text(B)], curve, policy_of(scheduler, curve=curve), num_requests=2, max_new_tokens=9, name="told"
    )
    assert report == LoadReport("told", 2, num_rounds=4, num_tokens=6, num_verified=9, seconds=10.5)
    shown = [[A.confidence, B.confidence], [A.confidence], [C.confidence]]
    histories = [1.0, 1.0]  # corrected by what happened: A's first slot passed as expected, B's did not
    assert_close(torch.tensor(scheduler.confidences[0]), torch.tensor(shown[0]))
    assert len(scheduler.confidences[1]) == len(scheduler.confidences[2]) == len(histories) - 1
    assert all(outlook.curve is curve for outlook in scheduler.outlooks)


def test_the_policy_learns_by_hand():
    """Two pseudo-rounds at 0.6. Round 1 judges slot 0 of both, A's is accepted; slot 1 never: A sent one."""
    scheduler = Watching([[1, 2], [0], [2]])
    replay([text(A, C), text(B)], SPSCurve.linear(0.1), policy_of(scheduler), num_requests=2)
    first, second, _ = scheduler.outlooks
    assert first.expected_survival == pytest.approx((0.6, 0.36))
    assert second.expected_survival == pytest.approx(mean_survival(((1 + 1.2) / 3, 0.6)))


def test_plain_decoding_commits_one_token_each():
    """Texts of 3, 1 and 2 recorded tokens, two at a time: B ends after a round, the others after three."""
    curve = SPSCurve((1, 2), (1.0, 1.5), draft_s=9.0)
    report = replay([text(A), text(B), text(C)], curve, None, num_requests=2, request_s=0.25)
    assert report == LoadReport("plain", 2, num_rounds=6, num_tokens=6, num_verified=6, seconds=6.0)  # no drafting


def test_a_text_ends_at_its_limit():
    report = replay([text(A, A, A)], SPSCurve.linear(0.1), policy_of(FixedScheduler(2)), max_new_tokens=4)
    assert report.num_tokens == 4  # three, and then no draft fits
    assert report.num_verified == 3 + 1


def test_figures_of_a_report():
    report = LoadReport("any", num_requests=4, num_rounds=40, num_tokens=80, num_verified=120, seconds=5.0)
    assert (report.tokens_per_s, report.user_tokens_per_s) == (16.0, 4.0)
    assert (report.accepted_length, report.verify_length, report.verified_per_token) == (2.0, 2.0, 1.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.seconds = 1.0


@pytest.mark.parametrize("num_requests", [1, 2, 3, 40])
def test_whole_blocks_commit_what_was_recorded(num_requests):
    """None is lost, none counted twice, however many texts wait."""
    rounds = random_rounds()
    records = [record for own in rounds for record in own]
    policy = policy_of(FixedScheduler(4), num_slots=4)
    report = replay(random_texts(), SPSCurve.linear(0.1, draft_cost=0.2), policy, num_requests)
    assert report.num_rounds == len(records) == 40
    assert report.num_tokens == sum(record.num_accepted + 1 for record in records)
    assert report.num_verified == 40 * 5
    assert report.policy == "FixedScheduler"


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_tokens_are_bounded_by_what_is_verified_and_what_was_accepted(make):
    rounds, scheduler = random_rounds(), make()
    recorded = sum(record.num_accepted + 1 for own in rounds for record in own)
    report = replay(
        random_texts(),
        SPSCurve((1, 20, 60), (1.0, 1.1, 4.0), 0.1),
        scheduler and policy_of(scheduler, num_slots=4),
        num_requests=10,
    )
    assert report.num_rounds <= report.num_tokens <= report.num_verified
    assert recorded <= report.num_tokens < recorded + 5 * len(rounds)  # the last block may be met again
    assert report.verified_per_token >= 1


def test_longer_blocks_verify_more_in_fewer_rounds():
    curve, rounds = SPSCurve.linear(0.1), random_texts()
    reports = [replay(rounds, curve, policy_of(FixedScheduler(n), num_slots=4), 5) for n in range(5)]
    assert reports[4].num_rounds < reports[1].num_rounds < reports[0].num_rounds
    for shorter, longer in zip(reports, reports[1:], strict=False):
        assert longer.num_verified > shorter.num_verified
    assert reports[0].num_tokens == reports[0].num_rounds == reports[0].num_verified


def many_rounds(seed: int = 3) -> list[RecordedText]:
    return [own for start in range(12) for own in random_texts(seed + start) if len(own.blocks) > 5]


def test_load_costs_each_user_speed_and_raises_throughput():
    """Where a token more costs less than a pass: up to the point where it costs as much."""
    curve, rounds = SPSCurve((1, 64, 128), (1.0, 1.5, 4.0)), many_rounds()
    reports = [replay(rounds, curve, policy_of(FixedScheduler(2), num_slots=4), n) for n in (1, 2, 4, 8, 16)]
    for fewer, more in zip(reports, reports[1:], strict=False):
        assert more.user_tokens_per_s < fewer.user_tokens_per_s
        assert more.tokens_per_s > fewer.tokens_per_s


def test_schedulers_send_less_under_load_and_beat_a_fixed_length():
    """Flat up to 32 tokens, then every token costs: with one request all is sent, with many little."""
    curve, rounds = SPSCurve((1, 32, 64), (1.0, 1.0, 2.0), 0.05), many_rounds()
    full = replay(rounds, curve, policy_of(FixedScheduler(4), num_slots=4), 24)
    for make in (PrefixScheduler, CapacityScheduler, LookaheadScheduler):
        alone, loaded = (replay(rounds, curve, policy_of(make(), 4, curve=curve), n) for n in (1, 24))
        assert alone.verify_length > 3.5
        assert loaded.verify_length < 2.5
        assert loaded.tokens_per_s > full.tokens_per_s


def test_the_gate_skips_rounds_of_a_draft_that_is_never_right():
    rounds = [text(*[record(0, (0.6, 0.6))] * 200)]
    curve = SPSCurve.linear(0.1, draft_cost=0.2)
    gated, always = (
        replay(rounds, curve, policy_of(LookaheadScheduler(), curve=curve, may_skip=skip)) for skip in (True, False)
    )
    assert gated.num_tokens == always.num_tokens == 200
    assert gated.seconds < 0.9 * always.seconds


CUT = dataclasses.replace(A, token_ids=(0,), num_accepted=1)  # one of two drafts sent
COPIED = dataclasses.replace(A, num_copied=1)
UNJUDGED = record(1, (0.9, 0.8), bonus_token=None)  # a stop string ended the text at the first draft
BARE = dataclasses.replace(A, confidence=())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (CUT, 'record 2 sent 1 of 2 drafts, and what became of the others is not known. .* schedule "constant"'),
        (COPIED, "record 2 goes on with copied drafts. Record with `prompt_lookup_num_tokens` 0"),
        (UNJUDGED, "record 2 is of a text that ended at draft 1, before the next was judged"),
        (BARE, "record 2 has no confidences. Record .* with a draft that has a confidence head"),
    ],
)
def test_records_that_do_not_answer_for_every_length_are_refused(bad, message):
    with pytest.raises(ValueError, match=f"Every record must be of a full block; {message}"):
        text(A, B, bad, C)
    assert full_blocks([A, bad, B], 2) == [A, B]


def test_a_text_that_ended_in_an_accepted_block_is_a_full_one():
    ended = record(2, (0.9, 0.8), bonus_token=None)
    assert full_blocks([ended], 2) == [ended]
    assert replay([text(ended)], SPSCurve.linear(0.1), policy_of(FixedScheduler(2))).num_tokens == 3


@pytest.mark.parametrize("texts", [[], [RecordedText((1, 2), 1, ())]])
def test_nothing_recorded(texts):
    with pytest.raises(ValueError, match="`texts` must hold at least one block, got none"):
        replay(texts, SPSCurve.linear(0.1), None)


def test_no_requests():
    with pytest.raises(ValueError, match="`num_requests` must be >= 1, got 0"):
        replay([text(A)], SPSCurve.linear(0.1), None, num_requests=0)


def test_blocks_of_two_drafts_are_refused():
    with pytest.raises(ValueError, match=r"as many slots, got \[1, 2\]"):
        replay([text(A), text(record(1, (0.9,)))], SPSCurve.linear(0.1), None)


def test_a_text_of_rounds_by_hand():
    """A's drafts 0 and 1 are accepted and 9 follows; of B nothing is, and 9 follows again."""
    built = text(A, dataclasses.replace(B, anchor_id=9))
    blocks = (RecordedBlock(1, (0, 1), A.confidence, 2), RecordedBlock(4, (0, 1), B.confidence, 0))
    assert built == RecordedText((1, 0, 1, 9, 9), 1, blocks)


def repeating(num_right: int) -> RecordedText:
    """A prompt of 5 6 7 8 9 5 6, and an answer that goes on with so many of 7 8 9 5 6, then with other tokens.

    The draft proposes 7 and then nonsense, with confidences that say so.
    """
    prompt, answer = (5, 6, 7, 8, 9, 5, 6), (7, 8, 9, 5, 6)[:num_right] + tuple(range(20, 28 - num_right))
    blocks = [
        RecordedBlock(len(prompt) + place, (7, 3), (0.99, 0.01), int(answer[place] == 7))
        for place in range(len(answer))
    ]
    return RecordedText(prompt + answer, len(prompt), tuple(blocks))


@pytest.mark.parametrize("num_right", [0, 1, 3, 5])
def test_copies_by_hand(num_right):
    """Six and five before it agree: all of 7 8 9 5 are copied, and so many of them are right."""
    curve = SPSCurve((1, 8), (1.0, 8.0), draft_s=100.0)
    copies = CopyOptions(num_tokens=4, shortest_match=2)
    policy = policy_of(FixedScheduler(0), curve=curve, copies=copies)
    report = replay([repeating(num_right)], curve, policy, max_new_tokens=6)
    first = min(num_right, 4) + 1
    # Once the text is new, rounds draft (100 s each) and send nothing, but for one that has only room for a token.
    assert report.num_tokens == 6
    assert report.seconds >= 5.0 + 100.0 * (6 - first - 1)


def test_copies_are_chosen_where_they_pay():
    texts, curve = [repeating(5)], SPSCurve((1, 8), (1.0, 1.2), draft_s=0.5)
    with_copies, without = (
        replay(texts, curve, policy_of(PrefixScheduler(), curve=curve, copies=own), max_new_tokens=6)
        for own in (CopyOptions(prior=[0.9] * 7), None)
    )
    assert with_copies.num_tokens == without.num_tokens == 6
    assert with_copies.num_rounds < without.num_rounds
    assert with_copies.seconds < 0.7 * without.seconds
    doubtful = policy_of(PrefixScheduler(), curve=curve, copies=CopyOptions(prior=[0.0] * 7))
    learnt = replay(texts, curve, doubtful, max_new_tokens=6)  # from tokens that it did not copy
    assert with_copies.num_rounds < learnt.num_rounds < without.num_rounds


def test_a_copy_goes_on_where_it_agrees_with_the_block():
    """The draft is sure of 7 and a copy says 7 8 9: with the block drafted anyway, 8 and 9 cost little more."""
    curve = SPSCurve((1, 2, 8), (1.0, 1.01, 1.02), draft_s=0.0)
    prior = [0.0, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9]
    policy = policy_of(LookaheadScheduler(), curve=curve, copies=CopyOptions(prior=prior))
    history = policy.new_history()
    history.copies.read([5, 6, 7, 8, 9, 5, 6])
    plan = policy.plan([history], [4], [2])
    chosen = DraftPlan((0,), (True,), plan.copy_acceptance)  # as if the block had been the better choice
    assert policy.copies_beyond([history], chosen, [1], [True]) == (3,)
    assert policy.copies_beyond([history], chosen, [1], [False]) == (0,)
    steep = policy_of(LookaheadScheduler(), curve=SPSCurve.linear(3.0), copies=CopyOptions(prior=prior))
    assert steep.copies_beyond([history], chosen, [1], [True]) == (0,)
