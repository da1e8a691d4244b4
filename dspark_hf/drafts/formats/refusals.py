# SPDX-License-Identifier: Apache-2.0
"""The reasons why a config.json is not a loadable draft, one sentence each."""

from __future__ import annotations

from typing import Any


# A target's config describes its draft with these; they are not the config of a separate draft.
_IN_CHECKPOINT_KEYS = ("dspark_block_size", "dspark_markov_rank", "dspark_noise_token_id", "dspark_target_layer_ids")


def refuse(config: dict[str, Any], source: str) -> Exception:
    """The error for a config that no reader accepts."""
    architectures = [str(name) for name in config.get("architectures") or []]
    if any(key in config for key in _IN_CHECKPOINT_KEYS):
        return NotImplementedError(
            f"{source} carries its DSpark draft inside the target's checkpoint (DeepSeek-V4 style: MoE draft layers "
            "under `mtp.*`), which this package does not run. Serve it with vLLM or SGLang."
        )
    if "speculators_model_type" in config:
        return NotImplementedError(
            f"{source} is a speculators draft of type {config['speculators_model_type']!r}; only 'dspark' and "
            "'dflash' are supported. Serve it with vLLM."
        )
    if any(name.endswith(("DSparkModel", "Eagle3Model")) for name in architectures):
        return NotImplementedError(
            f"{source} is a DeepSpec draft of class {architectures[0]}; only Qwen3DSparkModel and Gemma4DSparkModel "
            "are supported. Serve it with vLLM or SGLang."
        )
    if {"DSparkDraftModel", "DFlashDraftModel"} & set(architectures):
        return ValueError(
            f"{source} names the class {architectures[0]}, which several projects use, but has none of the fields "
            "that tell which one wrote it (`model_type: dspark_draft`, `speculators_model_type`, `dflash_config`)."
        )
    return ValueError(
        f"{source} is not a DSpark draft: its config.json has architectures {architectures} and model_type "
        f"{config.get('model_type')!r}. Pass a draft made for your target (a plain smaller model is passed to "
        "`generate(assistant_model=...)` through AutoModelForCausalLM instead)."
    )
