# SPDX-License-Identifier: Apache-2.0
"""DeepSpec's layout for Gemma 4 targets (`Gemma4DSparkModel`): a flat copy of the target's text config.

The draft's layers are like the target's full-attention layers, with their own head width and number of key-value
heads. The embedding's scale and the soft cap of the logits are read from the target, not from here.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ..configuration_dspark import DSparkConfig
from .deepspec import draft_fields, written_draft_fields
from .fields import OPTIONAL_STACK_FIELDS, REQUIRED_STACK_FIELDS, ConfigFile, first_class


# Parts of Gemma 4 that no DeepSpec draft has.
_OTHER_PARTS = ("enable_moe_block", "hidden_size_per_layer_input", "num_kv_shared_layers")
_RENAMED = {"hidden_act", "head_dim", "num_key_value_heads"}


def matches(config: dict[str, Any]) -> bool:
    """Whether a config.json is of this format."""
    return first_class(config) == "Gemma4DSparkModel"


def to_config(file: ConfigFile) -> DSparkConfig:
    """Translate a config.json of this format."""
    for name in _OTHER_PARTS:
        if file.fields.get(name):
            raise NotImplementedError(
                f"{file.source} is a Gemma 4 draft with `{name}` {file.fields[name]}, which this package does not "
                "run. Serve it with vLLM or SGLang."
            )
    fields = {name: value for name, value in file.stack_fields().items() if name not in _RENAMED}
    file.require("layer_types")  # transformers' default for Gemma 4 is another
    k_eq_v = file.require("attention_k_eq_v")
    head_dim, num_key_value_heads = _full_attention_heads(file, k_eq_v)
    rope = file.part("rope_parameters").part("full_attention")
    factor = rope.require("partial_rotary_factor") if rope.require("rope_type") == "proportional" else 1.0
    if type(rope.require("rope_theta")) not in (int, float) or type(factor) not in (int, float) or not 0 < factor <= 1:
        raise ValueError(
            "`rope_parameters` of full-attention layers must have numbers as `rope_theta` and "
            f"`partial_rotary_factor`, the latter in (0, 1], got {rope.fields} in {file.source}."
        )
    return DSparkConfig(
        **fields,
        **draft_fields(file),
        layer_kind="gemma4",
        attention_k_eq_v=k_eq_v,
        hidden_act=file.require("hidden_activation"),
        head_dim=head_dim,
        num_key_value_heads=num_key_value_heads,
        rope_parameters=rope.fields,
    )


def from_config(config: DSparkConfig, target_config: PreTrainedConfig) -> dict[str, Any]:
    """Write a configuration in this format."""
    if target_config.model_type != "gemma4_text":
        raise ValueError(
            f"A draft with `layer_kind` 'gemma4' is written for a Gemma 4 target, got {target_config.model_type!r}."
        )
    fields = target_config.to_dict()
    for name in ("per_layer_config", "_name_or_path"):
        fields.pop(name, None)
    names = (*REQUIRED_STACK_FIELDS, *OPTIONAL_STACK_FIELDS)
    fields |= {name: getattr(config, name) for name in names if name not in _RENAMED and name != "dtype"}
    rope = {name: value for name, value in (fields.get("rope_parameters") or {}).items() if isinstance(value, dict)}
    return fields | {
        "architectures": ["Gemma4DSparkModel"],
        "target_model_type": "gemma4",
        "target_text_model_type": target_config.model_type,
        "hidden_activation": config.hidden_act,
        "attention_k_eq_v": config.attention_k_eq_v,
        "global_head_dim": config.head_dim,
        "num_key_value_heads": config.num_key_value_heads,
        "num_global_key_value_heads": config.num_key_value_heads,
        "rope_parameters": rope | {"full_attention": config.rope_parameters},
        "tie_word_embeddings": False,
        **written_draft_fields(config),
    }


def _full_attention_heads(file: ConfigFile, k_eq_v: bool) -> tuple[int, int]:
    """Width and number of the key-value heads of full-attention layers."""
    per_layer = file.fields.get("per_layer_config")  # transformers >= 5.19 writes this instead of the two fields
    if per_layer and file.fields.get("global_head_dim") is None:
        layers = list(per_layer.values()) if isinstance(per_layer, dict) else []
        if len(layers) != file.require("num_hidden_layers") or any(layer != layers[0] for layer in layers):
            raise ValueError(
                f"`per_layer_config` must give every layer of a draft the same heads, got {per_layer} in "
                f"{file.source}."
            )
        own = ConfigFile(layers[0], file.source)
        heads = own.fields.get("num_key_value_heads")
        return own.require("head_dim"), file.require("num_key_value_heads") if heads is None else heads
    # The separate number of heads applies only if keys serve as values.
    heads = file.fields.get("num_global_key_value_heads") if k_eq_v else None
    return file.require("global_head_dim"), file.require("num_key_value_heads") if heads is None else heads
