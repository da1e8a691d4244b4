# SPDX-License-Identifier: Apache-2.0
"""Packed passes against the same attention text by text."""

import copy
import math
import pickle
import threading

import pytest
import torch
from torch import nn

from dspark_hf.decoding.packed_attention import (
    MOST_FOLDED_QUERIES,
    PACKED_ATTENTION,
    PackedAttention,
    check_layers,
    packed_attention,
)
from dspark_hf.decoding.packed_pass import PackedPass, packed_pass
from tests.support.closeness import assert_close, assert_differs
from tests.support.models import random_prompt, tiny_target


CPU = torch.device("cpu")


def test_places_of_packed_tokens():
    current = PackedPass(rows=[4, 1, 2], starts=[5, 0, 2], counts=[2, 3, 1], device=CPU)
    assert current.cache_rows.tolist() == [4, 4, 1, 1, 1, 2]
    assert current.positions.tolist() == [5, 6, 0, 1, 2, 2]
    assert current.last_indices.tolist() == [1, 4, 5]
    assert (current.longest, current.num_queries, tuple(current.stand_in_mask.shape)) == (7, 3, (1, 1, 1, 6))


def test_spread_and_gather_are_inverse():
    current = PackedPass([0, 1], [0, 0], [2, 3], CPU)
    packed = torch.arange(1.0, 6.0)[None, None, :, None].expand(1, 2, 5, 3)
    spread = current.spread(packed)
    assert spread.shape == (2, 2, 3, 3)
    assert (spread[0, 0, :2, 0].tolist(), spread[1, 0, :, 0].tolist()) == ([1, 2], [3, 4, 5])
    assert torch.equal(current.gather(spread.transpose(1, 2)), packed.transpose(1, 2))


def test_masks():
    current = PackedPass([0, 1], [2, 0], [2, 1], CPU)

    def rows(mask: torch.Tensor) -> list[list[str]]:
        return [["".join("x" if seen else "." for seen in query) for query in text] for text in mask[:, 0].tolist()]

    assert [rows(current.mask(5, None))[0], rows(current.mask(5, None))[1][:1]] == [["xxx..", "xxxx."], ["x...."]]
    assert [rows(current.mask(5, 2))[0], rows(current.mask(5, 2))[1][:1]] == [[".xx..", "..xx."], ["x...."]]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("counts", [[1, 4, 2], [3, 1, MOST_FOLDED_QUERIES + 5], [5, MOST_FOLDED_QUERIES + 1, 1]])
def test_attention_of_each_text_is_its_own(counts, window):
    generator = torch.Generator().manual_seed(0)
    starts, heads, kv_heads, width, capacity = [6, 0, 3], 4, 2, 8, 80
    keys, values = torch.randn(2, 3, kv_heads, capacity, width, generator=generator)
    query = torch.randn(1, heads, sum(counts), width, generator=generator)
    with packed_pass(PackedPass([0, 1, 2], starts, counts, CPU)):
        output, weights = packed_attention(nn.Identity(), query, keys, values, None, 0.3, sliding_window=window)
    assert weights is None
    first = 0
    for text, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for slot in range(count):
            visible = slice(max(0, start + slot + 1 - window) if window else 0, start + slot + 1)
            for head in range(heads):
                own_keys, own_values = keys[text, head // 2, visible], values[text, head // 2, visible]
                weight = (own_keys @ query[0, head, first + slot] * 0.3).softmax(-1)
                assert_close(output[0, first + slot, head], weight @ own_values)
        first += count


def test_a_pass_over_some_rows_reads_their_keys():
    keys, values = torch.randn(2, 5, 2, 9, 4, generator=torch.Generator().manual_seed(1))
    query = torch.randn(1, 2, 2, 4, generator=torch.Generator().manual_seed(2))
    with packed_pass(PackedPass([3, 1], [4, 8], [1, 1], CPU)):
        some, _ = packed_attention(nn.Identity(), query, keys, values, None)
    with packed_pass(PackedPass([0, 1], [4, 8], [1, 1], CPU)):
        alone, _ = packed_attention(nn.Identity(), query, keys[[3, 1]], values[[3, 1]], None, 1 / math.sqrt(4))
    assert_close(some, alone)


def test_values_may_be_narrower_than_keys():
    keys, values = torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 5)
    query = torch.randn(1, 4, 3, 8)
    with packed_pass(PackedPass([0, 1], [4, 2], [1, 2], CPU)):
        output, _ = packed_attention(nn.Identity(), query, keys, values, None)
    assert output.shape == (1, 3, 4, 5)
    weight = (keys[0, 1, :5] @ query[0, 3, 0] / math.sqrt(8)).softmax(-1)
    assert_close(output[0, 0, 3], weight @ values[0, 1, :5])


def test_a_window_may_be_the_layers_own():
    class Layer(nn.Module):
        sliding_window = 2

    keys = torch.randn(1, 2, 9, 4)
    query = torch.randn(1, 2, 1, 4)
    with packed_pass(PackedPass([0], [6], [1], CPU)):
        own, _ = packed_attention(Layer(), query, keys, keys, None)
        told, _ = packed_attention(nn.Identity(), query, keys, keys, None, sliding_window=2)
        full, _ = packed_attention(Layer(), query, keys, keys, None, sliding_window=None)
    assert torch.equal(own, told)
    assert_differs(own, full)


def test_a_call_without_a_mask_does_not_see_the_future():
    """A plain call that began before a batch may have made none, for its kernel needed none."""
    keys, values = torch.randn(2, 1, 2, 6, 4)
    query = torch.randn(1, 4, 6, 4)
    output, _ = packed_attention(nn.Identity(), query, keys, values, None)
    first, _ = packed_attention(nn.Identity(), query[:, :, :1], keys[:, :, :1], values[:, :, :1], None)
    assert_close(output[:, :1], first)


def test_parts_get_their_own_implementations_back():
    target = tiny_target()
    target.model.config = copy.copy(target.config)
    target.model.config._attn_implementation_internal = "eager"
    with PackedAttention(target):
        assert PackedAttention(target).own_implementation == "sdpa"
    assert (target.config._attn_implementation, target.model.config._attn_implementation) == ("sdpa", "eager")


@pytest.mark.parametrize("name", ["softcap", "s_aux", "sinks", "position_bias"])
def test_what_changes_the_scores_is_refused(name):
    tensor = torch.ones(1, 2, 1, 4)
    with pytest.raises(NotImplementedError, match=rf"plain softmax attention only; Identity passes `{name}`"):
        packed_attention(nn.Identity(), tensor, tensor, tensor, None, **{name: 1.0})


def test_ordinary_calls_keep_their_mask_meanwhile():
    target, ids = tiny_target(), random_prompt(9)
    with torch.no_grad():
        expected = target(ids).logits
        with PackedAttention(target):
            assert target.config._attn_implementation == PACKED_ATTENTION
            assert_close(target(ids).logits, expected)


def test_the_last_user_puts_the_own_implementation_back():
    target = tiny_target()
    target.set_attn_implementation("eager")
    inside, leave = threading.Event(), threading.Event()

    def other():
        with PackedAttention(target):
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=other)
    with PackedAttention(target):
        thread.start()
        assert inside.wait(20)
    assert target.config._attn_implementation == PACKED_ATTENTION
    leave.set()
    thread.join(20)
    assert target.config._attn_implementation == "eager"


def test_a_copy_of_a_target_has_no_users():
    """The state lies with the target, so that a copy and a saved one must do without its lock."""
    target = tiny_target()
    with PackedAttention(target):
        copies = [copy.deepcopy(target), pickle.loads(pickle.dumps(target))]
    for copied in copies:
        copied.set_attn_implementation("eager")
        with PackedAttention(copied):
            assert copied.config._attn_implementation == PACKED_ATTENTION
        assert copied.config._attn_implementation == "eager"
    assert target.config._attn_implementation == "sdpa"


def test_a_target_that_failed_to_switch_can_be_used_again(monkeypatch):
    target = tiny_target()
    monkeypatch.setattr(type(target), "_supports_attention_backend", False)
    with pytest.raises(NotImplementedError), PackedAttention(target):
        raise AssertionError
    monkeypatch.undo()
    with PackedAttention(target):
        assert target.config._attn_implementation == PACKED_ATTENTION
    assert target.config._attn_implementation == "sdpa"


def test_targets_whose_attention_is_their_own_are_refused():
    class Stubborn(type(tiny_target())):
        _supports_attention_backend = False

    target = tiny_target()
    target.__class__ = Stubborn
    refusal = pytest.raises(NotImplementedError, match=r"which Stubborn does not allow .+ one row at a time")
    with refusal, PackedAttention(target):
        raise AssertionError
    assert target.config._attn_implementation == "sdpa"


def test_other_layers_are_refused():
    target = tiny_target()
    check_layers(target)
    target.config.layer_types = ["full_attention", "chunked_attention"] * 2
    with pytest.raises(NotImplementedError, match=r"has \['chunked_attention'\]"):
        check_layers(target)
