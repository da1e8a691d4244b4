# SPDX-License-Identifier: Apache-2.0
"""DeepSpec's layout (`deepseek-ai/dspark_qwen3_*`, `deepseek-ai/dflash_qwen3_*`): a flat copy of the target's config.

Every slot predicts (`sample_from_anchor`), the frozen embedding and LM head of the target are stored beside the draft
and not needed, and DFlash is the same class with `markov_rank` 0 and no confidence head.
"""

from __future__ import annotations

from typing import Any

from ..configuration_dspark import DSparkConfig
from .fields import ConfigFile, draft_to_write, first_class, layer_stack_fields, stack_to_write


# DeepSpec's training setting, which its class requires when it loads.
NUM_ANCHORS = 512


def matches(config: dict[str, Any]) -> bool:
    """Whether a config.json is of this format."""
    return first_class(config) == "Qwen3DSparkModel"


def to_config(file: ConfigFile) -> DSparkConfig:
    """Translate a config.json of this format."""
    return DSparkConfig(**layer_stack_fields(file), **draft_fields(file))


def draft_fields(file: ConfigFile) -> dict[str, Any]:
    """The fields that DeepSpec adds to a copy of the target's config."""
    fields = file.block_fields() | file.head_fields()
    return fields | {"target_layer_ids": file.require_layer_ids(), "sample_from_anchor": True}


def from_config(config: DSparkConfig) -> dict[str, Any]:
    """Write a configuration in this format."""
    return stack_to_write(config) | written_draft_fields(config) | {"architectures": ["Qwen3DSparkModel"]}


def written_draft_fields(config: DSparkConfig) -> dict[str, Any]:
    """The reverse of [`draft_fields`]."""
    for is_so, what in (
        (config.draft_vocab_size is not None, "a reduced vocabulary"),
        (not config.sample_from_anchor, "slots whose first repeats the anchor (`sample_from_anchor` false)"),
        ("sliding_attention" in config.layer_types, "sliding-window layers"),
    ):
        if is_so:
            raise ValueError(
                f"DeepSpec's layout cannot represent {what}, which this draft has. Write the speculators layout "
                "instead: vLLM and llama.cpp read it."
            )
    names = ["target_layer_ids", "markov_rank", "enable_confidence_head"]
    names += ["markov_head_type"] if config.markov_rank else []
    names += ["confidence_head_with_markov"] if config.enable_confidence_head else []
    return draft_to_write(config, *names) | {"num_anchors": NUM_ANCHORS}
