# SPDX-License-Identifier: Apache-2.0
"""The configuration that drafts of every kind share: their shapes, their RoPE, and what they read from a target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
# Types that the checks of values can compare.
INTEGER, FLAG, NAME = ((int,), "an integer"), ((bool,), "true or false"), ((str,), "a name")
_TYPES = {
    "draft_vocab_size": INTEGER,
    "num_target_layers": INTEGER,
    "attention_bias": FLAG,
    "rms_norm_eps": ((int, float), "a number"),
    "hidden_act": NAME,
    "rope_parameters": ((dict,), "a dictionary"),
}
# Fields that cannot be guessed, and what they are.
_REQUIRED = {
    "mask_token_id": "the embedding row that stands for 'to be drafted'",
    "target_layer_ids": "the target layers whose hidden states the draft reads",
}


class DraftConfig(PreTrainedConfig):
    """Fields and rules of every draft's configuration; [`DSparkConfig`] and [`Eagle3Config`] describe them."""

    vocab_size: int = 151936
    hidden_size: int = 2560
    intermediate_size: int = 9728
    num_hidden_layers: int = 1
    num_attention_heads: int = 32
    if TYPE_CHECKING:  # as `__post_init__` and `require_target_fields` leave them
        num_key_value_heads: int
        head_dim: int
        target_layer_ids: list[int]
    else:
        num_key_value_heads: int | None = None
        head_dim: int | None = None
        target_layer_ids: list[int] | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 40960
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_dropout: float = 0.0

    num_target_layers: int | None = None
    draft_vocab_size: int | None = None
    target_name_or_path: str | None = None
    training_info: dict | None = None

    def __post_init__(self, **kwargs):
        check_types(self, _TYPES)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None and self.num_attention_heads:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.draft_vocab_size == self.vocab_size:
            self.draft_vocab_size = None  # the whole vocabulary: the target's own LM head serves
        super().__post_init__(**kwargs)
        # transformers builds a config without arguments to find what differs from the defaults, so the fields that
        # have no sound default are checked by the model (`require_target_fields`), everything else here.
        for name in SIZES:
            check_size(self, name)
        _check_layers(self)
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size < self.vocab_size:
            raise ValueError(
                f"`draft_vocab_size` must lie in [1, vocab_size={self.vocab_size}], got {self.draft_vocab_size}."
            )
        if self.target_layer_ids is not None:
            _check_target_layer_ids(self)

    def require_target_fields(self) -> None:
        """Check the fields that define what the draft reads from its target and that cannot be guessed."""
        for name, why in _REQUIRED.items():
            if getattr(self, name, why) is None:
                raise ValueError(
                    f"`{name}` must be set, got None: {why}. No formula recovers it, and a wrong guess silently drops "
                    "the accepted length to 1. Set it in the draft's config.json to the value the draft was trained "
                    "with."
                )


def check_types(config: PreTrainedConfig, types: dict[str, tuple[tuple[type, ...], str]]) -> None:
    """Reject values of types that other checks cannot compare."""
    for name, (allowed, wanted) in types.items():
        value = getattr(config, name)
        if value is not None and type(value) not in allowed:
            raise ValueError(f"`{name}` must be {wanted}, got {value!r}. Set it in the draft's config.json.")


def check_size(config: PreTrainedConfig, name: str) -> None:
    """Reject a size that is no positive integer."""
    value = getattr(config, name)
    if type(value) is not int or value < 1:
        raise ValueError(f"`{name}` must be an integer >= 1, got {value!r}. Set it in the draft's config.json.")


def _check_layers(config: DraftConfig) -> None:
    if config.hidden_act not in ACT2FN:
        raise ValueError(
            f"`hidden_act` must be an activation that transformers knows, got {config.hidden_act!r}. Set it in the "
            "draft's config.json."
        )
    if not 0 < config.rms_norm_eps < 1:
        raise ValueError(
            f"`rms_norm_eps` must lie in (0, 1), got {config.rms_norm_eps}. Set it in the draft's config.json."
        )
    rope = config.rope_parameters or {}
    rope_type, theta = rope.get("rope_type", "default"), rope.get("rope_theta", 1.0)
    is_known = isinstance(rope_type, str) and rope_type in {"default", *ROPE_INIT_FUNCTIONS}
    if not is_known or type(theta) not in (int, float) or not theta > 0:
        raise ValueError(
            "`rope_parameters` must have a `rope_type` that transformers knows and a positive number as `rope_theta`, "
            f"got {rope}. Set it in the draft's config.json."
        )
    if config.head_dim % 2:
        raise ValueError(
            f"`head_dim` must be even, since RoPE rotates its entries in pairs, got {config.head_dim}. Set "
            "`head_dim`, or another number of heads."
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"`num_attention_heads` must be a multiple of `num_key_value_heads`, got {config.num_attention_heads} and "
            f"{config.num_key_value_heads}."
        )


def _check_target_layer_ids(config: DraftConfig) -> None:
    ids = config.target_layer_ids
    if not isinstance(ids, (list, tuple)) or not ids or not all(isinstance(i, int) for i in ids):
        raise ValueError(f"`target_layer_ids` must be a non-empty list of integers, got {ids!r}.")
    if len(set(ids)) != len(ids):
        raise ValueError(f"`target_layer_ids` must not repeat a layer, got {ids}.")
    if min(ids) < -1:
        raise ValueError(f"`target_layer_ids` must be >= -1 (-1: the embedding output), got {ids}.")
    if config.num_target_layers is not None and max(ids) >= config.num_target_layers - 1:
        raise ValueError(
            f"`target_layer_ids` must lie below the target's last layer {config.num_target_layers - 1}, got {ids}: "
            "transformers returns the last layer's output after the final norm, which no draft was trained on."
        )
