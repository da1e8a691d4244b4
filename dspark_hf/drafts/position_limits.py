# SPDX-License-Identifier: Apache-2.0
"""Limits the drafts by the target's positions: one pass over several tokens must give what single steps give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .target_structure import longest_position


# Rotary embeddings whose frequencies depend on the longest position of a pass. Longrope has two sets of them, the
# others compute new ones for every length. ("su" is the first name of longrope, still found in configs.)
_TWO_SETS = ("longrope", "su")
_ANY_LENGTH = "dynamic"


@dataclass(frozen=True)
class PositionLimits:
    """Lengths at which a pass over several tokens differs from single steps, or fails; they count the anchor."""

    switch: int | None = None  # longest text whose frequencies are the original ones
    one_set_beyond: bool = True  # whether the frequencies are the same for all texts longer than that
    end: int | None = None  # positions that the target has

    def most_drafts(self, length: int) -> int | None:
        """Drafts that may follow a text of `length` tokens in one pass; `None` without a limit."""
        limits = [self.end - length] if self.end is not None else []
        if self.switch is not None:
            if length <= self.switch:
                limits.append(self.switch - length)
            elif length == self.switch + 1 or not self.one_set_beyond:  # the step across recomputes the cache in Phi
                limits.append(0)
        return max(0, min(limits)) if limits else None

    def check_batch(self, lengths: Sequence[tuple[int, int]]) -> None:
        """Reject texts, each with its first and its greatest length, that need different frequencies in one pass."""
        if self.switch is None or all(longest <= self.switch for _, longest in lengths):
            return
        if self.one_set_beyond and all(prompt > self.switch for prompt, _ in lengths):
            return
        shortest, longest = min(first for first, _ in lengths), max(last for _, last in lengths)
        raise NotImplementedError(
            f"The rotary frequencies of this target change when a text grows beyond {self.switch} tokens, and "
            f"the texts of a batch share them: they must all stay below or begin beyond, got lengths from {shortest} "
            f"up to {longest}. Lower `max_new_tokens`, or generate one row at a time."
        )


def position_limits(target: PreTrainedModel) -> PositionLimits:
    """The limits of a target, from its rotary parameters and its tables of positions."""
    config = target.config.get_text_config(decoder=True)
    found = [(_switch(rope, config), rope) for rope in _rotary_parameters(config)]
    switches = [(length, rope) for length, rope in found if length is not None]
    return PositionLimits(
        switch=min((length for length, _ in switches), default=None),
        one_set_beyond=all(_kind(rope) in _TWO_SETS for _, rope in switches),
        end=_end(target, config),
    )


def _rotary_parameters(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """The rotary parameters of a config, those of every kind of layer where they differ."""
    for field in ("rope_parameters", "rope_scaling"):
        parameters = getattr(config, field, None)
        if isinstance(parameters, dict):
            yield from (part for part in (parameters, *parameters.values()) if isinstance(part, dict) and _kind(part))


def _kind(rope: dict[str, Any]) -> str:
    kind = rope.get("rope_type", rope.get("type"))
    return kind if isinstance(kind, str) else ""


def _switch(rope: dict[str, Any], config: PreTrainedConfig) -> int | None:
    """The longest text of the original frequencies; `None` where they do not depend on the length."""
    if _kind(rope) not in _TWO_SETS and _ANY_LENGTH not in _kind(rope):
        return None
    field = "original_max_position_embeddings"
    lengths = (rope.get(field), getattr(config, field, None), longest_position(config))
    return min((length for length in lengths if isinstance(length, int)), default=None)


def _end(target: PreTrainedModel, config: PreTrainedConfig) -> int | None:
    """The number of positions; `None` where they are computed, so that none is the last."""
    end = longest_position(config)
    if end is None:
        return None
    embed_tokens = target.get_input_embeddings()
    tables = (module for module in target.modules() if isinstance(module, nn.Embedding) and module is not embed_tokens)
    # Some tables begin with rows for padding (OPT).
    if any(0 <= table.num_embeddings - end <= 2 for table in tables):
        return end
    is_computed = any(name.endswith("inv_freq") for name, _ in target.named_buffers())
    return None if is_computed else end
