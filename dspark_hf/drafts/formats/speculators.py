# SPDX-License-Identifier: Apache-2.0
"""The layout of the speculators package (`speculators_model_type`): layer stack in a nested config, heads beside it.

Layer ids count hidden states (id 0 is the embedding output), one more than ours. The LM head is stored only with a
reduced vocabulary, with `d2t` as offsets and the redundant membership mask `t2d`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..configuration_dspark import DSparkConfig
from .fields import ConfigFile, draft_to_write, layer_stack_fields, stack_to_write


# The release whose layout is written; `tests/parity/speculators_package.py` compares with it.
VERSION = "0.9.0"


def matches(config: dict[str, Any]) -> bool:
    """Whether a config.json is of this format."""
    return config.get("speculators_model_type") in ("dspark", "dflash")


def to_config(file: ConfigFile) -> DSparkConfig:
    """Translate a config.json of this format."""
    fields = layer_stack_fields(_with_one_rope(file.part("transformer_layer_config")))
    if file.fields.get("target_hidden_size") not in (None, fields["hidden_size"]):
        raise ValueError(
            f"`target_hidden_size` must equal the draft's hidden size {fields['hidden_size']}, got "
            f"{file.fields['target_hidden_size']} in {file.source}: the draft shares its target's embedding."
        )
    if file.fields["speculators_model_type"] == "dflash":
        # Files written before the field was added use the convention that is still its default.
        fields |= {"markov_rank": 0, "enable_confidence_head": False}
        fields["sample_from_anchor"] = file.get("sample_from_anchor", False)
    else:
        fields |= {"sample_from_anchor": file.require("sample_from_anchor")} | file.head_fields()
    fields.setdefault("dtype", file.fields.get("dtype"))
    return DSparkConfig(
        **fields,
        **({"target_name_or_path": _verifier_name(file)} | file.block_fields()),
        target_layer_ids=file.require_layer_ids("aux_hidden_state_layer_ids", offset=1),
        draft_vocab_size=file.require("draft_vocab_size"),
        sliding_window_non_causal=file.get("sliding_window_non_causal", False),
    )


def from_config(config: DSparkConfig, verifier_architectures: list[str]) -> dict[str, Any]:
    """Write a configuration in this format."""
    if config.layer_kind != "qwen3":
        raise ValueError(
            f"The speculators layout cannot represent layers of kind {config.layer_kind!r}. Write DeepSpec's layout "
            "instead."
        )
    has_heads = config.markov_rank > 0 or config.enable_confidence_head
    kind = "dspark" if has_heads or config.sample_from_anchor else "dflash"
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.num_draft_slots}
    proposal |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
    fields = {
        "architectures": ["DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": config.target_name_or_path, "architectures": verifier_architectures},
        },
        "transformer_layer_config": stack_to_write(config),
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
    }
    names = ["sample_from_anchor", "sliding_window_non_causal"]
    if kind == "dspark":
        names += ["markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"]
    return fields | draft_to_write(config, *names)


def membership_mask(
    draft_token_ids: torch.Tensor,  # [D]
    vocab_size: int,  # V
) -> torch.Tensor:  # [V]
    """The redundant `t2d` of a reduced vocabulary."""
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[draft_token_ids] = True
    return mask


def _with_one_rope(stack: ConfigFile) -> ConfigFile:
    """If a RoPE per layer type was copied from the target, the package uses that of sliding layers for all."""
    rope = stack.fields.get("rope_parameters")
    if isinstance(rope, dict) and isinstance(rope.get("sliding_attention"), dict):
        return replace(stack, fields=stack.fields | {"rope_parameters": rope["sliding_attention"]})
    return stack


def _verifier_name(file: ConfigFile) -> str | None:
    for name in ("speculators_config", "verifier"):
        if not isinstance(file.fields.get(name), dict):
            return None
        file = file.part(name)
    return file.fields.get("name_or_path")
