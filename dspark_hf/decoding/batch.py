# SPDX-License-Identifier: Apache-2.0
"""Splits a batch into requests that are generated independently, and joins the results."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from .._compat import CACHE_KEY
from ..common.records import AcceptanceStats
from .outputs import DSparkGenerateOutput
from .request import Request
from .request_processors import own_rule


class RequestFactory:
    """Makes the requests of a call."""

    def __init__(
        self,
        processors: LogitsProcessorList,  # as `generate` prepared them for the batch
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        padded_length: int,  # length of the padded prompts
    ):
        self._processors, self._criteria = processors, stopping_criteria
        self._config, self._padded_length = generation_config, padded_length

    def only(
        self,
        input_ids: torch.Tensor,  # [1, s], prompt
    ) -> Request:
        """The only request of a call, with its padding and the call's own processors."""
        return Request(0, input_ids, self._processors, self._criteria, self._config.max_length, self._config)

    def one(
        self,
        index: int,
        prompt: torch.Tensor,  # [1, s], prompt without padding
    ) -> Request:
        """One of several requests."""
        if prompt.shape[1] == 0:
            raise ValueError(
                f"Every row must hold at least one token, got row {index} without any. Check its `attention_mask`, or "
                "remove the row."
            )
        shift = self._padded_length - prompt.shape[1]
        processors = LogitsProcessorList(own_rule(processor, prompt, shift, index) for processor in self._processors)
        criteria = StoppingCriteriaList(own_rule(criterion, prompt, shift, index) for criterion in self._criteria)
        return Request(index, prompt, processors, criteria, self._config.max_length - shift, self._config)

    def all(
        self,
        input_ids: torch.Tensor,  # [R, s], padded prompts
        attention_mask: torch.Tensor | None,  # [R, s], 0 where there is padding
    ) -> list[Request]:
        """The requests of a batch."""
        kept = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        kept = kept[:, -input_ids.shape[1] :].to(input_ids.device).bool()
        return [self.one(index, input_ids[index][kept[index]][None]) for index in range(len(input_ids))]


def joined_sequences(
    input_ids: torch.Tensor,  # [R, s], padded prompts
    rows: Sequence[Request],  # [R]
    pad_token_id: int,
) -> torch.Tensor:  # [R, s + longest answer]
    """The texts as one tensor: prompts padded as received, answers padded on the right."""
    answers = [row.new_ids.to(input_ids.device) for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(answers, batch_first=True, padding_value=pad_token_id)
    return torch.cat([input_ids, padded], dim=1)


def joined_entries(
    per_row: Sequence[tuple[torch.Tensor, ...] | None],  # [R], per row an entry [1, V] for every token, or all None
) -> tuple[torch.Tensor, ...] | None:  # each [R, V]; None where none were asked for
    """Scores or logits of all rows, token by token; zeros where a text has ended."""
    rows = [entries for entries in per_row if entries is not None]
    if not rows:
        return None
    nothing = torch.zeros_like(rows[0][0])
    return tuple(torch.cat(step) for step in zip_longest(*rows, fillvalue=nothing))


def as_output(
    input_ids: torch.Tensor, requests: Sequence[Request], config: GenerationConfig, cache: Any, stats: AcceptanceStats
) -> DSparkGenerateOutput | torch.Tensor:
    """The return value of `generate`."""
    pad_token = getattr(config, "_pad_token_tensor", None)
    sequences = joined_sequences(input_ids, requests, int(pad_token) if pad_token is not None else 0)
    if not config.return_dict_in_generate:
        return sequences
    return DSparkGenerateOutput(
        sequences=sequences,
        scores=joined_entries([request.log.scores for request in requests]),
        logits=joined_entries([request.log.logits for request in requests]),
        attentions=requests[0].log.attentions,
        hidden_states=requests[0].log.hidden_states,
        acceptance_stats=stats,
        **{CACHE_KEY: cache},
    )
