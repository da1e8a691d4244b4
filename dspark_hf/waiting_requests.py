# SPDX-License-Identifier: Apache-2.0
"""Many prompts through a batch of limited size: when a text ends, a waiting prompt takes its place."""

from __future__ import annotations

import contextlib
import contextvars
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from .decoding_rows import Row


class WaitingRequests:
    """Prompts that have not begun, and answers that are done.

    Args:
        prompts (`Sequence[torch.LongTensor]`): Each `(1, s)`, in the order of their numbers.
        first_number (`int`): Number of the first of them.
        max_batch (`int`): Most texts at a time.
        on_finished (`Callable`, *optional*): Called with number and answer `(n,)` of every text that ends.
    """

    def __init__(
        self,
        prompts: Sequence[torch.Tensor],
        first_number: int,
        max_batch: int,
        on_finished: Callable[[int, torch.Tensor], None],
    ):
        self._waiting = deque(enumerate(prompts, first_number))
        self._max_batch, self._on_finished = max_batch, on_finished

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def prompt_lengths(self) -> list[int]:
        """`list[int]`: Tokens of each prompt."""
        return [prompt.shape[1] for _, prompt in self._waiting]

    def take(self, num_running: int) -> list[tuple[int, torch.Tensor]]:
        """The prompts that may begin now.

        Args:
            num_running (`int`): Texts that have not ended.

        Returns:
            `list[tuple[int, torch.LongTensor]]`: numbers and prompts.
        """
        count = min(self._max_batch - num_running, len(self._waiting))
        return [self._waiting.popleft() for _ in range(count)]

    def hand_in(self, rows: Sequence[Row]) -> None:
        """Take the answers of texts that ended.

        Args:
            rows (`Sequence[Row]`): The texts.
        """
        for row in rows:
            self._on_finished(row.index, row.new_ids)


_active: contextvars.ContextVar[WaitingRequests | None] = contextvars.ContextVar("waiting_requests", default=None)


@contextlib.contextmanager
def waiting(queue: WaitingRequests) -> Iterator[None]:
    """Let the `generate` call inside the `with` block go on with these prompts.

    Args:
        queue (`WaitingRequests`): The prompts.
    """
    token = _active.set(queue)
    try:
        yield
    finally:
        _active.reset(token)


def take_queue() -> WaitingRequests | None:
    """The prompts that the present call goes on with; a call that is made while it runs gets none.

    Returns:
        [`WaitingRequests`] or `None`
    """
    queue = _active.get()
    _active.set(None)
    return queue
