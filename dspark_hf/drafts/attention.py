# SPDX-License-Identifier: Apache-2.0
"""Attention of few queries over many keys, without a copy of keys and values for heads that share them.

Legend: b rows, q queries of each, k keys, e head width, v value width. Heads form groups, one for each key-value head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def eager_attention(
    module: nn.Module,
    query: torch.Tensor,  # [b, heads, q, e]
    key: torch.Tensor,  # [b, kv_heads, k, e]
    value: torch.Tensor,  # [b, kv_heads, k, v]
    attention_mask: torch.Tensor | None,  # broadcastable to [b, 1, q, k], True = visible
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # outputs [b, q, heads, v] and weights [b, kv_heads, heads / kv_heads, q, k]
    """Attention as two grouped matmuls, in transformers' attention interface; key-value heads are not repeated."""
    b, heads, q, e = query.shape
    kv_heads, k = key.shape[1], key.shape[2]
    groups = heads // kv_heads
    # The heads of a group are rows of one matmul, so nothing is broadcast or copied.
    grouped = (query * scaling).reshape(b, kv_heads, groups * q, e)
    scores = torch.matmul(grouped, key.transpose(-1, -2)).view(b, kv_heads, groups, q, k)
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask.unsqueeze(1), torch.finfo(scores.dtype).min)
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    outputs = torch.matmul(weights.view(b, kv_heads, groups * q, k), value).view(b, heads, q, value.shape[-1])
    return outputs.transpose(1, 2), weights


def folded_attention(
    query: torch.Tensor,  # [b, heads, q, e]
    key: torch.Tensor,  # [b, kv_heads, k, e]
    value: torch.Tensor,  # [b, kv_heads, k, v]
    attention_mask: torch.Tensor | None,  # of `folded_mask`
    scaling: float,
) -> torch.Tensor:  # [b, q, heads, v]
    """Attention by a fused kernel; the heads of a group become queries of one head, so nothing is repeated.

    On a CPU, a few queries take 33-100 % of the time of two matmuls, and 25-50 % of that of the fused kernel with
    repeated heads (benchmarks/attention.py).
    """
    b, heads, q, e = query.shape
    folded = query.reshape(b, key.shape[1], -1, e)
    outputs = nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return outputs.reshape(b, heads, q, value.shape[-1]).transpose(1, 2)


def folded_mask(
    visible: torch.Tensor,  # [b, 1, q or 1, k], True = visible
    groups: int,
    dtype: torch.dtype,
) -> torch.Tensor:  # [b, 1, groups * q or 1, k]
    """A mask for [`folded_attention`], added to the scores: kernels convert a boolean one at every layer."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, float("-inf"))
    return mask if mask.shape[2] == 1 else mask.repeat(1, 1, groups, 1)
