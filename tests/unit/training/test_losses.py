# SPDX-License-Identifier: Apache-2.0
"""Losses by hand arithmetic on two or three symbols."""

import math

import pytest
import torch

from dspark_hf.training.losses import LossSums, LossWeights, combine, decay_weights, slot_losses
from tests.support.closeness import assert_close


def logits_of(*rows):
    return torch.tensor(rows).log()


def ones(count: int) -> torch.Tensor:
    return torch.ones(count)


def known(*values: bool) -> torch.Tensor:
    return torch.tensor(values)


def test_decay():
    assert decay_weights(3, 4.0).tolist() == pytest.approx([1.0, math.exp(-0.25), math.exp(-0.5)])
    assert decay_weights(4, math.inf).tolist() == [1.0] * 4
    assert decay_weights(2, 1e-3).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("loss_decay", [0, -4, float("nan")])
def test_decay_must_be_positive(loss_decay):
    with pytest.raises(ValueError, match="`loss_decay` must be > 0, got"):
        decay_weights(3, loss_decay)


def test_two_slots_of_two_symbols():
    """q = (0.5, 0.5) and (0.9, 0.1), p = (0.7, 0.3) and (0.4, 0.6), labels 0 and 1, weights 1 and 0.5.

    CE: -ln 0.5 and -ln 0.1; L1: 0.2 + 0.2 and 0.5 + 0.5; acceptance 1 - 0.2 and 1 - 0.5.
    """
    sums, rates, label_probs = slot_losses(
        logits_of([0.5, 0.5], [0.9, 0.1]),
        torch.tensor([[0.7, 0.3], [0.4, 0.6]]),
        torch.tensor([0, 1]),
        known(True, True),
        torch.tensor([1.0, 0.5]),
    )
    assert_close(sums.cross_entropy, math.log(2) + 0.5 * math.log(10))
    assert_close(sums.total_variation, 0.4 + 0.5 * 1.0)
    assert sums.confidence.item() == 0
    assert sums.weight.item() == 1.5
    assert_close(rates, [0.8, 0.5])
    assert_close(label_probs, [0.5, 0.1])


def test_confidence_is_compared_with_the_acceptance_rate():
    """q = (0.5, 0.5), p = (0.7, 0.3): label 0.8. Confidence 0.6: -(0.8 ln 0.6 + 0.2 ln 0.4)."""
    logit = torch.tensor([math.log(0.6 / 0.4)])
    sums, *_ = slot_losses(
        logits_of([0.5, 0.5]), torch.tensor([[0.7, 0.3]]), torch.tensor([0]), known(True), torch.tensor([2.0]), logit
    )
    assert_close(sums.confidence, -2 * (0.8 * math.log(0.6) + 0.2 * math.log(0.4)))


def test_gradients_reach_the_draft_and_nothing_else():
    """dCE/dz = q - onehot; no gradient into p, and none through the confidence's label."""
    logits = torch.zeros(1, 2, requires_grad=True)
    confidence = torch.zeros(1, requires_grad=True)
    p = torch.tensor([[0.9, 0.1]], requires_grad=True)
    sums, rates, _ = slot_losses(logits, p, torch.tensor([0]), known(True), ones(1), confidence)
    assert not rates.requires_grad
    (of_confidence,) = torch.autograd.grad(sums.confidence, confidence, retain_graph=True)
    assert_close(of_confidence, [0.5 - 0.6])  # sigmoid(0) - label
    assert torch.autograd.grad(sums.confidence, logits, retain_graph=True, allow_unused=True) == (None,)
    (of_logits,) = torch.autograd.grad(sums.cross_entropy, logits, retain_graph=True)
    assert_close(of_logits[0], [-0.5, 0.5])
    # L1 = |0.5 - 0.9| + |0.5 - 0.1|: signs (-1, 1); dL1/dz_0 = q_0 q_1 (-1 - 1) = -0.5
    (of_l1,) = torch.autograd.grad(sums.total_variation, logits)
    assert_close(of_l1[0], [-0.5, 0.5])
    assert p.grad is None


def test_mass_that_a_reduced_vocabulary_leaves_out_is_distance():
    """p = (0.5, 0.2) of three symbols, 0.3 left out; q = (0.6, 0.4): L1 = 0.1 + 0.2 + 0.3, acceptance 0.5 + 0.2."""
    sums, rates, _ = slot_losses(
        logits_of([0.6, 0.4]),
        torch.tensor([[0.5, 0.2]]),
        torch.tensor([1]),
        known(True),
        ones(1),
        left_out_probs=torch.tensor([0.3]),
    )
    assert_close(sums.total_variation, 0.6)
    assert_close(rates, [0.7])
    assert_close(rates, [min(0.6, 0.5) + min(0.4, 0.2)])
    assert_close(sums.cross_entropy, -math.log(0.4))


def test_label_outside_the_vocabulary_has_no_cross_entropy():
    """Its weight stays in the normaliser, and so does its distance."""
    sums, *_ = slot_losses(
        logits_of([0.6, 0.4], [0.5, 0.5]),
        torch.tensor([[0.1, 0.2], [0.5, 0.5]]),
        torch.tensor([0, 0]),
        known(False, True),
        ones(2),
        left_out_probs=torch.tensor([0.7, 0.0]),
    )
    assert_close(sums.cross_entropy, math.log(2))
    assert_close(sums.total_variation, 0.5 + 0.2 + 0.7)
    assert sums.weight.item() == 2


def test_distant_distributions_are_never_accepted_and_equal_ones_always():
    sums, rates, _ = slot_losses(
        torch.tensor([[100.0, -100.0], [0.0, 0.0]]),
        torch.tensor([[0.0, 1.0], [0.5, 0.5]]),
        torch.tensor([1, 0]),
        known(True, True),
        ones(2),
        torch.tensor([500.0, -500.0]),  # certain and wrong, both times
    )
    assert rates.tolist() == [0, 1]
    assert sums.total_variation.item() == 2
    assert sums.confidence.item() == 1000
    assert math.isfinite(sums.cross_entropy.item())


def test_half_precision_logits_are_compared_in_fp32():
    logits = torch.tensor([[0.0, math.log(3)]], dtype=torch.bfloat16)
    sums, *_ = slot_losses(logits, torch.tensor([[0.25, 0.75]]), torch.tensor([1]), known(True), ones(1))
    assert sums.cross_entropy.dtype == torch.float32
    exact = torch.log_softmax(logits.float(), dim=-1)[0, 1]
    assert_close(sums.cross_entropy, -exact)


def test_nothing_to_count_is_zero_with_a_gradient():
    """A process whose batch has no anchor takes part in the backward all the same."""
    logits, confidence = torch.zeros(0, 3, requires_grad=True), torch.zeros(0, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.long)
    sums, rates, _ = slot_losses(logits, torch.zeros(0, 3), empty, empty.bool(), torch.zeros(0), confidence)
    loss = combine(sums, LossWeights(), 1.0)
    loss.backward()
    assert loss.item() == 0
    assert rates.shape == (0,)
    assert logits.grad is not None
    assert confidence.grad is not None


def test_total_is_the_weighted_sum_over_the_normaliser():
    """0.1 * 3 + 0.9 * 5 + 1 * 7 = 11.8, over 4; other weights 1 * 3 + 0 * 5 + 2 * 7 = 17."""
    sums = LossSums(*(torch.tensor(float(value)) for value in (3, 5, 7, 99)))
    assert combine(sums, LossWeights(), 4.0).item() == pytest.approx(2.95)
    assert combine(sums, LossWeights(1.0, 0.0, 2.0), torch.tensor(4.0)).item() == pytest.approx(4.25)


def test_sums_add_up():
    one, two = (LossSums(*(torch.tensor(float(start + i)) for i in range(4))) for start in (1, 10))
    added = one + two
    assert [value.item() for value in vars(added).values()] == [11, 13, 15, 17]
