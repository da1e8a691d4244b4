# SPDX-License-Identifier: Apache-2.0
"""Attention for texts of different lengths whose new tokens are concatenated in one row ("packed").

Everything but attention works token by token, so a packed pass costs the sum of the tokens, not the number of texts
times the longest. Attention alone is computed text by text: queries are spread to one row per text, keys and values
come from a cache with a row per text.

Legend: N packed tokens, A texts in a pass, q the most new tokens of one of them, h heads, e head width, K keys.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from ..drafts.attention import folded_attention, folded_mask


PACKED_ATTENTION = "dspark_packed"
# Further arguments that layers pass to attention, which packed attention would ignore.
CHANGES_SCORES = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices")
# Beyond this many queries per text, a mask for each head of a group fills the memory without any gain.
MOST_FOLDED_QUERIES = 64


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
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}
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
        key = (num_keys, window)
        if key not in self._masks:
            keys = torch.arange(num_keys, device=self._starts.device)
            query = self._starts[:, None, None] + torch.arange(self.num_queries, device=keys.device)[:, None]
            mask = keys <= query  # [A, q, K]
            if window is not None:
                mask = mask & (keys > query - window)
            self._masks[key] = mask[:, None]
        return self._masks[key]

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


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,  # [1, h, N, e]
    key: torch.Tensor,  # [rows, kv_heads, K, e]
    value: torch.Tensor,  # [rows, kv_heads, K, e]
    attention_mask: torch.Tensor | None,  # read outside of a packed pass only
    scaling: float | None = None,  # factor on the scores; 1 / sqrt(e) without it
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # outputs [1, N, h, e], and no weights
    """Attention of a packed pass, in transformers' attention interface; outside of one, of an ordinary batch."""
    for name in CHANGES_SCORES:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"DSpark drafts for batches with plain softmax attention only; {type(module).__name__} passes "
                f"`{name}`. Generate one row at a time."
            )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = kwargs["sliding_window"] if "sliding_window" in kwargs else getattr(module, "sliding_window", None)
    current = _active.get()
    if current is None:
        mask = _ordinary_mask(attention_mask, query.shape[2], key.shape[2], window, query.device)
        return _fused(query, key, value, mask, scaling, dropout), None
    if current.num_queries > MOST_FOLDED_QUERIES or dropout:
        return _text_by_text(current, query, key, value, window, scaling, dropout), None
    if len(current.rows) < key.shape[0]:  # a pass over some of the texts
        rows = list(current.rows)
        key, value = key[rows, :, : current.longest], value[rows, :, : current.longest]
    mask = current.folded_mask(key.shape[2], window, query.shape[1] // key.shape[1], query.dtype)
    return current.gather(folded_attention(current.spread(query), key, value, mask, scaling)), None


def _text_by_text(
    current: PackedPass,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    scaling: float,
    dropout: float,
) -> torch.Tensor:  # [1, N, h, e]
    """Attention to prompts: padded to the longest, they would cost the square of its length each."""
    outputs, places = [], zip(current.rows, current.starts, current.counts, strict=True)
    for queries, (row, start, count) in zip(query.split(current.counts, dim=2), places, strict=True):
        keys, values = (states[row : row + 1, :, : start + count] for states in (key, value))
        mask = None
        if start or (window is not None and window < count):
            mask = _visible(count, start + count, window, query.device)
        outputs.append(_fused(queries, keys, values, mask, scaling, dropout, is_causal=mask is None))
    return torch.cat(outputs, dim=1)


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    dropout: float,
    is_causal: bool = False,
) -> torch.Tensor:
    """A fused kernel, `(b, q, h, e)`; with a mask those of accelerators want their heads repeated."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    outputs = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling, is_causal=is_causal
    )
    return outputs.transpose(1, 2)


def _ordinary_mask(
    mask: torch.Tensor | None, num_queries: int, num_keys: int, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """The mask of another thread's plain call; one that began earlier may have none, if its kernel needed none."""
    if mask is not None or num_queries == 1:
        return mask
    return _visible(num_queries, num_keys, window, device)


def _visible(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """The tokens that each of the last ones of a text sees, [q, K]."""
    query = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    keys = torch.arange(num_keys, device=device)
    visible = keys <= query
    return visible if window is None else visible & (keys > query - window)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
# Without a mask of its own, an implementation is handed none, and an ordinary call would attend to the future.
AttentionMaskInterface.register(
    PACKED_ATTENTION, lambda *args, **kwargs: sdpa_mask(*args, **(kwargs | {"allow_is_causal_skip": False}))
)


def check_layers(target: PreTrainedModel) -> None:
    """Reject targets with layers other than full or declared sliding-window attention."""
    config = target.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    others = sorted(kinds - {"full_attention", "sliding_attention"})
    if others:
        raise NotImplementedError(
            f"Batches need layers with full or sliding attention, and {type(target).__name__} has {others}. Generate "
            "one row at a time."
        )


_users_lock = threading.Lock()
# How many batches run with a target, and how its parts attended before.
_users: weakref.WeakKeyDictionary[PreTrainedModel, tuple[int, list[tuple[PreTrainedConfig, Any]]]] = (
    weakref.WeakKeyDictionary()
)


@contextlib.contextmanager
def attention_packed(target: PreTrainedModel) -> Iterator[None]:
    """Make a target use [`packed_attention`]; its own implementation is restored after the last such block."""
    with _users_lock:
        count, as_found = _users.get(target, (0, None))
        if count == 0:
            as_found = _implementations(target)
            _switch(target, as_found)
        _users[target] = (count + 1, as_found)
    try:
        yield
    finally:
        with _users_lock:
            count, as_found = _users.pop(target)
            if count > 1:
                _users[target] = (count - 1, as_found)
            else:
                _restore(as_found)


def own_attention(target: PreTrainedModel) -> str | None:
    """The attention implementation of a target's language model, also while a batch has replaced it."""
    config = target.config.get_text_config(decoder=True)
    _, as_found = _users.get(target, (0, []))
    own = next((value for part, value in as_found if part is config), None)
    return own if own is not None else getattr(config, "_attn_implementation", None)


def _implementations(target: PreTrainedModel) -> list[tuple[PreTrainedConfig, Any]]:
    """The configs of a target's parts, with how each attends."""
    configs = [module.config for module in target.modules() if isinstance(module, PreTrainedModel)]
    configs += [target.config.get_text_config(decoder=True)]
    return [(config, config._attn_implementation) for config in {id(c): c for c in configs}.values()]


def _restore(as_found: list[tuple[PreTrainedConfig, Any]]) -> None:
    for config, implementation in as_found:
        config._attn_implementation_internal = implementation  # the property would set all parts alike


def _switch(target: PreTrainedModel, as_found: list[tuple[PreTrainedConfig, Any]]) -> None:
    config = target.config.get_text_config(decoder=True)
    before = config._attn_implementation
    try:
        # For a `PeftModel` only the instance has it, which asks the model inside.
        if any(getattr(owner, "_supports_attention_backend", False) for owner in (type(target), target)):
            target.set_attn_implementation(PACKED_ATTENTION)
    except ValueError:  # a part that cannot
        _restore(as_found)
    except BaseException:
        _restore(as_found)
        raise
    if config._attn_implementation != PACKED_ATTENTION:
        raise NotImplementedError(
            f"DSpark drafts for batches only where attention can be replaced, which {type(target).__name__} does not "
            f"allow (it has {before!r}). Generate one row at a time."
        )
