# SPDX-License-Identifier: Apache-2.0
"""Attention for texts of different lengths whose new tokens are concatenated in one row ("packed").

Everything but attention works token by token, so a packed pass costs the sum of the tokens, not the number of texts
times the longest. Attention alone is computed text by text: a few queries of each are spread to one row per text, and
keys and values come from a cache with a row per text.

Legend: N packed tokens, A texts in a pass, q the most new tokens of one of them, h heads, e head width, K keys.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from ..drafts.attention import folded_attention
from ..drafts.target_probe import findings_of
from .packed_pass import PackedPass, current_pass


PACKED_ATTENTION = "dspark_packed"
# Further arguments that layers pass to attention, which packed attention would ignore.
CHANGES_SCORES = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices")
# Beyond this many queries per text, a mask for each head of a group fills the memory without any gain.
MOST_FOLDED_QUERIES = 64


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
    current = current_pass()
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


class _Switch:
    """How many batches run with a target, and how its parts attended before; kept with the target."""

    def __init__(self) -> None:
        self.lock, self.num_users = threading.Lock(), 0
        self.as_found: list[tuple[PreTrainedConfig, Any]] = []

    def __reduce__(self) -> tuple[type[_Switch], tuple[()]]:
        return _Switch, ()  # no batch runs with a copy of the target


class PackedAttention:
    """While it is entered, a target uses [`packed_attention`]; the last to leave restores what the first one found."""

    def __init__(self, target: PreTrainedModel):
        self._target, self._switch = target, findings_of(target).setdefault("packed attention", _Switch())

    def __enter__(self) -> None:
        AttentionInterface.register(PACKED_ATTENTION, packed_attention)
        AttentionMaskInterface.register(PACKED_ATTENTION, _mask_of_ordinary_calls)
        with self._switch.lock:
            if self._switch.num_users == 0:
                as_found = _implementations(self._target)
                _replace(self._target, as_found)
                self._switch.as_found = as_found
            self._switch.num_users += 1

    def __exit__(self, *_: object) -> None:
        with self._switch.lock:
            self._switch.num_users -= 1
            if self._switch.num_users == 0:
                _restore(self._switch.as_found)
                self._switch.as_found = []

    @property
    def own_implementation(self) -> str | None:
        """How the language model of the target attends by itself, also while a batch runs."""
        config = self._target.config.get_text_config(decoder=True)
        found = next((own for part, own in self._switch.as_found if part is config), None)
        return found if found is not None else getattr(config, "_attn_implementation", None)


def _mask_of_ordinary_calls(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Without a mask of its own, an implementation is handed none, and an ordinary call would attend to the future."""
    return sdpa_mask(*args, **(kwargs | {"allow_is_causal_skip": False}))


def _implementations(target: PreTrainedModel) -> list[tuple[PreTrainedConfig, Any]]:
    """The configs of a target's parts, with how each attends."""
    configs = [module.config for module in target.modules() if isinstance(module, PreTrainedModel)]
    configs += [target.config.get_text_config(decoder=True)]
    return [(config, config._attn_implementation) for config in {id(c): c for c in configs}.values()]


def _restore(as_found: list[tuple[PreTrainedConfig, Any]]) -> None:
    for config, implementation in as_found:
        config._attn_implementation_internal = implementation  # the property would set all parts alike


def _replace(target: PreTrainedModel, as_found: list[tuple[PreTrainedConfig, Any]]) -> None:
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
