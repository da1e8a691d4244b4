# SPDX-License-Identifier: Apache-2.0
"""The layout of z-lab, SpecForge and NVIDIA's Model Optimizer: a Qwen3 config with a `dflash_config` inside.

z-lab's own drafts have no heads, and their slot 0 repeats the anchor. `projector_type: dspark` adds the heads; such
files do not say what slot 0 predicts unless they set `sample_from_anchor` or `shift_label`. Nothing of the target is
stored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers.utils import logging

from ..configuration_dspark import DSparkConfig
from .fields import ConfigFile, layer_stack_fields


logger = logging.get_logger("transformers.dspark_hf.drafts.formats.dflash")

_PARTS = ("dflash_config", "dflash_architecture_config")
# Fields of drafts with parts that this package does not support.
_OTHER_PARTS = ("conv_kernel_size", "selector_top_k", "attention_sink_bias", "use_swa", "gru_hidden_dim")


def matches(config: dict[str, Any]) -> bool:
    """Whether a config.json is of this format."""
    return any(name in config for name in _PARTS)


def to_config(file: ConfigFile) -> DSparkConfig:
    """Translate a config.json of this format."""
    file = _flattened(file)
    _refuse_other_parts(file)
    fields = layer_stack_fields(file)
    if "sliding_window" in fields:
        # Readers of these files disagree: z-lab's code attends in both directions, vLLM's only backwards.
        causal = file.fields.get("causal")
        fields["sliding_window_non_causal"] = (
            file.require("sliding_window_non_causal") if causal is None else not causal
        )
    if _has_heads(file):
        fields |= {"sample_from_anchor": file.require("sample_from_anchor", _slot_key(file)), **_head_fields(file)}
    else:
        fields |= {"sample_from_anchor": file.get(_slot_key(file) or "sample_from_anchor", False)}
        fields |= {"markov_rank": 0, "enable_confidence_head": False}
    return DSparkConfig(
        **fields,
        **file.block_fields(),
        target_layer_ids=_with_spread_layer_ids(file).require_layer_ids(),
    )


def _with_spread_layer_ids(file: ConfigFile) -> ConfigFile:
    """If a draft without heads names no layers, z-lab's own code reads one for each draft layer, spread evenly."""
    num_target_layers, num_layers = file.fields.get("num_target_layers"), file.require("num_hidden_layers")
    if _has_heads(file) or file.get("target_layer_ids") is not None or type(num_target_layers) is not int:
        return file
    ids = _spread(num_target_layers, num_layers)
    logger.warning(
        f"The draft config of {file.source} has no `target_layer_ids`, and z-lab's formula for {num_layers} draft and "
        f"{num_target_layers} target layers gives {ids}. If drafts are hardly accepted, pass `target_layer_ids=...` "
        "to `from_pretrained`, or set them in config.json, as the draft was trained."
    )
    return replace(file, fields=file.fields | {"target_layer_ids": ids})


def _spread(num_target_layers: int, num_layers: int) -> list[int]:
    """From the second layer to the third last, halves rounded to even; a single draft layer reads the middle one."""
    if num_layers == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    return [round(1 + i * span / (num_layers - 1)) for i in range(num_layers)]


def _flattened(file: ConfigFile) -> ConfigFile:
    """The nested part lifted to the top; converters have lifted some of its fields already."""
    fields = {name: value for name, value in file.fields.items() if name not in _PARTS}
    for part in (file.part(name) for name in _PARTS if name in file.fields):
        for name, value in part.fields.items():
            if value is not None and fields.get(name) not in (None, value):
                raise ValueError(
                    f"`{name}` is {fields[name]!r} at one place of the draft config of {file.source} and {value!r} at "
                    "another. Keep the one the draft was trained with."
                )
            fields[name] = value if fields.get(name) is None else fields[name]
    return ConfigFile(fields, file.source, file.stated)


def _refuse_other_parts(file: ConfigFile) -> None:
    kind = file.fields.get("projector_type")
    found = [name for name in _OTHER_PARTS if file.fields.get(name)]
    if kind not in (None, "dflash", "dspark") or file.fields.get("attention_mode") not in (None, "gqa") or found:
        raise NotImplementedError(
            f"{file.source} is a draft of another kind in the layout of z-lab and SpecForge (`projector_type` "
            f"{kind!r}, `attention_mode` {file.fields.get('attention_mode')!r}, {', '.join(found) or 'no other marks'}"
            "): only 'dflash' and 'dspark' with grouped-query attention run here. Serve it with SGLang or vLLM."
        )
    full = "full_attention" in (file.fields.get("layer_types") or ["full_attention"])
    causal = [name for name in ("causal", "causal_head", "is_causal") if file.fields.get(name)]
    if causal and (full or causal != ["causal"]):
        raise NotImplementedError(
            f"{file.source} is a draft whose slots see only those before them (`{causal[0]}`), but full-attention "
            "layers look both ways here. Serve it with vLLM."
        )


def _has_heads(file: ConfigFile) -> bool:
    return file.fields.get("projector_type") == "dspark" or bool(file.get("markov_rank"))


def _slot_key(file: ConfigFile) -> str | None:
    """Model Optimizer's name of the slot convention."""
    return "shift_label" if file.fields.get("sample_from_anchor") is None and "shift_label" in file.fields else None


def _head_fields(file: ConfigFile) -> dict[str, Any]:
    """The heads; Model Optimizer calls one field by another name."""
    fields = dict(file.fields)
    if fields.get("enable_confidence_head") is None:
        fields["enable_confidence_head"] = fields.get("use_confidence_head")
    return ConfigFile(fields, file.source, file.stated).head_fields()
