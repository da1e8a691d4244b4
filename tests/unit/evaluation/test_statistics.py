# SPDX-License-Identifier: Apache-2.0
"""Figures of an evaluation against rounds whose outcome is known, worked out by hand."""

import math

import pytest

from dspark_hf.common.records import RoundRecord
from dspark_hf.evaluation.record import Run
from dspark_hf.evaluation.statistics import (
    Recording,
    confidence_figures,
    drafter_figures,
    question_figures,
    speedup_by_length,
    threshold_sweep,
    worst_decile,
)
from dspark_hf.evaluation.timed import TimedAnswer, observed_rounds
from tests.support.closeness import assert_close


def record(num_drafts, num_accepted, num_committed=None, confidence=()):
    """A round; the tokens' values do not matter."""
    committed = num_accepted + 1 if num_committed is None else num_committed
    return RoundRecord(1, (5,) * num_drafts, confidence, num_accepted, 7, committed)


def plain_run(index, num_tokens, task="math", decoding="greedy", turn=0, tokens=None):
    """One token a second."""
    blocks = tuple((token,) for token in (tokens or range(num_tokens)))
    rounds = tuple(record(0, 0) for _ in range(num_tokens - 1))
    times = tuple(float(second) for second in range(1, num_tokens + 1))
    answer = TimedAnswer(float(num_tokens), blocks, times, rounds)
    return Run.of(answer, task, index, turn, decoding, "plain", 10)


def draft_run(index, rounds, times, seconds, task="math", decoding="greedy", turn=0, first=0):
    """The same text as `plain_run`, in blocks of one and then of what each round committed."""
    blocks, token = [(first,)], first + 1
    for entry in rounds:
        blocks.append(tuple(range(token, token + entry.num_committed)))
        token += entry.num_committed
    answer = TimedAnswer(seconds, tuple(blocks), tuple(times), tuple(rounds))
    return Run.of(answer, task, index, turn, decoding, "draft", 10)


# A is drafted well, B badly. B's last block has two drafts.
A = draft_run(0, [record(3, 2), record(3, 3)], times=[1.0, 2.0, 3.0], seconds=4.0)
B = draft_run(1, [record(3, 0), record(3, 0), record(2, 1)], times=[1.0, 2.0, 3.0, 4.5], seconds=5.0)
RECORDING = Recording([plain_run(0, 8), plain_run(1, 5), A, B])


def figures(recording=RECORDING, **chosen):
    return drafter_figures(recording, **({"task": "math", "decoding": "greedy", "drafter": "draft"} | chosen))


def values(intervals):
    return [interval.value for interval in intervals]


def test_accepted_length_pools_over_rounds_and_counts_the_bonus_token():
    # 3 + 4 tokens in 2 rounds, and 1 + 1 + 2 in 3. The mean over prompts would be (3.5 + 4/3) / 2 = 2.42.
    assert figures().accepted_length.value == pytest.approx(11 / 5)
    # Footnote 3: six accepted drafts in five rounds, and a bonus token in each.
    assert figures().accepted_length.value == pytest.approx(1 + 6 / 5)


def test_acceptance():
    found = figures()
    assert found.acceptance_rate.value == pytest.approx(6 / 14)
    # Slot 0: 5 rounds sent it, 3 accepted it. Slot 1: 3 sent it with slot 0 accepted. Slot 2: A's two.
    assert values(found.conditional_acceptance) == pytest.approx([3 / 5, 2 / 3, 1 / 2])
    assert found.verified_per_token.value == pytest.approx((14 + 5) / 11)


def test_a_round_that_the_text_ends_in_counts_what_it_added():
    ended = draft_run(0, [record(3, 3, num_committed=2)], times=[1.0, 2.0], seconds=2.0)
    found = figures(Recording([plain_run(0, 3), ended]))
    assert found.accepted_length.value == 2.0
    assert found.acceptance_rate.value == 1.0


def test_speedup_is_that_of_the_sums():
    # 13 tokens in 9 seconds against 13 in 13. The mean over prompts would be (2 + 1) / 2 = 1.5.
    assert figures().speedup.value == pytest.approx(13 / 9)
    assert figures().tokens_per_s == pytest.approx(13 / 9)
    assert figures(drafter="plain").speedup.value == 1.0
    assert figures(drafter="plain").accepted_length.value == 1.0
    assert figures(drafter="plain").verified_per_token.value == 1.0


def test_speedup_compares_rates_where_texts_have_other_lengths():
    twice_as_long = draft_run(0, [record(3, 3)] * 3, times=[1.0, 2.0, 3.0, 4.0], seconds=4.0)  # 13 tokens
    found = figures(Recording([plain_run(0, 8), twice_as_long]))
    assert found.speedup.value == pytest.approx((13 / 4) / (8 / 8))


def test_latencies():
    found = figures()
    low, high = 2 / 7, 3.5 / 4  # A: 7 tokens in 2 s after the first; B: 4 in 3.5 s
    assert found.token_latency_s.p50 == pytest.approx((low + high) / 2)
    assert found.token_latency_s.p95 == pytest.approx(low + 0.95 * (high - low))
    assert (found.first_token_s.p50, found.first_token_s.p95) == (1.0, 1.0)
    one_token = Recording([plain_run(0, 1)])
    assert math.isnan(figures(one_token, drafter="plain").token_latency_s.p50)


def test_tokens_of_a_block_arrive_together():
    assert [A.seconds_to(n) for n in (1, 2, 4, 5, 8, 9)] == [1.0, 2.0, 2.0, 3.0, 3.0, None]


def test_when_it_pays():
    parts = speedup_by_length(RECORDING, "math", "greedy", "draft", lengths=(2, 6, 9))
    # Two tokens: 2 + 2 seconds on both sides. Six: A alone, 6 seconds against 3. Nine: no answer is that long.
    assert [(part.num_tokens, part.num_answers) for part in parts] == [(2, 2), (6, 1), (None, 2)]
    assert values(part.speedup for part in parts) == pytest.approx([1.0, 2.0, 13 / 9])


def test_tasks_are_pooled_and_kept_apart():
    code = draft_run(0, [record(3, 3)], times=[1.0, 2.0], seconds=2.0, task="code")
    recording = Recording([*RECORDING.runs, plain_run(0, 5, task="code"), code])
    assert recording.tasks == ["math", "code", "all"]
    assert figures(recording).accepted_length.value == pytest.approx(11 / 5)
    assert figures(recording, task="code").accepted_length.value == 4.0
    everything = figures(recording, task="all")
    assert everything.accepted_length.value == pytest.approx(15 / 6)
    assert (everything.num_questions, everything.num_tokens, everything.num_rounds) == (3, 18, 6)


def test_turns_of_a_question_belong_together():
    turns = [plain_run(0, 8), plain_run(0, 5, turn=1), A, draft_run(0, B.rounds, B.times_s, 5.0, turn=1)]
    found = figures(Recording(turns))
    assert (found.num_questions, found.num_answers) == (1, 2)
    (entry,) = question_figures(Recording(turns), "greedy", "draft")
    assert (entry.num_tokens, entry.num_rounds, entry.seconds) == (13, 5, 9.0)
    assert entry.accepted_length == pytest.approx(11 / 5)
    assert entry.speedup == pytest.approx(13 / 9)


def test_greedy_answers_that_differ_are_counted_and_named():
    other = plain_run(0, 8, tokens=[0, 1, 2, 99, 4, 5, 6, 7])
    recording = Recording([other, plain_run(1, 5), A, B])
    assert figures(recording).num_different == 1
    first, second = question_figures(recording, "greedy", "draft")
    assert (first.first_differences, second.first_differences) == ((3,), (None,))


def test_sampled_answers_are_not_compared():
    runs = [
        plain_run(0, 8, decoding="temperature 1", tokens=[9] * 8),
        draft_run(0, A.rounds, A.times_s, 4.0, decoding="temperature 1"),
    ]
    assert figures(Recording(runs), decoding="temperature 1").num_different is None
    (entry,) = question_figures(Recording(runs), "temperature 1", "draft")
    assert entry.first_differences == (None,)


def test_the_worst_decile_is_named():
    runs = []
    for index in range(11):  # accepted lengths 1, 1.5, 2, ...
        rounds = [record(10, index), record(10, 0)]
        runs += [plain_run(index, index + 3), draft_run(index, rounds, [1.0, 2.0, 3.0], seconds=4.0)]
    worst = worst_decile(Recording(reversed(runs)), "greedy", "draft")
    assert [entry.index for entry in worst.questions] == [0, 1]  # a tenth of eleven, rounded up
    assert worst.accepted_length == pytest.approx((2 + 3) / 4)
    assert worst.speedup == pytest.approx((7 / 8) / (7 / 7))


def test_questions_without_rounds_are_nobodys_worst():
    nothing = draft_run(0, [], times=[1.0], seconds=1.0)
    recording = Recording([plain_run(0, 1), plain_run(1, 5), nothing, B])
    assert [entry.index for entry in worst_decile(recording, "greedy", "draft").questions] == [1]
    assert worst_decile(Recording([plain_run(0, 1), nothing]), "greedy", "draft") is None


# Confidence


BLOCKS = [record(3, 3, confidence=(0.9, 0.8, 0.3)), record(3, 1, confidence=(0.9, 0.4, 0.95))]
BLOCKS += [record(3, 0, confidence=(0.2, 0.9, 0.9))]


def test_thresholds_are_replayed_with_a_causal_cut():
    everything, half, nothing = threshold_sweep(BLOCKS, (0.0, 0.5, 1.0))
    assert everything.accepted_length == pytest.approx(7 / 3)
    assert everything.acceptance_rate == pytest.approx(4 / 9)
    assert everything.verified_per_token == pytest.approx(12 / 7)
    # Sent: 2, 1 and 0. The 0.95 and the two 0.9 lie behind a cut, and are not sent.
    assert half.verify_length == pytest.approx(1.0)
    assert half.accepted_length == pytest.approx(2.0)
    assert half.acceptance_rate == 1.0
    assert half.verified_per_token == 1.0
    assert (nothing.verify_length, nothing.accepted_length) == (0.0, 1.0)
    assert math.isnan(nothing.acceptance_rate)


def confidence_of(*entries):
    rounds = [record(1, accepted, confidence=(confidence,)) for confidence, accepted in entries]
    times = [float(second) for second in range(1, len(rounds) + 2)]
    num_tokens = 1 + sum(entry.num_committed for entry in rounds)
    run = draft_run(0, rounds, times, seconds=times[-1])
    return confidence_figures(Recording([plain_run(0, num_tokens), run]), "greedy", "draft", num_slots=1)


def test_ece_and_auc():
    exact = confidence_of((0.75, 1), (0.75, 1), (0.75, 0), (0.75, 1)).slots[0]
    assert_close(exact.expected_calibration_error, 0.0, scale=1.0)
    assert exact.area_under_curve == 0.5
    wrong = confidence_of((0.75, 0), (0.75, 0), (0.75, 0), (0.75, 0)).slots[0]
    assert_close(wrong.expected_calibration_error, 0.75)
    ranked = confidence_of((0.9, 1), (0.8, 1), (0.2, 0), (0.1, 0)).slots[0]
    assert ranked.area_under_curve == 1.0
    assert confidence_of((0.2, 1), (0.9, 0)).slots[0].area_under_curve == 0.0


def test_only_full_blocks_are_judged():
    short = RoundRecord(1, (5,), (0.9, 0.9), 1, 7, 2)  # cut: the second slot was not sent
    run = draft_run(0, [short, record(2, 1, confidence=(0.9, 0.5))], [1.0, 2.0, 3.0], seconds=3.0)
    found = confidence_figures(Recording([plain_run(0, 5), run]), "greedy", "draft", num_slots=2)
    assert found.num_rounds == 1
    assert confidence_figures(RECORDING, "greedy", "draft", num_slots=3) is None  # no confidences


# Rounds seen from outside


def test_rounds_from_inputs_and_tokens():
    first, second, third = observed_rounds(
        inputs=[[1, 2, 3], [4, 5, 6, 7], [9, 1, 2], [2]],
        blocks=[[4], [5, 9], [1, 2], [8]],
        times_s=[1.0, 1.5, 3.0, 3.25],
    )
    assert (first.anchor_id, first.token_ids, first.num_accepted, first.bonus_token) == (4, (5, 6, 7), 1, 9)
    assert (first.num_committed, first.round_s, first.drafted) == (2, 0.5, True)
    # The text ended after the second draft, before a bonus token.
    assert (second.token_ids, second.num_accepted, second.bonus_token, second.num_committed) == ((1, 2), 2, None, 2)
    assert (third.token_ids, third.num_accepted, third.bonus_token, third.drafted) == ((), 0, 8, False)


def test_a_prompt_in_pieces_is_no_round():
    (only,) = observed_rounds(inputs=[[1, 2], [3], [4, 5]], blocks=[[4], [5, 6]], times_s=[1.0, 2.0])
    assert (only.anchor_id, only.num_accepted, only.bonus_token) == (4, 1, 6)


def test_tokens_from_nowhere_are_an_error():
    with pytest.raises(RuntimeError, match="2 blocks from 1 passes"):
        observed_rounds(inputs=[[1]], blocks=[[2], [3]], times_s=[1.0, 2.0])


def test_runs_survive_the_file():
    run = draft_run(3, BLOCKS, [1.0, 2.0, 3.0, 4.0], seconds=4.5)
    row = run.to_row()
    assert row["key"] == run.key == "math/3/0/greedy/draft"
    assert Run.from_row(row) == run
    del row["blocks"]
    with pytest.raises(ValueError, match="choose another output"):
        Run.from_row(row)
