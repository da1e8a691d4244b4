# SPDX-License-Identifier: Apache-2.0
"""The training objective: the parallel stage over all blocks of a batch, then the heads and losses of their slots.

Legend: b batch, s sequence, n anchors, g block_size, N slots that count, d hidden, r Markov rank, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from ..drafts.modeling_dspark import DSparkDraftModel
from ..drafts.target_binding import TargetBinding
from .blocks import AnchorBlocks, block_attention_mask, block_input_ids, block_position_ids, previous_ids
from .dataset import TargetFeatures
from .losses import LossSums, LossWeights, combine, decay_weights, slot_losses


@dataclass(frozen=True)
class SlotSums:
    """Sums over slots for the log: they add up across batches, and are divided at the end."""

    acceptance_rate: torch.Tensor  # [g], sum of 1 - TV per slot
    confidence_error: torch.Tensor  # [g], sum of |c - (1 - TV)| per slot
    count: torch.Tensor  # [g], slots counted
    accepted_length: torch.Tensor  # sum over blocks of the expected accepted length, bonus token included
    num_blocks: torch.Tensor  # blocks counted

    def __add__(self, other: SlotSums) -> SlotSums:
        return SlotSums(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class SlotBatch:
    """Slots that count, of all blocks of a batch."""

    hidden: torch.Tensor  # [N, d], after the final norm
    last_hidden: torch.Tensor  # [N, d], the target's
    labels: torch.Tensor  # [N]
    weights: torch.Tensor  # [N], fp32
    bias_features: torch.Tensor | None  # [N, r]; None without a sequential head
    confidence_logits: torch.Tensor | None  # [N]; None without a confidence head

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The tensors that have a gradient."""
        found = (self.hidden, self.bias_features, self.confidence_logits)
        return [tensor for tensor in found if tensor is not None]

    def leaves(self, part: slice, needs_gradient: bool) -> SlotBatch:
        """Some of the slots, their inputs cut off from the graph before them."""
        rows = {field.name: getattr(self, field.name) for field in fields(self)}
        rows = {name: tensor if tensor is None else tensor[part] for name, tensor in rows.items()}
        for name in ("hidden", "bias_features", "confidence_logits"):
            if rows[name] is not None:
                rows[name] = rows[name].detach().requires_grad_(needs_gradient)
        return SlotBatch(**rows)


def draft_blocks(
    draft: torch.nn.Module,
    binding: TargetBinding,
    input_ids: torch.Tensor,  # [b, s]
    features: TargetFeatures,
    blocks: AnchorBlocks,
) -> torch.Tensor:  # [b, n, g, d], slots after the final norm
    """The parallel stage over all blocks of a batch."""
    plain: Any = getattr(draft, "module", draft)  # of a draft that several processes train
    config, dtype = plain.config, plain.fc.weight.dtype
    b, s = input_ids.shape
    ids = block_input_ids(input_ids, blocks, config.mask_token_id)
    masks = {"full_attention": block_attention_mask(blocks, s)}
    if config.sliding_window is not None:
        masks["sliding_attention"] = block_attention_mask(
            blocks, s, config.sliding_window, causal_in_block=not config.sliding_window_non_causal
        )
    outputs = draft(
        noise_embeds=binding.embed(ids.view(b, -1)).detach().to(dtype),
        context_hidden_states=features.context_hidden_states.to(dtype),
        position_ids=block_position_ids(blocks, s),
        attention_mask=masks,
    )
    return outputs.last_hidden_state.view(*ids.shape, -1)


class BlockObjective:
    """Losses and figures of a batch of blocks, in chunks of slots.

    The gradient of a chunk is taken as soon as its loss is known, so that the logits of one chunk exist at a time and
    none is computed twice.
    """

    def __init__(
        self,
        draft: DSparkDraftModel,  # the draft, unwrapped
        binding: TargetBinding,  # the shared modules
        loss_decay: float,  # see `DSparkTrainingArguments`
        chunk_size: int,  # slots whose logits exist at once
        loss_weights: LossWeights | None = None,  # of the terms of the total
    ):
        self.draft, self.binding, self.chunk_size = draft, binding, chunk_size
        self.loss_decay = loss_decay
        self.loss_weights = loss_weights if loss_weights is not None else LossWeights()
        vocab_size = draft.config.vocab_size
        self.kept_ids = draft.draft_token_ids()
        self.to_draft_ids = None
        if self.kept_ids is not None:
            self.to_draft_ids = torch.full((vocab_size,), -1, dtype=torch.long, device=self.kept_ids.device)
            self.to_draft_ids[self.kept_ids] = torch.arange(self.kept_ids.shape[0], device=self.kept_ids.device)

    def __call__(
        self,
        hidden: torch.Tensor,  # [b, n, g, d]
        input_ids: torch.Tensor,  # [b, s]
        features: TargetFeatures,
        blocks: AnchorBlocks,
    ) -> tuple[torch.Tensor, LossSums, SlotSums]:
        """Evaluate the heads on all slots that count."""
        embeddings, bias_features = self._head_features(hidden, input_ids, blocks)
        mask = blocks.label_mask  # [b, n, g]
        g = mask.shape[-1]
        slots = torch.arange(g, device=mask.device)
        confidence_logits = None
        if self.draft.confidence_head is not None:
            confidence_logits = self.draft.confidence_head(hidden, embeddings)[mask]
        at = (blocks.positions.unsqueeze(-1) + slots).clamp(max=input_ids.shape[1] - 1)
        rows = torch.arange(at.shape[0], device=at.device)[:, None, None].expand_as(at)
        batch = SlotBatch(
            hidden=hidden[mask],
            last_hidden=features.last_hidden_states[rows[mask], at[mask]],
            labels=blocks.label_ids[mask],
            weights=decay_weights(g, self.loss_decay).to(mask.device).expand_as(mask)[mask],
            bias_features=bias_features[mask] if bias_features is not None else None,
            confidence_logits=confidence_logits,
        )
        total, sums, rates, ratios = self._in_chunks(batch)
        return total, sums, self._slot_sums(mask, rates, ratios, confidence_logits)

    def _head_features(
        self, hidden: torch.Tensor, input_ids: torch.Tensor, blocks: AnchorBlocks
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Token embeddings W_1[x_{k-1}] and what W_2 maps to the bias, both [b, n, g, r], with teacher forcing."""
        head = self.draft.markov_head
        if head is None:
            return None, None
        embeddings = head.markov_w1(previous_ids(input_ids, blocks))
        state, features = head.initial_state(hidden[:, :, 0]), []
        for slot in range(hidden.shape[2]):
            feature, state = head.features(embeddings[:, :, slot], hidden[:, :, slot], state)
            features.append(feature)
        return embeddings, torch.stack(features, dim=2)

    def _in_chunks(self, batch: SlotBatch) -> tuple[torch.Tensor, LossSums, torch.Tensor, torch.Tensor]:
        heads = (getattr(self.draft.markov_head, "markov_w2", None), getattr(self.draft, "lm_head", None))
        weights = [w for head in heads if head is not None for w in head.parameters() if w.requires_grad]
        # Every weight is an input, also where no slot counts: it takes part in the graph on every process.
        outputs = _GradientAhead.apply(self, batch, weights, *batch.inputs, *weights)
        total, *terms, rates, ratios = outputs
        return total, LossSums(*terms), rates, ratios

    def chunk(self, batch: SlotBatch) -> tuple[torch.Tensor, LossSums, torch.Tensor, torch.Tensor]:
        """The total, its terms, and the acceptance of each slot of a chunk.

        Returns total, `LossSums`, acceptance rates [N], and min(1, q / p) of the labels [N].
        """
        labels, head = batch.labels, self.draft.markov_head
        logits = self.draft.base_logits(batch.hidden, self.binding)
        if head is not None:
            logits = logits + head.markov_w2(batch.bias_features)
        with torch.no_grad():
            target_probs = torch.softmax(self.binding.logits(batch.last_hidden).float(), dim=-1)
            p_label = target_probs.gather(-1, labels[:, None]).squeeze(-1)
            label_ids, known, left_out = labels, torch.ones_like(labels, dtype=torch.bool), None
            if self.kept_ids is not None and self.to_draft_ids is not None:
                target_probs = target_probs[:, self.kept_ids]
                left_out = (1 - target_probs.sum(dim=-1)).clamp(min=0)
                label_ids = self.to_draft_ids[labels]
                known = label_ids >= 0
                label_ids = label_ids.clamp(min=0)
        sums, rates, q_label = slot_losses(
            logits, target_probs, label_ids, known, batch.weights, batch.confidence_logits, left_out
        )
        # P(this very token was an accepted draft), given that the target's text holds it: min(1, q / p).
        ratios = (q_label / p_label.clamp(min=torch.finfo(torch.float32).tiny)).clamp(max=1.0)
        return combine(sums, self.loss_weights, 1.0), sums, rates, ratios

    def _slot_sums(
        self, mask: torch.Tensor, rates: torch.Tensor, ratios: torch.Tensor, confidence_logits: torch.Tensor | None
    ) -> SlotSums:
        def spread(values: torch.Tensor) -> torch.Tensor:
            full = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
            full[mask] = values.detach().float()
            return full

        error = torch.zeros_like(rates)
        if confidence_logits is not None:
            error = (torch.sigmoid(confidence_logits.detach().float()) - rates).abs()
        whole = mask.all(dim=-1)  # blocks that no text end cuts short
        survival = spread(ratios).cumprod(dim=-1).sum(dim=-1)[whole]
        count = mask.sum(dim=(0, 1)).float()
        return SlotSums(
            spread(rates).sum(dim=(0, 1)),
            spread(error).sum(dim=(0, 1)),
            count,
            (1 + survival).sum(),
            whole.sum().float(),
        )


class _GradientAhead(torch.autograd.Function):
    """Total, terms and rates of all slots, chunk by chunk, and the total's gradient while a chunk's logits exist."""

    @staticmethod
    def forward(ctx, objective, batch, weights, *inputs):
        needs_gradient = any(ctx.needs_input_grad)
        grads = [torch.zeros_like(x) for x in inputs] if needs_gradient else []
        scalars = [batch.weights.new_zeros(()) for _ in range(5)]  # five tensors: only the first has a gradient
        rates, ratios, num_rows = [batch.weights[:0]], [batch.weights[:0]], len(batch.inputs)
        for begin in range(0, batch.labels.shape[0], objective.chunk_size):
            part = slice(begin, begin + objective.chunk_size)
            chunk = batch.leaves(part, needs_gradient)
            with torch.set_grad_enabled(needs_gradient):
                total, terms, chunk_rates, chunk_ratios = objective.chunk(chunk)
            if needs_gradient:
                found = torch.autograd.grad(total, [*chunk.inputs, *weights], allow_unused=True)
                places = [*(grad[part] for grad in grads[:num_rows]), *grads[num_rows:]]
                for place, grad in zip(places, found, strict=True):
                    if grad is not None:  # a confidence of weight 0
                        place += grad
            values = (total, *(getattr(terms, name) for name in terms.__dataclass_fields__))
            scalars = [a + b.detach() for a, b in zip(scalars, values, strict=True)]
            rates.append(chunk_rates)
            ratios.append(chunk_ratios)
        ctx.grads = grads
        outputs = (*scalars, torch.cat(rates), torch.cat(ratios))
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx, grad_total, *_):
        return None, None, None, *(grad * grad_total for grad in ctx.grads)
