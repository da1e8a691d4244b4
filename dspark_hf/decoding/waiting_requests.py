# SPDX-License-Identifier: Apache-2.0
"""Many prompts through a batch of limited size: when a text ends, a waiting prompt takes its place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .request import Request


class WaitingRequests:
    """Prompts that have not started, and finished answers."""

    def __init__(
        self,
        prompts: Sequence[torch.Tensor],  # each [1, s], in the order of their numbers
        first_number: int,  # number of the first of them
        max_batch: int,  # most texts at a time
        on_finished: Callable[[int, torch.Tensor], None],  # called with number and answer [n] of every text that ends
    ):
        self._waiting = deque(enumerate(prompts, first_number))
        self._max_batch, self._on_finished = max_batch, on_finished

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return [prompt.shape[1] for _, prompt in self._waiting]

    def take(self, num_running: int) -> list[tuple[int, torch.Tensor]]:
        """Take the prompts that may start now."""
        count = min(self._max_batch - num_running, len(self._waiting))
        return [self._waiting.popleft() for _ in range(count)]

    def hand_in(self, rows: Sequence[Request]) -> None:
        """Store the answers of texts that ended."""
        for row in rows:
            self._on_finished(row.index, row.new_ids)


class QueueStreamer:
    """A streamer that carries more prompts, and passes the tokens of each text to a function.

    `on_tokens`: called with the number of a prompt and its new tokens, [n].
    """

    def __init__(
        self,
        queue: WaitingRequests,  # the prompts that the call continues with
        on_tokens: Callable[[int, torch.Tensor], None] | None,
    ):
        self.queue, self._on_tokens = queue, on_tokens

    def put(self, value: torch.Tensor) -> None:
        """No-op: prompts are not streamed."""

    def put_row(self, row: Request, new_ids: torch.Tensor) -> None:
        """See [`RowStreamer.put_row`]."""
        if self._on_tokens is not None:
            self._on_tokens(row.index, new_ids[0])

    def end(self) -> None:
        """No-op: there is nothing to close."""


def queue_of(streamer: Any) -> WaitingRequests | None:
    """The prompts that a call continues with."""
    return streamer.queue if isinstance(streamer, QueueStreamer) else None
