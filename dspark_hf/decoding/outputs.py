# SPDX-License-Identifier: Apache-2.0
"""Optional outputs of `generate`, with one entry per generated token as in plain generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

from ..common.records import AcceptanceStats


@dataclass
class DSparkGenerateOutput(GenerateDecoderOnlyOutput):
    """transformers' `GenerateDecoderOnlyOutput` with the rounds of the call.

    Args:
        acceptance_stats (`AcceptanceStats`, *optional*): The call's rounds and figures.
    """

    acceptance_stats: AcceptanceStats | None = None


class OutputLog:
    """Collects scores, logits, attentions and hidden states where the call asks for them."""

    def __init__(self, generation_config: GenerationConfig):
        def empty(wanted: bool) -> tuple | None:
            return () if generation_config.return_dict_in_generate and wanted else None

        self.scores = empty(generation_config.output_scores)
        self.logits = empty(generation_config.output_logits)
        self.attentions = empty(generation_config.output_attentions)
        self.hidden_states = empty(generation_config.output_hidden_states)

    def add(
        self,
        raw_logits: torch.Tensor | None,  # [1, n, V]
        scores: torch.Tensor | None,  # [1, n, V], the same after the processors
        num_committed: int,
    ) -> None:
        """Append the logits and scores of committed tokens."""
        if self.scores is not None and scores is not None:
            self.scores += tuple(scores[:, i] for i in range(num_committed))
        if self.logits is not None and raw_logits is not None:
            self.logits += tuple(raw_logits[:, i].float() for i in range(num_committed))

    def add_layers(self, outputs: Any, cache: Any, num_committed: int, one_entry: bool) -> None:
        """Append the hidden states and attentions of the tokens that one forward pass committed."""
        if self.hidden_states is not None:
            self.hidden_states += _entries(outputs.hidden_states, num_committed, one_entry)
        if self.attentions is not None:  # empty where the attention implementation has no weights to return
            self.attentions += _entries(outputs.attentions, num_committed, one_entry, cache)


def _entries(layers: tuple[torch.Tensor | None, ...], num_committed: int, one_entry: bool, cache: Any = None) -> tuple:
    """Per token, per layer: its row. With a cache they are attentions, over the keys plain generation has then."""
    if one_entry:
        return (tuple(layers),)

    def row(layer_idx: int, i: int) -> torch.Tensor | None:
        layer = layers[layer_idx]
        if layer is None:
            return None
        entry = layer[..., i : i + 1, :]
        if cache is None:
            return entry
        return _own_keys(entry, cache.layers[layer_idx], num_after=layer.shape[-2] - 1 - i)

    return tuple(tuple(row(layer_idx, i) for layer_idx in range(len(layers))) for i in range(num_committed))


def _own_keys(entry: torch.Tensor, cache_layer: Any, num_after: int) -> torch.Tensor:
    """One row of attentions without the keys of the tokens after it, and without those that left the window."""
    if hasattr(cache_layer, "max_cache_len"):  # a static cache always shows all its slots
        return entry
    entry = entry[..., : entry.shape[-1] - num_after]
    return entry[..., -cache_layer.sliding_window :] if getattr(cache_layer, "is_sliding", False) else entry
