# SPDX-License-Identifier: Apache-2.0
"""DeepSpec's checkpoints give DeepSpec's numbers."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.parity.golden import GOLDEN, check_block, check_cached_rounds, check_decoding, load_pair
from tests.support.closeness import assert_close, assert_differs
from tests.support.models import uncached_block


QWEN3 = ("qwen3_vanilla", "qwen3_gated", "qwen3_rnn", "qwen3_dflash")
GEMMA4 = ("gemma4_vanilla", "gemma4_mix")
NAMES = (*QWEN3, *GEMMA4)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_block(name, attention):
    check_block(GOLDEN / name, *load_pair(GOLDEN / name, attention=attention))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", NAMES)
def test_cached_rounds(name, attention, monkeypatch):
    folder = GOLDEN / name
    # Forty tokens in blocks of seven, nearly all accepted, are six rounds.
    assert check_cached_rounds(folder, *load_pair(folder, attention=attention), monkeypatch) >= 5


@pytest.mark.parametrize("name", NAMES)
def test_decoding(name):
    folder = GOLDEN / name
    target, draft = load_pair(folder)
    cases = json.loads((folder / "decoding.json").read_text())["cases"]
    thresholds, compared, shortened = set(), 0, 0
    for case in cases:
        if case["threshold"] and draft.confidence_head is None:
            continue
        thresholds.add(case["threshold"])
        counts = check_decoding(case, target, draft)
        compared, shortened = compared + counts[0], shortened + counts[1]
    assert thresholds == {"qwen3_dflash": {0.0}}.get(name, {0.0, 0.5} | ({0.8} if name in GEMMA4 else set()))
    assert compared >= 20
    assert shortened <= 5 * len(cases)  # one per token of a block at most
    # The data hold rounds with all, some and none of the drafts accepted.
    assert {1, 6} < {length for case in cases for length in case["accepted_lengths"]}


def test_thresholds_cut_blocks():
    for name in QWEN3[:3]:
        cases = json.loads((GOLDEN / name / "decoding.json").read_text())["cases"]
        lengths = {n for case in cases if case["threshold"] for n in case["proposal_lengths"]}
        assert {1, 3, 4, 5} <= lengths, "the data cut too little"


@pytest.mark.parametrize("name", QWEN3)
def test_configuration(name):
    _, draft = load_pair(GOLDEN / name)
    config = draft.config
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (5, 255, [0, 1, 3])
    assert config.sample_from_anchor is True
    assert config.num_draft_slots == 5
    assert config.num_target_layers == 5
    assert config.draft_vocab_size is None
    assert config.layer_types == ["full_attention"] * 2
    head = {"qwen3_vanilla": "MarkovHead", "qwen3_gated": "GatedMarkovHead", "qwen3_rnn": "RNNHead"}.get(name)
    assert (type(draft.markov_head).__name__ if head else draft.markov_head) == head
    assert (draft.confidence_head is None) == (head is None)


@torch.no_grad()
def test_soft_cap_acts_before_the_transition_bias():
    folder = GOLDEN / "gemma4_vanilla"
    golden, (target, draft) = load_file(folder / "block.safetensors"), load_pair(folder)
    raw = golden["raw_head_logits"]
    assert_close(golden["base_logits"], torch.tanh(raw / 8.0) * 8.0)
    assert_differs(raw, golden["base_logits"])
    block = uncached_block(target, draft, torch.cat([golden["prompt"], golden["anchor"][None]], dim=1))
    bias = draft.markov_head.markov_w2(draft.markov_head.markov_w1(golden["anchor"]))
    assert_close(block.draft_logits[:, 0], golden["base_logits"][:, 0] + bias)


def test_configuration_of_gemma4_drafts():
    vanilla, mix = (load_pair(GOLDEN / name)[1].config for name in GEMMA4)
    assert (vanilla.layer_kind, mix.layer_kind) == ("gemma4", "gemma4")
    assert (vanilla.target_layer_ids, mix.target_layer_ids) == ([0, 2, 4], [-1, 1, 3])
    # Heads of the target's full-attention layers; their own number counts where keys serve as values.
    assert (vanilla.head_dim, vanilla.num_key_value_heads, vanilla.attention_k_eq_v) == (32, 1, True)
    assert (mix.head_dim, mix.num_key_value_heads, mix.attention_k_eq_v) == (16, 2, False)
    assert (vanilla.rope_parameters["rope_theta"], mix.rope_parameters["rope_theta"]) == (1e6, 1e5)
    assert vanilla.hidden_act == mix.hidden_act == "gelu_pytorch_tanh"
    assert (mix.attention_bias, vanilla.attention_bias) == (True, False)


@pytest.mark.parametrize("name", GEMMA4)
def test_layer_scalars_are_those_of_the_file(name):
    draft = load_pair(GOLDEN / name)[1]
    stored = load_file(GOLDEN / name / "draft" / "model.safetensors")
    for index, layer in enumerate(draft.layers):
        assert torch.equal(layer.layer_scalar, stored[f"layers.{index}.layer_scalar"])
        assert layer.layer_scalar != 1.0
