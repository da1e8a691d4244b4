# SPDX-License-Identifier: Apache-2.0
"""Drafts where the positions of a target end, or where its rotary frequencies change with the length of the text."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel

from dspark_hf import collect_rounds
from dspark_hf.drafts.position_limits import PositionLimits, position_limits
from tests.support.eagle3 import oracle_eagle3
from tests.support.models import oracle_draft, random_prompt
from tests.support.scripted import scripted_draft


SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
SWITCH = 16
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0, 3.0, 2.0, 5.0],
    "original_max_position_embeddings": SWITCH,
    "factor": 4.0,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
ROTARY = {
    "phi3": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": SWITCH}),
    "llama_longrope": ("Llama", {"rope_parameters": LONGROPE}),
    "llama_dynamic": ("Llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": SWITCH}),
    "qwen3_dynamic": ("Qwen3", {"rope_parameters": DYNAMIC, "max_position_embeddings": SWITCH, "head_dim": 8}),
    "gemma3_longrope": (
        "Gemma3",
        {
            "head_dim": 8,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": LONGROPE,
            },
        },
    ),
}


def build(name: str) -> PreTrainedModel:
    """A new target each time: rotary embeddings of the dynamic kind remember the longest text they saw."""
    kind, extra = ROTARY[name]
    config_name = "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config"
    torch.manual_seed(0)
    target = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, config_name)(**(SIZES | extra))).eval()
    target.generation_config = GenerationConfig(pad_token_id=0)
    return target


def with_draft(name: str, prompt: torch.Tensor, num_new: int, **arguments) -> tuple[torch.Tensor, torch.Tensor, list]:
    """Text of plain generation, text with a draft that is mostly right, and the rounds."""
    plain = build(name).generate(prompt, do_sample=False, max_new_tokens=num_new, **arguments)
    draft = scripted_draft(build(name), plain)
    with collect_rounds() as stats:
        text = build(name).generate(
            prompt, do_sample=False, max_new_tokens=num_new, assistant_model=draft, **arguments
        )
    return plain, text, stats.rounds


@pytest.mark.parametrize("length", [3, SWITCH - 1, SWITCH, SWITCH + 1, SWITCH + 5], ids=lambda n: f"prompt{n}")
@pytest.mark.parametrize("name", ROTARY)
def test_the_text_is_that_of_plain_generation_below_across_and_beyond_the_switch(name, length):
    plain, text, rounds = with_draft(name, random_prompt(length), 24)
    assert text.tolist() == plain.tolist()
    if length < SWITCH - 4:
        assert any(record.num_accepted for record in rounds)


@pytest.mark.parametrize("name", ["phi3", "llama_longrope", "gemma3_longrope"])
def test_drafts_are_sent_again_beyond_the_switch_where_one_set_of_frequencies_holds(name):
    _, _, rounds = with_draft(name, random_prompt(SWITCH + 5), 24)
    assert sum(record.num_accepted for record in rounds) > 8


def test_no_drafts_are_sent_where_every_length_has_frequencies_of_its_own():
    _, _, rounds = with_draft("llama_dynamic", random_prompt(SWITCH + 5), 12)
    assert len(rounds) == 11
    assert all(record.verify_length == 0 for record in rounds)


def test_a_padded_prompt_changes_where_plain_generation_changes():
    prompt = torch.cat([torch.zeros(1, 5, dtype=torch.long), random_prompt(8)], dim=1)
    mask = torch.ones_like(prompt)
    mask[:, :5] = 0
    for name in ROTARY:
        plain, text, _ = with_draft(name, prompt, 20, attention_mask=mask)
        assert text.tolist() == plain.tolist(), name


@pytest.mark.parametrize("name", ROTARY)
def test_a_batch_on_one_side_of_the_switch_is_right_and_any_other_is_refused(name):
    prompts, mask = torch.cat([random_prompt(6), random_prompt(6, seed=4)]), torch.ones(2, 6, dtype=torch.long)
    prompts[1, :2], mask[1, :2] = 0, 0
    draft = oracle_draft(build(name))

    def generate(num_new: int) -> torch.Tensor:
        return build(name).generate(
            prompts, attention_mask=mask, do_sample=False, max_new_tokens=num_new, assistant_model=draft
        )

    short = generate(8)
    for row, first in ((0, 0), (1, 2)):
        alone = build(name).generate(prompts[row : row + 1, first:], do_sample=False, max_new_tokens=8)
        assert short[row, first:].tolist() == alone[0].tolist()
    with pytest.raises(NotImplementedError, match=f"beyond {SWITCH} tokens.*from 4 up to 20"):
        generate(14)


def learned(kind: str) -> PreTrainedModel:
    """Targets with a table of 24 positions, or with a rule that ends there."""
    table = {
        "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_positions": 24}),
        "gptj": ("GPTJForCausalLM", "GPTJConfig", {"n_positions": 24, "rotary_dim": 4}),
        "gpt_neo": (
            "GPTNeoForCausalLM",
            "GPTNeoConfig",
            {"max_position_embeddings": 24, "attention_types": [[["global", "local"], 2]], "num_layers": 4},
        ),
        "opt": (
            "OPTForCausalLM",
            "OPTConfig",
            {"max_position_embeddings": 24, "word_embed_proj_dim": 32, "ffn_dim": 64},
        ),
        "gpt_bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", {"n_positions": 24}),
        "mpt": ("MptForCausalLM", "MptConfig", {"max_seq_len": 24}),
    }
    model_name, config_name, extra = table[kind]
    sizes = {
        key: value for key, value in SIZES.items() if key not in ("max_position_embeddings", "num_key_value_heads")
    }
    if kind == "gpt_neo":
        sizes = {key: value for key, value in sizes.items() if key not in ("num_hidden_layers", "intermediate_size")}
    torch.manual_seed(0)
    target = getattr(transformers, model_name)(getattr(transformers, config_name)(**(sizes | extra))).eval()
    target.generation_config = GenerationConfig(pad_token_id=0)
    return target


def text_that_ends_at(target: PreTrainedModel, length: int) -> tuple[torch.Tensor, int, torch.Tensor]:
    """A prompt of 10 tokens, an end token, and the text of exactly `length` tokens that ends with it."""
    for seed in range(60):
        prompt = random_prompt(10, seed)
        text = target.generate(prompt, do_sample=False, max_new_tokens=length - 10)
        if text[0, -1] not in text[0, 10:-1]:
            return prompt, int(text[0, -1]), text
    raise AssertionError("no prompt ends there")


@pytest.mark.parametrize("length", [21, 22, 23, 24])
@pytest.mark.parametrize("kind", ["gpt2", "gptj", "gpt_neo", "opt", "gpt_bigcode", "mpt"])
def test_drafts_end_where_positions_end(kind, length):
    target = learned(kind)
    prompt, end, expected = text_that_ends_at(target, length)
    draft = scripted_draft(target, torch.cat([expected, random_prompt(8)], dim=1))
    text = target.generate(prompt, do_sample=False, max_new_tokens=100, eos_token_id=end, assistant_model=draft)
    assert text.tolist() == expected.tolist()


def test_limits_by_hand():
    limits = PositionLimits(switch=16, one_set_beyond=True, end=24)
    assert [limits.most_drafts(n) for n in (1, 15, 16, 17, 18, 23, 24, 30)] == [15, 1, 0, 0, 6, 1, 0, 0]
    assert PositionLimits(switch=16, one_set_beyond=False).most_drafts(40) == 0
    assert PositionLimits(switch=16).most_drafts(40) is None
    assert PositionLimits().most_drafts(10**6) is None


def test_computed_positions_have_no_end():
    target = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    assert position_limits(target) == PositionLimits()


def test_a_batch_by_hand():
    limits = PositionLimits(switch=16)
    limits.check_batch([(3, 16), (9, 16)])
    limits.check_batch([(17, 40), (30, 90)])
    for lengths in ([(3, 17)], [(16, 17)], [(3, 10), (20, 30)]):
        with pytest.raises(NotImplementedError, match="beyond 16 tokens"):
            limits.check_batch(lengths)
    with pytest.raises(NotImplementedError, match="beyond 16 tokens"):
        PositionLimits(switch=16, one_set_beyond=False).check_batch([(17, 40), (30, 90)])
    PositionLimits().check_batch([(1, 10**6)])


@pytest.mark.parametrize("length", [10, SWITCH, SWITCH + 1])
def test_eagle3_drafts_keep_to_the_same_limits(length):
    prompt = random_prompt(length)
    plain = build("llama_longrope").generate(prompt, do_sample=False, max_new_tokens=20)
    target = build("llama_longrope")
    draft = oracle_eagle3(target)
    assert (
        target.generate(prompt, do_sample=False, max_new_tokens=20, assistant_model=draft).tolist() == plain.tolist()
    )
