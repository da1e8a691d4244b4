# SPDX-License-Identifier: Apache-2.0
"""Targets of many architectures: positions, norms, windows, experts, scaled heads. No model is known by name here."""

import pytest
import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import output_capturing

import dspark_hf
from tests.support.closeness import assert_close, assert_differs
from tests.support.models import random_prompt
from tests.support.scripted import (
    NUM_NEW,
    ForwardCounter,
    StreamerSpy,
    draft_config_for,
    expected_accepted,
    generate,
    lively_target,
    num_accepted,
    scripted_draft,
)


SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
REFUSED_IN_BATCHES = {
    *("bloom", "falcon", "mpt", "stablelm", "xglm"),  # attention of their own
    *(() if transformers.GPTJForCausalLM._supports_attention_backend else ("gptj",)),  # likewise, in older releases
    *("gemma2", "vaultgemma", "gpt_oss"),  # scores that are capped, or sinks
    *("lfm2", "lfm2_moe", "llama4_text"),  # convolutions, chunks
}

# Config and model class by name, and what differs from SIZES.
ARCHITECTURES = {
    "bitnet": ("BitNetConfig", "BitNetForCausalLM", {}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {}),
    "cohere": ("CohereConfig", "CohereForCausalLM", {"logit_scale": 0.25}),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", {"logit_scale": 0.25, "sliding_window": 8}),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        EXPERTS
        | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
        | {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    ),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM", {"head_dim": 8}),
    "falcon": ("FalconConfig", "FalconForCausalLM", {}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {"head_dim": 8}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {"head_dim": 8, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0, "sliding_window": 8},
    ),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", {"head_dim": 8}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", {"rotary_dim": 4}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {"logits_scaling": 4.0, "residual_multiplier": 0.5}),
    "granitemoe": (
        "GraniteMoeConfig",
        "GraniteMoeForCausalLM",
        {"logits_scaling": 4.0, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "helium": ("HeliumConfig", "HeliumForCausalLM", {"head_dim": 8}),
    "hyperclovax": ("HyperCLOVAXConfig", "HyperCLOVAXForCausalLM", {"logits_scaling": 3.0, "head_dim": 8}),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"] * 2, "block_ff_dim": 64}),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        EXPERTS | {"num_experts": 4, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * 2},
    ),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 64, "attention_chunk_size": 8},
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "modernbert_decoder": (
        "ModernBertDecoderConfig",
        "ModernBertDecoderForCausalLM",
        {"cls_token_id": 1, "sep_token_id": 2},
    ),
    "mpt": ("MptConfig", "MptForCausalLM", {}),
    "nanochat": ("NanoChatConfig", "NanoChatForCausalLM", {"final_logit_softcapping": 3.0}),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM", {}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", {"sliding_window": 8}),
    "opt": ("OPTConfig", "OPTForCausalLM", {"word_embed_proj_dim": 32, "ffn_dim": 64}),
    "phi": ("PhiConfig", "PhiForCausalLM", {}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", EXPERTS | {"head_dim": 8, "num_experts": 4}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {}),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", {}),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", {}),
    "vaultgemma": ("VaultGemmaConfig", "VaultGemmaForCausalLM", {"head_dim": 8, "final_logit_softcapping": 3.0}),
    "xglm": ("XGLMConfig", "XGLMForCausalLM", {}),
}


def build(name: str, **overrides) -> PreTrainedModel:
    config_name, model_name, extra = ARCHITECTURES[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**(SIZES | extra | overrides))
    target = getattr(transformers, model_name)(config).eval()
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.ndim > 1 and parameter.std() < 0.1:  # a range that the model does not read
                parameter.normal_(0, 0.3)
    target.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
    return target


@pytest.fixture(scope="module", params=ARCHITECTURES)
def target(request):
    return build(request.param)


def test_text_is_that_of_plain_generation(target):
    prompt = random_prompt(11)
    plain = generate(target, prompt)
    draft = scripted_draft(target, plain)
    with dspark_hf.collect_rounds() as stats:
        text = generate(target, prompt, draft)
    assert torch.equal(text, plain)
    assert num_accepted(stats) == expected_accepted(11, NUM_NEW) == [0, 2, 2, 2, 2, 2, 0]


def test_left_padding(target):
    prompt = torch.cat([torch.zeros(1, 3, dtype=torch.long), random_prompt(11)], dim=1)
    mask = (torch.arange(14) >= 3).long()[None]
    plain = generate(target, prompt, attention_mask=mask)
    draft = scripted_draft(target, plain[:, 3:])
    with dspark_hf.collect_rounds() as stats:
        text = generate(target, prompt, draft, attention_mask=mask)
    assert torch.equal(text, plain)
    assert num_accepted(stats) == expected_accepted(11, NUM_NEW)


@torch.no_grad()
def test_batch_of_two(target):
    """Each row as it would be alone, or refused with the reason before any token."""
    torch.manual_seed(2)
    draft = dspark_hf.DSparkDraftModel(draft_config_for(target)).eval()
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    long, short = random_prompt(20, seed=5), random_prompt(9, seed=6)  # windows are 8 wide
    batch = torch.cat([long, torch.cat([torch.zeros(1, 11, dtype=torch.long), short], dim=1)])
    mask = torch.ones_like(batch)
    mask[1, :11] = 0
    if target.config.model_type in REFUSED_IN_BATCHES:
        with pytest.raises(NotImplementedError, match="one row at a time"):
            generate(target, batch, draft, attention_mask=mask)
        return
    text = generate(target, batch, draft, attention_mask=mask)
    for row, prompt in enumerate((long, short)):
        alone = generate(target, prompt)
        assert text[row, 20:].tolist() == alone[0, prompt.shape[1] :].tolist()


def test_draft_reads_the_outputs_of_its_layers(target):
    # Of every committed token, in order, once: hooks on the layers of a pass over the whole text say the same.
    prompt = random_prompt(11)
    plain = generate(target, prompt)
    draft = scripted_draft(target, plain, target_layer_ids=[2, 0])
    generate(target, prompt, draft)
    layers = next(m for m in target.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 4)
    seen = {}
    handles = [
        layers[i].register_forward_hook(
            lambda module, args, output, i=i: seen.__setitem__(i, output[0] if isinstance(output, tuple) else output)
        )
        for i in (2, 0)
    ]
    target(plain)
    for handle in handles:
        handle.remove()
    context = torch.cat(draft.contexts, dim=1)
    # The last round had no room for drafts, so the draft was not run.
    expected = torch.cat([seen[2], seen[0]], dim=-1)[:, : context.shape[1]]
    assert [context.shape[1] for context in draft.contexts] == [11, 1, 3, 3, 3, 3]
    assert_close(context, expected)


@torch.no_grad()
def test_base_logits_are_the_targets_own(target):
    # Scaled, soft-capped, biased or tied: the draft makes of the last hidden state what the target makes of it.
    prompt = random_prompt(11)
    outputs = target(prompt, output_hidden_states=True)
    draft = dspark_hf.DSparkDraftModel(draft_config_for(target))
    logits = draft.bind_target(target).logits(outputs.hidden_states[-1])
    assert_close(logits, outputs.logits)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("gemma2", {"final_logit_softcapping": None}),
        ("cohere", {"logit_scale": 1.0}),
        ("granite", {"logits_scaling": 1.0}),
        ("mpt", {"logit_scale": "inv_sqrt_d_model"}),  # a field of the same name that this model does not read
    ],
)
def test_base_logits_without_a_scale(name, overrides):
    test_base_logits_are_the_targets_own(build(name, **overrides))


@torch.no_grad()
def test_base_logits_of_a_head_with_a_factor_and_a_cap():
    # Muse Glimmer has its factor in a field of another name, and its text model inside another one.
    torch.manual_seed(0)
    text = SIZES | {"head_dim": 8, "output_multiplier": 0.5, "final_logit_softcapping": 3.0}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MuseGlimmerConfig(text_config=text, vision_config=vision)
    target = transformers.MuseGlimmerForConditionalGeneration(config).eval()
    test_base_logits_are_the_targets_own(target)


@torch.no_grad()
def test_base_logits_depend_on_the_scale():
    # The check above would pass for a scale of 1 alone.
    prompt = random_prompt(11)
    for name, field in (
        ("gemma2", "final_logit_softcapping"),
        ("cohere", "logit_scale"),
        ("granite", "logits_scaling"),
    ):
        target = build(name)
        raw = target.get_output_embeddings()(target(prompt, output_hidden_states=True).hidden_states[-1])
        assert getattr(target.config, field) not in (None, 1.0)
        assert_differs(raw, target(prompt).logits)


def test_embedding_output_as_a_context():
    # Layer id -1 is what goes into layer 0.
    target, prompt = lively_target(), random_prompt(11)
    plain = generate(target, prompt)
    draft = scripted_draft(target, plain, target_layer_ids=[-1, 1])
    assert torch.equal(generate(target, prompt, draft), plain)
    assert torch.equal(draft.contexts[0][..., :32], target.get_input_embeddings()(prompt))


# A selection names hidden states since transformers 5.23; before, it named layers, and some models kept them all.
CAN_SELECT_HIDDEN_STATES = hasattr(output_capturing, "resolve_hidden_states_indices")


def test_only_the_layers_that_are_read_are_kept():
    target, prompt = lively_target(), random_prompt(11)
    draft = scripted_draft(target, generate(target, prompt))
    generate(target, prompt, draft)  # the target is probed here
    kept = []
    handle = target.register_forward_hook(lambda module, args, outputs: kept.append(outputs.hidden_states))
    generate(target, prompt, draft)
    handle.remove()
    expected = [1, 3] if CAN_SELECT_HIDDEN_STATES else [0, 1, 2, 3, 4]
    for hidden_states in kept:
        assert [i for i, states in enumerate(hidden_states) if states is not None] == expected


def test_token_types():
    # GPT-2 adds an embedding of each token's type; a new token gets the type of the last one.
    target, prompt = build("gpt2"), random_prompt(11)
    token_types = torch.tensor([[5] * 6 + [9] * 5])
    plain = generate(target, prompt, token_type_ids=token_types)
    assert not torch.equal(plain, generate(target, prompt))
    draft = scripted_draft(target, plain)
    with dspark_hf.collect_rounds() as stats:
        text = generate(target, prompt, draft, token_type_ids=token_types)
    assert torch.equal(text, plain)
    assert num_accepted(stats) == expected_accepted(11, NUM_NEW)


def test_shared_keys_and_values():
    # Gemma 4: the last layers read the keys and values of earlier ones.
    torch.manual_seed(0)
    extra = {"head_dim": 8, "global_head_dim": 8, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}
    config = transformers.Gemma4TextConfig(**(SIZES | ALTERNATING | extra | {"vocab_size_per_layer_input": 97}))
    target = transformers.Gemma4ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
    target.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
    prompt = random_prompt(11)
    plain = generate(target, prompt)
    with dspark_hf.collect_rounds() as stats:
        text = generate(target, prompt, scripted_draft(target, plain))
    assert torch.equal(text, plain)
    assert num_accepted(stats) == expected_accepted(11, NUM_NEW)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma3"])
def test_attention_implementations(kind, implementation):
    target, prompt = lively_target(kind), random_prompt(12)
    target.set_attn_implementation(implementation)
    plain = generate(target, prompt)
    draft = scripted_draft(target, plain)
    draft.set_attn_implementation(implementation)
    with dspark_hf.collect_rounds() as stats:
        text = generate(target, prompt, draft)
    assert torch.equal(text, plain)
    assert num_accepted(stats) == expected_accepted(12, NUM_NEW)


RECURRENT = {
    "Qwen3NextForCausalLM": ("Qwen3NextConfig", {"head_dim": 8}),
    "Mamba2ForCausalLM": ("Mamba2Config", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1}),
    "MambaForCausalLM": ("MambaConfig", {"state_size": 8}),
    "FalconH1ForCausalLM": ("FalconH1Config", {}),
    "RecurrentGemmaForCausalLM": ("RecurrentGemmaConfig", {}),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_targets_are_refused_by_name(name):
    config_name, extra = RECURRENT[name]
    target = getattr(transformers, name)(getattr(transformers, config_name)(**(SIZES | extra))).eval()
    target.generation_config.eos_token_id = None
    draft, spy = dspark_hf.DSparkDraftModel(draft_config_for(target)), StreamerSpy()
    with ForwardCounter(target) as forwards, pytest.raises(NotImplementedError, match=f"{name}.* plain generation"):
        generate(target, random_prompt(11), draft, streamer=spy)
    assert forwards.num_prompts == 0
    assert spy.puts == []


def test_a_target_with_a_cache_of_its_own_kind_is_refused_by_name():
    # MiniMax mixes linear attention in and makes its cache itself: the user did not switch any cache off.
    config = transformers.MiniMaxConfig(**(SIZES | {"block_size": 8, "head_dim": 8, "num_local_experts": 2}))
    target = transformers.MiniMaxForCausalLM(config).eval()
    target.generation_config.eos_token_id = None
    draft, spy = dspark_hf.DSparkDraftModel(draft_config_for(target)), StreamerSpy()
    with (
        ForwardCounter(target) as forwards,
        pytest.raises((NotImplementedError, ValueError), match="MiniMaxForCausalLM"),
    ):
        generate(target, random_prompt(11), draft, streamer=spy)
    assert forwards.num_prompts == 0


def test_a_target_whose_hidden_states_are_stacked_is_refused_by_name():
    # Gemma 3n carries several streams through its layers: its hidden states have four dimensions.
    extra = {"head_dim": 8, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8, "laurel_rank": 4}
    extra |= {"num_kv_shared_layers": 2, "altup_num_inputs": 2, "activation_sparsity_pattern": None}
    target = transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**(SIZES | ALTERNATING | extra))).eval()
    target.generation_config.eos_token_id = None
    draft, spy = dspark_hf.DSparkDraftModel(draft_config_for(target)), StreamerSpy()
    with pytest.raises((NotImplementedError, ValueError), match=r"Gemma3nForCausalLM|hidden states .* dimensions"):
        generate(target, random_prompt(11), draft, streamer=spy)
    assert len(spy.puts) <= 1
