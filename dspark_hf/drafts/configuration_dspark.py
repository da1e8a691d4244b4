# SPDX-License-Identifier: Apache-2.0
"""Configuration of a DSpark draft: its geometry, what it reads from its target, and its heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from ..scheduling.copying import MATCH_LENGTHS
from .configuration_draft import FLAG, INTEGER, NAME, DraftConfig, check_size, check_types
from .target_structure import full_attention_layer, full_attention_rope, longest_position, norm_epsilon


MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
LAYER_TYPES = ("full_attention", "sliding_attention")
LAYER_KINDS = ("qwen3", "gemma4")
_TYPES = {
    "mask_token_id": INTEGER,
    "sliding_window": INTEGER,
    "sample_from_anchor": FLAG,
    "enable_confidence_head": FLAG,
    "confidence_head_with_markov": FLAG,
    "sliding_window_non_causal": FLAG,
    "attention_k_eq_v": FLAG,
    "layer_kind": NAME,
    "layer_types": ((list, tuple), "a list"),
}


class DSparkConfig(DraftConfig):
    """Configuration of a [`DSparkDraftModel`].

    Widths, vocabulary and RoPE describe the draft; its hidden size and vocabulary are those of its target, whose
    embedding and LM head it shares.

    Args:
        vocab_size (`int`, *optional*, defaults to 151936): Rows of the target's embedding.
        hidden_size (`int`, *optional*, defaults to 2560): Width d of the draft and of the target.
        intermediate_size (`int`, *optional*, defaults to 9728): Width of the MLPs.
        num_hidden_layers (`int`, *optional*, defaults to 5): Draft layers.
        num_attention_heads (`int`, *optional*, defaults to 32): Query heads.
        num_key_value_heads (`int`, *optional*): Key and value heads; `None` means as many as query heads.
        head_dim (`int`, *optional*): Width of a head; `None` means `hidden_size // num_attention_heads`.
        hidden_act (`str`, *optional*, defaults to `"silu"`): Activation of the MLPs.
        max_position_embeddings (`int`, *optional*, defaults to 40960): Longest position, in tokens.
        initializer_range (`float`, *optional*, defaults to 0.02): Standard deviation of fresh weights.
        rms_norm_eps (`float`, *optional*, defaults to 1e-6): Epsilon of the RMS norms.
        rope_parameters (`dict`, *optional*): RoPE in transformers' schema (`rope_theta`, `rope_type`, ...).
        attention_bias (`bool`, *optional*, defaults to `False`): Biases in the attention projections.
        attention_dropout (`float`, *optional*, defaults to 0.0): Dropout of attention weights in training.
        layer_kind (`str`, *optional*, defaults to `"qwen3"`):
            `"qwen3"`: two norms per layer. `"gemma4"`: norms before and after attention and MLP, a norm of the values,
            a scalar per layer, unscaled attention scores; full-attention layers only.
        attention_k_eq_v (`bool`, *optional*, defaults to `False`):
            Whether the keys before their norm serve as values; with `layer_kind="gemma4"` only.
        layer_types (`list[str]`, *optional*):
            `"full_attention"` or `"sliding_attention"` per draft layer; `None` means all full.
        sliding_window (`int`, *optional*): Context tokens, counted from the anchor, that sliding layers see.
        sliding_window_non_causal (`bool`, *optional*, defaults to `False`):
            Whether the slots of a block see each other in both directions in sliding layers too. Full layers always
            do.
        block_size (`int`, *optional*, defaults to 7): Tokens of the parallel pass: the anchor and its masks (g).
        mask_token_id (`int`): Row of the target's embedding that stands for "to be drafted".
        target_layer_ids (`list[int]`):
            Target layers whose outputs are read, 0-based, in concatenation order: id l is `hidden_states[l + 1]`, -1
            is the embedding output. The target's last layer is not allowed (transformers returns it after the final
            norm).
        num_target_layers (`int`, *optional*): Depth of the target, to check the ids early.
        sample_from_anchor (`bool`, *optional*, defaults to `True`):
            Slot convention. `True`: slot k predicts position anchor + 1 + k, `block_size` drafts. `False` (the
            original DFlash): slot 0 repeats the anchor and is dropped, slot k predicts anchor + k, `block_size - 1`
            drafts.
        markov_rank (`int`, *optional*, defaults to 256): Rank r of the sequential head; 0 for none (DFlash).
        markov_head_type (`str`, *optional*, defaults to `"vanilla"`): `"vanilla"` (Eq 5), `"gated"` or `"rnn"` (Eq 6).
        enable_confidence_head (`bool`, *optional*, defaults to `True`): Whether there is a confidence head (Eq 7).
        confidence_head_with_markov (`bool`, *optional*, defaults to `True`):
            Whether the confidence head also reads the sequential head's embedding of the previous token.
        draft_vocab_size (`int`, *optional*):
            Size of a reduced draft vocabulary. The draft then has an LM head of its own with that many rows, and a map
            `d2t` from draft ids to target ids, stored as offsets. `None`: the target's whole LM head is used.
        target_name_or_path (`str`, *optional*): The target the draft was trained for, for messages.
        training_info (`dict`, *optional*): What the draft was trained on: template hash, thinking mode, data,
            versions.
        confidence_temperatures (`list[float]`, *optional*):
            One per draft slot, positive; the logit of c_k is divided by the k-th before the sigmoid (paper section
            3.2). `None`: not calibrated, as if all were 1.
        acceptance_prior (`list[float]`, *optional*):
            One per draft slot, in [0, 1]: P(slot k accepted | all before it were), measured ahead of any call.
        copy_prior (`list[float]`, *optional*):
            In [0, 1], one for each class of lengths in `dspark_hf.scheduling.copying.MATCH_LENGTHS`: how often the
            token after an earlier occurrence of the text's ending came again.
        calibration_info (`dict`, *optional*): What these were measured on: rounds, prompts, decoding, versions.

    Raises:
        ValueError: On any contradiction above, with the field, the value received and the remedy.

    Example:
        >>> DSparkConfig(mask_token_id=4, target_layer_ids=[1, 9, 17], block_size=5).num_draft_slots
        5
    """

    model_type = "dspark_draft"

    num_hidden_layers: int = 5
    layer_kind: str = "qwen3"
    attention_k_eq_v: bool = False
    if TYPE_CHECKING:  # as `__post_init__` leaves it
        layer_types: list[str]
    else:
        layer_types: list[str] | None = None
    sliding_window: int | None = None
    sliding_window_non_causal: bool = False
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    block_size: int = 7
    mask_token_id: int | None = None
    sample_from_anchor: bool = True
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    confidence_temperatures: list[float] | None = None
    acceptance_prior: list[float] | None = None
    copy_prior: list[float] | None = None
    calibration_info: dict | None = None

    def __post_init__(self, **kwargs):
        check_types(self, _TYPES)
        check_size(self, "num_hidden_layers")  # before a list of that length is made
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        super().__post_init__(**kwargs)
        _check_layer_kind(self)
        _check_block(self)
        _check_heads(self)
        _check_calibration(self)
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` must be a row of the target's embedding, in [0, {self.vocab_size}), got "
                f"{self.mask_token_id}. Use a reserved id that the tokenizer never produces; do not add a new row."
            )

    @classmethod
    def from_target(
        cls,
        target_config: PreTrainedConfig,
        mask_token_id: int,
        num_hidden_layers: int = 2,
        num_taps: int = 5,
        **overrides: Any,
    ) -> DSparkConfig:
        """Defaults for a new draft of a decoder-only target: its widths, its RoPE, layers spread over its depth."""
        text_config = target_config.get_text_config(decoder=True)
        layer = full_attention_layer(text_config)
        depth = text_config.num_hidden_layers
        fields = {
            "vocab_size": text_config.vocab_size,
            "hidden_size": text_config.hidden_size,
            "intermediate_size": layer.intermediate_size,
            "num_attention_heads": layer.num_attention_heads,
            "num_key_value_heads": layer.num_key_value_heads,
            "head_dim": layer.head_dim,
            "max_position_embeddings": longest_position(text_config) or cls.max_position_embeddings,
            "rms_norm_eps": norm_epsilon(text_config) or cls.rms_norm_eps,
            "rope_parameters": full_attention_rope(text_config),
            "bos_token_id": getattr(text_config, "bos_token_id", None),
            "eos_token_id": getattr(text_config, "eos_token_id", None),
            "pad_token_id": getattr(text_config, "pad_token_id", None),
            "target_layer_ids": spread_layer_ids(depth, num_taps),
            "num_target_layers": depth,
            "num_hidden_layers": num_hidden_layers,
            "mask_token_id": mask_token_id,
            "target_name_or_path": target_config.name_or_path or None,
        }
        return cls(**(fields | overrides))

    @property
    def num_draft_slots(self) -> int:
        """`int`: Drafts that one block proposes: `block_size`, or one less where slot 0 repeats the anchor."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1


def spread_layer_ids(num_target_layers: int, num_taps: int) -> list[int]:  # ascending
    """Layer ids spread evenly over a target's depth, from the second layer to the third last; never the last."""
    if num_target_layers < 2 or num_taps < 1:
        raise ValueError(
            f"A draft reads at least one layer below the target's last, got {num_target_layers} layers and {num_taps} "
            "taps."
        )
    first, last = min(1, num_target_layers - 2), max(num_target_layers - 3, min(1, num_target_layers - 2))
    if num_taps > last - first + 1:
        return list(range(max(0, num_target_layers - 1 - num_taps), num_target_layers - 1))[:num_taps]
    if num_taps == 1:
        return [(first + last) // 2]
    return [round(first + i * (last - first) / (num_taps - 1)) for i in range(num_taps)]


def _check_layer_kind(config: DSparkConfig) -> None:
    if config.layer_kind not in LAYER_KINDS:
        raise ValueError(f"`layer_kind` must be one of {LAYER_KINDS}, got {config.layer_kind!r}.")
    if config.layer_kind == "gemma4" and any(kind != "full_attention" for kind in config.layer_types):
        raise ValueError(
            f"`layer_types` must be all 'full_attention' with `layer_kind='gemma4'`, got {config.layer_types}."
        )
    if config.attention_k_eq_v and config.layer_kind != "gemma4":
        raise ValueError(
            f"`attention_k_eq_v=True` needs `layer_kind='gemma4'`, got {config.layer_kind!r}: other layers have their "
            "own value projection."
        )


def _check_block(config: DSparkConfig) -> None:
    smallest_block = 1 if config.sample_from_anchor else 2
    if type(config.block_size) is not int or config.block_size < smallest_block:
        raise ValueError(
            f"`block_size` must be >= {smallest_block} with `sample_from_anchor={config.sample_from_anchor}`, got "
            f"{config.block_size!r}. Set it in the draft's config.json to the block the draft was trained with."
        )
    if len(config.layer_types) != config.num_hidden_layers or any(t not in LAYER_TYPES for t in config.layer_types):
        raise ValueError(
            f"`layer_types` must hold one of {LAYER_TYPES} for each of the {config.num_hidden_layers} layers, got "
            f"{config.layer_types}."
        )
    if "sliding_attention" in config.layer_types and not (config.sliding_window and config.sliding_window > 0):
        raise ValueError(
            f"`sliding_window` must be >= 1 when `layer_types` has sliding layers, got {config.sliding_window}."
        )


def _check_heads(config: DSparkConfig) -> None:
    if type(config.markov_rank) is not int or config.markov_rank < 0:
        raise ValueError(f"`markov_rank` must be >= 0 (0: no sequential head), got {config.markov_rank!r}.")
    if config.markov_rank and config.markov_head_type not in MARKOV_HEAD_TYPES:
        raise ValueError(f"`markov_head_type` must be one of {MARKOV_HEAD_TYPES}, got {config.markov_head_type!r}.")
    if config.enable_confidence_head and config.confidence_head_with_markov and config.markov_rank == 0:
        raise ValueError(
            "`confidence_head_with_markov=True` needs the sequential head's token embedding, but `markov_rank` is 0. "
            "Set `confidence_head_with_markov=False`, or a `markov_rank` >= 1."
        )


def _check_calibration(config: DSparkConfig) -> None:
    # A temperature of 0 would divide by it; a slot that is never accepted has a prior of 0.
    slots = (config.num_draft_slots, "draft slot")
    _check_numbers(config, "confidence_temperatures", slots, "positive and finite", lambda value: 0 < value < math.inf)
    _check_numbers(config, "acceptance_prior", slots, "in [0, 1]", _is_probability)
    _check_numbers(config, "copy_prior", (len(MATCH_LENGTHS), "class of match lengths"), "in [0, 1]", _is_probability)


def _is_probability(value: float) -> bool:
    return 0 <= value <= 1


def _check_numbers(
    config: DSparkConfig, name: str, each: tuple[int, str], allowed: str, is_allowed: Callable[[float], bool]
) -> None:
    values, (count, kind) = getattr(config, name), each
    if values is None:
        return
    is_list = isinstance(values, (list, tuple)) and len(values) == count
    if not is_list or not all(type(value) in (int, float) and is_allowed(value) for value in values):
        raise ValueError(
            f"`{name}` must be a list of {count} numbers, one for each {kind} and each {allowed}, got {values!r}. "
            "Calibrate the draft again, or remove the field from its config.json."
        )
