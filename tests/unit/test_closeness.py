# SPDX-License-Identifier: Apache-2.0
"""The comparison of the tests lets rounding pass and nothing else."""

import math

import pytest
import torch

from tests.support.closeness import LeadRecorder, assert_close, assert_differs, is_close, smallest_lead


EPS = 2.0**-23  # fp32: 1 + EPS is the next number after 1
INF = math.inf


@pytest.mark.parametrize("scale", [2.0**-20, 1.0, 2.0**10])
@pytest.mark.parametrize("place", [0, 1])
def test_just_below_passes_and_just_above_does_not(scale, place):
    """256 units of the largest value, for a large entry as for a small one."""
    expected = torch.tensor([0.0, -scale])
    for units, allowed in ((255, True), (257, False)):
        for sign in (1, -1):
            actual = expected.clone()
            actual[place] += sign * units * EPS * scale
            assert actual[place] != expected[place]
            assert is_close(actual, expected) == allowed
    with pytest.raises(AssertionError, match="differs by .*: 257 units, of which 256 are allowed"):
        assert_close(actual, expected)


@pytest.mark.parametrize(
    ("dtype", "eps"),
    [(torch.float32, 2**-23), (torch.float64, 2**-23), (torch.float16, 2**-10), (torch.bfloat16, 2**-7)],
)
def test_precision_is_that_of_the_dtype_but_never_finer_than_fp32(dtype, eps):
    expected = torch.tensor([1.0, 0.0], dtype=dtype)
    for units, allowed in ((3.9, True), (4.1, False)):
        assert is_close(expected + torch.tensor([0.0, units * eps], dtype=dtype), expected, factor=4) == allowed


def test_zero_needs_a_scale():
    assert not is_close(1e-9, 0.0)
    assert is_close(255 * EPS, 0.0, scale=1.0)
    assert not is_close(257 * EPS, 0.0, scale=1.0)


def test_factor_zero_is_equality():
    assert is_close(torch.ones(2), torch.ones(2), factor=0)
    assert not is_close(torch.ones(2) + EPS, torch.ones(2), factor=0)


def test_containers_are_compared_entry_by_entry():
    """A large tensor gives a small one beside it no freedom, and a list of numbers is one tensor."""
    large, small = torch.tensor([1000.0]), torch.tensor([1.0])
    for wrap in (lambda a, b: (a, b), lambda a, b: {"a": a, "b": b}, lambda a, b: [(a,), (b,)]):
        assert is_close(wrap(large, small), wrap(large, small))
        assert not is_close(wrap(large, small + 0.001), wrap(large, small))
    assert is_close([1000.0, 1.001], [1000.0, 1.0])
    with pytest.raises(AssertionError, match=r"\['b'\] differs by"):
        assert_close({"a": large, "b": small + 0.001}, {"a": large, "b": small})
    with pytest.raises(AssertionError, match="keys"):
        assert_close({"a": large}, {"a": large, "b": small})
    with pytest.raises(AssertionError, match="1 entries instead of 2"):
        assert_close((large,), (large, small))


def test_what_rounding_never_does_is_refused():
    ones = torch.ones(2)
    assert not is_close(torch.ones(3), ones)
    assert not is_close(torch.ones(1, 2), ones)
    assert not is_close(ones.double(), ones)
    assert not is_close(torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]))
    assert not is_close(torch.tensor([1.0, INF]), ones)
    assert not is_close(ones, torch.tensor([1.0, -INF]))
    assert not is_close(torch.tensor([1.0, INF]), torch.tensor([1.0, -INF]))


def test_masked_entries_are_no_scale():
    """Processors forbid a token with -inf or with the lowest number of the dtype."""
    lowest = torch.finfo(torch.float32).min
    for mask in (-INF, lowest):
        expected = torch.tensor([1.0, 2.0, mask])
        assert is_close(expected, expected)
        assert not is_close(torch.tensor([1.001, 2.0, mask]), expected)
        assert not is_close(torch.tensor([1.0, 2.0, 0.0]), expected)


def test_a_difference_must_be_more_than_rounding():
    ones = torch.ones(2)
    assert_differs(ones + 0.001, ones)
    for rounding in (0.0, EPS, 1000 * EPS):
        with pytest.raises(AssertionError, match="differs by less"):
            assert_differs(ones + rounding, ones)


def test_leads_are_counted_in_units_of_the_largest_score():
    scores = torch.tensor([[-4.0, 1.0, 1.0 + 8 * EPS], [2.0, 1.0, -INF]])
    assert smallest_lead(scores) == 2  # 8 EPS of 4 EPS
    assert smallest_lead(scores[1:]) == 2**22
    assert smallest_lead(torch.tensor([[3.0, -INF, -INF]])) == INF
    assert smallest_lead(torch.tensor([[0.0, torch.finfo(torch.float32).min]])) == INF
    assert smallest_lead(torch.tensor([[1.0, 1.0]])) == 0
    recorder = LeadRecorder()
    later = scores[1:]
    assert recorder(torch.zeros(1, 1), later) is later
    assert recorder.smallest == 2**22
    recorder(torch.zeros(1, 1), scores[:1])
    recorder(torch.zeros(1, 1), scores[1:])
    assert recorder.smallest == 2
