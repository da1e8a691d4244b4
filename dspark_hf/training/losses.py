# SPDX-License-Identifier: Apache-2.0
"""The training losses (paper Eq 9 to 12) as sums and counts. Imports torch only.

p is the target's distribution, q the draft's. Legend: N slots that count, V vocabulary of the draft, g block_size.
Normaliser of every term: the sum of the decayed weights over all counted slots of the global batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True)
class LossSums:
    """Weighted sums of the loss terms over slots; they add up across chunks, sequences and processes."""

    cross_entropy: torch.Tensor  # sum of w * CE (Eq 9); scalar, fp32
    total_variation: torch.Tensor  # sum of w * L1, which is twice the total variation (Eq 10)
    confidence: torch.Tensor  # sum of w * BCE of the confidence (Eq 11); zero without a confidence head
    weight: torch.Tensor  # sum of w

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(
            self.cross_entropy + other.cross_entropy,
            self.total_variation + other.total_variation,
            self.confidence + other.confidence,
            self.weight + other.weight,
        )


@dataclass(frozen=True)
class LossWeights:
    """Weights of the three terms in Eq 12."""

    cross_entropy: float = 0.1  # needed early: from a cold start L1 alone hardly moves
    total_variation: float = 0.9  # of the L1 term
    confidence: float = 1.0  # of the confidence term


def decay_weights(block_size: int, loss_decay: float = 4.0) -> torch.Tensor:  # [g], fp32
    """w_k = exp(-k / loss_decay): later slots matter less, since they count only if all before them are accepted."""
    if not loss_decay > 0:
        raise ValueError(f"`loss_decay` must be > 0, got {loss_decay}.")
    return torch.exp(-torch.arange(block_size, dtype=torch.float32) / loss_decay)


def slot_losses(
    draft_logits: torch.Tensor,  # [N, V]
    target_probs: torch.Tensor,  # [N, V]
    label_ids: torch.Tensor,  # [N]
    label_in_vocabulary: torch.Tensor,  # [N], False where a reduced vocabulary lacks the label
    weights: torch.Tensor,  # [N], w, fp32
    confidence_logits: torch.Tensor | None = None,  # [N], confidence before the sigmoid
    left_out_probs: torch.Tensor | None = None,  # [N]
) -> tuple[LossSums, torch.Tensor, torch.Tensor]:  # `LossSums`, the acceptance rates [N], and q of the labels [N]
    """Loss sums and acceptance rates of slots.

    Label of the cross entropy: the text's own token. The confidence label is the acceptance rate 1 - L1 / 2, detached;
    no gradient reaches p.
    """
    cross_entropy, l1 = _Distances.apply(draft_logits.float(), target_probs.detach(), label_ids)
    label_probs = torch.exp(-cross_entropy.detach()) * label_in_vocabulary
    cross_entropy = cross_entropy * label_in_vocabulary
    if left_out_probs is not None:
        l1 = l1 + left_out_probs.detach()
    acceptance_rate = (1 - l1.detach() / 2).clamp(0, 1)
    confidence = l1.new_zeros(())
    if confidence_logits is not None:
        bce = functional.binary_cross_entropy_with_logits(confidence_logits.float(), acceptance_rate, reduction="none")
        confidence = (weights * bce).sum()
    sums = LossSums((weights * cross_entropy).sum(), (weights * l1).sum(), confidence, weights.sum())
    return sums, acceptance_rate, label_probs


class _Distances(torch.autograd.Function):
    """Cross entropy of the labels and L1 distance to p, per slot; one pass over [N, V] each way.

    With s = sign(q - p): d CE / d logits = q - onehot(label), d L1 / d logits = q * (s - sum of s * q).
    """

    @staticmethod
    def forward(ctx, logits, target_probs, label_ids):  # noqa: ARG004
        log_probs = torch.log_softmax(logits, dim=-1)
        cross_entropy = -log_probs.gather(-1, label_ids[:, None]).squeeze(-1)
        probs = log_probs.exp_()
        ctx.save_for_backward(probs, target_probs, label_ids)
        return cross_entropy, torch.sub(probs, target_probs).abs_().sum(dim=-1)

    @staticmethod
    def backward(ctx, grad_cross_entropy, grad_l1):
        probs, target_probs, label_ids = ctx.saved_tensors
        sign = torch.sub(probs, target_probs).sign_()
        mean_sign = torch.linalg.vecdot(sign, probs)
        # q * (grad_l1 * (s - mean) + grad_ce), and -grad_ce at the label
        grad = sign.mul_(grad_l1[:, None]).add_((grad_cross_entropy - grad_l1 * mean_sign)[:, None]).mul_(probs)
        grad.scatter_add_(-1, label_ids[:, None], -grad_cross_entropy[:, None])
        return grad, None, None


def combine(sums: LossSums, loss_weights: LossWeights, normaliser: torch.Tensor | float) -> torch.Tensor:
    """The training loss (Eq 12)."""
    total = (
        loss_weights.cross_entropy * sums.cross_entropy
        + loss_weights.total_variation * sums.total_variation
        + loss_weights.confidence * sums.confidence
    )
    return total / normaliser
