# SPDX-License-Identifier: Apache-2.0
"""A target cache whose rows have different lengths: texts advance at their own pace, end, and free their row.

A row holds the tokens of one text from its first slot on, without padding and without gaps: rejected tokens are
overwritten by the next ones.

Legend: R rows, h key-value heads, e head width, N packed tokens (see `packed_attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .packed_pass import PackedPass


class RowCacheLayer(CacheLayerMixin):
    """Keys and values of one layer; a forward adds the packed tokens of a pass, each to the row of its text.

    Forwards see the whole buffer (the mask hides what lies behind a row's end), since a slice of it would be copied by
    every matmul; so the buffer grows in steps of `GRANULARITY` tokens and holds little more than the longest row.
    """

    is_sliding = False
    GRANULARITY = 32

    def __init__(self) -> None:
        super().__init__()
        self.num_rows, self.capacity = 0, 0
        self.current: PackedPass | None = None

    def lazy_initialization(
        self,
        key_states: torch.Tensor,  # [*, h, *, e]
        value_states: torch.Tensor,  # [*, h, *, e]
    ) -> None:
        """Allocate the buffers like given states."""
        shape = (self.num_rows, key_states.shape[1], self.capacity)
        self.keys = key_states.new_zeros(*shape, key_states.shape[3])
        self.values = value_states.new_zeros(*shape, value_states.shape[3])
        self.is_initialized = True

    def reserve(self, num_rows: int, num_tokens: int) -> None:
        """Grow the buffers; their contents are kept."""
        rows = max(0, num_rows - self.num_rows)
        tokens = max(0, -(-num_tokens // self.GRANULARITY) * self.GRANULARITY - self.capacity)
        if self.is_initialized and (rows or tokens):
            padding = (0, 0, 0, tokens, 0, 0, 0, rows)
            self.keys = torch.nn.functional.pad(self.keys, padding)
            self.values = torch.nn.functional.pad(self.values, padding)
        self.num_rows, self.capacity = self.num_rows + rows, self.capacity + tokens

    def keep(self, rows: Sequence[int], num_tokens: int) -> None:
        """Drop all other rows, and capacity that no remaining row needs."""
        self.num_rows = len(rows)
        self.capacity = min(self.capacity, -(-max(num_tokens, 1) // self.GRANULARITY) * self.GRANULARITY)
        if self.is_initialized:
            self.keys = self.keys[list(rows), :, : self.capacity].contiguous()
            self.values = self.values[list(rows), :, : self.capacity].contiguous()

    def update(
        self,
        key_states: torch.Tensor,  # [1, h, N, e]
        value_states: torch.Tensor,  # [1, h, N, e]
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # keys and values [R, h, capacity, e]
        """Add the packed tokens of the pass."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.current is None:
            raise RuntimeError("Packed tokens are written inside a pass; call `PackedCache.begin` before it.")
        rows, positions = self.current.cache_rows, self.current.positions
        self.keys[rows, :, positions] = key_states[0].transpose(0, 1)
        self.values[rows, :, positions] = value_states[0].transpose(0, 1)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002
        """Keys that a forward sees, and their offset."""
        return self.capacity, 0

    def get_seq_length(self) -> int:
        """Tokens of the longest row before the pass."""
        return max(self.current.starts) if self.current is not None else 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.24


class RowCache(Cache):
    """One [`RowCacheLayer`] per layer of the target."""

    def __init__(self, num_layers: int, num_rows: int):
        self.lengths = [0] * num_rows
        super().__init__(layers=[RowCacheLayer() for _ in range(num_layers)])

    def begin(self, rows: Sequence[int], counts: Sequence[int], device: torch.device) -> PackedPass:
        """Announce a forward."""
        starts = [self.lengths[row] for row in rows]
        current = PackedPass(rows, starts, counts, device)
        longest = max(*self.lengths, current.longest)
        for layer in self.layers:
            layer.reserve(len(self.lengths), longest)
            layer.current = current
        return current

    def commit(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Commit tokens of the pass; those after them are dropped."""
        for row, count in zip(rows, counts, strict=True):
            self.lengths[row] += count

    def add(self, num_rows: int) -> None:
        """Add rows for more texts, after the present ones."""
        self.lengths += [0] * num_rows

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        self.lengths = [self.lengths[row] for row in rows]
        for layer in self.layers:
            layer.keep(rows, max(self.lengths, default=0))
