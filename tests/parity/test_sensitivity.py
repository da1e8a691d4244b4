# SPDX-License-Identifier: Apache-2.0
"""The tolerance of the golden comparisons lets no real error pass, and the tokens on record were not coin tosses."""

import json

import pytest
import torch

from tests.parity import test_eagle3
from tests.parity.golden import GOLDEN, check_block, load_pair
from tests.support.closeness import SAFE_LEAD, smallest_lead
from tests.support.eagle3 import uncached_chain
from tests.support.models import uncached_block


EAGLE3 = str(test_eagle3.FOLDER.relative_to(GOLDEN))
NAMES = [str(path.parent.relative_to(GOLDEN)) for path in sorted(GOLDEN.glob("**/decoding.json"))]
# Relative change of every weight of one tensor, at random. In drafts trained for a few steps, the gate of the
# transition bias and the bias of the confidence are small beside what they are added to.
CHANGE, CHANGE_OF_SMALL = 1e-3, 0.1
SMALL = ("markov_head.gate_proj", "markov_head.joint_proj.bias", "confidence_head.proj.bias")


def load(name):
    if name == EAGLE3:
        return test_eagle3.load_pair()
    own = GOLDEN / name / "target"
    return load_pair(GOLDEN / name, own if own.exists() else own.parents[1] / "target")


def check(name, target, draft):
    if name == EAGLE3:
        test_eagle3.check_block(target, draft)
    else:
        check_block(GOLDEN / name, target, draft)


def test_no_golden_draft_is_left_out():
    assert len(NAMES) == 13


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_small_change_of_any_tensor_shows(name):
    target, draft = load(name)
    noise = torch.Generator().manual_seed(0)
    for tensor_name, tensor in draft.named_parameters():
        before = tensor.clone()
        change = CHANGE_OF_SMALL if tensor_name.startswith(SMALL) else CHANGE
        tensor.mul_(1 + change * torch.randn(tensor.shape, generator=noise).sign())
        with pytest.raises(AssertionError, match="units"):
            check(name, target, draft)
        tensor.copy_(before)
    check(name, target, draft)


def slot_late(draft):
    """The block one position behind its place."""
    right = draft.forward

    def late(*args, position_ids, **kwargs):
        return right(*args, position_ids=position_ids + (position_ids == position_ids.max()).long(), **kwargs)

    draft.forward = late


def without_a_norm(draft):
    draft.layers[0].post_attention_layernorm.forward = lambda states: states


def other_epsilon(draft):
    for module in draft.modules():
        if hasattr(module, "eps") or hasattr(module, "variance_epsilon"):
            setattr(module, "eps" if hasattr(module, "eps") else "variance_epsilon", 1e-3)


def masked_neighbour(draft):
    """No slot sees the last row of the context."""
    right = draft.forward

    def blind(*args, context_hidden_states, **kwargs):
        context = context_hidden_states.clone()
        context[:, -1] = 0
        return right(*args, context_hidden_states=context, **kwargs)

    draft.forward = blind


ERRORS = (slot_late, without_a_norm, other_epsilon, masked_neighbour)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
@pytest.mark.parametrize("name", [name for name in NAMES if name != EAGLE3])
@torch.no_grad()
def test_an_error_shows(name, error):
    target, draft = load(name)
    error(draft)
    with pytest.raises(AssertionError, match="units"):
        check(name, target, draft)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_no_token_on_record_was_decided_by_rounding(name):
    """Choices of target and draft lead, and confidences are away from the threshold, by more than rounding moves."""
    target, draft = load(name)
    choices, distances = [], []
    for case in json.loads((GOLDEN / name / "decoding.json").read_text())["cases"]:
        text, end = torch.tensor([case["plain_greedy"]]), len(case["prompt"]) + 1
        choices.append(smallest_lead(target(text).logits[0, end - 2 : -1]))
        for reference, accepted in zip(case["rounds"], case["accepted_lengths"], strict=True):
            num_drafts = len(reference["drafts"])
            if num_drafts and name == EAGLE3:
                choices.append(smallest_lead(uncached_chain(target, draft, text[:, :end], num_drafts).draft_logits))
            elif num_drafts:
                block = uncached_block(target, draft, text[:, :end])
                choices.append(smallest_lead(block.draft_logits[0, :num_drafts]))
                if case.get("threshold"):
                    distances.append(float((block.confidence_logits.sigmoid() - case["threshold"]).abs().min()))
            end += accepted
    assert len(choices) > 50
    assert min(choices) > SAFE_LEAD
    assert min(distances, default=1.0) > SAFE_LEAD / 2 * torch.finfo(torch.float32).eps
