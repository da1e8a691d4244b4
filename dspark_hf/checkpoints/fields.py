# SPDX-License-Identifier: Apache-2.0
"""Field handling shared by the readers."""

from __future__ import annotations

from typing import Any


# Fields of a Qwen3-style layer stack that mean the same in every format.
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_OPTIONAL = (
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "attention_bias",
    "attention_dropout",
    "layer_types",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
)
# 5.x writes `rope_parameters`, 4.x wrote the other two; DSparkConfig normalises them.
_ROPE = ("rope_parameters", "rope_theta", "rope_scaling")


def require(config: dict[str, Any], name: str, source: str) -> Any:
    """A field that must be there.

    Args:
        config (`dict[str, Any]`): Contents of config.json, or a part of it.
        name (`str`): Field.
        source (`str`): Where the config came from.

    Returns:
        The value, never `None`.

    Raises:
        ValueError: If it is missing or null.
    """
    value = config.get(name)
    if value is None:
        raise ValueError(
            f"The draft config of {source} must set `{name}`, but it is missing. It cannot be guessed; set it to the "
            "value the draft was trained with."
        )
    return value


def layer_stack_fields(config: dict[str, Any], source: str) -> dict[str, Any]:
    """The fields of the draft's layer stack.

    Args:
        config (`dict[str, Any]`): A Qwen3-style config.
        source (`str`): Where it came from.

    Returns:
        `dict[str, Any]`: Keyword arguments of [`DSparkConfig`].

    Raises:
        ValueError: If a size, or the RoPE base in either schema, is missing.
    """
    fields = {name: require(config, name, source) for name in _REQUIRED}
    fields |= {name: config[name] for name in _OPTIONAL if config.get(name) is not None}
    rope = {name: config[name] for name in _ROPE if config.get(name) is not None}
    if "rope_theta" not in rope and "rope_parameters" not in rope:
        require(config, "rope_parameters", source)
    # Sliding layers count only where the stack says so, as in transformers' Qwen3Config.
    if "sliding_attention" in fields.get("layer_types", ()):
        fields["sliding_window"] = require(config, "sliding_window", source)
    return fields | rope
