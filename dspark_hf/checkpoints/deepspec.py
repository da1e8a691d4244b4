# SPDX-License-Identifier: Apache-2.0
"""DeepSpec's layout (`deepseek-ai/dspark_qwen3_*`, `deepseek-ai/dflash_qwen3_*`): a flat copy of the target's config.

Every slot predicts (`sample_from_anchor`), the frozen embedding and LM head of the target are stored beside the draft
and not needed, and DFlash is the same class with `markov_rank` 0 and no confidence head.
"""

from __future__ import annotations

from typing import Any

from ..configuration_dspark import DSparkConfig
from .fields import layer_stack_fields, require


def matches(config: dict[str, Any]) -> bool:
    """Whether a config.json is of this format.

    Args:
        config (`dict[str, Any]`): Contents of config.json.

    Returns:
        `bool`
    """
    return (config.get("architectures") or [None])[0] == "Qwen3DSparkModel" and "dflash_config" not in config


def to_config(config: dict[str, Any], source: str) -> DSparkConfig:
    """Translate a config.json of this format.

    Args:
        config (`dict[str, Any]`): Contents of config.json.
        source (`str`): Where it came from.

    Returns:
        [`DSparkConfig`]

    Raises:
        ValueError: If a field is missing or contradicts another.
    """
    markov_rank = require(config, "markov_rank", source)
    enable_confidence_head = require(config, "enable_confidence_head", source)
    fields = layer_stack_fields(config, source)
    fields |= {name: require(config, name, source) for name in ("block_size", "mask_token_id", "target_layer_ids")}
    if markov_rank:
        fields["markov_head_type"] = require(config, "markov_head_type", source)
    if enable_confidence_head:
        fields["confidence_head_with_markov"] = require(config, "confidence_head_with_markov", source)
    return DSparkConfig(
        **fields,
        num_target_layers=config.get("num_target_layers"),
        sample_from_anchor=True,
        markov_rank=markov_rank,
        enable_confidence_head=enable_confidence_head,
    )
