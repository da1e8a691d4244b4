# SPDX-License-Identifier: Apache-2.0
"""Field access shared by the readers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ..configuration_dspark import DSparkConfig


# Fields that published files have left open; `from_pretrained` takes them as arguments.
OPEN_FIELDS = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "sample_from_anchor",
    "sliding_window_non_causal",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
# Our fields that no other format has, stored under their own names: other readers ignore them.
KEPT_FIELDS = (
    "num_target_layers",
    "target_name_or_path",
    "training_info",
    "confidence_temperatures",
    "acceptance_prior",
    "copy_prior",
    "calibration_info",
)
# Fields of a Qwen3-style layer stack that mean the same in every format.
REQUIRED_STACK_FIELDS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
OPTIONAL_STACK_FIELDS = (
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


@dataclass(frozen=True)
class ConfigFile:
    """A config.json to translate."""

    fields: dict[str, Any]  # its contents, or a part of them
    source: str  # where it came from, for messages
    stated: dict[str, Any] = field(default_factory=dict)  # values of `OPEN_FIELDS` that the caller gives

    def get(self, name: str, default: Any = None) -> Any:
        """A field that may be missing."""
        value = self.fields.get(name)
        value = self.stated.get(name) if value is None else value
        return default if value is None else value

    def require(self, name: str, key: str | None = None) -> Any:  # its value, never None
        """A field that must be there."""
        value = self.fields.get(key or name)
        value = self.stated.get(name) if value is None else value
        if value is None:
            remedy = "set it to the value the draft was trained with."
            if name in OPEN_FIELDS:
                remedy = (
                    f"pass `{name}=...` to `from_pretrained`, or set it in config.json, to the value the draft was "
                    "trained with. `dspark-hf doctor` shows how many drafts the target accepts with it."
                )
            raise ValueError(
                f"The draft config of {self.source} must set `{key or name}`, but it is missing. It cannot be "
                f"guessed; {remedy}"
            )
        return value

    def part(self, name: str) -> ConfigFile:
        """A nested part."""
        fields = self.require(name)
        if not isinstance(fields, dict):
            raise ValueError(f"`{name}` must be a dictionary, got {fields!r} in {self.source}.")
        return replace(self, fields=fields)

    def require_layer_ids(self, key: str = "target_layer_ids", offset: int = 0) -> list[int]:
        """The target layers that the draft reads."""
        stated_by_file = self.fields.get(key) is not None
        ids = self.require("target_layer_ids", key)
        if not isinstance(ids, (list, tuple)) or not all(type(i) is int for i in ids):
            raise ValueError(f"`{key}` must be a list of integers, got {ids!r} in {self.source}.")
        if any(a >= b for a, b in zip(ids, ids[1:], strict=False)):
            raise ValueError(
                f"`{key}` must ascend without repeating a layer, got {ids} in {self.source}. Engines that write this "
                "layout concatenate the layers by depth, so another order says nothing about the columns of `fc`."
            )
        return [i - offset for i in ids] if stated_by_file else list(ids)

    def head_fields(self) -> dict[str, Any]:
        """The fields of the sequential and the confidence head, under the names most formats use."""
        fields = {name: self.require(name) for name in ("markov_rank", "enable_confidence_head")}
        if fields["markov_rank"]:
            fields["markov_head_type"] = self.require("markov_head_type")
        if fields["enable_confidence_head"]:
            fields["confidence_head_with_markov"] = self.require("confidence_head_with_markov")
        return fields

    def block_fields(self) -> dict[str, Any]:
        """The fields of the block, and our own fields that this package stored in the file."""
        kept = {name: self.fields[name] for name in KEPT_FIELDS if self.fields.get(name) is not None}
        return {name: self.require(name) for name in ("block_size", "mask_token_id")} | kept

    def stack_fields(self) -> dict[str, Any]:
        """The fields of the layer stack that are read as they are."""
        optional = {name: self.fields[name] for name in OPTIONAL_STACK_FIELDS if self.fields.get(name) is not None}
        return {name: self.require(name) for name in REQUIRED_STACK_FIELDS} | optional


def first_class(config: dict[str, Any]) -> Any:
    """The class that a config.json names first."""
    return (config.get("architectures") or [None])[0]


def layer_stack_fields(stack: ConfigFile) -> dict[str, Any]:
    """The fields of the draft's layer stack."""
    fields = stack.stack_fields()
    if stack.fields.get("torch_dtype") is not None:  # the 4.x name
        fields.setdefault("dtype", stack.fields["torch_dtype"])
    fields["rope_parameters"] = _rope_parameters(stack)
    # Sliding layers count only if the stack says so, as in transformers' Qwen3Config.
    layer_types = fields.get("layer_types") or (stack.require("layer_types") if _slides(stack) else ())
    if isinstance(layer_types, (list, tuple)) and "sliding_attention" in layer_types:
        fields["sliding_window"] = stack.require("sliding_window")
    return fields


def _slides(stack: ConfigFile) -> bool:
    """Whether some layers have a window by the older keys, which do not say which layers."""
    return bool(stack.fields.get("use_sliding_window")) and stack.fields.get("sliding_window") is not None


def stack_to_write(config: DSparkConfig) -> dict[str, Any]:
    """The layer stack as a flat Qwen3-style config, the reverse of [`layer_stack_fields`]."""
    names = (*REQUIRED_STACK_FIELDS, *OPTIONAL_STACK_FIELDS, "rope_parameters", "sliding_window")
    fields = {name: getattr(config, name) for name in names if name != "dtype"}
    uses_sliding = "sliding_attention" in config.layer_types
    return fields | {
        "model_type": "qwen3",
        "use_sliding_window": uses_sliding,
        "max_window_layers": 0 if uses_sliding else config.num_hidden_layers,
        "tie_word_embeddings": False,
        "use_cache": True,
    }


def draft_to_write(config: DSparkConfig, *names: str) -> dict[str, Any]:
    """Fields of the block and of the heads by name, our own ones, and the dtype of the weights, as far as known."""
    ids = config.target_layer_ids
    if any(a >= b for a, b in zip(ids, ids[1:], strict=False)):
        raise ValueError(
            f"`target_layer_ids` must ascend to be written for other engines, got {ids}: they concatenate the layers "
            "by depth. Train the draft on ascending ids."
        )
    fields = {name: getattr(config, name) for name in ("block_size", "mask_token_id", *names)}
    fields |= {name: getattr(config, name) for name in KEPT_FIELDS if getattr(config, name) is not None}
    return fields if config.dtype is None else fields | {"dtype": str(config.dtype).removeprefix("torch.")}


def _rope_parameters(stack: ConfigFile) -> dict[str, Any]:
    """RoPE in transformers' 5.x schema; 4.x wrote `rope_theta` and `rope_scaling`."""
    new, theta, scaling = (stack.fields.get(name) for name in ("rope_parameters", "rope_theta", "rope_scaling"))
    for name, value in (("rope_parameters", new), ("rope_scaling", scaling)):
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"`{name}` must be a dictionary, got {value!r} in {stack.source}.")
    if new is None and theta is None:
        stack.require("rope_parameters")
    rope = dict(_of_one_kind(new, stack) if new is not None else scaling or {})
    if theta is not None and rope.setdefault("rope_theta", theta) != theta:
        raise ValueError(
            f"The RoPE base of {stack.source} is {theta} as `rope_theta`, but {rope['rope_theta']} in "
            "`rope_parameters`. Keep the one the draft was trained with."
        )
    if not isinstance(rope.get("rope_theta"), (int, float)):
        raise ValueError(
            f"The draft config of {stack.source} must set `rope_parameters` with a number as `rope_theta`, got {rope}."
        )
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    # Sections of multimodal RoPE place image patches; a draft reads text positions, where they change nothing.
    for name in ("mrope_section", "mrope_interleaved"):
        rope.pop(name, None)
    if rope["rope_type"] == "mrope":
        rope["rope_type"] = "default"
    _refuse_other_rope(stack, rope)
    return rope


def _of_one_kind(rope: dict[str, Any], stack: ConfigFile) -> dict[str, Any]:
    """Some configs nest one RoPE per layer type; a draft has one."""
    nested = [value for value in rope.values() if isinstance(value, dict)]
    if not nested or "rope_theta" in rope:
        return rope
    if any(value != nested[0] for value in nested):
        raise NotImplementedError(
            f"{stack.source} has another RoPE per layer type ({rope}), which this package does not run. Serve it with "
            "the engine it was trained for."
        )
    return nested[0]


def _refuse_other_rope(stack: ConfigFile, rope: dict[str, Any]) -> None:
    partial = rope.get("partial_rotary_factor", stack.fields.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise NotImplementedError(
            f"{stack.source} rotates a part of each head only (`partial_rotary_factor` {partial}), which drafts of "
            "Qwen3's kind do not. Serve it with the engine it was trained for."
        )
    if stack.fields.get("rope_is_neox_style") is False:
        raise NotImplementedError(
            f"{stack.source} interleaves the halves of its RoPE (`rope_is_neox_style: false`), which this package "
            "does not run. Serve it with the engine it was trained for."
        )
