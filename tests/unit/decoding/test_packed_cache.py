# SPDX-License-Identifier: Apache-2.0
"""Rows of their own lengths: what is stored where, and what is forgotten."""

import pytest
import torch

from dspark_hf.decoding.packed_cache import RowCache, RowCacheLayer


CPU = torch.device("cpu")
HEADS, WIDTH = 2, 4


def states(*values: float) -> torch.Tensor:
    """Packed states (1, h, N, e), one number per token."""
    return torch.tensor(values, dtype=torch.float32)[None, None, :, None].expand(1, HEADS, -1, WIDTH).clone()


def run(cache: RowCache, rows: list[int], tokens: list[list[float]], kept: list[int] | None = None):
    """A pass: layer i stores the numbers + 100 i, their values are negative."""
    counts = [len(own) for own in tokens]
    cache.begin(rows, counts, CPU)
    packed = states(*[value for own in tokens for value in own])
    for layer in range(len(cache.layers)):
        keys, values = cache.update(packed + 100 * layer, -packed - 100 * layer, layer)
        assert torch.equal(keys, -values)
    cache.commit(rows, counts if kept is None else kept)


def held(cache: RowCache, layer: int = 0) -> list[list[float]]:
    keys = cache.layers[layer].keys
    assert torch.equal(keys, keys[:, :1, :, :1].expand_as(keys))
    return [keys[row, 0, :length, 0].tolist() for row, length in enumerate(cache.lengths)]


@pytest.fixture
def cache():
    cache = RowCache(2, 3)
    run(cache, [0, 2], [[1, 2, 3], [21]])
    return cache


def test_tokens_lie_in_the_rows_of_their_texts(cache):
    assert (cache.lengths, held(cache), held(cache, 1)) == (
        [3, 0, 1],
        [[1, 2, 3], [], [21]],
        [[101, 102, 103], [], [121]],
    )


def test_each_row_grows_at_its_own_end_and_takes_back_what_was_not_kept(cache):
    run(cache, [0, 1, 2], [[4, 5], [11, 12, 13], [22, 23]], kept=[1, 3, 0])
    assert held(cache) == [[1, 2, 3, 4], [11, 12, 13], [21]]
    run(cache, [2, 0], [[24], [6, 7]])
    assert held(cache) == [[1, 2, 3, 4, 6, 7], [11, 12, 13], [21, 24]]


def test_buffer_grows_in_steps_and_keeps_its_tokens(cache):
    assert [layer.capacity for layer in cache.layers] == [32, 32]
    run(cache, [2], [[float(i) for i in range(64)]])
    assert cache.layers[1].keys.shape == (3, HEADS, 96, WIDTH)
    assert held(cache)[0] == [1, 2, 3]
    assert held(cache)[2] == [21, *range(64)]


def test_memory_stays_close_to_the_longest_row(cache):
    run(cache, [0], [[0.0] * 150])
    assert cache.layers[0].capacity <= 1.25 * max(cache.lengths)
    cache.keep([2, 1])
    assert (cache.layers[0].capacity, cache.layers[0].keys.shape[:3]) == (32, (2, HEADS, 32))


def test_rows_are_dropped_in_the_order_asked_for_and_new_ones_come_last(cache):
    cache.keep([2, 0])
    assert held(cache) == [[21], [1, 2, 3]]
    cache.add(2)
    assert cache.lengths == [1, 3, 0, 0]
    run(cache, [3, 0], [[31, 32], [22]])
    assert held(cache, 1) == [[121, 122], [101, 102, 103], [], [131, 132]]


def test_rows_are_dropped_before_anything_was_stored():
    cache = RowCache(1, 4)
    cache.keep([0, 1])
    run(cache, [0, 1], [[1], [2]])
    assert held(cache) == [[1], [2]]


def test_sizes_that_transformers_asks_for(cache):
    layer = cache.layers[0]
    assert isinstance(layer, RowCacheLayer)
    assert layer.get_mask_sizes(1) == (layer.capacity, 0)
    cache.begin([0, 2], [1, 1], CPU)
    assert layer.get_seq_length() == 3
    assert layer.get_max_length() == layer.get_max_cache_shape() == -1
