# SPDX-License-Identifier: Apache-2.0
"""A batch taken apart into texts that are generated each on its own, and put together again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from .request import Request
from .request_processors import own_rule


class RequestFactory:
    """Makes the requests of a call.

    Args:
        processors (`LogitsProcessorList`): As `generate` prepared them for the batch.
        stopping_criteria (`StoppingCriteriaList`): Likewise.
        generation_config (`GenerationConfig`): The call's prepared config.
        padded_length (`int`): Length of the padded prompts.

    Raises:
        NotImplementedError: If a processor works for one row only.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        padded_length: int,
    ):
        self._processors, self._criteria = processors, stopping_criteria
        self._config, self._padded_length = generation_config, padded_length

    def only(self, input_ids: torch.Tensor) -> Request:
        """The only request of a call, padding and all, with the call's own processors.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, s)`): Prompt.

        Returns:
            [`Request`]
        """
        return Request(0, input_ids, self._processors, self._criteria, self._config.max_length, self._config)

    def one(self, index: int, prompt: torch.Tensor) -> Request:
        """One of several requests.

        Args:
            index (`int`): Its number.
            prompt (`torch.LongTensor` of shape `(1, s)`): Prompt without padding.

        Returns:
            [`Request`]
        """
        if prompt.shape[1] == 0:
            raise ValueError(
                f"Every row must hold at least one token, got row {index} without any. Check its `attention_mask`, or "
                "leave the row away."
            )
        shift = self._padded_length - prompt.shape[1]
        processors = LogitsProcessorList(own_rule(processor, prompt, shift, index) for processor in self._processors)
        criteria = StoppingCriteriaList(own_rule(criterion, prompt, shift, index) for criterion in self._criteria)
        return Request(index, prompt, processors, criteria, self._config.max_length - shift, self._config)

    def all(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[Request]:
        """The requests of a batch.

        Args:
            input_ids (`torch.LongTensor` of shape `(R, s)`): Padded prompts.
            attention_mask (`torch.Tensor` of shape `(R, s)`, *optional*): 0 where there is padding.

        Returns:
            `list[Request]`

        Raises:
            ValueError: If a row holds no token.
        """
        kept = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        kept = kept[:, -input_ids.shape[1] :].to(input_ids.device).bool()
        return [self.one(index, input_ids[index][kept[index]][None]) for index in range(len(input_ids))]


def joined_sequences(input_ids: torch.Tensor, rows: Sequence[Request], pad_token_id: int) -> torch.Tensor:
    """The texts as one tensor, with the prompts padded as they came and the answers padded on the right.

    Args:
        input_ids (`torch.LongTensor` of shape `(R, s)`): Padded prompts.
        rows (`Sequence[Request]` of length R): The texts.
        pad_token_id (`int`): Padding.

    Returns:
        `torch.LongTensor` of shape `(R, s + longest answer)`.
    """
    answers = [row.new_ids.to(input_ids.device) for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(answers, batch_first=True, padding_value=pad_token_id)
    return torch.cat([input_ids, padded], dim=1)


def joined_entries(per_row: Sequence[tuple[torch.Tensor, ...] | None]) -> tuple[torch.Tensor, ...] | None:
    """Scores or logits of all rows, token by token; zeros where a text has ended.

    Args:
        per_row (`Sequence[tuple[torch.Tensor]]` of length R): Per row an entry `(1, V)` for every token.

    Returns:
        `tuple[torch.Tensor]`, each `(R, V)`; `None` where none were asked for.
    """
    if per_row[0] is None:
        return None
    steps = max(map(len, per_row))
    nothing = torch.zeros_like(per_row[0][0])
    return tuple(torch.cat([entries[i] if i < len(entries) else nothing for entries in per_row]) for i in range(steps))
