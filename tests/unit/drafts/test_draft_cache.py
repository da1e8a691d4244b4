# SPDX-License-Identifier: Apache-2.0

import pytest
import torch

from dspark_hf.drafts.draft_cache import DraftCache, block_mask


def states(*values: float) -> torch.Tensor:
    """One head, two wide."""
    return torch.tensor(values)[None, None, :, None].expand(-1, -1, -1, 2).clone()


def columns(tensor: torch.Tensor, row: int = 0) -> list[float]:
    assert torch.equal(tensor[..., 0], tensor[..., 1])
    return tensor[row, 0, :, 0].tolist()


def write(cache: DraftCache, context: list[float], block: list[float], layer: int = 0):
    """One round of one request: its keys, and the values, which are their negatives."""
    cache.begin([len(context)], len(block))
    keys, values = cache.write(layer, states(*context, *block), -states(*context, *block))
    assert torch.equal(keys, -values)
    return keys


def test_blocks_are_overwritten_and_context_is_kept():
    cache = DraftCache(num_layers=1)
    assert cache.lengths == [0]
    assert columns(write(cache, [1, 2], [91, 92])) == [1, 2, 91, 92]
    cache.commit()
    assert cache.lengths == [2]
    assert columns(write(cache, [3], [93, 94])) == [1, 2, 3, 93, 94]
    cache.commit()
    assert columns(write(cache, [], [95])) == [1, 2, 3, 95]


def test_without_commit_nothing_is_kept():
    cache = DraftCache(num_layers=1)
    write(cache, [1, 2], [])
    assert columns(write(cache, [3], [])) == [3]
    assert cache.lengths == [0]


def test_layers_do_not_mix():
    cache = DraftCache(num_layers=2)
    write(cache, [1], [], layer=0)
    write(cache, [5], [], layer=1)
    cache.commit()
    assert columns(write(cache, [], [2], layer=0)) == [1, 2]
    assert columns(write(cache, [], [6], layer=1)) == [5, 6]


@pytest.mark.parametrize("min_capacity", [1, 2, 3, 8, 256])
def test_growth_keeps_the_context(min_capacity):
    cache, expected = DraftCache(num_layers=1, min_capacity=min_capacity), []
    for i in range(40):
        new = [float(i), i + 0.5][: 1 + i % 2]
        expected += new
        assert columns(write(cache, new, [1000.0, 1001.0])) == [*expected, 1000.0, 1001.0]
        cache.commit()
        assert cache.lengths == [len(expected)]


def test_buffers_are_reused_until_full_and_then_doubled():
    cache = DraftCache(num_layers=1, min_capacity=4)
    first = write(cache, [1, 2], [])
    cache.commit()
    second = write(cache, [3, 4], [])
    assert second.data_ptr() == first.data_ptr()
    cache.commit()
    third = write(cache, [5], [])
    assert third.data_ptr() != first.data_ptr()
    assert cache._buffers[0][0].shape[2] == 10


def test_context_may_be_empty():
    cache = DraftCache(num_layers=1)
    write(cache, [], [9])
    cache.commit()
    assert cache.lengths == [0]


def test_dtype_follows_the_states():
    cache = DraftCache(num_layers=1)
    cache.begin([1], 0)
    keys, values = cache.write(0, states(1).bfloat16(), states(1).bfloat16())
    assert keys.dtype == values.dtype == torch.bfloat16


@pytest.mark.parametrize("min_capacity", [1, 4, 256])
def test_requests_advance_at_their_own_pace(min_capacity):
    cache = DraftCache(num_layers=1, min_capacity=min_capacity, num_requests=2)
    cache.begin([1, 3], 2)
    keys, _ = cache.write(0, states(1, 11, 12, 13, 91, 92, 81, 82), states(*[0] * 8))
    assert (cache.ends, keys.shape) == ([3, 5], (2, 1, 5, 2))
    assert (columns(keys)[:3], columns(keys, 1)) == ([1, 91, 92], [11, 12, 13, 81, 82])
    cache.commit()
    cache.begin([2, 0], 2)
    keys, _ = cache.write(0, states(2, 3, 93, 94, 83, 84), states(*[0] * 6))
    assert (cache.ends, cache.lengths) == ([5, 5], [1, 3])
    assert (columns(keys), columns(keys, 1)) == ([1, 2, 3, 93, 94], [11, 12, 13, 83, 84])
    cache.commit()
    assert cache.lengths == [3, 3]


def test_requests_go_and_come():
    cache = DraftCache(num_layers=1, min_capacity=4, num_requests=3)
    cache.begin([1, 2, 1], 1)
    cache.write(0, states(1, 11, 12, 21, 9, 9, 9), states(*[0] * 7))
    cache.commit()
    cache.keep([2, 1])
    assert cache.lengths == [1, 2]
    cache.add(1)
    cache.begin([1, 0, 2], 1)
    keys, _ = cache.write(0, states(22, 31, 32, 7, 8, 6), states(*[0] * 6))
    assert [columns(keys, row) for row in range(3)] == [[21, 22, 7], [11, 12, 8], [31, 32, 6]]


def test_what_lies_behind_a_shorter_request_is_finite():
    cache = DraftCache(num_layers=1, min_capacity=1, num_requests=2)
    for counts in ([1, 40], [1, 3]):  # grows in between
        cache.begin(counts, 1)
        keys, values = cache.write(0, states(*[1.0] * (sum(counts) + 2)), states(*[1.0] * (sum(counts) + 2)))
        assert bool(keys.isfinite().all())
        assert bool(values.isfinite().all())
        cache.commit()


def visible(mask: torch.Tensor | None, row: int, num_queries: int, num_keys: int) -> list[str]:
    """Per query a string of visible keys."""
    full = mask.expand(mask.shape[0], 1, num_queries, num_keys)[row, 0]
    return ["".join("x" if seen else "." for seen in query) for query in full.tolist()]


def test_masks_of_decoding():
    device = torch.device("cpu")
    assert block_mask([5, 5], 2, None, False, device) is None
    assert block_mask([5], 2, 3, False, device) is None  # the window holds all
    ragged = block_mask([3, 5], 2, None, False, device)
    assert visible(ragged, 0, 2, 5) == ["xxx..", "xxx.."]
    assert visible(ragged, 1, 2, 5) == ["xxxxx", "xxxxx"]
    causal = block_mask([3, 5], 2, 1, True, device)
    assert visible(causal, 0, 2, 5) == ["xx...", "xxx.."]
    assert visible(causal, 1, 2, 5) == ["..xx.", "..xxx"]
    window = block_mask([3, 6], 2, 2, False, device)
    assert visible(window, 1, 2, 6) == ["..xxxx", "..xxxx"]
