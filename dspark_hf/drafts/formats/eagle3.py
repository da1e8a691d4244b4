# SPDX-License-Identifier: Apache-2.0
"""Layouts of Eagle3 drafts: this package's and DeepSpec's (`deepseek-ai/eagle3_qwen3_*`), with the same tensor names.

DeepSpec writes a flat copy of the target's config, and stores the target's frozen embedding and LM head beside the
draft; they are not needed.
"""

from __future__ import annotations

from typing import Any

from ..configuration_eagle3 import Eagle3Config
from .fields import ConfigFile, first_class, layer_stack_fields


MODEL_TYPE = Eagle3Config.model_type
_DEEPSPEC_CLASS = "Qwen3Eagle3Model"
# Class names of other projects' Eagle3 drafts, and of DeepSpec's for another kind of layer.
_OTHER_CLASSES = ("LlamaForCausalLMEagle3", "Gemma4Eagle3Model")


def matches(config: dict[str, Any]) -> bool:
    """Whether a config.json is of one of these layouts."""
    return config.get("model_type") == MODEL_TYPE or first_class(config) == _DEEPSPEC_CLASS


def to_fields(file: ConfigFile) -> dict[str, Any]:
    """Translate a config.json of one of these layouts."""
    config, source = file.fields, file.source
    if not matches(config):
        raise _refuse(file)
    if config.get("model_type") == MODEL_TYPE:
        return {**config, "target_layer_ids": file.require("target_layer_ids")}
    fields = layer_stack_fields(file)
    if "sliding_attention" in (fields.pop("layer_types", None) or ()):
        raise NotImplementedError(
            f"{source} is an Eagle3 draft with a sliding window, but only full attention runs here. Serve it with "
            "the engine it was trained for."
        )
    if file.get("draft_num_hidden_layers", 1) != fields["num_hidden_layers"]:
        raise ValueError(
            f"`draft_num_hidden_layers` is {file.fields['draft_num_hidden_layers']!r} and `num_hidden_layers` is "
            f"{fields['num_hidden_layers']!r} in {source}. Keep the number of layers that the weights have."
        )
    return fields | {
        "ttt_length": file.require("ttt_length"),
        "target_layer_ids": file.require_layer_ids(),
        "num_target_layers": file.get("num_target_layers"),
        "target_name_or_path": file.get("target_name_or_path", file.get("target_model_name_or_path")),
        "training_info": file.get("training_info"),
    }


def _refuse(file: ConfigFile) -> Exception:
    name, kind = first_class(file.fields), file.fields.get("speculators_model_type")
    if name in _OTHER_CLASSES or kind == "eagle3":
        return NotImplementedError(
            f"{file.source} is an Eagle3 draft of another layout (class {name!r}, `speculators_model_type` {kind!r}); "
            f"only DeepSpec's {_DEEPSPEC_CLASS} is supported. Serve it with vLLM or SGLang."
        )
    return ValueError(
        f"{file.source} is not an Eagle3 draft: its config.json has architectures "
        f"{list(file.fields.get('architectures') or [])} and model_type {file.fields.get('model_type')!r}. Pass a "
        f"draft whose config.json names the class {_DEEPSPEC_CLASS} or the model type {MODEL_TYPE!r}."
    )
