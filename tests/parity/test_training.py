# SPDX-License-Identifier: Apache-2.0
"""One training step gives DeepSpec's logits, losses and gradients, through the functions that the trainer calls."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from dspark_hf.training import objective
from dspark_hf.training.blocks import label_blocks
from dspark_hf.training.dataset import TargetFeatures, target_features
from dspark_hf.training.losses import LossWeights
from dspark_hf.training.objective import BlockObjective, draft_blocks
from tests.parity.golden import GOLDEN, load_pair
from tests.support.closeness import TRAINED, assert_close


NAMES = ("qwen3_vanilla", "qwen3_gated", "qwen3_rnn", "qwen3_dflash", "gemma4_vanilla", "gemma4_mix")
CHUNK_SIZES = (7, 1024)
DECAY = 4.0


class Step:
    """One forward and backward over the golden batch, and what each slot's loss was computed from."""

    def __init__(self, name: str, chunk_size: int, online: bool, monkeypatch, changed: str | None = None):
        target, self.draft = load_pair(GOLDEN / name)
        if changed is not None:
            weight = self.draft.get_parameter(changed).data
            weight.mul_(1 + 1e-3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).sign())
        target.requires_grad_(False)
        self.golden = load_file(GOLDEN / name / "training.safetensors")
        ids, config = self.golden["input_ids"], self.draft.config
        self.blocks = label_blocks(
            ids,
            self.golden["loss_mask"],
            self.golden["anchor_positions"],
            self.golden["block_keep_mask"],
            config.num_draft_slots,
        )
        if online:
            features = target_features(target, ids, config.target_layer_ids)
        else:
            features = TargetFeatures(self.golden["context_hidden_states"], self.golden["last_hidden_states"])
        binding = self.draft.bind_target(target)
        self.columns: list[tuple[torch.Tensor, ...]] = []
        right = objective.slot_losses

        def spy(logits, target_probs, labels, known, weights, confidence_logits, left_out):
            columns = (logits, target_probs, labels, weights, confidence_logits)
            self.columns.append(tuple(c.detach() for c in columns if c is not None))
            return right(logits, target_probs, labels, known, weights, confidence_logits, left_out)

        with monkeypatch.context() as patch:
            patch.setattr(objective, "slot_losses", spy)
            hidden = draft_blocks(self.draft, binding, ids, features, self.blocks)
            weights = LossWeights(confidence=1.0 if self.draft.confidence_head is not None else 0.0)
            evaluate = BlockObjective(self.draft, binding, DECAY, chunk_size, weights)
            total, self.sums, self.slots = evaluate(hidden, ids, features, self.blocks)
            self.loss = total / self.sums.weight
            self.loss.backward()
            assert len(self.columns) == self.num_chunks(chunk_size), "a chunk is computed once"

    def num_chunks(self, chunk_size: int) -> int:
        return -(-int(self.blocks.label_mask.sum()) // chunk_size)

    def column(self, index: int) -> torch.Tensor:
        return torch.cat([chunk[index] for chunk in self.columns])


@pytest.fixture(scope="module", params=[False, True], ids=["features on record", "features online"])
def online(request):
    return request.param


@pytest.fixture(scope="module", params=CHUNK_SIZES, ids=lambda size: f"chunks of {size}")
def chunk_size(request):
    return request.param


@pytest.fixture(scope="module", params=NAMES)
def step(request, online, chunk_size):
    with pytest.MonkeyPatch.context() as patch:
        return Step(request.param, chunk_size, online, patch)


def test_labels_and_masks(step):
    assert torch.equal(step.blocks.label_mask, step.golden["eval_mask"])
    mask = step.golden["eval_mask"]
    assert torch.equal(step.blocks.label_ids[mask], step.golden["target_ids"][mask])
    assert 0 < mask.sum() < mask.numel()


def test_logits(step):
    mask = step.golden["eval_mask"]
    assert_close(step.column(0), step.golden["draft_logits"][mask])
    assert_close(step.column(1), torch.softmax(step.golden["aligned_target_logits"], dim=-1)[mask])
    assert torch.equal(step.column(2), step.golden["target_ids"][mask])
    if step.draft.confidence_head is not None:
        assert_close(step.column(4), step.golden["confidence_logits"][mask])


def test_terms(step):
    """Sums and normalisers; DFlash has no confidence, and its normaliser is 0 there."""
    names = {"cross_entropy": "ce_loss", "total_variation": "l1_loss", "confidence": "confidence_loss"}
    for ours, theirs in names.items():
        numerator, denominator = (step.golden[f"term.{theirs}_{part}"] for part in ("num", "den"))
        assert_close(getattr(step.sums, ours).detach()[None], numerator)
        if denominator:
            assert_close(step.sums.weight[None], denominator)


def test_total_loss(step):
    assert_close(step.loss.detach()[None], step.golden["total_loss"])


def test_gradients(step):
    expected = {name.removeprefix("grad."): grad for name, grad in step.golden.items() if name.startswith("grad.")}
    ours = {name: parameter.grad for name, parameter in step.draft.named_parameters()}
    assert set(ours) == set(expected)
    for name, grad in ours.items():
        assert grad is not None, name
        # Errors of either sign nearly cancel in the gradient of the one bias: their size is the scale of the sum.
        one_bias = name == "confidence_head.proj.bias"
        scale = float(step.slots.confidence_error.sum() / step.slots.count.sum()) if one_bias else None
        assert_close(grad, expected[name], TRAINED, scale)


def test_acceptance_of_each_slot(step):
    """1 - TV from the golden logits, per slot."""
    mask = step.golden["eval_mask"]
    q, p = (torch.softmax(step.golden[name], dim=-1) for name in ("draft_logits", "aligned_target_logits"))
    rates = torch.minimum(q, p).sum(dim=-1) * mask
    assert_close(step.slots.acceptance_rate, rates.sum(dim=(0, 1)))
    assert torch.equal(step.slots.count, mask.sum(dim=(0, 1)).float())


@pytest.mark.parametrize("changed", ["fc.weight", "layers.0.self_attn.k_proj.weight", "norm.weight"])
@pytest.mark.parametrize("name", NAMES)
def test_a_small_change_of_a_weight_shows(name, changed, monkeypatch):
    """By 1e-3 of each entry: the tolerances let no more pass."""
    step = Step(name, 1024, False, monkeypatch, changed)
    for check in (test_logits, test_gradients):
        with pytest.raises(AssertionError, match="units"):
            check(step)
