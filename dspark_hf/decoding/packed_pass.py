# SPDX-License-Identifier: Apache-2.0
"""A pass over the new tokens of texts of different lengths, concatenated in one row ("packed").

Legend: N packed tokens, A texts in a pass, q the most new tokens of one of them, h heads, e head width, K keys.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence

import torch

from ..drafts.attention import folded_mask


class PackedPass:
    """Maps packed tokens to texts and cache positions in one forward of the target."""

    def __init__(
        self,
        rows: Sequence[int],  # [A], cache rows of the texts
        starts: Sequence[int],  # [A], tokens that each text has in the cache already
        counts: Sequence[int],  # [A], new tokens of each, at least 1
        device: torch.device,  # of the target
    ):
        self.rows, self.starts, self.counts = tuple(rows), tuple(starts), tuple(counts)
        self.num_queries = max(counts)
        count = torch.tensor(counts)
        self._text = torch.arange(len(counts)).repeat_interleave(count).to(device)  # [N], 0 to A - 1
        self._slot = torch.cat([torch.arange(n) for n in counts]).to(device)  # [N]
        self._starts = torch.tensor(starts, device=device)
        self.cache_rows = torch.tensor(rows, device=device)[self._text]  # [N]
        self.positions = self._starts[self._text] + self._slot  # [N]: in the text, and in its cache row
        self._spread_from = torch.zeros(len(counts) * self.num_queries, dtype=torch.long, device=device)
        self._gather_from = self._text * self.num_queries + self._slot  # [N]
        self._spread_from[self._gather_from] = torch.arange(len(self._text), device=device)  # [A * q]
        self._folded_masks: dict[tuple, torch.Tensor] = {}

    @property
    def last_indices(self) -> torch.Tensor:  # [A]
        """The last packed token of each text."""
        return torch.tensor(self.counts, device=self._text.device).cumsum(0) - 1

    @property
    def longest(self) -> int:
        """Tokens of the longest text, the new ones included."""
        return max(start + count for start, count in zip(self.starts, self.counts, strict=True))

    @property
    def stand_in_mask(self) -> torch.Tensor:  # [1, 1, 1, N]
        """A 4-D mask, so that the model makes none; its contents are ignored: `packed_attention` builds the mask."""
        return torch.ones(1, 1, 1, len(self._text), dtype=torch.bool, device=self._text.device)

    def spread(
        self,
        packed: torch.Tensor,  # [1, h, N, e]
    ) -> torch.Tensor:  # [A, h, q, e]; positions past a text's last query are undefined
        """One row per text."""
        _, heads, _, width = packed.shape
        tokens = packed[0].transpose(0, 1).reshape(-1, heads * width)
        spread = tokens.index_select(0, self._spread_from).view(-1, self.num_queries, heads, width)
        return spread.transpose(1, 2)

    def gather(
        self,
        spread: torch.Tensor,  # [A, q, h, e]
    ) -> torch.Tensor:  # [1, N, h, e]
        """The reverse of [`spread`], in the layout that attention returns."""
        _, _, heads, width = spread.shape
        tokens = spread.reshape(-1, heads * width).index_select(0, self._gather_from)
        return tokens.view(1, -1, heads, width)

    def mask(self, num_keys: int, window: int | None) -> torch.Tensor:  # [A, 1, q, K], True = visible
        """The mask of the new tokens: each sees the tokens up to itself, or the last `window` of them."""
        keys = torch.arange(num_keys, device=self._starts.device)
        query = self._starts[:, None, None] + torch.arange(self.num_queries, device=keys.device)[:, None]
        mask = keys <= query  # [A, q, K]
        if window is not None:
            mask = mask & (keys > query - window)
        return mask[:, None]

    def folded_mask(
        self, num_keys: int, window: int | None, groups: int, dtype: torch.dtype
    ) -> torch.Tensor:  # [A, 1, groups * q, K]
        """[`mask`] for [`folded_attention`], made once for all layers."""
        key = (num_keys, window, groups, dtype)
        if key not in self._folded_masks:
            self._folded_masks[key] = folded_mask(self.mask(num_keys, window), groups, dtype)
        return self._folded_masks[key]


_active: contextvars.ContextVar[PackedPass | None] = contextvars.ContextVar("packed_pass", default=None)


@contextlib.contextmanager
def packed_pass(current: PackedPass) -> Iterator[None]:
    """Set the packed tokens that the attention of every forward in the `with` block works on."""
    token = _active.set(current)
    try:
        yield
    finally:
        _active.reset(token)


def current_pass() -> PackedPass | None:
    """The pass that the caller's forward is, if it is one."""
    return _active.get()
