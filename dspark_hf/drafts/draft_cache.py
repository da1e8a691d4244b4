# SPDX-License-Identifier: Apache-2.0
"""Keys and values of the committed context in the draft's layers. Imports torch only.

Legend: R requests, h key-value heads, c_r new context tokens of request r and C their sum, g block_size, e head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class DraftCache:
    """Context keys and values per draft layer, in buffers that grow by doubling; requests may differ in length.

    A block's own keys and values are written behind the context and overwritten by the next round, so that no round
    copies the context and nothing needs cropping: only [`commit`] moves the ends of the contexts.

    Args:
        num_layers (`int`): Draft layers.
        min_capacity (`int`, *optional*, defaults to 256): Smallest buffer, in tokens.
        num_requests (`int`, *optional*, defaults to 1): R.
    """

    def __init__(self, num_layers: int, min_capacity: int = 256, num_requests: int = 1):
        self._buffers: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * num_layers
        self._min_capacity = min_capacity
        self.lengths = [0] * num_requests
        self._counts: tuple[int, ...] = ()
        self._ends: list[int] = []

    def begin(self, counts: Sequence[int], block_size: int) -> None:
        """Announce a round: where its keys and values belong.

        Args:
            counts (`Sequence[int]` of length R): c_r.
            block_size (`int`): g, slots of every request's block.
        """
        self._counts = tuple(counts)
        starts = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self._ends = [start + block_size for start in starts]
        if len(self.lengths) == 1:
            return  # one request: context and block are one slice
        rows = torch.arange(len(counts))
        contexts = [torch.arange(length, start) for length, start in zip(self.lengths, starts, strict=True)]
        blocks = torch.tensor(starts)[:, None] + torch.arange(block_size)
        self._rows = torch.cat([rows.repeat_interleave(torch.tensor(counts)), rows.repeat_interleave(block_size)])
        self._places = torch.cat([*contexts, blocks.flatten()])

    def write(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the round's keys and values behind the committed contexts.

        Args:
            layer_idx (`int`): Draft layer.
            keys (`torch.Tensor` of shape `(1, h, C + R * g, e)`):
                The new context of request 0, of request 1, ..., then their blocks.
            values (`torch.Tensor` of shape `(1, h, C + R * g, e)`): Likewise.

        Returns:
            `tuple`: keys and values of shape `(R, h, longest, e)`, views of the buffers; what lies behind the end of
            a shorter request is to be hidden, see [`block_mask`].
        """
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
        return buffers[0][:, :, :end], buffers[1][:, :, :end]

    @property
    def ends(self) -> list[int]:
        """`list[int]`: Keys of each request in this round, the block included."""
        return self._ends

    def commit(self) -> None:
        """Keep the context written this round, drop the blocks."""
        self.lengths = [length + count for length, count in zip(self.lengths, self._counts, strict=True)]

    def keep(self, requests: Sequence[int]) -> None:
        """Forget all other requests.

        Args:
            requests (`Sequence[int]`): Requests to keep, in their new order.
        """
        self.lengths = [self.lengths[request] for request in requests]
        self._buffers = [
            None if buffers is None else tuple(buffer[list(requests)] for buffer in buffers)
            for buffers in self._buffers
        ]

    def add(self, num_requests: int) -> None:
        """Make room for more requests, after the present ones.

        Args:
            num_requests (`int`): How many.
        """
        self.lengths = self.lengths + [0] * num_requests
        self._buffers = [
            None
            if buffers is None
            else tuple(torch.cat([buffer, buffer.new_zeros(num_requests, *buffer.shape[1:])]) for buffer in buffers)
            for buffers in self._buffers
        ]

    def _grow(
        self, buffers: tuple[torch.Tensor, torch.Tensor] | None, like: torch.Tensor, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        capacity = max(self._min_capacity, 2 * end)
        shape = (len(self.lengths), like.shape[1], capacity, like.shape[3])
        # Zeros: what lies behind a shorter request is hidden by a weight of 0, and 0 times NaN is NaN.
        grown = (like.new_zeros(shape), like.new_zeros(shape))
        if buffers is not None:
            for new, old in zip(grown, buffers, strict=True):
                new[:, :, : old.shape[2]] = old
        return grown


def block_mask(
    ends: Sequence[int],
    num_queries: int,
    window: int | None,
    is_causal: bool,
    device: torch.device,
) -> torch.Tensor | None:
    """What the blocks of a decoding round see: the context of their own request, or a window of it, and the block.

    Args:
        ends (`Sequence[int]` of length R): Keys of each request, its block last.
        num_queries (`int`): Slots of a block.
        window (`int`, *optional*):
            Context tokens visible before the anchor; it is counted from the anchor and does not move with the slot.
        is_causal (`bool`): Whether a slot sees no later slot.
        device (`torch.device`): Where the mask is needed.

    Returns:
        `torch.BoolTensor` broadcastable to `(R, 1, num_queries, max(ends))`, True = visible; `None` where everything
        is.
    """
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
