# SPDX-License-Identifier: Apache-2.0
"""Streams the tokens of a batch, one stream per row."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .request import Request


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
        """Receive the prompts, which `generate` sends before the first token.

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
        """Receive new tokens of a row.

        Args:
            row (`Request`): The request.
            new_ids (`torch.LongTensor` of shape `(1, n)`): New tokens.
        """
        self._streamers[row.index].put(new_ids[0])
        if row.finished:
            self._ended.add(row.index)
            self._streamers[row.index].end()

    def end(self) -> None:
        """End all streams that are still open, even if ending one of them fails."""
        with contextlib.ExitStack() as ends:  # runs all of them, the last one first
            for index in reversed(range(len(self._streamers))):
                if index not in self._ended:
                    ends.callback(self._streamers[index].end)
            self._ended.clear()  # the next call begins with all of them


def row_sink(
    streamer: Any, num_rows: int
) -> Callable[[Request, torch.Tensor], None]:  # takes a row and its new tokens [1, n]
    """The function that receives the tokens of a round."""
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
