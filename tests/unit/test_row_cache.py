# SPDX-License-Identifier: Apache-2.0
"""Rows of their own lengths: what is stored where, and what each row may see."""

import pytest
import torch
from transformers import DynamicCache

from dspark_hf.row_cache import RowCache, RowCacheLayer


HEADS, WIDTH = 2, 4


def states(rows: int, tokens: int, value: float = 0.0) -> torch.Tensor:
    """Distinct numbers, so that a misplaced token shows."""
    return value + torch.arange(rows * HEADS * tokens * WIDTH, dtype=torch.float32).view(rows, HEADS, tokens, WIDTH)


def prompts(rows: int, tokens: int, value: float = 0.0) -> DynamicCache:
    cache = DynamicCache()
    for layer in range(2):
        cache.update(states(rows, tokens, value + layer), states(rows, tokens, value + layer + 0.5), layer)
    return cache


@pytest.fixture
def cache():
    """Rows of 5 and 3 tokens; row 1 is free."""
    cache = RowCache(2, 3, "cpu")
    cache.fill([0, 2], prompts(2, 5))
    cache.set_lengths([0, 2], [5, 3])
    return cache


def test_prompts_lie_in_their_rows(cache):
    assert cache.lengths.tolist() == [5, 0, 3]
    for index, layer in enumerate(cache.layers):
        assert torch.equal(layer.keys[0, :, :5], states(2, 5, index)[0])
        assert torch.equal(layer.keys[2, :, :3], states(2, 5, index)[1, :, :3])
        assert torch.equal(layer.values[2, :, :3], states(2, 5, index + 0.5)[1, :, :3])
        assert not layer.keys[1].any()


def test_mask_shows_each_row_its_tokens_and_the_new_one(cache):
    mask = cache.begin_step()
    assert mask.shape == (3, 1, 1, 64)
    assert mask.sum(dim=-1).flatten().tolist() == [6, 1, 4]
    assert mask[0, 0, 0, :6].all()


def test_each_row_grows_at_its_own_end(cache):
    for step in range(2):
        cache.begin_step()
        new = states(3, 1, 100.0 * (step + 1))
        for layer in range(2):
            keys, values = cache.update(new + layer, new + layer + 0.5, layer)
            assert keys.shape == values.shape == (3, HEADS, 64, WIDTH)
            for row, end in enumerate((5, 0, 3)):
                assert torch.equal(keys[row, :, end + step], new[row, :, 0] + layer)
                assert torch.equal(values[row, :, end + step], new[row, :, 0] + layer + 0.5)
        assert cache.lengths.tolist() == [5 + step, step, 3 + step]  # counted once the whole model has run
        cache.end_step()
    assert cache.lengths.tolist() == [7, 2, 5]
    assert cache.get_seq_length() == 7
    assert torch.equal(cache.layers[0].keys[0, :, :5], states(2, 5)[0])


def test_buffer_grows_in_steps_and_keeps_its_tokens(cache):
    cache.lengths[0] = 64
    mask = cache.begin_step()
    assert mask.shape[-1] == 128
    layer = cache.layers[0]
    assert layer.keys.shape[2] == layer.capacity == 128
    assert torch.equal(layer.keys[2, :, :3], states(2, 5)[1, :, :3])
    layer.reserve(10)  # never shrinks
    assert layer.capacity == 128


def test_refilled_row_forgets_what_it_held(cache):
    cache.fill([0], prompts(1, 2, 900.0))
    cache.set_lengths([0], [2])
    assert cache.begin_step().sum(dim=-1).flatten().tolist() == [3, 1, 4]
    assert torch.equal(cache.layers[1].keys[0, :, :2], states(1, 2, 901.0)[0])


def test_rows_are_dropped_in_the_order_asked_for(cache):
    cache.keep([2, 0])
    assert cache.lengths.tolist() == [3, 5]
    assert all(layer.lengths is cache.lengths for layer in cache.layers)
    assert torch.equal(cache.layers[0].keys[0, :, :3], states(2, 5)[1, :, :3])
    cache.begin_step()
    for layer in range(2):
        cache.update(states(2, 1, 500.0), states(2, 1, 500.0), layer)
    cache.end_step()
    assert cache.lengths.tolist() == [4, 6]
    assert torch.equal(cache.layers[0].keys[0, :, 3], states(2, 1, 500.0)[0, :, 0])


def test_rows_are_dropped_before_anything_was_stored():
    """Prompts of one token leave nothing to prefill."""
    cache = RowCache(1, 4, "cpu")
    cache.set_lengths([0, 1], [0, 0])
    cache.keep([0, 1])
    assert cache.begin_step().shape == (2, 1, 1, 64)
    keys, _ = cache.update(states(2, 1, 7.0), states(2, 1), 0)
    assert torch.equal(keys[:, :, 0], states(2, 1, 7.0)[:, :, 0])


def test_sizes_that_transformers_asks_for(cache):
    layer = cache.layers[0]
    assert isinstance(layer, RowCacheLayer)
    assert layer.get_mask_sizes(1) == (layer.capacity, 0)
    assert layer.get_seq_length() == 5
    assert layer.get_max_length() == layer.get_max_cache_shape() == -1
