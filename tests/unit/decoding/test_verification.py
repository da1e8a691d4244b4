# SPDX-License-Identifier: Apache-2.0
"""Sampling by hand; the distributions of its draws are tested in tests/losslessness."""

import math

import pytest
import torch

from dspark_hf.decoding.verification import (
    VerificationResult,
    accept_drafts,
    argmax_token,
    logits_to_probs,
    select_bonus,
    select_token,
    verify_blocks,
)
from tests.support.closeness import assert_close


INF = float("inf")


def log(*probabilities):
    return torch.tensor(probabilities).log()


@pytest.fixture
def draws(monkeypatch):
    """Makes the uniform draws of the accept rule the given ones."""

    def use(*values):
        monkeypatch.setattr(torch, "rand_like", lambda like: torch.tensor(values).expand_as(like))

    return use


@pytest.fixture
def multinomial_weights(monkeypatch):
    """Records what tokens are drawn from; the draw itself takes the first token that is possible."""
    weights = []

    def first_possible(probabilities, num_samples, generator=None):
        weights.append(probabilities / probabilities.sum(-1, keepdim=True))
        return (probabilities > 0).long().argmax(-1, keepdim=True)

    monkeypatch.setattr(torch, "multinomial", first_possible)
    return weights


def test_probabilities_are_a_softmax_in_fp32():
    probabilities = logits_to_probs(torch.tensor([[math.log(1.0), math.log(3.0)]], dtype=torch.bfloat16))
    assert probabilities.dtype == torch.float32
    first = 1 / (1 + math.exp(141 / 128))  # log(3) is 140.6 / 128, and bfloat16 counts in 128ths there
    assert_close(probabilities, [[first, 1 - first]])


def test_probabilities_do_not_care_for_a_constant():
    logits = torch.tensor([[1.0, 2.0, -INF]])
    assert_close(logits_to_probs(logits + 50), logits_to_probs(logits))
    assert logits_to_probs(logits)[0, 2] == 0


def test_greedy_probabilities_are_one_hot_at_the_first_maximum():
    assert logits_to_probs(torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]]), do_sample=False).tolist() == [
        [0.0, 1.0, 0.0],
        [1.0, 0.0, 0.0],
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 7), (3, 1000), (2, 5, 33_000)])
def test_argmax_token_is_argmax_with_ties(dtype, shape):
    logits = torch.randint(0, 12, shape).to(dtype)  # plenty of equal maxima
    logits[..., 0] = -INF
    assert torch.equal(argmax_token(logits), logits.argmax(dim=-1))
    assert argmax_token(torch.zeros(shape, dtype=dtype)).unique().tolist() == [0]


def test_select_token_greedy():
    assert select_token(torch.tensor([[0.1, 0.5, 0.2], [9.0, 1.0, 2.0]]), do_sample=False).tolist() == [1, 0]


def test_select_token_sampled(multinomial_weights):
    assert select_token(log([0.0, 0.2, 0.8]), do_sample=True).tolist() == [1]
    assert_close(multinomial_weights[0], torch.tensor([[0.0, 0.2, 0.8]]))


def test_greedy_drafts_are_accepted_where_they_are_the_argmax():
    target = torch.tensor([[[0.0, 1.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]])
    accepted = accept_drafts(torch.tensor([[1, 1], [0, 1]]), target, None, do_sample=False)
    assert accepted.tolist() == [[True, False], [False, True]]


@pytest.mark.parametrize(("draw", "expected"), [(0.0, True), (0.5999, True), (0.6001, False), (0.9999, False)])
def test_draft_is_accepted_with_probability_p_over_q(draws, draw, expected):
    """p = 0.3, q = 0.5: 0.6. Constants in the logits cancel."""
    draws(draw)
    accepted = accept_drafts(torch.tensor([[1]]), log(0.7, 0.3)[None, None] + 3, log(0.5, 0.5)[None, None] - 2, True)
    assert accepted.tolist() == [[expected]]


@pytest.mark.parametrize("draw", [0.0, 0.999999])
def test_draft_that_the_target_likes_better_is_always_accepted(draws, draw):
    draws(draw)
    assert accept_drafts(torch.tensor([[0]]), log(0.7, 0.3)[None, None], log(0.5, 0.5)[None, None], True).all()


def test_draft_that_the_target_excludes_is_never_accepted(draws):
    draws(0.0)
    assert not accept_drafts(torch.tensor([[1]]), log(1.0, 0.0)[None, None], log(0.5, 0.5)[None, None], True).any()


def test_each_draft_is_judged_on_its_own(draws):
    """Ratios 0.6, 1, 0.25 against draws 0.7, 0.9, 0.2."""
    draws(0.7, 0.9, 0.2)
    target = torch.stack([log(0.7, 0.3), log(0.6, 0.4), log(0.9, 0.1)])[None]
    draft = torch.stack([log(0.5, 0.5), log(0.5, 0.5), log(0.6, 0.4)])[None]
    assert accept_drafts(torch.tensor([[1, 0, 1]]), target, draft, True).tolist() == [[False, True, True]]


@pytest.mark.parametrize(("draw", "expected"), [(0.0, True), (0.2999, True), (0.3001, False), (0.9999, False)])
def test_a_copied_draft_is_accepted_with_probability_p(draws, draw, expected):
    draws(draw)
    assert accept_drafts(torch.tensor([1]), log(0.7, 0.3)[None] + 3, None, True).tolist() == [expected]


def test_a_copy_that_the_target_excludes_is_never_accepted_and_a_certain_one_always(draws):
    draws(0.0)
    assert not accept_drafts(torch.tensor([1]), log(1.0, 0.0)[None], None, True).any()
    draws(0.999999)
    assert accept_drafts(torch.tensor([0]), log(1.0, 0.0)[None], None, True).all()


def test_drawn_and_copied_drafts_together(draws):
    """Drawn, copied, drawn: 0.3 / 0.5, 0.6, 0.1 / 0.4 against draws 0.5, 0.61, 0.2."""
    draws(0.5, 0.61, 0.2)
    target = torch.stack([log(0.7, 0.3), log(0.6, 0.4), log(0.9, 0.1)])
    draft = torch.stack([log(0.5, 0.5), log(0.6, 0.4)])
    is_copied = torch.tensor([False, True, False])
    assert accept_drafts(torch.tensor([1, 0, 1]), target, draft, True, is_copied).tolist() == [True, False, True]


def test_bonus_after_a_rejection_comes_from_the_residual(multinomial_weights):
    """p - q = (0.2, -0.3, 0.1): (2/3, 0, 1/3)."""
    select_bonus(log(0.6, 0.2, 0.2)[None], torch.tensor([[0.4, 0.5, 0.1]]), True)
    assert_close(multinomial_weights[0], torch.tensor([[2 / 3, 0.0, 1 / 3]]))


def test_bonus_after_full_acceptance_comes_from_p(multinomial_weights):
    select_bonus(log(0.6, 0.2, 0.2)[None], None, True)
    assert_close(multinomial_weights[0], torch.tensor([[0.6, 0.2, 0.2]]))


def test_bonus_where_p_equals_q_comes_from_p(multinomial_weights):
    """The residual is empty: its limit is p, not a division by zero."""
    rows = torch.stack([log(0.6, 0.4), log(0.6, 0.4)])
    select_bonus(rows, torch.tensor([[0.6, 0.4], [0.2, 0.8]]), True)
    assert_close(multinomial_weights[0], torch.tensor([[0.6, 0.4], [1.0, 0.0]]))


def test_greedy_bonus_is_the_argmax_even_with_a_rejected_draft():
    assert select_bonus(log(0.1, 0.9)[None], torch.tensor([[0.9, 0.1]]), False).tolist() == [1]


@pytest.mark.parametrize(
    ("drafts", "num_accepted", "bonus"),
    [([2, 0, 1], 3, 2), ([2, 0, 0], 2, 1), ([2, 1, 1], 1, 0), ([0, 0, 1], 0, 2)],
)
def test_greedy_block(drafts, num_accepted, bonus):
    """The target's choices are 2, 0, 1, 2: a wrong draft ends the block, right ones after it do not count."""
    target = torch.nn.functional.one_hot(torch.tensor([2, 0, 1, 2]), 3).float()
    result = verify_blocks(torch.tensor(drafts), target, None, [3], do_sample=False)
    assert isinstance(result, VerificationResult)
    assert (result.num_accepted.tolist(), result.bonus_token.tolist()) == ([num_accepted], [bonus])


def test_greedy_block_does_not_read_draft_logits():
    target = torch.nn.functional.one_hot(torch.tensor([2, 0]), 3).float()
    result = verify_blocks(torch.tensor([2]), target, torch.full((1, 3), math.nan), [1], do_sample=False)
    assert (int(result.num_accepted), int(result.bonus_token)) == (1, 0)


def test_sampled_block(draws, multinomial_weights):
    """Ratios 1, 0.6, 1: the second draft is rejected at 0.8, the third does not count, the bonus is row 1's."""
    draws(0.8)
    target = torch.stack([log(0.7, 0.3), log(0.7, 0.3), log(0.9, 0.1), log(0.5, 0.5)])
    draft = torch.stack([log(0.5, 0.5), log(0.5, 0.5), log(0.6, 0.4)])
    result = verify_blocks(torch.tensor([0, 1, 0]), target, draft, [3], do_sample=True)
    assert (int(result.num_accepted), int(result.bonus_token)) == (1, 0)
    assert_close(multinomial_weights[0], torch.tensor([[1.0, 0.0]]))


def test_sampled_block_that_is_accepted_ends_with_the_last_row(draws, multinomial_weights):
    draws(0.1)
    target = torch.stack([log(0.7, 0.3), log(0.0, 1.0)])
    result = verify_blocks(torch.tensor([0]), target, log(0.5, 0.5)[None], [1], do_sample=True)
    assert (int(result.num_accepted), int(result.bonus_token)) == (1, 1)
    assert_close(multinomial_weights[0], torch.tensor([[0.0, 1.0]]))


def test_greedy_blocks_of_several_requests():
    """Blocks of 2, 0, 3 and 1 drafts; the target's choices are 1 0 2, 2, 0 1 1 2 and 1 1."""
    target = torch.nn.functional.one_hot(torch.tensor([1, 0, 2, 2, 0, 1, 1, 2, 1, 1]), 3).float()
    result = verify_blocks(torch.tensor([1, 0, 0, 2, 1, 0]), target, None, [2, 0, 3, 1], do_sample=False)
    assert result.num_accepted.tolist() == [2, 0, 1, 0]
    assert result.bonus_token.tolist() == [2, 2, 1, 1]


def test_sampled_blocks_of_several_requests(draws, multinomial_weights):
    """Each row is verified by its own p and q: the second request has no drafts, all of the third are accepted.

    First: 0.6 at draw 0.7 is rejected, the bonus comes from p - q = (0.2, -0.2). Third: 0.4 / 0.5 at draw 0.1, then p.
    Fourth: 1, then 0.25 at draw 0.9, p - q = (0.3, -0.3).
    """
    draws(0.7, 0.1, 0.3, 0.9)
    none = log(0.5, 0.5)
    p = [log(0.7, 0.3), none, log(0.25, 0.75), log(0.6, 0.4), log(0.8, 0.2), log(0.5, 0.5), log(0.9, 0.1), none]
    q = [log(0.5, 0.5), log(0.5, 0.5), log(0.5, 0.5), log(0.6, 0.4)]
    result = verify_blocks(torch.tensor([1, 1, 0, 1]), torch.stack(p), torch.stack(q), [1, 0, 1, 2], do_sample=True)
    assert result.num_accepted.tolist() == [0, 0, 1, 1]
    (weights,) = multinomial_weights
    assert_close(weights, torch.tensor([[1.0, 0.0], [0.25, 0.75], [0.8, 0.2], [1.0, 0.0]]))


def test_bad_numbers_of_one_request_stay_out_of_the_others(draws, multinomial_weights):
    """Where no draft was rejected, whatever row of q stands there is not read."""
    draws(0.0)
    p = torch.stack([log(0.25, 0.75), log(0.5, 0.5), log(0.5, 0.5)])
    verify_blocks(torch.tensor([1]), p, torch.tensor([[math.nan, math.nan]]), [0, 1], do_sample=True)
    assert_close(multinomial_weights[0][0], torch.tensor([0.25, 0.75]))


def test_bonus_after_a_rejected_copy_is_anything_else(draws, multinomial_weights):
    """p = (0.5, 0.2, 0.3): without the second token (5/8, 0, 3/8)."""
    draws(0.9)
    result = verify_blocks(torch.tensor([1, 1]), log(0.5, 0.2, 0.3).expand(3, 3), None, [2], do_sample=True)
    assert (int(result.num_accepted), int(result.bonus_token)) == (0, 0)
    assert_close(multinomial_weights[0], torch.tensor([[5 / 8, 0.0, 3 / 8]]))


def test_a_block_that_a_copy_continues(draws, multinomial_weights):
    """One drawn, two copied: 1, then 0.6 at draw 0.55, then 0.4 at draw 0.55; the bonus is p without the copy."""
    draws(0.55)
    target = torch.stack([log(0.7, 0.3), log(0.6, 0.4), log(0.4, 0.6), log(0.5, 0.5)])
    result = verify_blocks(torch.tensor([0, 0, 0]), target, log(0.5, 0.5)[None], [3], True, num_copied=[2])
    assert (int(result.num_accepted), int(result.bonus_token)) == (2, 1)
    assert_close(multinomial_weights[0], torch.tensor([[0.0, 1.0]]))


def test_copies_and_blocks_of_several_requests(draws, multinomial_weights):
    """A block of one, a copy of one, nothing, a block of one that a copy continues: each residual is of its own kind.

    First: 0.6 at draw 0.7, p - q = (0.2, -0.2). Second: p = 0.3 at draw 0.4, then p without the draft. Third: p.
    Fourth: 1 at draw 0.9, then the copy's 0.8 at draw 0.9, p without it.
    """
    draws(0.7, 0.4, 0.9, 0.9)
    none = log(0.5, 0.5)
    p = [log(0.7, 0.3), none, log(0.7, 0.3), none, log(0.25, 0.75), log(0.6, 0.4), log(0.8, 0.2), none]
    q = torch.stack([log(0.5, 0.5), log(0.5, 0.5)])
    drafts, lengths = torch.tensor([1, 1, 0, 0]), [1, 1, 0, 2]
    result = verify_blocks(drafts, torch.stack(p), q, lengths, do_sample=True, num_copied=[0, 1, 0, 1])
    assert result.num_accepted.tolist() == [0, 0, 0, 1]
    (weights,) = multinomial_weights
    assert_close(weights, torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.25, 0.75], [0.0, 1.0]]))
