# SPDX-License-Identifier: Apache-2.0
"""A batch taken apart into texts that are generated each by its own rules, and put together again.

Each row is a text without padding, with processors and criteria of its own, so that it comes out as it would alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from .decoding_rows import Request
from .row_rules import own_rule


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


class RowStreamer:
    """Streams a batch: one streamer of transformers' for each row.

    Args:
        streamers (`Sequence[BaseStreamer]`): `TextIteratorStreamer`, `TextStreamer` or the like, in the order of rows.

    Example:
        >>> streamers = [TextIteratorStreamer(tokenizer, skip_prompt=True) for _ in prompts]  # doctest: +SKIP
        >>> target.generate(**batch, assistant_model=draft, streamer=RowStreamer(streamers))  # doctest: +SKIP
    """

    def __init__(self, streamers: Sequence[Any]):
        self._streamers = list(streamers)
        self._ended: set[int] = set()  # in this call

    def put(self, value: torch.Tensor) -> None:
        """Take the prompts, which `generate` sends before the first token.

        Args:
            value (`torch.LongTensor` of shape `(R, s)`): Padded prompts.

        Raises:
            ValueError: If there are not as many streamers as rows.
        """
        self._ended.clear()
        if len(value) != len(self._streamers):
            raise ValueError(
                f"`RowStreamer` needs one streamer for each of {len(value)} rows, got {len(self._streamers)}."
            )
        for streamer, row in zip(self._streamers, value, strict=True):
            streamer.put(row[None])

    def put_row(self, row: Request, new_ids: torch.Tensor) -> None:
        """Take new tokens of a row.

        Args:
            row (`Request`): The request.
            new_ids (`torch.LongTensor` of shape `(1, n)`): New tokens.
        """
        self._streamers[row.index].put(new_ids[0])
        if row.finished:
            self._ended.add(row.index)
            self._streamers[row.index].end()

    def end(self) -> None:
        """End the streams that are still open: each of them, also where ending another one fails."""
        with contextlib.ExitStack() as ends:  # runs all of them, the last one first
            for index in reversed(range(len(self._streamers))):
                if index not in self._ended:
                    ends.callback(self._streamers[index].end)
            self._ended.clear()  # the next call begins with all of them


def row_sink(streamer: Any, num_rows: int) -> Callable[[Request, torch.Tensor], None]:
    """Where the tokens of a round go.

    Args:
        streamer (`BaseStreamer` or `RowStreamer`, *optional*): The call's.
        num_rows (`int`): R.

    Returns:
        `Callable`: takes a row and its new tokens `(1, n)`.

    Raises:
        ValueError: If the streamer cannot take rows.
    """
    if streamer is None:
        return lambda row, new_ids: None  # noqa: ARG005
    if hasattr(streamer, "put_row"):
        return lambda row, new_ids: streamer.put_row(row, new_ids.cpu())
    if num_rows > 1:
        raise ValueError(
            f"A batch needs a streamer for each row, got one {type(streamer).__name__} for {num_rows} rows. Pass "
            "`RowStreamer([...])` of dspark_hf."
        )
    return lambda row, new_ids: streamer.put(new_ids.cpu())  # noqa: ARG005
