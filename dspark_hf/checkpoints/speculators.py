# SPDX-License-Identifier: Apache-2.0
"""The layout of the speculators package (`speculators_model_type: dspark`): layer stack and heads in a nested config.

Layer ids count hidden states (id 0 is the embedding output), one more than ours. The LM head is stored only with a
reduced vocabulary, with `d2t` as offsets and the redundant membership mask `t2d`.
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
    return config.get("speculators_model_type") == "dspark"


def to_config(config: dict[str, Any], source: str) -> DSparkConfig:
    """Translate a config.json of this format.

    Args:
        config (`dict[str, Any]`): Contents of config.json.
        source (`str`): Where it came from.

    Returns:
        [`DSparkConfig`]

    Raises:
        ValueError: If a field is missing or contradicts another; among them `sample_from_anchor`, whose absence stands
            for an older slot convention in some files and for the newer one in others.
    """
    fields = layer_stack_fields(require(config, "transformer_layer_config", source), source)
    if config.get("target_hidden_size") not in (None, fields["hidden_size"]):
        raise ValueError(
            f"`target_hidden_size` must equal the draft's hidden size {fields['hidden_size']}, got "
            f"{config['target_hidden_size']} in {source}: the draft shares its target's embedding."
        )
    names = ("block_size", "mask_token_id", "sample_from_anchor", "markov_rank", "enable_confidence_head")
    fields |= {name: require(config, name, source) for name in names}
    if fields["markov_rank"]:
        fields["markov_head_type"] = require(config, "markov_head_type", source)
    if fields["enable_confidence_head"]:
        fields["confidence_head_with_markov"] = require(config, "confidence_head_with_markov", source)
    fields.setdefault("dtype", config.get("dtype"))
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    return DSparkConfig(
        **fields,
        target_layer_ids=[i - 1 for i in require(config, "aux_hidden_state_layer_ids", source)],
        draft_vocab_size=require(config, "draft_vocab_size", source),
        sliding_window_non_causal=bool(config.get("sliding_window_non_causal", False)),
        target_name_or_path=verifier.get("name_or_path"),
    )
