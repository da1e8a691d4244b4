# SPDX-License-Identifier: Apache-2.0
"""A tiny random model of every architecture that transformers has, made by rules about the fields of configs.

A config's defaults say what the architecture is made of; the rules below only make the sizes small: by the field's
name, by a list's length, by a token id's range. `EXCEPTIONS` holds what no rule covers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from tests.support.models import random_prompt


CAUSAL_LM, IMAGE_TEXT = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"
VOCAB_SIZE = 97
NUM_LAYERS = 4
WINDOW = 8
# The prompt that every model is asked to say something about: longer than the windows.
PROMPT = random_prompt(20, seed=5)

# Weights are tried in these sizes until a text has so many different tokens: models with norms after the residual
# repeat themselves in most of them.
NUM_DISTINCT = 8
_SCALES = (0.3, 0.4, 0.5, 0.2, 0.15, 0.1, 0.05, 1.0, 2.0)

# Sizes, and the names they go by. A name that a config does not have, or has as 0, is left alone.
_SIZES: tuple[tuple[int, str], ...] = (
    (VOCAB_SIZE, "vocab_size decoder_vocab_size unpadded_vocab_size vocab_size_per_layer_input"),
    (512, "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length"),
    (512, "original_max_position_embeddings max_target_positions"),
    # Layers
    (NUM_LAYERS, "num_hidden_layers n_layer n_layers num_layers num_blocks decoder_layers encoder_layers"),
    (NUM_LAYERS, "num_decoder_layers num_encoder_layers"),
    (2, "num_kv_shared_layers attn_layer_period expert_layer_period n_recurrent_loops"),
    (1, "attn_layer_offset expert_layer_offset n_input_layers n_output_layers num_nextn_predict_layers"),
    # Widths
    (32, "hidden_size d_model n_embd embedding_dim word_embed_proj_dim embedding_size input_embedding_size"),
    (
        32,
        "output_embedding_size pronunciation_embed_dim shape_embed_dim lru_width dim_model_base backbone_hidden_size",
    ),
    (
        64,
        "intermediate_size ffn_dim ffn_hidden_size decoder_ffn_dim encoder_ffn_dim n_inner dim_ff dff d_inner emb_dim",
    ),
    (64, "dense_intermediate_size intermediate_size_mlp attention_hidden_size feed_forward_size mamba_d_ssm"),
    (48, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size"),
    (48, "shared_experts_intermediate_size moe_shared_expert_intermediate_size"),
    (16, "kv_lora_rank q_lora_rank o_lora_rank router_hidden_size loop_gate_rank hc_lowrank"),
    (8, "d_rel hidden_size_per_layer_input laurel_rank adapter_rank"),
    (4, "o_groups hc_mult gated_norm_rank"),
    # Heads. The scores of an indexer are sums over heads of what is above 0: with many of them no two are 0.
    (
        4,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads",
    ),
    (4, "num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads"),
    (2, "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads num_query_groups"),
    (8, "head_dim d_head dim_head kv_channels attention_head_size swa_head_dim rotary_dim"),
    (8, "qk_rope_head_dim qk_nope_head_dim v_head_dim index_head_dim"),
    (16, "qk_head_dim attention_head_dim index_n_heads"),
    # Experts
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k zero_expert_num"),
    (1, "n_group topk_group num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts"),
    (1, "first_k_dense_replace num_dense_layers moe_layer_start_index"),
    # Recurrent layers
    (4, "linear_num_heads linear_num_value_heads mamba_n_heads mamba_num_heads n_mamba_heads"),
    (2, "linear_num_key_heads mamba_n_groups n_groups mamba_ngroups"),
    (8, "linear_head_dim linear_key_head_dim linear_value_head_dim state_size mamba_d_state ssm_state_size"),
    (8, "time_step_rank mamba_dt_rank chunk_size mamba_chunk_size"),
    (16, "mamba_d_head mamba_head_dim mamba_headdim"),
    # Reaches: all shorter than a prompt
    (WINDOW, "sliding_window sliding_window_size window_size local_attention attention_window_size"),
    (WINDOW, "attention_chunk_size index_topk index_block_size keep_window_size rel_extent"),
    (2, "index_topk_blocks"),
)
_SIZE_OF = {name: size for size, names in _SIZES for name in names.split()}

# What a model does only when it is told to.
_SWITCHES: dict[str, Any] = {
    "is_decoder": True,
    "use_sliding_window": True,
    "tie_word_embeddings": False,  # a tied random model repeats its last token
    "max_window_layers": 2,
}
_SPECIAL_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

_INDEXER = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
_SLIDING_HEADS = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
}
# Model type -> fields that no rule gives, and why.
EXCEPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "bamba": ({"attn_layer_indices": [1, 3]}, "its defaults name no attention layer"),
    "granitemoehybrid": (
        {"layer_types": ["linear_attention", "full_attention"] * 2},
        "its defaults name no attention layer",
    ),
    "lfm2_moe": ({"layer_types": ["conv", "full_attention"] * 2}, "its defaults name no layer"),
    "lfm2": ({"layer_types": ["conv", "full_attention"] * 2}, "its defaults name no convolution"),
    "mamba2": ({"head_dim": 16}, "heads must fill twice the hidden size"),
    "rwkv": ({"attention_hidden_size": 32}, "as wide as the hidden size"),
    "xmod": ({"default_language": "en_XX"}, "its text is in a language"),
    "zaya": ({"num_experts_per_tok": 1}, "allows one only"),
    "dory": ({"n_recurrent_layers": 2}, "layers before, in and after the loop are all layers"),
    "cohere_compass_text": (
        {
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
                for kind in ("sliding_attention", "full_attention")
            }
        },
        "its defaults name no rotation",
    ),
    "dbrx": (
        {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
        "its attention reads fields it lacks",
    ),
    "inkling2_loop_text": (
        {"n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 3},
        "the loop lies within its layers",
    ),
    "dots3_note_text": (_SLIDING_HEADS, "its windowed layers have sizes of their own"),
    "qwen4_exp_text": (_INDEXER, "its defaults have no indexer"),
    "xlstm": ({"hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0}, "its sizes are rounded up to 64"),
    "minimax_m3_vl_text": (
        {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_n_heads": 2},
        "its defaults name no sparse layer",
    ),
    "reformer": (
        {"axial_pos_shape": [16, 32], "axial_pos_embds_dim": [8, 24]},
        "its positions are a product of two tables",
    ),
}


_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 32,
}
# What a config can ask for beside its defaults: name -> model type and fields. Texts of the sweep have 44 tokens.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, frequencies that grow with the text": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
            "max_position_embeddings": 32,
        },
    ),
    "llama, frequencies of long texts": ("llama", {"rope_parameters": _LONGROPE, "max_position_embeddings": 128}),
    "phi3, frequencies of long texts": (
        "phi3",
        {"rope_parameters": _LONGROPE, "max_position_embeddings": 128, "original_max_position_embeddings": 32},
    ),
    "granitemoehybrid, attention only": ("granitemoehybrid", {"layer_types": ["full_attention"] * NUM_LAYERS}),
    "gpt2, positions end with the text": ("gpt2", {"n_positions": 44}),
    "opt, positions end with the text": ("opt", {"max_position_embeddings": 44}),
    "bart, positions end with the text": ("bart", {"max_position_embeddings": 44}),
    "llama4_text, scores that grow with the text": ("llama4_text", {"floor_scale": 8, "attn_scale": 0.5}),
}


def model_types(mapping: str = CAUSAL_LM) -> dict[str, str]:
    """Model type -> name of its class, as the installed transformers has them."""
    return dict(getattr(modeling_auto, mapping))


def shrink(config_class: type[PreTrainedConfig], variant: dict[str, Any] | None = None) -> PreTrainedConfig:
    """The config of a tiny model, from the defaults of a config class; `variant` overrides fields."""
    default = config_class()
    fields = default.to_dict()
    num_layers = getattr(default, "num_hidden_layers", None)
    tiny = {name: _tiny_value(name, value, num_layers) for name, value in fields.items()}
    tiny = {name: value for name, value in tiny.items() if value is not None}
    if "sliding_window" in tiny and set(tiny.get("layer_types", ())) == {"full_attention"}:
        tiny["layer_types"] = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
    if "kv_lora_rank" in tiny and "num_key_value_heads" in tiny:
        tiny["num_key_value_heads"] = tiny["num_attention_heads"]  # latent attention expands to all heads
    tiny |= {name: value for name, value in (_SWITCHES | _SPECIAL_IDS).items() if name in fields}
    for name in getattr(default, "sub_configs", {}):
        part = getattr(default, name, None)
        if isinstance(part, PreTrainedConfig):
            tiny[name] = shrink(type(part))
    extra, _ = EXCEPTIONS.get(config_class.model_type, ({}, ""))
    return config_class(**(tiny | extra | (variant or {})))


def _tiny_value(name: str, value: Any, num_layers: int | None) -> Any:
    """A field's value in the tiny config; None for the default."""
    if name in _SIZE_OF and (value is None or value == "auto" or type(value) is int and value > 0):
        return _SIZE_OF[name]
    if type(value) is int and name.endswith(("_token_id", "_token_index")) and value >= VOCAB_SIZE:
        return VOCAB_SIZE - 2
    if isinstance(value, (list, tuple)) and value:
        if name.endswith("token_id"):
            return VOCAB_SIZE - 2
        if all(type(item) is int for item in value) and list(value) == sorted(set(value)):  # numbers of layers
            return [item for item in value if item < NUM_LAYERS] or [1, 3]
        if len(value) == num_layers:  # a value for each layer
            values = [_tiny_value(name, item, None) or item for item in _distinct(value)]
            return (values * NUM_LAYERS)[:NUM_LAYERS]
    return None


def _distinct(values: Sequence[Any]) -> list[Any]:
    return [value for i, value in enumerate(values) if value not in values[:i]]


def build(name: str) -> PreTrainedModel:
    """A tiny fp32 model of a model type or variant; its weights are large enough to make its text vary."""
    model_type, variant = VARIANTS.get(name, (name, {}))
    class_name = (model_types(IMAGE_TEXT) | model_types())[model_type]
    model_class, config_class = getattr(transformers, class_name), CONFIG_MAPPING[model_type]
    if config_class.sub_configs and model_class.config_class is not None:
        config_class = model_class.config_class  # of the text model alone, where the class is that
    torch.manual_seed(0)
    model = model_class(shrink(config_class, variant)).eval()
    texts = {}
    for scale in _SCALES:
        _fill(model, scale)
        texts[scale] = len(set(_text(model)))
        if texts[scale] >= NUM_DISTINCT:
            return model
    _fill(model, max(texts, key=texts.get))
    return model


@torch.no_grad()
def _fill(model: PreTrainedModel, scale: float) -> None:
    """Random weights of a known seed."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, scale)
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)


def _text(model: PreTrainedModel) -> list[int]:
    return model.generate(PROMPT, do_sample=False, max_new_tokens=24)[0, 20:].tolist()
