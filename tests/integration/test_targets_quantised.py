# SPDX-License-Identifier: Apache-2.0
"""bitsandbytes targets on the CPU. Its int8 kernels look at all rows at once, so there texts may part."""

import pytest
import torch
from transformers import BitsAndBytesConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

import dspark_hf
from tests.support.closeness import assert_close
from tests.support.models import random_prompt
from tests.support.scripted import (
    NUM_NEW,
    assert_same_up_to_near_ties,
    draft_config_for,
    generate,
    num_accepted,
    scripted_draft,
    text_of,
)


FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
KINDS = {
    "4bit": FOUR_BITS,
    "4bit_nested": FOUR_BITS | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "8bit": {"load_in_8bit": True},
}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request, tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.15,
        tie_word_embeddings=request.param,
    )
    path = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(path)
    return path, request.param


def load(path, **quantisation):
    target = LlamaForCausalLM.from_pretrained(
        path, quantization_config=BitsAndBytesConfig(**quantisation), device_map="cpu", dtype=torch.float32
    )
    target.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
    return target


def check(target, exact):
    prompt = random_prompt(11)
    plain = generate(target, prompt)
    assert len(set(plain[0, 11:].tolist())) > 5
    draft = scripted_draft(target, plain)
    with dspark_hf.collect_rounds() as stats:
        text = generate(target, prompt, draft)
    # The statistics are of this text, whatever it is.
    assert text.shape == (1, 11 + NUM_NEW)
    assert text[0, 12:].tolist() == text_of(stats)
    assert all(0 <= record.num_accepted <= record.verify_length <= 4 for record in stats.rounds)
    assert sum(num_accepted(stats)) > 0
    if exact:
        assert_same_up_to_near_ties(target, text, plain, gap=1e-2)
    with dspark_hf.collect_rounds() as stats:
        sampled = generate(target, prompt, draft, do_sample=True)
    assert sampled[0, 12:].tolist() == text_of(stats)


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_layers(folder, kind):
    target = load(folder[0], **KINDS[kind])
    assert type(target.model.layers[0].self_attn.q_proj).__name__ in ("Linear4bit", "Linear8bitLt")
    assert type(target.lm_head) is torch.nn.Linear
    check(target, exact=kind != "8bit")


@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_quantised_lm_head(folder, kind):
    path, tied = folder
    if tied:  # the libraries cannot quantise a tied head: it stays what it is
        target = load(path, **KINDS[kind])
    else:
        target = load(path, **KINDS[kind], llm_int8_skip_modules=["none of them"])
        assert not target.lm_head.weight.is_floating_point()
    check(target, exact=kind != "8bit")
    with torch.no_grad():
        outputs = target(random_prompt(11), output_hidden_states=True)
        binding = dspark_hf.DSparkDraftModel(draft_config_for(target)).bind_target(target)
        assert_close(binding.logits(outputs.hidden_states[-1]), outputs.logits)


def test_a_draft_in_half_precision(folder):
    target, prompt = load(folder[0], **KINDS["4bit"]), random_prompt(11)
    plain = generate(target, prompt)
    draft = scripted_draft(target, plain).bfloat16()
    assert_same_up_to_near_ties(target, generate(target, prompt, draft), plain, gap=1e-2)


def test_a_draft_loaded_beside_a_quantised_target_is_not_quantised(folder, tmp_path):
    target = load(folder[0], **KINDS["4bit"])
    draft = dspark_hf.DSparkDraftModel(draft_config_for(target))
    draft.save_pretrained(tmp_path)
    loaded = dspark_hf.DSparkDraftModel.from_pretrained(tmp_path)
    assert {type(module) for module in loaded.modules() if "Linear" in type(module).__name__} == {torch.nn.Linear}
    for name, tensor in draft.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_binding_leaves_the_target_as_it_is(folder):
    target = load(folder[0], **KINDS["4bit"])
    generate(target, random_prompt(11))  # the first use packs the weights for the CPU
    before = {name: parameter.data_ptr() for name, parameter in target.named_parameters()}
    dtypes = {name: parameter.dtype for name, parameter in target.named_parameters()}
    generate(target, random_prompt(11), scripted_draft(target, random_prompt(30)))
    assert {name: parameter.data_ptr() for name, parameter in target.named_parameters()} == before
    assert {name: parameter.dtype for name, parameter in target.named_parameters()} == dtypes
