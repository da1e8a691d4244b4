# SPDX-License-Identifier: Apache-2.0
"""Slots drawn one after the other, and where blocks end because nothing can be drawn."""

import math

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper
from transformers.generation import EtaLogitsWarper, SuppressTokensLogitsProcessor

from dspark_hf.decoding.drawing import BlockDrawer
from dspark_hf.decoding.verification import draw_token


NAN, INF = math.nan, math.inf
TEXT = torch.tensor([[7, 7]])


def drawer(num_requests=1, processors=(), limits=None, do_sample=False, ids=None, vocab_size=4):
    own = [LogitsProcessorList(processors) for _ in range(num_requests)]
    return BlockDrawer([TEXT] * num_requests, own, limits or [3] * num_requests, do_sample, vocab_size, ids)


# One draw


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([1.0, NAN, 0.0], False),
        ([1.0, 2.0, INF], False),
        ([INF, INF, INF], False),
        ([-INF, -INF, -INF], False),
        ([-INF, NAN, -INF], False),
        ([-INF, 0.5, -INF], True),  # a constraint that leaves one token
        ([3e38, -3e38, 0.0], True),
    ],
)
def test_what_can_be_drawn_from(row, expected, do_sample):
    token, witness = draw_token(torch.tensor([[0.0, 1.0, 0.0], row]), do_sample)
    assert torch.isfinite(witness).tolist() == [True, expected]
    assert 0 <= int(token[1]) < 3
    if row[1] == 0.5:
        assert int(token[1]) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_one_nan_anywhere_in_a_large_vocabulary_is_found(dtype):
    logits = torch.zeros(3, 5003, dtype=dtype)
    logits[1, 4999], logits[2, 0] = NAN, INF
    assert torch.isfinite(draw_token(logits, do_sample=False)[1]).tolist() == [True, False, False]
    assert torch.isfinite(draw_token(logits.float(), do_sample=True)[1]).tolist() == [True, False, False]


def test_a_draw_is_that_of_multinomial():
    """The same numbers of the same random stream, so the same distribution."""
    logits = torch.tensor([[0.3, -1.0, 2.0, -INF, 0.0], [1.0, 1.0, 0.0, 0.5, -3.0]])
    for seed in range(50):
        torch.manual_seed(seed)
        expected = torch.multinomial(torch.softmax(logits, dim=-1), 1).squeeze(1)
        after = torch.rand(1)
        torch.manual_seed(seed)
        assert torch.equal(draw_token(logits, do_sample=True)[0], expected)
        assert torch.equal(torch.rand(1), after)


# Blocks


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("processors", [(), (TemperatureLogitsWarper(0.5),), (EtaLogitsWarper(1e-4),)])
def test_a_row_that_is_not_finite_ends_its_own_block_alone(processors, do_sample):
    """Certain rows: token 2, then 1, then 3. Request 1 has NaN in slot 1, request 2 an overflow in slot 0."""
    sure = [[-1e4, -1e4, 0.0, -1e4], [-1e4, 0.0, -1e4, -1e4], [-1e4, -1e4, -1e4, 0.0]]
    blocks = drawer(3, processors, do_sample=do_sample)
    for slot in range(3):
        rows = torch.tensor([sure[slot]] * 3)
        if slot == 1:
            rows[1, 3] = NAN
        if slot == 0:
            rows[2] = INF
        blocks.draw(rows)
        assert blocks.has_open_blocks
    drawn = blocks.finish()
    assert drawn.lengths == [3, 1, 0]
    assert drawn.overflowed == [False, True, True]
    assert drawn.token_ids[0].tolist() == [2, 1, 3]
    assert int(drawn.token_ids[1, 0]) == 2
    assert (drawn.draft_logits is not None) == do_sample
    if do_sample:
        assert torch.isfinite(drawn.draft_logits[0]).any(dim=-1).all()


def test_all_slots_at_once():
    logits = torch.tensor([[[0.0, 1.0], [2.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [NAN, 0.0], [0.0, 1.0]]])
    blocks = drawer(2, ids=torch.tensor([5, 9]), vocab_size=10)
    blocks.draw_all(logits)
    drawn = blocks.finish()
    assert (drawn.lengths, drawn.overflowed) == ([3, 1], [False, True])
    assert drawn.token_ids[0].tolist() == [9, 5, 9]
    assert drawn.token_ids[1, :1].tolist() == [9]


def test_limits_hold_and_what_lies_behind_them_is_no_overflow():
    blocks = drawer(3, limits=[1, 3, 0])
    for row in ([0.0, 1.0, 0.0, 0.0], [NAN] * 4):
        blocks.draw(torch.tensor([row] * 3))
    drawn = blocks.finish()
    assert drawn.lengths == [1, 1, 0]
    assert drawn.overflowed == [False, True, False]


def test_a_constraint_is_no_overflow():
    """Ids 1 and 3 are the draft vocabulary; both are suppressed."""
    blocks = drawer(processors=[SuppressTokensLogitsProcessor([1, 3])], ids=torch.tensor([1, 3]))
    blocks.draw(torch.tensor([[0.0, 1.0]]))
    assert not blocks.has_open_blocks
    drawn = blocks.finish()
    assert (drawn.lengths, drawn.overflowed) == ([0], [False])


def test_an_overflow_is_one_even_where_a_processor_reads_the_text():
    blocks = drawer(processors=[SuppressTokensLogitsProcessor([1])])
    blocks.draw(torch.tensor([[0.0, 1.0, 2.0, 0.0]]))
    blocks.draw(torch.tensor([[0.0, NAN, 2.0, 0.0]]))  # the processor would cover it
    assert not blocks.has_open_blocks
    drawn = blocks.finish()
    assert (drawn.lengths, drawn.overflowed, int(drawn.token_ids[0, 0])) == ([1], [True], 2)


def test_processors_do_not_see_what_comes_after_the_end_of_a_block():
    """A grammar may know no continuation of a token that nobody drew."""
    seen = []

    class Grammar(LogitsProcessor):
        def __call__(self, input_ids, scores):
            assert torch.isfinite(scores).all()
            seen.append(input_ids[0].tolist())
            return scores

    blocks = drawer(2, [Grammar()], limits=[3, 2])
    for slot in range(3):
        rows = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
        if slot == 1:
            rows[0] = NAN
        if blocks.has_open_blocks:
            blocks.draw(rows)
    assert blocks.finish().lengths == [1, 2]
    # Slot 0 of both, slot 1 of both (of request 0 with a row of zeros), and then nothing: both have ended.
    assert seen == [[7, 7], [7, 7], [7, 7, 1], [7, 7, 3]]
