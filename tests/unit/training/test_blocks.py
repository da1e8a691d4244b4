# SPDX-License-Identifier: Apache-2.0
"""Training geometry against values worked out by hand and against brute force."""

import pytest
import torch

from dspark_hf.training.blocks import (
    AnchorBlocks,
    block_attention_mask,
    block_input_ids,
    block_position_ids,
    label_blocks,
    previous_ids,
    sample_anchors,
)


# Two rows of ten tokens; answers at 4-7 and at 2-3, 6-9 of the other (a second turn).
INPUT_IDS = torch.tensor([[10, 11, 12, 13, 14, 15, 16, 17, 18, 19], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29]])
LOSS_MASK = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0, 1, 1, 1, 1]]).bool()
# Anchors whose successor is in the answer as well.
CANDIDATES = [{4, 5, 6}, {2, 6, 7, 8}]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def blocks_at(positions, keep=None, block_size: int = 3) -> AnchorBlocks:
    positions = torch.tensor(positions)
    keep_mask = torch.tensor(keep) if keep is not None else torch.ones_like(positions, dtype=torch.bool)
    return label_blocks(INPUT_IDS, LOSS_MASK, positions, keep_mask, block_size)


def test_anchors_and_their_successors_are_answer_tokens():
    for seed in range(50):
        positions, keep_mask = sample_anchors(LOSS_MASK, 2, generator(seed))
        assert positions.shape == keep_mask.shape == (2, 2)
        assert keep_mask.all()
        for row, candidates in enumerate(CANDIDATES):
            assert set(positions[row].tolist()) <= candidates


def test_anchors_never_repeat_and_ascend():
    mask = torch.rand(3, 60, generator=generator()) < 0.7
    for seed in range(50):
        positions, keep_mask = sample_anchors(mask, 12, generator(seed))
        for row, keep in zip(positions, keep_mask, strict=True):
            kept = row[keep].tolist()
            assert kept == sorted(set(kept))


def test_every_anchor_has_the_same_chance():
    """4 candidates, 2 drawn: each in half of the draws; 2000 draws have a standard deviation of 22."""
    counts = torch.zeros(10)
    stream = generator()
    for _ in range(2000):
        counts[sample_anchors(LOSS_MASK[1:], 2, stream)[0]] += 1
    assert {i for i in range(10) if counts[i]} == CANDIDATES[1]
    assert (counts[list(CANDIDATES[1])] - 1000).abs().max() < 5 * 22.4


def test_as_many_anchors_as_the_fullest_row_needs():
    positions, keep_mask = sample_anchors(LOSS_MASK, 512, generator())
    assert positions.tolist() == [[4, 5, 6, 0], [2, 6, 7, 8]]  # the 0 is a dummy
    assert keep_mask.tolist() == [[True, True, True, False], [True] * 4]


@pytest.mark.parametrize(
    "mask",
    [[0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1], [1]],
    ids=["none", "one token", "no two neighbours", "the last alone", "a single token"],
)
def test_row_without_an_anchor_has_a_dummy(mask):
    positions, keep_mask = sample_anchors(torch.tensor([mask]).bool(), 8, generator())
    assert positions.tolist() == [[0]]
    assert keep_mask.tolist() == [[False]]


def test_empty_row_beside_a_full_one():
    mask = torch.stack([torch.zeros(10, dtype=torch.bool), LOSS_MASK[0]])
    positions, keep_mask = sample_anchors(mask, 2, generator())
    assert keep_mask.tolist() == [[False, False], [True, True]]
    assert positions[0].tolist() == [0, 0]


def test_anchors_do_not_depend_on_padding():
    mask = torch.rand(1, 37, generator=generator()) < 0.8
    padded = torch.nn.functional.pad(mask, (0, 91))
    for seed in range(20):
        alone, wide = sample_anchors(mask, 5, generator(seed)), sample_anchors(padded, 5, generator(seed))
        assert torch.equal(alone[0], wide[0])
        assert torch.equal(alone[1], wide[1])


def test_same_generator_same_anchors():
    mask = torch.ones(2, 200, dtype=torch.bool)
    assert torch.equal(sample_anchors(mask, 8, generator(3))[0], sample_anchors(mask, 8, generator(3))[0])
    assert not torch.equal(sample_anchors(mask, 8, generator(3))[0], sample_anchors(mask, 8, generator(4))[0])


@pytest.mark.parametrize("num_anchors", [0, -1])
def test_no_anchors_are_refused(num_anchors):
    with pytest.raises(ValueError, match=f"`num_anchors` must be >= 1, got {num_anchors}"):
        sample_anchors(LOSS_MASK, num_anchors)


def test_labels_end_with_the_answer_and_with_the_sequence():
    blocks = blocks_at([[4, 6, 0], [2, 7, 8]], keep=[[True, True, False], [True, True, True]])
    assert blocks.label_ids[0, 0].tolist() == [15, 16, 17]
    assert blocks.label_mask[0].tolist() == [[True] * 3, [True, False, False], [False] * 3]
    # Row 1: from 2, the answer pauses at 4 and does not count again at 6; from 7 and 8 the sequence ends.
    assert blocks.label_mask[1].tolist() == [[True, False, False], [True, True, False], [True, False, False]]
    assert blocks.label_ids[1, 1, :2].tolist() == [28, 29]


def test_slots_after_a_pause_do_not_count():
    blocks = blocks_at([[4], [3]], block_size=5)
    assert blocks.label_mask[1, 0].tolist() == [False] * 5  # the successor of 3 is no answer token
    assert blocks.label_mask[0, 0].tolist() == [True, True, True, False, False]


def test_drafted_tokens_are_the_anchor_and_masks():
    assert block_input_ids(INPUT_IDS, blocks_at([[4], [8]]), 99).tolist() == [[[14, 99, 99]], [[28, 99, 99]]]


def test_previous_tokens_are_those_of_the_text():
    assert previous_ids(INPUT_IDS, blocks_at([[4], [2]])).tolist() == [[[14, 15, 16]], [[22, 23, 24]]]


def test_positions_are_true_positions():
    positions = block_position_ids(blocks_at([[4, 6], [2, 8]]), 10)
    context = list(range(10))
    assert positions.tolist() == [context + [4, 5, 6, 6, 7, 8], context + [2, 3, 4, 8, 9, 10]]


@pytest.mark.parametrize("causal", [False, True], ids=["both directions", "causal"])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_mask_by_brute_force(window, causal):
    g, s = 3, 10
    blocks = blocks_at([[4, 6], [2, 0]], keep=[[True, True], [True, False]], block_size=g)
    mask = block_attention_mask(blocks, s, window, causal)
    expected = torch.zeros(2, 1, 2 * g, s + 2 * g, dtype=torch.bool)
    for row in range(2):
        for query in range(2 * g):
            anchor = int(blocks.positions[row, query // g])
            for at in range(s):  # strictly before the anchor; a dummy has no context
                near = window is None or at >= anchor - window
                expected[row, 0, query, at] = at < anchor and near and bool(blocks.keep_mask[row, query // g])
            for key in range(2 * g):
                same_block = key // g == query // g
                expected[row, 0, query, s + key] = same_block and (not causal or key <= query)
    assert torch.equal(mask, expected)
    assert mask.any(dim=-1).all()  # no query without a key, or a softmax would be NaN
