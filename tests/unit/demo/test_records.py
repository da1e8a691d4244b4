# SPDX-License-Identifier: Apache-2.0
"""Origins of tokens, and what two texts say about each other."""

import pytest

from dspark_hf import RoundRecord
from dspark_hf.demo.records import ACCEPTED, BONUS, CORRECTION, PLAIN, Progress, Side, Token, tokens_of_round
from dspark_hf.demo.settings import RunSettings


GREEDY = RunSettings("Hello")


def origins(token_ids, record):
    tokens = tokens_of_round(token_ids, tuple(str(i) for i in token_ids), record, 4)
    return [(token.origin, token.slot, token.confidence) for token in tokens]


def side(token_ids, seconds=1.0, finished=True):
    return Side(tuple(Token(token_id, "x") for token_id in token_ids), seconds, finished=finished)


def test_a_rejected_draft_is_followed_by_a_correction():
    record = RoundRecord(1, (5, 6, 7), (0.9, 0.4, 0.2), num_accepted=1, bonus_token=8, num_committed=2)
    assert origins((5, 8), record) == [(ACCEPTED, 0, 0.9), (CORRECTION, 1, 0.4)]


def test_a_block_accepted_whole_is_followed_by_a_bonus():
    # A third slot was drafted and not sent: its confidence belongs to no token.
    record = RoundRecord(1, (5, 6), (0.9, 0.8, 0.1), num_accepted=2, bonus_token=8, num_committed=3)
    assert origins((5, 6, 8), record) == [(ACCEPTED, 0, 0.9), (ACCEPTED, 1, 0.8), (BONUS, None, None)]


def test_a_round_without_drafts_is_a_step_of_the_target_alone():
    assert origins((8,), RoundRecord(1, (), (), 0, 8, 1)) == [(PLAIN, None, None)]


def test_a_round_that_the_text_ended_in_has_its_drafts_only():
    record = RoundRecord(1, (5, 6, 7), (), num_accepted=3, bonus_token=None, num_committed=2)
    assert origins((5, 6), record) == [(ACCEPTED, 0, None), (ACCEPTED, 1, None)]


def test_the_prefill_belongs_to_no_round():
    (token,) = tokens_of_round((3,), ("a",), None, None)
    assert token == Token(3, "a", PLAIN)
    assert tokens_of_round((8,), ("a",), RoundRecord(1, (), (), 0, 8, 1), 4)[0].round_index == 4


@pytest.mark.parametrize(
    ("plain", "dspark", "stopped", "phase"),
    [
        (None, None, False, "waiting"),
        (side((1,), finished=False), None, False, "plain"),
        (side((1,)), None, False, "plain"),
        (side((1,)), side((1,), finished=False), False, "dspark"),
        (side((1,)), side((1,)), False, "done"),
        (side((1,)), side((1,)), True, "stopped"),
        (None, None, True, "stopped"),
    ],
)
def test_phase(plain, dspark, stopped, phase):
    assert Progress(GREEDY, plain, dspark, stopped).phase == phase


def test_speedup_is_the_ratio_of_tokens_per_second():
    progress = Progress(GREEDY, side((1, 2, 3), seconds=3.0), side((1, 2, 3), seconds=1.5))
    assert (progress.plain.tokens_per_s, progress.dspark.tokens_per_s, progress.speedup) == (1.0, 2.0, 2.0)
    assert Progress(GREEDY, side((1,)), side(())).speedup is None
    assert Progress(GREEDY, side((1,))).speedup is None


def test_texts_are_identical_only_when_both_are_complete():
    assert Progress(GREEDY, side((1, 2)), side((1, 2))).identical
    for other in (side((1, 3)), side((1,)), side((1, 2), finished=False)):
        assert not Progress(GREEDY, side((1, 2)), other).identical
    assert not Progress(GREEDY, side((1, 2)), side((1, 2)), stopped=True).identical


def test_a_text_that_is_still_growing_does_not_differ_by_being_shorter():
    assert Progress(GREEDY, side((1, 2, 3)), side((1, 2), finished=False)).first_difference is None
    assert Progress(GREEDY, side((1, 2, 3)), side((1, 4), finished=False)).first_difference == 1
    assert Progress(GREEDY, side((1, 2, 3)), side((1, 2))).first_difference == 2
