# SPDX-License-Identifier: Apache-2.0
"""Keys and values of the committed context in the draft's layers. Imports torch only.

Legend: R requests, h key-value heads, c context tokens of this round, g block_size, e head width.
"""

from __future__ import annotations

import torch


class DraftCache:
    """Context keys and values per draft layer, in buffers that grow by doubling.

    A block's own keys and values are written behind the context and overwritten by the next round, so that no round
    copies the context and nothing needs cropping: only [`commit`] moves the end of the context.

    Args:
        num_layers (`int`): Draft layers.
        min_capacity (`int`, *optional*, defaults to 256): Smallest buffer, in tokens.
    """

    def __init__(self, num_layers: int, min_capacity: int = 256):
        self._buffers: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * num_layers
        self._min_capacity = min_capacity
        self._length = 0

    @property
    def length(self) -> int:
        """`int`: Committed context tokens."""
        return self._length

    def write(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write this round's keys and values behind the committed context.

        Args:
            layer_idx (`int`): Draft layer.
            keys (`torch.Tensor` of shape `(R, h, c + g, e)`): New context, then the block.
            values (`torch.Tensor` of shape `(R, h, c + g, e)`): Likewise.

        Returns:
            `tuple`: keys and values of shape `(R, h, length + c + g, e)`, views of the buffers.
        """
        end = self._length + keys.shape[2]
        buffers = self._buffers[layer_idx]
        if buffers is None or buffers[0].shape[2] < end:
            buffers = self._grow(buffers, keys, end)
            self._buffers[layer_idx] = buffers
        for buffer, new in zip(buffers, (keys, values), strict=True):
            buffer[:, :, self._length : end] = new
        return buffers[0][:, :, :end], buffers[1][:, :, :end]

    def commit(self, num_context: int) -> None:
        """Keep the first `num_context` of the tokens written this round, drop the rest (the block).

        Args:
            num_context (`int`): c, the new context tokens.
        """
        self._length += num_context

    def _grow(
        self, buffers: tuple[torch.Tensor, torch.Tensor] | None, like: torch.Tensor, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        capacity = max(self._min_capacity, 2 * end)
        shape = (like.shape[0], like.shape[1], capacity, like.shape[3])
        grown = (like.new_empty(shape), like.new_empty(shape))
        if buffers is not None:
            for new, old in zip(grown, buffers, strict=True):
                new[:, :, : self._length] = old[:, :, : self._length]
        return grown
