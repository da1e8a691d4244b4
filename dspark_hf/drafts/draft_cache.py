# SPDX-License-Identifier: Apache-2.0
"""Keys and values of the committed context in the draft's layers. Imports torch only.

Legend: R requests, D of them that draft in a round, h key-value heads, C new context tokens of these, g block_size, e
head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class DraftCache:
    """Context keys and values per draft layer, in buffers that grow by doubling; requests may differ in length.

    A block's own keys and values are written after the context and overwritten by the next round, so no round copies
    the context and nothing needs cropping: only [`commit`] moves the ends of the contexts.
    """

    def __init__(self, num_layers: int, min_capacity: int = 256, num_requests: int = 1):
        self._buffers: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * num_layers
        self._min_capacity = min_capacity
        self.lengths = [0] * num_requests
        self._requests: list[int] = []  # those of the round
        self._counts: list[int] = []
        self._ends: list[int] = []

    def begin(
        self,
        counts: Sequence[int],  # [D]
        block_size: int,
        requests: Sequence[int] | None = None,  # [D], those that draft, ascending; None: all
    ) -> None:
        """Begin a round: set where its keys and values are written."""
        self._requests, self._counts = list(range(len(counts)) if requests is None else requests), list(counts)
        lengths = [self.lengths[request] for request in self._requests]
        starts = [length + count for length, count in zip(lengths, counts, strict=True)]
        self._ends = [start + block_size for start in starts]
        if len(self.lengths) == 1:
            return  # one request: context and block are one slice
        rows = torch.tensor(self._requests)
        contexts = [torch.arange(length, start) for length, start in zip(lengths, starts, strict=True)]
        blocks = torch.tensor(starts)[:, None] + torch.arange(block_size)
        self._rows = torch.cat([rows.repeat_interleave(torch.tensor(counts)), rows.repeat_interleave(block_size)])
        self._places = torch.cat([*contexts, blocks.flatten()])

    def write(
        self,
        layer_idx: int,
        keys: torch.Tensor,  # [1, h, C + D * g, e], the new context of request 0, of request 1, ..., then their blocks
        values: torch.Tensor,  # [1, h, C + D * g, e]
    ) -> tuple[torch.Tensor, torch.Tensor]:  # keys and values [D, h, longest, e], views of the buffers if all draft
        """Write the round's keys and values after the committed contexts."""
        end = max(self._ends)
        buffers = self._buffers[layer_idx]
        if buffers is None or buffers[0].shape[2] < end:
            buffers = self._grow(buffers, keys, end)
            self._buffers[layer_idx] = buffers
        for buffer, new in zip(buffers, (keys, values), strict=True):
            if len(self.lengths) == 1:
                buffer[:, :, self.lengths[0] : end] = new
            else:
                rows, places = self._rows.to(buffer.device), self._places.to(buffer.device)
                buffer[rows, :, places] = new[0].transpose(0, 1)
        if len(self._requests) < len(self.lengths):
            return buffers[0][self._requests, :, :end], buffers[1][self._requests, :, :end]
        return buffers[0][:, :, :end], buffers[1][:, :, :end]

    @property
    def ends(self) -> list[int]:
        """Keys of each request of this round, the block included."""
        return self._ends

    def commit(self) -> None:
        """Keep the context written this round, drop the blocks."""
        for request, count in zip(self._requests, self._counts, strict=True):
            self.lengths[request] += count

    def keep(self, requests: Sequence[int]) -> None:
        """Forget all other requests."""
        self.lengths = [self.lengths[request] for request in requests]
        self._buffers = [
            None if buffers is None else (buffers[0][list(requests)], buffers[1][list(requests)])
            for buffers in self._buffers
        ]

    def add(self, num_requests: int) -> None:
        """Add rows for more requests, after the present ones."""
        self.lengths = self.lengths + [0] * num_requests

        def with_rows(buffer: torch.Tensor) -> torch.Tensor:
            return torch.cat([buffer, buffer.new_zeros(num_requests, *buffer.shape[1:])])

        self._buffers = [
            None if buffers is None else (with_rows(buffers[0]), with_rows(buffers[1])) for buffers in self._buffers
        ]

    def _grow(
        self, buffers: tuple[torch.Tensor, torch.Tensor] | None, like: torch.Tensor, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        capacity = max(self._min_capacity, 2 * end)
        shape = (len(self.lengths), like.shape[1], capacity, like.shape[3])
        # Zeros: positions past a shorter request get a weight of 0, and 0 times NaN would be NaN.
        grown = (like.new_zeros(shape), like.new_zeros(shape))
        if buffers is not None:
            for new, old in zip(grown, buffers, strict=True):
                new[:, :, : old.shape[2]] = old
        return grown


def block_mask(
    ends: Sequence[int],  # [R], keys of each request, its block last
    num_queries: int,
    window: int | None,
    is_causal: bool,
    device: torch.device,
) -> torch.Tensor | None:  # broadcastable to [R, 1, num_queries, max(ends)], True = visible; None where everything is
    """The mask of a decoding round's blocks: the context of their own request, or a window of it, and the block."""
    longest = max(ends)
    ragged = min(ends) < longest
    if not ragged and not is_causal and (window is None or longest <= window + num_queries):
        return None
    keys = torch.arange(longest, device=device)
    end = torch.tensor(ends, device=device)[:, None, None]  # [R, 1, 1]
    last = end - num_queries + torch.arange(num_queries, device=device)[:, None] if is_causal else end - 1
    mask = keys <= last
    if window is not None:
        mask = mask & (keys >= end - num_queries - window)
    return mask[:, None]
