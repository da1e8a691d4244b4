# SPDX-License-Identifier: Apache-2.0
"""What `generate` returns besides the tokens, one entry per generated token as in plain generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

from .metrics import AcceptanceStats


@dataclass
class DSparkGenerateOutput(GenerateDecoderOnlyOutput):
    """transformers' `GenerateDecoderOnlyOutput` with the rounds of the call.

    Args:
        acceptance_stats (`AcceptanceStats`, *optional*): The call's rounds and figures.
    """

    acceptance_stats: AcceptanceStats | None = None


class OutputLog:
    """Collects scores, logits, attentions and hidden states where the call asks for them.

    Args:
        generation_config (`GenerationConfig`): The call's prepared config.
    """

    def __init__(self, generation_config: GenerationConfig):
        def empty(wanted: bool) -> tuple | None:
            return () if generation_config.return_dict_in_generate and wanted else None

        self.scores = empty(generation_config.output_scores)
        self.logits = empty(generation_config.output_logits)
        self.attentions = empty(generation_config.output_attentions)
        self.hidden_states = empty(generation_config.output_hidden_states)

    def add(
        self, outputs: Any, raw_logits: torch.Tensor, scores: torch.Tensor, num_committed: int, prefill: bool
    ) -> None:
        """Append the entries of the tokens that one forward pass committed.

        Args:
            outputs (`ModelOutput`): The target's.
            raw_logits (`torch.Tensor` of shape `(1, n, V)`): Logits that tokens came from, n >= num_committed.
            scores (`torch.Tensor` of shape `(1, n, V)`): The same after the processors.
            num_committed (`int`): Tokens committed.
            prefill (`bool`): Whether this was the prompt, whose one entry spans all its rows.
        """
        if self.scores is not None:
            self.scores += tuple(scores[:, i] for i in range(num_committed))
        if self.logits is not None:
            self.logits += tuple(raw_logits[:, i].float() for i in range(num_committed))
        if self.hidden_states is not None:
            self.hidden_states += _entries(outputs.hidden_states, num_committed, prefill, drop_keys=False)
        if self.attentions is not None:  # empty where the attention implementation has no weights to return
            self.attentions += _entries(outputs.attentions, num_committed, prefill, drop_keys=True)

    def finish(
        self, sequences: torch.Tensor, cache: Any, cache_key: str, stats: AcceptanceStats
    ) -> DSparkGenerateOutput:
        """The output object of the call.

        Args:
            sequences (`torch.LongTensor` of shape `(1, s)`): Prompt and generated tokens.
            cache (`Cache`): The target's, as plain generation would leave it.
            cache_key (`str`): Name of the cache field in this transformers release.
            stats (`AcceptanceStats`): The call's rounds.

        Returns:
            [`DSparkGenerateOutput`]
        """
        return DSparkGenerateOutput(
            sequences=sequences,
            scores=self.scores,
            logits=self.logits,
            attentions=self.attentions,
            hidden_states=self.hidden_states,
            acceptance_stats=stats,
            **{cache_key: cache},
        )


def _entries(layers: tuple[torch.Tensor, ...], num_committed: int, prefill: bool, drop_keys: bool) -> tuple:
    """Per token, per layer: its row; of attentions, without the keys of the tokens after it."""
    if prefill:
        return (tuple(layers),)
    num_rows = layers[0].shape[-2] if layers and layers[0] is not None else 0

    def row(layer: torch.Tensor | None, i: int) -> torch.Tensor | None:
        if layer is None:
            return None
        after = num_rows - 1 - i
        entry = layer[..., i : i + 1, :]
        return entry[..., : entry.shape[-1] - after] if drop_keys else entry

    return tuple(tuple(row(layer, i) for layer in layers) for i in range(num_committed))
