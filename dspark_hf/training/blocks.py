# SPDX-License-Identifier: Apache-2.0
"""Geometry of training: the blocks of a sequence, what each sees and what it must predict. Imports torch only.

All blocks of a sequence go through the draft in one forward: keys are the sequence's context followed by all blocks.
Legend: b batch, s sequence, n anchors, g block_size, q = n * g.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AnchorBlocks:
    """Blocks to train on, and their labels.

    `label_mask`: True while every position from anchor + 1 on lies inside the sequence and inside a response.
    """

    positions: torch.Tensor  # [b, n], anchor positions; 0 for dummies
    keep_mask: torch.Tensor  # [b, n], False for dummies, which no loss counts
    label_ids: torch.Tensor  # [b, n, g], token that slot k predicts, at position anchor + 1 + k
    label_mask: torch.Tensor  # [b, n, g]


def sample_anchors(
    loss_mask: torch.Tensor,  # [b, s], True at response tokens
    num_anchors: int,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # positions [b, n] in ascending order and keep mask [b, n], n <= num_anchors
    """Draw anchors without replacement; an anchor and the token after it must both be response tokens."""
    if num_anchors < 1:
        raise ValueError(f"`num_anchors` must be >= 1, got {num_anchors}.")
    candidates = torch.zeros_like(loss_mask, dtype=torch.bool)
    candidates[:, :-1] = loss_mask[:, :-1].bool() & loss_mask[:, 1:].bool()
    n = max(1, min(num_anchors, int(candidates.sum(dim=1).max())))
    keys = torch.rand(candidates.shape, generator=generator).to(loss_mask.device)
    chosen = keys.masked_fill(~candidates, -1.0).topk(n, dim=1)  # candidates first, in random order
    positions = chosen.indices.masked_fill(chosen.values < 0, loss_mask.shape[1])
    positions = positions.sort(dim=1).values  # dummies last
    keep_mask = positions < loss_mask.shape[1]
    return positions.masked_fill(~keep_mask, 0), keep_mask


def label_blocks(
    input_ids: torch.Tensor,  # [b, s]
    loss_mask: torch.Tensor,  # [b, s], True at response tokens
    positions: torch.Tensor,  # [b, n], anchor positions
    keep_mask: torch.Tensor,  # [b, n], False for dummies
    block_size: int,
) -> AnchorBlocks:
    """Labels of the blocks at given anchors."""
    b, s = input_ids.shape
    slots = torch.arange(1, block_size + 1, device=positions.device)
    at = positions.unsqueeze(-1) + slots  # [b, n, g]
    inside = at < s
    flat = at.clamp(max=s - 1).view(b, -1)
    label_ids = input_ids.gather(1, flat).view(at.shape)
    counted = loss_mask.bool().gather(1, flat).view(at.shape) & inside & keep_mask.unsqueeze(-1)
    return AnchorBlocks(positions, keep_mask, label_ids, counted.long().cumprod(dim=-1).bool())


def block_input_ids(
    input_ids: torch.Tensor,  # [b, s]
    blocks: AnchorBlocks,
    mask_token_id: int,
) -> torch.Tensor:  # [b, n, g]
    """Tokens the draft reads: each anchor and its masks."""
    ids = torch.full_like(blocks.label_ids, mask_token_id)
    ids[..., 0] = input_ids.gather(1, blocks.positions)
    return ids


def previous_ids(
    input_ids: torch.Tensor,  # [b, s]
    blocks: AnchorBlocks,
) -> torch.Tensor:  # [b, n, g]
    """Tokens before each slot, from the text itself (teacher forcing): the anchor, then the labels."""
    anchors = input_ids.gather(1, blocks.positions).unsqueeze(-1)
    return torch.cat([anchors, blocks.label_ids[..., :-1]], dim=-1)


def block_position_ids(blocks: AnchorBlocks, sequence_length: int) -> torch.Tensor:  # [b, s + q]
    """Positions of the context, then of all blocks."""
    b, _, g = blocks.label_ids.shape
    device = blocks.positions.device
    context = torch.arange(sequence_length, device=device).expand(b, -1)
    slots = blocks.positions.unsqueeze(-1) + torch.arange(g, device=device)
    return torch.cat([context, slots.view(b, -1)], dim=1)


def block_attention_mask(
    blocks: AnchorBlocks, sequence_length: int, sliding_window: int | None = None, causal_in_block: bool = False
) -> torch.Tensor:  # [b, 1, q, s + q], True = visible; dummies see their own block only
    """The mask of each slot: the context strictly before its anchor, and its own block."""
    b, n, g = blocks.label_ids.shape
    device = blocks.positions.device
    anchors = torch.where(blocks.keep_mask, blocks.positions, 0).repeat_interleave(g, dim=1).unsqueeze(-1)  # [b, q, 1]
    at = torch.arange(sequence_length, device=device)
    context = at < anchors  # [b, q, s]
    if sliding_window is not None:
        context = context & (at >= anchors - sliding_window)
    own = torch.ones(g, g, dtype=torch.bool, device=device)
    own = torch.block_diag(*[own.tril() if causal_in_block else own] * n)  # [q, q]
    return torch.cat([context, own.expand(b, -1, -1)], dim=-1).unsqueeze(1)
