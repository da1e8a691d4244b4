# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import numpy as np
import pytest

from dspark_hf.scheduling.copying import COPY_PRIOR, MATCH_LENGTHS, CopySource, measure_copy_prior


@pytest.fixture
def without_decay(monkeypatch):
    """Nothing fades, and the prior is always trusted."""
    monkeypatch.setattr(CopySource, "DECAY", 1.0)
    monkeypatch.setattr(CopySource, "TRUST_TOKENS", 1e12)


def test_acceptance_follows_the_length_of_the_match():
    """A match of three: a copy that was right makes it one of four, then of five, ..., of sixteen and more."""
    source = CopySource()
    source.read([5, 6, 7, 8, 9, 5, 6, 7])
    assert source.match_length == 3
    expected = [0.6, 0.65, 0.75, 0.75, 0.75, *[0.85] * 8, 0.95, 0.95]
    assert source.acceptance(15).tolist() == pytest.approx(expected)
    assert source.tokens(4).tolist() == [8, 9, 5, 6]


def test_nothing_to_copy():
    source = CopySource()
    assert source.match_length == source.num_read == 0
    source.read([5, 6, 7])
    assert (source.match_length, source.num_read) == (0, 3)


def test_every_token_teaches(without_decay):
    """Match of two, then 8 as before: a right one of class 2. Then 1 instead of 9: a wrong one of class 3."""
    source = CopySource()
    source.read([6, 7, 8, 9, 6, 7])
    source.read([8, 1])
    source.read([6])  # 1 did not occur before: nothing to learn
    source.read([7])  # after a match of one, 7 came again
    assert source.match_length == 2
    rates = (4 * np.asarray(COPY_PRIOR) + [1, 1, 0, 0, 0, 0, 0]) / (4 + np.array([1, 1, 1, 0, 0, 0, 0]))
    assert source.acceptance(3).tolist() == pytest.approx(rates[1:4].tolist())


def test_tokens_after_the_first_wrong_one_teach_nothing(without_decay):
    source = CopySource()
    source.read([6, 7, 8, 9, 6, 7])
    source.read([1, 9, 6, 7])  # only the first is judged
    assert source.match_length == 3  # 9 6 7
    assert source.acceptance(1)[0] == pytest.approx(COPY_PRIOR[2])
    source.read([2, 6, 7])
    assert source.acceptance(1)[0] == pytest.approx(4 * COPY_PRIOR[1] / 5)  # of class 2, wrong once


def test_trust_by_hand(monkeypatch):
    """Two matches of class 2 fail: of 1.5 copies that were right 1.5 are left, and 2.5 should have been."""
    monkeypatch.setattr(CopySource, "TRUST_DECAY", 1.0)
    source = CopySource()
    source.read([5, 6])
    for wrong in (100, 101, 102):
        source.read([wrong, 5, 6])
    assert source.match_length == 2
    assert source.acceptance(2)[1] == pytest.approx(COPY_PRIOR[2] * 1.5 / 2.5)  # a class that has not been tried


def test_prior_is_trusted_again_when_copies_are_right():
    source = CopySource()
    source.read([5, 6])
    for wrong in range(100, 110):
        source.read([wrong, 5, 6])
    doubtful = source.acceptance(3)[2]
    for _ in range(8):
        source.read([7, 5, 6])
    assert source.match_length > 2
    assert source._recent > 0.9 * source._expected
    assert doubtful < 0.5 * COPY_PRIOR[3]


def test_false_matches_end_soon():
    source = CopySource()
    source.read([5, 6])
    for wrong in range(100, 120):
        before = source.acceptance(1)[0] if source.match_length else None
        source.read([wrong, 5, 6])
        assert before is None or source.acceptance(1)[0] < before
    assert source.acceptance(1)[0] < 0.15


def test_the_longest_match_may_be_limited():
    source = CopySource(longest_match=2)
    source.read([1, 2, 3, 4, 5, 1, 2, 3, 4])
    assert source.match_length == 2


def test_a_prior_by_hand():
    """5 6 | 5 6 7: before the 5 nothing agrees; 6 comes after 5 again; after the match of two 7, not 5."""
    measured = measure_copy_prior([([5, 6, 5, 6, 7], 2)])
    expected = list(COPY_PRIOR)
    expected[0] = (4 * COPY_PRIOR[0] + 1) / 5
    expected[1] = 4 * COPY_PRIOR[1] / 5
    assert measured == pytest.approx(expected)
    assert measure_copy_prior([]) == pytest.approx(COPY_PRIOR)


def test_a_prior_of_repetitions_is_high():
    measured = measure_copy_prior([(list(range(40)) * 6, 40)])
    assert len(measured) == len(MATCH_LENGTHS)
    assert measured[-1] > 0.99
    assert all(own >= prior for own, prior in zip(measured, COPY_PRIOR, strict=True))
