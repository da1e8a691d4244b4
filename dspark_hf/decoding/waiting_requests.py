# SPDX-License-Identifier: Apache-2.0
"""Many prompts through a batch of limited size: when a text ends, a waiting prompt takes its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from .request import Request


# Of many places, so many become free before one is filled: prompts share a pass, which costs more than its tokens.
PLACES_PER_PASS = 12


class WaitingRequests:
    """Prompts that have not started."""

    def __init__(
        self,
        prompts: Iterable[tuple[int, torch.Tensor]],  # numbers and prompts [1, s]; taken as places become free
        max_batch: int,  # most texts at a time
        prompt_lengths: Sequence[int] = (),  # tokens of each prompt, where they are known
    ):
        self._prompts = iter(prompts)
        self._ahead: list[tuple[int, torch.Tensor]] = []
        self._max_batch, self.prompt_lengths = max_batch, prompt_lengths

    @property
    def others_wait(self) -> bool:
        """Whether there is any."""
        if not self._ahead:
            self._ahead = list(islice(self._prompts, 1))
        return bool(self._ahead)

    def take(self, num_running: int) -> list[tuple[int, torch.Tensor]]:
        """Take the prompts that start now."""
        free = self._max_batch - num_running
        if free < min(self._max_batch, max(1, self._max_batch // PLACES_PER_PASS)):
            return []
        taken = [*self._ahead, *islice(self._prompts, free - len(self._ahead))]
        self._ahead = []
        return taken


@dataclass(frozen=True)
class QueueStreamer:
    """A streamer that carries more prompts, and passes the tokens of each text to functions."""

    queue: WaitingRequests  # the prompts that the call continues with
    on_tokens: Callable[[int, torch.Tensor], None]  # called with the number of a prompt and its new tokens [n]
    on_finished: Callable[[int, torch.Tensor], None]  # called with number and answer [n] of every text that ends

    def put(self, value: torch.Tensor) -> None:
        """No-op: prompts are not streamed."""

    def put_row(self, row: Request, new_ids: torch.Tensor) -> None:
        """See [`RowStreamer.put_row`]."""
        self.on_tokens(row.index, new_ids[0])
        if row.finished:
            self.on_finished(row.index, row.new_ids)

    def end(self) -> None:
        """No-op: there is nothing to close."""


def queue_of(streamer: Any) -> WaitingRequests | None:
    """The prompts that a call continues with."""
    return streamer.queue if isinstance(streamer, QueueStreamer) else None
