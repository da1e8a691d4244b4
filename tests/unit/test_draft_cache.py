# SPDX-License-Identifier: Apache-2.0

import pytest
import torch

from dspark_hf.draft_cache import DraftCache


def states(*values: float) -> torch.Tensor:
    """One row, one head, two wide."""
    return torch.tensor(values)[None, None, :, None].expand(-1, -1, -1, 2).clone()


def columns(tensor: torch.Tensor) -> list[float]:
    assert torch.equal(tensor[..., 0], tensor[..., 1])
    return tensor[0, 0, :, 0].tolist()


def test_blocks_are_overwritten_and_context_is_kept():
    cache = DraftCache(num_layers=1)
    assert cache.length == 0
    keys, values = cache.write(0, states(1, 2, 91, 92), states(-1, -2, -91, -92))
    assert (columns(keys), columns(values)) == ([1, 2, 91, 92], [-1, -2, -91, -92])
    cache.commit(2)
    assert cache.length == 2
    keys, values = cache.write(0, states(3, 93, 94), states(-3, -93, -94))
    assert (columns(keys), columns(values)) == ([1, 2, 3, 93, 94], [-1, -2, -3, -93, -94])
    cache.commit(1)
    keys, _ = cache.write(0, states(95), states(-95))
    assert columns(keys) == [1, 2, 3, 95]


def test_without_commit_nothing_is_kept():
    cache = DraftCache(num_layers=1)
    cache.write(0, states(1, 2), states(1, 2))
    keys, _ = cache.write(0, states(3), states(3))
    assert columns(keys) == [3]
    assert cache.length == 0


def test_layers_do_not_mix():
    cache = DraftCache(num_layers=2)
    cache.write(0, states(1), states(1))
    cache.write(1, states(5), states(5))
    cache.commit(1)
    assert columns(cache.write(0, states(2), states(2))[0]) == [1, 2]
    assert columns(cache.write(1, states(6), states(6))[0]) == [5, 6]


@pytest.mark.parametrize("min_capacity", [1, 2, 3, 8, 256])
def test_growth_keeps_the_context(min_capacity):
    cache, expected = DraftCache(num_layers=1, min_capacity=min_capacity), []
    for i in range(40):
        new = [float(i), i + 0.5][: 1 + i % 2]
        keys, values = cache.write(0, states(*new, 1000.0, 1001.0), states(*new, 1000.0, 1001.0))
        expected += new
        assert columns(keys) == columns(values) == [*expected, 1000.0, 1001.0]
        cache.commit(len(new))
        assert cache.length == len(expected)


def test_buffers_are_reused_until_full_and_then_doubled():
    cache = DraftCache(num_layers=1, min_capacity=4)
    first, _ = cache.write(0, states(1, 2), states(1, 2))
    cache.commit(2)
    second, _ = cache.write(0, states(3, 4), states(3, 4))
    assert second.data_ptr() == first.data_ptr()
    cache.commit(2)
    third, _ = cache.write(0, states(5), states(5))
    assert third.data_ptr() != first.data_ptr()
    assert cache._buffers[0][0].shape[2] == 10


def test_context_may_be_empty():
    cache = DraftCache(num_layers=1)
    cache.write(0, states(9), states(9))
    cache.commit(0)
    assert cache.length == 0


def test_dtype_follows_the_states():
    cache = DraftCache(num_layers=1)
    keys, values = cache.write(0, states(1).bfloat16(), states(1).bfloat16())
    assert keys.dtype == values.dtype == torch.bfloat16
