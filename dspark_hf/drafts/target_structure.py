# SPDX-License-Identifier: Apache-2.0
"""Reads how a target is built: the geometry of its layers, under any field name, and its backbone module.

Configs name the same width differently, and some have different values per layer. Nothing here depends on model names,
only on fields and modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel


_NAMES = {
    "num_attention_heads": ("num_attention_heads", "num_heads", "n_head", "n_heads", "attention_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "kv_n_heads"),
    "head_dim": ("head_dim", "dim_head", "attention_head_dim"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "inner_dim"),
    "norm_epsilon": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps", "eps"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions"),
}
# Sections of a config that hold the fields of one part of a layer.
_SECTIONS = ("attn_config", "ffn_config")
# What stands before the name of a field that holds for layers of one type only.
_PREFIXES = {"sliding_attention": "swa_", "full_attention": "global_"}


@dataclass(frozen=True)
class LayerGeometry:
    """The shape of one layer of a target."""

    layer_type: str  # `"full_attention"`, `"sliding_attention"`, or another word of the config
    num_attention_heads: int  # query heads
    num_key_value_heads: int
    head_dim: int  # width of a head
    intermediate_size: int  # width of the MLP; of experts, those that one token passes through together


def layers_of(text_config: PreTrainedConfig) -> tuple[LayerGeometry, ...]:
    """The shape of every layer of a target."""
    depth = getattr(text_config, "num_hidden_layers", None)
    if not isinstance(depth, int) or depth < 1:
        raise ValueError(
            f"A target's config must tell its number of layers, got {depth!r} as `num_hidden_layers` of "
            f"{type(text_config).__name__}. DSpark needs a decoder-only language model of transformer layers."
        )
    types = getattr(text_config, "layer_types", None) or ["full_attention"] * depth
    return tuple(_layer(text_config, index, layer_type) for index, layer_type in enumerate(types[:depth]))


def full_attention_layer(text_config: PreTrainedConfig) -> LayerGeometry:
    """The shape of a target's last full-attention layer, which a new draft copies."""
    layers = layers_of(text_config)
    full = [layer for layer in layers if layer.layer_type == "full_attention"]
    others = [layer for layer in layers if "sliding" not in layer.layer_type]
    return (full or others or layers)[-1]


def norm_epsilon(text_config: PreTrainedConfig) -> float | None:  # None if the config names none
    """The epsilon of a target's norms."""
    return _field(text_config, "norm_epsilon")


def longest_position(text_config: PreTrainedConfig) -> int | None:
    """The longest text that a target supports; the length of its training texts alone (`seq_length`) is no limit."""
    value = _field(text_config, "max_position_embeddings")
    return value if isinstance(value, int) and value > 0 else None


def full_attention_rope(text_config: PreTrainedConfig) -> dict[str, Any] | None:  # None if the config has none
    """The RoPE of a target's full-attention layers, for layers that rotate whole heads."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    nested = {name: value for name, value in rope.items() if isinstance(value, dict)}
    if nested:  # one per layer type
        layer_type = full_attention_layer(text_config).layer_type
        rope = next((nested[name] for name in ("full_attention", layer_type) if name in nested), [*nested.values()][0])
    if not rope.get("rope_theta"):
        return None
    # Sections of multimodal RoPE place image patches; a draft reads text positions.
    rope = {name: value for name, value in rope.items() if name != "mrope_section"}
    if rope.get("rope_type") == "proportional":  # which keeps its factor: it rotates whole heads, some not at all
        return rope
    if rope.pop("partial_rotary_factor", 1.0) != 1.0 and any(isinstance(value, list) for value in rope.values()):
        return {"rope_type": "default", "rope_theta": rope["rope_theta"]}  # a factor per frequency of a part of a head
    return rope


def value_over_layers(text_config: PreTrainedConfig, name: str) -> Any:  # None without one
    """A field of a config in JSON's types, also if its value differs per layer."""
    if name not in (getattr(text_config, "per_layer_attributes", None) or ()):
        value = getattr(text_config, name, None)
        if not isinstance(value, (list, tuple)):
            return value
        values: Sequence[Any] = value
    else:
        values = [getattr(config, name, None) for config in text_config.per_layer_config]
    counts = Counter(map(str, values))
    return ", ".join(f"{value} in {count} layers" for value, count in sorted(counts.items()))


def backbone_of(target: PreTrainedModel) -> PreTrainedModel:
    """The part of a target that turns token ids into the hidden states which its LM head reads.

    Calling it does not run the LM head. Adapters that are injected into its layers stay active.
    """
    return _modules_with_embedding(target)[0]


def decoder_of(target: PreTrainedModel) -> PreTrainedModel:
    """The part of a target that holds its layers: the backbone, or its language model where it also reads images."""
    return _modules_with_embedding(target)[-1]


def _modules_with_embedding(target: PreTrainedModel) -> list[PreTrainedModel]:
    """From the outermost to the innermost."""
    _refuse_prompt_learning(target)
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    found = []
    for module in target.modules():
        if isinstance(module, PreTrainedModel):
            parts = set(module.modules())
            if embedding in parts and head not in parts:
                found.append(module)
    if not found:
        raise NotImplementedError(
            f"DSpark needs the hidden states that the LM head reads, but {type(target).__name__} has no module that "
            "holds the embedding without the LM head. Use a target of the kind ...ForCausalLM."
        )
    return found


def _refuse_prompt_learning(target: PreTrainedModel) -> None:
    """Reject prompt learning: it works in the forward of the whole `PeftModel`, not in the layers."""
    adapter = getattr(target, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise NotImplementedError(
            "DSpark reads hidden states from the layers of a target, where adapters of prompt learning are not at "
            f"work, got {type(adapter).__name__}. Use an adapter inside the layers, LoRA for example."
        )


def _layer(text_config: PreTrainedConfig, index: int, layer_type: str) -> LayerGeometry:
    own = getattr(text_config, "is_heterogeneous", False)
    config = text_config.per_layer_config[index] if own else text_config
    heads = _layer_field(config, "num_attention_heads", index, layer_type)
    if not heads:
        raise ValueError(
            f"A target's config must tell its number of attention heads, got none in {type(text_config).__name__}. "
            "DSpark needs a target with attention; use plain generation for others."
        )
    # One head of keys and values for all queries, unless a later variant of the architecture groups them.
    shares_one = getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False)
    return LayerGeometry(
        layer_type=layer_type,
        num_attention_heads=heads,
        num_key_value_heads=1
        if shares_one
        else _layer_field(config, "num_key_value_heads", index, layer_type) or heads,
        head_dim=_layer_field(config, "head_dim", index, layer_type) or config.hidden_size // heads,
        intermediate_size=_layer_field(config, "intermediate_size", index, layer_type) or _other_mlp_width(config),
    )


def _other_mlp_width(config: PreTrainedConfig) -> int:
    """Width of the MLP of configs that give no dense one."""
    width = getattr(config, "moe_intermediate_size", None)
    if isinstance(width, int) and width:
        experts = getattr(config, "num_experts_per_tok", None) or 1
        return width * experts + (getattr(config, "shared_expert_intermediate_size", None) or 0)
    ratio = getattr(config, "expansion_ratio", None) or getattr(config, "intermediate_multiple_size", None) or 4
    return int(ratio * config.hidden_size)


def _layer_field(config: PreTrainedConfig, name: str, index: int, layer_type: str) -> Any:
    """A field for one layer: of its type, from a list over layers, or the one of all."""
    own = _field(config, name, _PREFIXES.get(layer_type, ""))
    if own is None:
        own = getattr(config, f"{name}_per_layer", None)
    value = own if own is not None else _field(config, name)
    return value[min(index, len(value) - 1)] if isinstance(value, (list, tuple)) else value


def _field(config: PreTrainedConfig, name: str, prefix: str = "") -> Any:
    """The first value that a config gives under any of a field's names."""
    sections = [getattr(config, section, None) for section in _SECTIONS]
    for holder in (config, *(section for section in sections if section is not None)):
        for alias in _NAMES[name]:
            value = getattr(holder, prefix + alias, None)
            if value is not None:
                return value
    return None
