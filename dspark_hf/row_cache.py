# SPDX-License-Identifier: Apache-2.0
"""A target cache whose rows have lengths of their own, so that a finished row can be given to another prompt.

Legend: R rows, h key-value heads, e head width.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache


class RowCacheLayer(CacheLayerMixin):
    """Keys and values of one layer; each forward adds one token per row, at that row's own length.

    Forwards see the whole buffer (the mask hides what lies behind a row's end), since a slice of it would be copied by
    every matmul; so the buffer grows in steps of `GRANULARITY` tokens and holds little more than the longest row.

    Args:
        lengths (`torch.LongTensor` of shape `(R,)`): Tokens per row; shared with, and advanced by, [`RowCache`].
    """

    is_sliding = False
    GRANULARITY = 64

    def __init__(self, lengths: torch.Tensor):
        super().__init__()
        self.lengths, self.capacity = lengths, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the buffers like given states.

        Args:
            key_states (`torch.Tensor` of shape `(*, h, *, e)`): Keys.
            value_states (`torch.Tensor` of shape `(*, h, *, e)`): Values.
        """
        rows = self.lengths.shape[0]
        self.keys = key_states.new_zeros(rows, key_states.shape[1], self.capacity, key_states.shape[3])
        self.values = value_states.new_zeros(rows, value_states.shape[1], self.capacity, value_states.shape[3])
        self.is_initialized = True

    def reserve(self, num_tokens: int) -> None:
        """Make room.

        Args:
            num_tokens (`int`): Tokens that the longest row must be able to hold.
        """
        capacity = -(-num_tokens // self.GRANULARITY) * self.GRANULARITY
        if capacity <= self.capacity:
            return
        if self.is_initialized:
            padding = (0, 0, 0, capacity - self.capacity)
            self.keys = torch.nn.functional.pad(self.keys, padding)
            self.values = torch.nn.functional.pad(self.values, padding)
        self.capacity = capacity

    def fill(self, rows: list[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put prompts into rows, from the left.

        Args:
            rows (`list[int]`): Rows to overwrite.
            keys (`torch.Tensor` of shape `(len(rows), h, s, e)`): Keys of the prompts, right-padded.
            values (`torch.Tensor` of shape `(len(rows), h, s, e)`): Values.
        """
        self.reserve(keys.shape[2])
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self.keys[rows, :, : keys.shape[2]] = keys
        self.values[rows, :, : values.shape[2]] = values

    def keep(self, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        """Drop all other rows.

        Args:
            rows (`torch.LongTensor`): Rows to keep, in their new order.
            lengths (`torch.LongTensor`): Their shared length tensor.
        """
        self.lengths = lengths
        if self.is_initialized:
            self.keys, self.values = self.keys[rows], self.values[rows]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add one token per row.

        Args:
            key_states (`torch.Tensor` of shape `(R, h, 1, e)`): Keys.
            value_states (`torch.Tensor` of shape `(R, h, 1, e)`): Values.

        Returns:
            `tuple`: keys and values of shape `(R, h, capacity, e)`.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows = torch.arange(self.lengths.shape[0], device=self.lengths.device)
        self.keys[rows, :, self.lengths] = key_states[:, :, 0]
        self.values[rows, :, self.lengths] = value_states[:, :, 0]
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002
        """Keys that a forward sees, and their offset.

        Args:
            query_length (`int`): Not read.

        Returns:
            `tuple[int, int]`
        """
        return self.capacity, 0

    def get_seq_length(self) -> int:
        """Tokens of the longest row.

        Returns:
            `int`
        """
        return int(self.lengths.max())

    def get_max_length(self) -> int:
        """No limit.

        Returns:
            `int`: -1.
        """
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.24


class RowCache(Cache):
    """One [`RowCacheLayer`] per layer of the target.

    Args:
        num_layers (`int`): Layers.
        num_rows (`int`): R.
        device (`torch.device` or `str`): Where the target runs.
    """

    def __init__(self, num_layers: int, num_rows: int, device: torch.device | str):
        self.lengths = torch.zeros(num_rows, dtype=torch.long, device=device)
        super().__init__(layers=[RowCacheLayer(self.lengths) for _ in range(num_layers)])

    def fill(self, rows: list[int], prompts: DynamicCache) -> None:
        """Take in prefilled prompts.

        Args:
            rows (`list[int]`): Rows to overwrite.
            prompts (`DynamicCache`): Cache of a right-padded batch of prompts.
        """
        for layer, filled in zip(self.layers, prompts.layers, strict=True):
            layer.fill(rows, filled.keys, filled.values)

    def set_lengths(self, rows: list[int], lengths: list[int]) -> None:
        """Say how many tokens rows hold.

        Args:
            rows (`list[int]`): Rows.
            lengths (`list[int]`): Tokens of each; 0 forgets what a row held.
        """
        self.lengths[rows] = torch.tensor(lengths, device=self.lengths.device)

    def begin_step(self) -> torch.Tensor:
        """Announce a forward with one token per row.

        Returns:
            `torch.BoolTensor` of shape `(R, 1, 1, capacity)`: its attention mask, True = visible.
        """
        longest = int(self.lengths.max())
        for layer in self.layers:
            layer.reserve(longest + 1)
        at = torch.arange(self.layers[0].capacity, device=self.lengths.device)
        return (at <= self.lengths[:, None])[:, None, None]

    def end_step(self) -> None:
        """Count the token that the forward added to every row."""
        self.lengths += 1

    def keep(self, rows: list[int]) -> None:
        """Drop all other rows.

        Args:
            rows (`list[int]`): Rows to keep, in their new order.
        """
        index = torch.tensor(rows, device=self.lengths.device)
        self.lengths = self.lengths[index]
        for layer in self.layers:
            layer.keep(index, self.lengths)
