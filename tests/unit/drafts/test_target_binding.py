# SPDX-License-Identifier: Apache-2.0

import re

import pytest
import torch
from torch import nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from dspark_hf.drafts import target_binding
from dspark_hf.drafts.target_binding import TargetBinding, bind
from tests.support.closeness import assert_close, assert_differs
from tests.support.models import TARGET_KINDS, oracle_draft, random_draft, tiny_config, tiny_target


SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize("kind", TARGET_KINDS)
@torch.no_grad()
def test_bound_head_gives_the_targets_logits(kind):
    target = tiny_target(kind)
    binding = bind(target, tiny_config())
    ids = torch.tensor([[5, 6, 7]])
    outputs = target(ids, output_hidden_states=True)
    assert_close(binding.logits(outputs.hidden_states[-1]), outputs.logits)
    assert_close(binding.embed(ids), outputs.hidden_states[0])


SCALED = {
    "cohere": (CohereForCausalLM, CohereConfig, {"logit_scale": 0.25}),
    "granite": (GraniteForCausalLM, GraniteConfig, {"logits_scaling": 8.0}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"final_logit_softcapping": 3.0, "head_dim": 8}),
}


@pytest.mark.parametrize("name", SCALED)
@torch.no_grad()
def test_scaled_and_capped_logits(name):
    model_class, config_class, extra = SCALED[name]
    torch.manual_seed(0)
    target = model_class(config_class(**SIZES, **extra, initializer_range=0.5)).eval()
    binding = bind(target, tiny_config())
    assert (binding.logit_scale, binding.logit_softcap) == {
        "cohere": (0.25, None),
        "granite": (0.125, None),
        "gemma2": (1.0, 3.0),
    }[name]
    outputs = target(torch.tensor([[5, 6, 7]]), output_hidden_states=True)
    assert_close(binding.logits(outputs.hidden_states[-1]), outputs.logits)
    raw = target.lm_head(outputs.hidden_states[-1])
    assert_differs(raw, outputs.logits)  # or else the scale does nothing here


def test_scale_by_hand():
    binding = TargetBinding(nn.Identity(), nn.Identity(), logit_scale=0.5, logit_softcap=2.0)
    expected = [2 * torch.tanh(torch.tensor(x * 0.5 / 2)).item() for x in (-4.0, 0.0, 6.0)]
    assert_close(binding.scale(torch.tensor([-4.0, 0.0, 6.0])), expected)
    assert TargetBinding(nn.Identity(), nn.Identity()).scale(torch.tensor([3.0])).tolist() == [3.0]


def test_hidden_states_take_the_dtype_of_the_head():
    target = tiny_target().bfloat16()
    binding = bind(target, tiny_config())
    assert binding.logits(torch.randn(1, 2, 32)).dtype == torch.bfloat16


def test_nothing_is_copied_or_stored():
    target, draft = tiny_target(), random_draft()
    names = set(draft.state_dict())
    binding = draft.bind_target(target)
    assert binding.embed_tokens is target.get_input_embeddings()
    assert binding.lm_head is target.get_output_embeddings()
    assert set(draft.state_dict()) == names
    assert draft.get_input_embeddings() is None


@torch.no_grad()
def test_draft_logits_use_the_targets_scale_also_over_a_reduced_vocabulary():
    model_class, config_class, extra = SCALED["granite"]
    torch.manual_seed(0)
    target = model_class(config_class(**SIZES, **extra)).eval()
    draft = oracle_draft(target, draft_vocab_size=48)
    hidden = torch.randn(1, 3, 32)
    assert_close(draft.base_logits(hidden, draft.bind_target(target)), draft.lm_head(hidden) * 0.125)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_size": 64}, "same `hidden_size`, got 32 in Qwen3ForCausalLM and 64 in the draft"),
        ({"vocab_size": 120}, "same `vocab_size`, got 97 in Qwen3ForCausalLM and 120 in the draft"),
        (
            {"target_layer_ids": [0, 3], "num_target_layers": None},
            "`target_layer_ids` must lie below the target's last layer 3, got [0, 3]",
        ),
        ({"num_target_layers": 6}, "made for a target of 6 layers, got 4 in Qwen3ForCausalLM"),
        ({"mask_token_id": None}, "`mask_token_id` must be set, got None"),
        ({"target_layer_ids": None}, "`target_layer_ids` must be set, got None"),
    ],
)
def test_a_draft_of_another_target_is_refused(overrides, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        bind(tiny_target(), tiny_config(**overrides))


def test_the_message_names_the_draft_s_own_target():
    with pytest.raises(ValueError, match="for some/model"):
        bind(tiny_target(), tiny_config(hidden_size=64, target_name_or_path="some/model"))


def test_mask_token_must_be_a_row_of_the_embedding():
    target = tiny_target()
    target.model.embed_tokens = nn.Embedding(90, 32)  # the config still says 97
    with pytest.raises(ValueError, match=re.escape("which has 90, got 96")):
        random_draft().bind_target(target)


def test_encoder_decoder_is_refused():
    target = T5ForConditionalGeneration(T5Config(vocab_size=97, d_model=32, num_layers=1, num_heads=4, d_ff=8, d_kv=8))
    with pytest.raises(NotImplementedError, match="encoder-decoder model T5ForConditionalGeneration"):
        bind(target, tiny_config())


def test_recurrent_target_is_refused():
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 4, "num_heads": 8, "head_dim": 8}
    target = Mamba2ForCausalLM(Mamba2Config(**sizes, state_size=8, n_groups=1)).eval()
    with pytest.raises(NotImplementedError, match="the recurrent state of Mamba2ForCausalLM"):
        bind(target, tiny_config())


def test_target_without_head_is_refused():
    with pytest.raises(ValueError, match="Qwen3Model lacks one. Load it as a ...ForCausalLM"):
        bind(tiny_target().model, tiny_config())


def rows_of(target, change=0.0):
    weight = target.get_input_embeddings().weight.detach()
    return {i: weight[i] + change for i in (0, 7, 40, 96)}


@pytest.mark.parametrize(("change", "warned"), [(0.0, False), (1e-4, False), (0.1, True)])
def test_another_embedding_than_in_training_is_warned_of(monkeypatch, change, warned):
    warnings = []
    monkeypatch.setattr(target_binding.logger, "warning_once", warnings.append)
    target = tiny_target()
    bind(target, tiny_config(), rows_of(target, change))
    assert bool(warnings) == warned
    if warned:
        assert "trained with another embedding than that of Qwen3ForCausalLM" in warnings[0]


def test_half_precision_is_no_other_embedding(monkeypatch):
    monkeypatch.setattr(target_binding.logger, "warning_once", pytest.fail)
    target = tiny_target()
    sample = rows_of(target)
    bind(target.bfloat16(), tiny_config(), sample)


def test_rows_beyond_the_target_are_left_out(monkeypatch):
    monkeypatch.setattr(target_binding.logger, "warning_once", pytest.fail)
    target = tiny_target()
    bind(target, tiny_config(), rows_of(target) | {500: torch.zeros(32)})
