# SPDX-License-Identifier: Apache-2.0
"""Geometry of targets under every name that configs use, and the module that is a target's backbone."""

import json

import peft
import pytest
import torch
import transformers
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedConfig, StoppingCriteriaList

from dspark_hf import DSparkConfig, DSparkDraftModel
from dspark_hf.decoding.packed_runner import check_memory
from dspark_hf.decoding.request import Request
from dspark_hf.drafts.target_structure import (
    backbone_of,
    decoder_of,
    full_attention_layer,
    full_attention_rope,
    layers_of,
    longest_position,
    norm_epsilon,
    value_over_layers,
)
from dspark_hf.profiling.fingerprint import fingerprint
from dspark_hf.training.dataset import target_features
from dspark_hf.training.sampling import SamplingSettings, sample_answers
from tests.support.models import VOCAB_SIZE, random_draft, random_prompt, tiny_target


# Config class, its arguments, and by hand: query heads, heads of keys and values, head width, width of the MLP.
GEOMETRIES = {
    "Llama": (
        {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48},
        4,
        2,
        8,
        48,
    ),
    "GPT2": ({"n_embd": 32, "n_head": 4}, 4, 4, 8, 128),
    "GPT2 with a width": ({"n_embd": 32, "n_head": 4, "n_inner": 80}, 4, 4, 8, 80),
    "GPTJ": ({"n_embd": 32, "n_head": 4}, 4, 4, 8, 128),
    "CodeGen": ({"n_embd": 32, "n_head": 4, "n_inner": 80}, 4, 4, 8, 80),
    "GPTBigCode": ({"n_embd": 32, "n_head": 4, "multi_query": True}, 4, 1, 8, 128),
    "GPTBigCode with all heads": ({"n_embd": 32, "n_head": 4, "multi_query": False}, 4, 4, 8, 128),
    "GPTNeo": (
        {"hidden_size": 32, "num_heads": 4, "num_layers": 2, "attention_types": [[["global"], 2]]},
        *(4, 4, 8, 128),
    ),
    "OPT": ({"hidden_size": 32, "num_attention_heads": 4, "ffn_dim": 80, "word_embed_proj_dim": 32}, 4, 4, 8, 80),
    "Bloom": ({"hidden_size": 32, "n_head": 4}, 4, 4, 8, 128),
    "Falcon": ({"hidden_size": 32, "num_attention_heads": 4, "multi_query": True}, 4, 1, 8, 128),
    "Falcon of groups": (
        {"hidden_size": 32, "num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True},
        *(4, 2, 8, 128),
    ),
    "Falcon with all heads": ({"hidden_size": 32, "num_attention_heads": 4, "multi_query": False}, 4, 4, 8, 128),
    "Mpt": ({"d_model": 32, "n_heads": 4, "expansion_ratio": 3}, 4, 4, 8, 96),
    "XGLM": ({"d_model": 32, "attention_heads": 4, "ffn_dim": 80}, 4, 4, 8, 80),
    "Starcoder2": ({"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}, 4, 2, 8, 12288),
    "SolarOpen": (
        {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        | {"moe_intermediate_size": 24, "num_experts_per_tok": 2},
        *(4, 2, 16, 48),
    ),
    "Qwen3_5MoeText": (
        {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        | {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 10},
        *(4, 2, 16, 58),
    ),
    "Cohere2Moe": (
        {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 48,
        },
        *(4, 2, 8, 48),
    ),
    "Dbrx": (
        {"d_model": 32, "n_heads": 4, "attn_config": {"kv_n_heads": 2}, "ffn_config": {"ffn_hidden_size": 40}},
        *(4, 2, 8, 40),
    ),
}


def config_of(name: str, **fields) -> PreTrainedConfig:
    config_class = getattr(transformers, name.split()[0] + "Config", None)
    if config_class is None:
        pytest.skip(f"{name} is not in this release of transformers")
    return config_class(**fields)


def gemma4(**fields) -> PreTrainedConfig:
    """Layers 2 and 4 of 4 see the whole text, with one head of keys and values of width 16."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1}
    other = {"attention_k_eq_v": True, "sliding_window": 8, "hidden_size_per_layer_input": 0, "vocab_size": VOCAB_SIZE}
    types = ["sliding_attention", "full_attention"] * 2
    return config_of(
        "Gemma4Text", **(sizes | heads | other | {"layer_types": types, "initializer_range": 0.3} | fields)
    )


@pytest.mark.parametrize("name", GEOMETRIES)
def test_geometry_under_every_name(name):
    fields, *expected = GEOMETRIES[name]
    config = config_of(name, **fields)
    layers = layers_of(config)
    assert len(layers) == config.num_hidden_layers
    for layer in layers:
        found = [layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim, layer.intermediate_size]
        assert found == expected
    draft = DSparkConfig.from_target(config, mask_token_id=4)
    assert [draft.num_attention_heads, draft.num_key_value_heads, draft.head_dim, draft.intermediate_size] == expected


@pytest.mark.parametrize(
    ("name", "fields", "epsilon", "longest"),
    [
        ("Llama", {"rms_norm_eps": 3e-6, "max_position_embeddings": 100}, 3e-6, 100),
        ("GPT2", {"layer_norm_epsilon": 3e-5, "n_positions": 100}, 3e-5, 100),
        ("Mpt", {"layer_norm_epsilon": 3e-5, "max_seq_len": 100}, 3e-5, 100),
        ("GPTNeoX", {"layer_norm_eps": 3e-5, "max_position_embeddings": 100}, 3e-5, 100),
        ("Cohere2Moe", {"layer_norm_eps": 3e-5, "max_position_embeddings": 100}, 3e-5, 100),
        ("Bloom", {"layer_norm_epsilon": 3e-5}, 3e-5, None),
        ("Bloom", {"layer_norm_epsilon": 3e-5, "seq_length": 100}, 3e-5, None),
        ("Bloom", {"layer_norm_epsilon": 3e-5, "max_target_positions": 100}, 3e-5, 100),
        ("OPT", {"max_position_embeddings": 100}, None, 100),
    ],
)
def test_norms_and_positions_under_every_name(name, fields, epsilon, longest):
    config = config_of(name, **fields)
    assert (norm_epsilon(config), longest_position(config)) == (epsilon, longest)
    draft = DSparkConfig.from_target(config, mask_token_id=4)
    assert draft.rms_norm_eps == (epsilon or 1e-6)
    assert draft.max_position_embeddings == (longest or 40960)


def test_layers_with_values_of_their_own():
    layers = layers_of(gemma4())
    assert [(layer.num_key_value_heads, layer.head_dim) for layer in layers] == [(2, 8), (1, 16)] * 2
    assert [layer.layer_type for layer in layers] == ["sliding_attention", "full_attention"] * 2


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        (
            "Gemma3nText",
            {"num_hidden_layers": 3, "intermediate_size": [10, 20, 30]},
            [(8, 2, 10), (8, 2, 20), (8, 2, 30)],
        ),
        (
            "Step3p7Text",
            {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
            | {"num_sliding_attention_heads": 96},
            [(96, 8, 11264), (64, 8, 11264)],
        ),
        (
            "Dots3NoteText",
            {"num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 48}
            | {"swa_num_attention_heads": 8, "swa_num_key_value_heads": 8, "use_sliding_window": True},
            [(16, 16, 48), (16, 16, 48), (8, 8, 48)],
        ),
        (
            "Laguna",
            {"num_hidden_layers": 2, "num_attention_heads_per_layer": [48, 64], "intermediate_size": 48},
            [(48, 8, 48), (64, 8, 48)],
        ),
        (
            "InklingText",
            {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "intermediate_size": 48},
            [(64, 16, 48), (64, 8, 48)],
        ),
    ],
)
def test_layers_that_differ(name, fields, expected):
    layers = layers_of(config_of(name, **fields).get_text_config(decoder=True))
    found = [(layer.num_attention_heads, layer.num_key_value_heads, layer.intermediate_size) for layer in layers]
    assert found == expected


def test_new_draft_takes_the_shape_of_full_attention():
    layer = full_attention_layer(gemma4(num_hidden_layers=4))
    assert (layer.layer_type, layer.num_key_value_heads, layer.head_dim) == ("full_attention", 1, 16)
    config = DSparkConfig.from_target(gemma4(), mask_token_id=96)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 1, 16)
    assert config.rope_parameters["rope_type"] == "proportional"
    assert config.rope_parameters["rope_theta"] == 1e6


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        (
            "Llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
            {"rope_type": "default", "rope_theta": 5.0},
        ),
        # A draft rotates whole heads.
        (
            "GPTNeoX",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0, "partial_rotary_factor": 0.25}},
            {"rope_type": "default", "rope_theta": 5.0},
        ),
        # One scale per frequency of half a head does not fit a whole one.
        (
            "Phi3",
            {
                "rope_parameters": {"rope_type": "longrope", "rope_theta": 5.0, "partial_rotary_factor": 0.5}
                | {"short_factor": [1.0] * 24, "long_factor": [2.0] * 24, "original_max_position_embeddings": 64}
            },
            {"rope_type": "default", "rope_theta": 5.0},
        ),
        ("GPT2", {}, None),
        ("Bloom", {}, None),
    ],
)
def test_rope_of_a_new_draft(name, fields, expected):
    config = config_of(name, **fields)
    assert full_attention_rope(config) == expected
    rope = DSparkConfig.from_target(config, mask_token_id=4).rope_parameters
    assert rope["rope_theta"] == (5.0 if expected else 10000.0)


def test_a_config_without_attention_is_refused():
    with pytest.raises(ValueError, match="must tell its number of attention heads, got none in MambaConfig"):
        DSparkConfig.from_target(config_of("Mamba"), mask_token_id=4)


def test_odd_heads_are_refused():
    config = config_of("GPT2", n_embd=28, n_head=4)
    with pytest.raises(ValueError, match="`head_dim` must be even, .* got 7"):
        DSparkConfig.from_target(config, mask_token_id=4)


def test_fields_over_layers_are_plain_values():
    assert value_over_layers(gemma4(), "head_dim") == "16 in 2 layers, 8 in 2 layers"
    assert value_over_layers(gemma4(), "num_attention_heads") == 4
    assert value_over_layers(gemma4(), "num_experts_per_tok") is None
    assert value_over_layers(tiny_target().config, "num_key_value_heads") == 2


def test_fingerprint_of_layers_that_differ():
    target = transformers.Gemma4ForCausalLM(gemma4()).eval()
    draft = random_draft()
    found = fingerprint(target, draft)
    assert found["target"]["num_key_value_heads"] == "1 in 2 layers, 2 in 2 layers"
    assert json.loads(json.dumps(found)) == found
    other = transformers.Gemma4ForCausalLM(gemma4(num_global_key_value_heads=2)).eval()
    assert fingerprint(other, draft) != found


@pytest.mark.parametrize(("available", "is_refused"), [(25599, True), (25600, False)])
def test_memory_of_layers_that_differ(monkeypatch, available, is_refused):
    """Two layers of 2 heads of width 8, two of 1 of width 16: 64 numbers of 4 bytes a token for keys, and for values.

    Two rows have room for the longest prompt each: 2 * 64 * 4 * 2 * 25 bytes.
    """
    target = transformers.Gemma4ForCausalLM(gemma4()).eval()
    nothing = LogitsProcessorList(), StoppingCriteriaList(), 30, GenerationConfig()
    rows = [Request(index, random_prompt(length), *nothing) for index, length in enumerate((25, 3))]
    monkeypatch.setattr("dspark_hf.decoding.packed_runner._available_bytes", lambda device: available)
    if is_refused:
        with pytest.raises(MemoryError, match="Keys and values of 2 rows with up to 25 tokens"):
            check_memory(target, rows)
    else:
        check_memory(target, rows)


SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def llama4():
    config = transformers.Llama4TextConfig(
        **SIZES, num_local_experts=2, intermediate_size_mlp=64, attention_chunk_size=8
    )
    return transformers.Llama4ForCausalLM(config)


def mllama():
    text = {name: value for name, value in SIZES.items() if name != "head_dim"} | {"cross_attention_layers": [1]}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_global_layers": 1}
    vision |= {"attention_heads": 2, "image_size": 28, "patch_size": 14, "vision_output_dim": 64}
    vision |= {"intermediate_layers_indices": [0], "max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]]}
    config = transformers.MllamaConfig(text_config=text | rope, vision_config=vision)
    return transformers.MllamaForConditionalGeneration(config)


def qwen2_5_vl():
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen2_5_VLConfig(text_config=SIZES | rope, vision_config=vision)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def gemma3():
    types = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
    vision = VISION | {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=SIZES | types, vision_config=vision, mm_tokens_per_image=4)
    return transformers.Gemma3ForConditionalGeneration(config)


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_head=4, n_layer=4, initializer_range=0.3)
    )


def opt():
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 4}
    return transformers.OPTForCausalLM(
        transformers.OPTConfig(vocab_size=VOCAB_SIZE, num_attention_heads=4, init_std=0.3, **sizes)
    )


def lora(*modules, **options):
    config = peft.LoraConfig(r=4, target_modules=list(modules), init_lora_weights=False, **options)
    return peft.get_peft_model(tiny_target("llama"), config)


TARGETS = {
    "qwen3": tiny_target,
    "gemma3_text": lambda: tiny_target("gemma3"),
    "gemma4": lambda: transformers.Gemma4ForCausalLM(gemma4()),
    "lora": lambda: lora("q_proj", "down_proj"),
    "lora_causal": lambda: lora("q_proj", task_type="CAUSAL_LM"),
    "lora_embedding_and_head": lambda: lora("embed_tokens", "lm_head"),
    "lora_saved_head": lambda: lora("q_proj", modules_to_save=["lm_head", "embed_tokens"]),
    "llama4": llama4,
    "mllama": mllama,
    "qwen2_5_vl": qwen2_5_vl,
    "gemma3": gemma3,
    "gpt2": gpt2,
    "opt": opt,
}


@pytest.mark.parametrize("name", TARGETS)
def test_features_are_the_hidden_states_of_the_whole_target(name):
    torch.manual_seed(0)
    target = TARGETS[name]().eval()
    ids = random_prompt(12).repeat(2, 1)
    with torch.no_grad():
        outputs = target(input_ids=ids, output_hidden_states=True, use_cache=False)
    features = target_features(target, ids, [0, 2])
    states = outputs.hidden_states
    torch.testing.assert_close(features.context_hidden_states, torch.cat([states[1], states[3]], dim=-1))
    torch.testing.assert_close(features.last_hidden_states, states[-1])
    logits = target.get_output_embeddings()(features.last_hidden_states)
    assert torch.equal(logits.argmax(-1), outputs.logits.argmax(-1))


def test_injected_adapters_stay_active():
    target, ids = lora("q_proj"), random_prompt(12)
    adapted = target_features(target, ids, [2]).context_hidden_states
    with target.disable_adapter():
        plain = target_features(target, ids, [2]).context_hidden_states
    torch.testing.assert_close(plain, target_features(tiny_target("llama"), ids, [2]).context_hidden_states)
    assert not torch.allclose(adapted, plain, atol=1e-3)


def test_decoder_of_an_image_target_is_its_language_model():
    target = qwen2_5_vl()
    assert backbone_of(target) is target.model
    assert decoder_of(target) is target.model.language_model


@pytest.mark.parametrize("adapter", [peft.PrefixTuningConfig, peft.PromptTuningConfig, peft.PromptEncoderConfig])
def test_prompt_learning_is_refused(adapter):
    target = peft.get_peft_model(tiny_target("llama"), adapter(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(NotImplementedError, match=f"prompt learning are not at work, got {adapter.__name__}"):
        target_features(target, random_prompt(12), [2])


def test_a_target_without_a_backbone_is_refused():
    """The embedding stands beside the layers, in the very module that has the LM head."""
    target = tiny_target()
    embedding = target.model.embed_tokens
    del target.model.embed_tokens
    target.embed_tokens = embedding
    target.get_input_embeddings = lambda: embedding
    with pytest.raises(NotImplementedError, match="Qwen3ForCausalLM has no module that holds the embedding without"):
        backbone_of(target)


@pytest.mark.parametrize("name", ["gpt2", "opt", "gemma4", "llama4", "lora"])
def test_new_drafts_run(name):
    target = TARGETS[name]().eval()
    config = DSparkConfig.from_target(target.config, mask_token_id=VOCAB_SIZE - 1, block_size=4, markov_rank=8)
    draft, prompt = DSparkDraftModel(config).eval(), random_prompt(9)
    settings = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None}
    text = target.generate(input_ids=prompt, assistant_model=draft, **settings)
    assert torch.equal(text, target.generate(input_ids=prompt, **settings))


@pytest.mark.parametrize("name", ["lora", "lora_causal", "qwen2_5_vl", "mllama", "gemma3", "gpt2", "opt", "gemma4"])
def test_answers_by_rows_are_those_of_generate(name):
    torch.manual_seed(0)
    target = TARGETS[name]().eval()
    prompts = [random_prompt(length, seed=length) for length in (5, 9, 7)]
    settings = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    expected = [target.generate(input_ids=ids, **settings)[0, ids.shape[1] :].tolist() for ids in prompts]
    sampling = SamplingSettings(max_new_tokens=6, temperature=0)
    numbered = [(index, ids[0].tolist()) for index, ids in enumerate(prompts)]
    answers = {own.key: list(own.token_ids) for own in sample_answers(target, numbered, sampling, frozenset(), 2)}
    assert [answers[index] for index in range(3)] == expected
