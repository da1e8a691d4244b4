# SPDX-License-Identifier: Apache-2.0
"""Attention of few queries over many keys, against plain sums."""

import pytest
import torch

from dspark_hf.drafts.attention import eager_attention, folded_attention, folded_mask
from tests.support.closeness import assert_close


def attend_by_hand(query, key, value, visible, scaling):
    """One query after the other, one head after the other, in plain sums."""
    b, heads, q, e = query.shape
    outputs = torch.zeros(b, q, heads, e)
    for row in range(b):
        for head in range(heads):
            kv_head = head // (heads // key.shape[1])
            for i in range(q):
                scores = [
                    float(query[row, head, i] @ key[row, kv_head, j]) * scaling if visible[i][j] else float("-inf")
                    for j in range(key.shape[2])
                ]
                weights = torch.tensor(scores).softmax(-1)
                outputs[row, i, head] = sum(w * v for w, v in zip(weights, value[row, kv_head], strict=True))
    return outputs


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 1), (2, 2)])
@pytest.mark.parametrize("masked", [True, False])
def test_eager_attention_by_hand(heads, kv_heads, masked):
    query, key, value = torch.randn(2, heads, 3, 5), torch.randn(2, kv_heads, 6, 5), torch.randn(2, kv_heads, 6, 5)
    visible = torch.ones(3, 6, dtype=torch.bool)
    if masked:
        visible = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 0, 1, 1, 0], [1, 0, 0, 0, 0, 1]]).bool()
    mask = visible[None, None] if masked else None
    module = torch.nn.Module().eval()
    outputs, weights = eager_attention(module, query, key, value, mask, scaling=0.3)
    assert_close(outputs, attend_by_hand(query, key, value, visible, 0.3))
    assert weights.shape == (2, kv_heads, heads // kv_heads, 3, 6)
    assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    assert not weights[..., ~visible].any()


def test_attention_dropout_only_in_training():
    query = key = value = torch.randn(1, 2, 4, 3)
    module = torch.nn.Module().eval()
    outputs = [eager_attention(module, query, key, value, None, 1.0, dropout=0.5)[0] for _ in range(2)]
    assert torch.equal(*outputs)
    module.train()
    assert not torch.equal(eager_attention(module, query, key, value, None, 1.0, dropout=0.5)[0], outputs[0])


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 1), (2, 2)])
@pytest.mark.parametrize("rows_of_mask", [0, 1, 3])
def test_folded_attention_by_hand(heads, kv_heads, rows_of_mask):
    """Without a mask, with one that all queries share, and with one for each."""
    query, key, value = torch.randn(2, heads, 3, 5), torch.randn(2, kv_heads, 6, 5), torch.randn(2, kv_heads, 6, 5)
    masks = {0: [[1] * 6], 1: [[1, 1, 0, 1, 0, 0]], 3: [[1, 1, 1, 1, 0, 0], [0, 1, 0, 1, 1, 0], [1, 0, 0, 0, 0, 1]]}
    visible = torch.tensor(masks[rows_of_mask]).bool()
    mask = folded_mask(visible[None, None], heads // kv_heads, torch.float32) if rows_of_mask else None
    outputs = folded_attention(query, key, value, mask, scaling=0.3)
    expected = attend_by_hand(query, key, value, visible.expand(3, 6), 0.3)
    assert_close(outputs, expected)


def test_folded_masks_of_rows_are_their_own():
    visible = torch.tensor([[[[1, 0], [1, 1]]], [[[0, 1], [1, 0]]]]).bool()
    no = float("-inf")
    mask = folded_mask(visible, 2, torch.bfloat16)
    assert mask.dtype == torch.bfloat16
    assert mask.tolist() == [[[[0, no], [0, 0], [0, no], [0, 0]]], [[[no, 0], [0, no], [no, 0], [0, no]]]]
