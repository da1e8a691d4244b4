# SPDX-License-Identifier: Apache-2.0
"""Training a draft with transformers' Trainer (paper section 3.3): one forward over all blocks of a batch.

Legend: b batch, s sequence, n anchors, g block_size, N slots that count, d hidden, V target vocabulary, D draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler, get_length_grouped_indices

from .blocks import (
    AnchorBlocks,
    block_attention_mask,
    block_input_ids,
    block_position_ids,
    label_blocks,
    previous_ids,
    sample_anchors,
)
from .data import TargetFeatures, collate, target_features
from .feature_cache import cached_features, collate_features
from .losses import LossSums, LossWeights, combine, decay_weights, slot_losses
from .modeling_dspark import DSparkDraftModel
from .pairing import TargetBinding


@dataclass
class DSparkTrainingArguments(TrainingArguments):
    """Arguments of [`DSparkTrainer`]: transformers' `TrainingArguments`, with the paper's recipe as defaults.

    Different from the parent: `learning_rate` 6e-4, cosine schedule with 4 % warm-up, no weight decay, length
    grouping, columns kept, and `ddp_find_unused_parameters` off: the heads run outside the wrapped forward, where the
    search would take them for unused.

    Args:
        num_anchors (`int`, *optional*, defaults to 512): Most blocks per sequence.
        loss_decay (`float`, *optional*, defaults to 4.0): Slots over which the weight of a slot falls by e.
        cross_entropy_weight (`float`, *optional*, defaults to 0.1): Weight of Eq 9.
        total_variation_weight (`float`, *optional*, defaults to 0.9): Weight of Eq 10.
        confidence_weight (`float`, *optional*, defaults to 1.0): Weight of Eq 11; without a confidence head it is 0.
        head_chunk_size (`int`, *optional*, defaults to 1024):
            Slots whose logits exist at once: peak memory grows with `head_chunk_size * V`, not with tokens times V.

    Raises:
        ValueError: If one of them is out of range.
    """

    learning_rate: float = 6e-4
    lr_scheduler_type: str = "cosine"
    warmup_steps: float = 0.04
    weight_decay: float = 0.0
    remove_unused_columns: bool = False
    train_sampling_strategy: str = "group_by_length"
    ddp_find_unused_parameters: bool | None = False
    num_anchors: int = field(default=512, metadata={"help": "Most blocks per sequence."})
    loss_decay: float = field(default=4.0, metadata={"help": "Slots over which the weight of a slot falls by e."})
    cross_entropy_weight: float = field(default=0.1, metadata={"help": "Weight of the cross entropy."})
    total_variation_weight: float = field(default=0.9, metadata={"help": "Weight of the L1 distance."})
    confidence_weight: float = field(default=1.0, metadata={"help": "Weight of the confidence loss."})
    head_chunk_size: int = field(default=1024, metadata={"help": "Slots whose logits exist at once."})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_anchors", "head_chunk_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be >= 1, got {getattr(self, name)}.")
        for name in ("cross_entropy_weight", "total_variation_weight", "confidence_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` must be >= 0, got {getattr(self, name)}. 0 leaves that term out.")
        decay_weights(1, self.loss_decay)


@dataclass(frozen=True)
class SlotSums:
    """Sums over slots for the log: they add up across batches, and are divided at the end.

    Args:
        acceptance_rate (`torch.Tensor` of shape `(g,)`): Sum of 1 - TV per slot.
        confidence_error (`torch.Tensor` of shape `(g,)`): Sum of |c - (1 - TV)| per slot.
        count (`torch.Tensor` of shape `(g,)`): Slots counted.
        accepted_length (`torch.Tensor`): Sum over blocks of the expected accepted length, bonus token included.
        num_blocks (`torch.Tensor`): Blocks counted.
    """

    acceptance_rate: torch.Tensor
    confidence_error: torch.Tensor
    count: torch.Tensor
    accepted_length: torch.Tensor
    num_blocks: torch.Tensor

    def __add__(self, other: SlotSums) -> SlotSums:
        return SlotSums(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


def draft_blocks(
    draft: torch.nn.Module,
    binding: TargetBinding,
    input_ids: torch.Tensor,
    features: TargetFeatures,
    blocks: AnchorBlocks,
) -> torch.Tensor:
    """The parallel stage over all blocks of a batch.

    Args:
        draft (`DSparkDraftModel`): The draft, or a wrapper of it whose forward is the draft's.
        binding (`TargetBinding`): The shared modules.
        input_ids (`torch.LongTensor` of shape `(b, s)`): The sequences.
        features (`TargetFeatures`): The target's hidden states of them.
        blocks (`AnchorBlocks`): The blocks.

    Returns:
        `torch.Tensor` of shape `(b, n, g, d)`: slots after the final norm.
    """
    config = getattr(draft, "module", draft).config
    b, s = input_ids.shape
    ids = block_input_ids(input_ids, blocks, config.mask_token_id)
    dtype = getattr(draft, "module", draft).fc.weight.dtype
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

    Args:
        draft (`DSparkDraftModel`): The draft, unwrapped.
        binding (`TargetBinding`): The shared modules.
        loss_decay (`float`): See [`DSparkTrainingArguments`].
        chunk_size (`int`): Slots whose logits exist at once.
    """

    def __init__(self, draft: DSparkDraftModel, binding: TargetBinding, loss_decay: float, chunk_size: int):
        self.draft, self.binding, self.chunk_size = draft, binding, chunk_size
        self.loss_decay = loss_decay
        vocab_size = draft.config.vocab_size
        self.kept_ids = draft.draft_token_ids()
        self.to_draft_ids = None
        if self.kept_ids is not None:
            self.to_draft_ids = torch.full((vocab_size,), -1, dtype=torch.long, device=self.kept_ids.device)
            self.to_draft_ids[self.kept_ids] = torch.arange(self.kept_ids.shape[0], device=self.kept_ids.device)

    def __call__(
        self, hidden: torch.Tensor, input_ids: torch.Tensor, features: TargetFeatures, blocks: AnchorBlocks
    ) -> tuple[LossSums, SlotSums]:
        """Evaluate the heads on all slots that count.

        Args:
            hidden (`torch.Tensor` of shape `(b, n, g, d)`): From [`draft_blocks`].
            input_ids (`torch.LongTensor` of shape `(b, s)`): The sequences.
            features (`TargetFeatures`): The target's hidden states of them.
            blocks (`AnchorBlocks`): The blocks.

        Returns:
            `tuple`: [`LossSums`] and [`SlotSums`].
        """
        embeddings, bias_features = self._head_features(hidden, input_ids, blocks)
        mask = blocks.label_mask  # [b, n, g]
        g = mask.shape[-1]
        slots = torch.arange(g, device=mask.device)
        confidence_logits = None
        if self.draft.confidence_head is not None:
            confidence_logits = self.draft.confidence_head(hidden, embeddings)[mask]
        at = (blocks.positions.unsqueeze(-1) + slots).clamp(max=input_ids.shape[1] - 1)
        rows = torch.arange(at.shape[0], device=at.device)[:, None, None].expand_as(at)
        columns = {
            "hidden": hidden[mask],
            "bias_features": bias_features[mask] if bias_features is not None else None,
            "last_hidden": features.last_hidden_states[rows[mask], at[mask]],
            "labels": blocks.label_ids[mask],
            "weights": decay_weights(g, self.loss_decay).to(mask.device).expand_as(mask)[mask],
            "confidence_logits": confidence_logits,
        }
        sums, rates, ratios = self._in_chunks(columns)
        return sums, self._slot_sums(mask, rates, ratios, confidence_logits)

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

    def _in_chunks(self, columns: dict[str, torch.Tensor | None]) -> tuple[LossSums, torch.Tensor, torch.Tensor]:
        num_slots = columns["hidden"].shape[0]
        parts = []
        # At least one chunk, though empty: every parameter takes part in the graph on every process.
        for begin in range(0, max(num_slots, 1), self.chunk_size):
            chunk = {n: c[begin : begin + self.chunk_size] if c is not None else None for n, c in columns.items()}
            parts.append(checkpoint(self._chunk, *chunk.values(), use_reentrant=False))
        sums = LossSums(*(torch.stack(column).sum() for column in zip(*(part[:4] for part in parts), strict=True)))
        return sums, torch.cat([part[4] for part in parts]), torch.cat([part[5] for part in parts])

    def _chunk(
        self, hidden, bias_features, last_hidden, labels, weights, confidence_logits
    ) -> tuple[torch.Tensor, ...]:
        logits = self.draft.base_logits(hidden, self.binding)
        if bias_features is not None:
            logits = logits + self.draft.markov_head.markov_w2(bias_features)
        with torch.no_grad():
            target_probs = torch.softmax(self.binding.logits(last_hidden).float(), dim=-1)
            p_label = target_probs.gather(-1, labels[:, None]).squeeze(-1)
            label_ids, known, left_out = labels, torch.ones_like(labels, dtype=torch.bool), None
            if self.kept_ids is not None:
                target_probs = target_probs[:, self.kept_ids]
                left_out = (1 - target_probs.sum(dim=-1)).clamp(min=0)
                label_ids = self.to_draft_ids[labels]
                known = label_ids >= 0
                label_ids = label_ids.clamp(min=0)
        sums, rates = slot_losses(logits, target_probs, label_ids, known, weights, confidence_logits, left_out)
        with torch.no_grad():
            q_label = torch.softmax(logits.float(), dim=-1).gather(-1, label_ids[:, None]).squeeze(-1) * known
            # P(this very token was an accepted draft), given that the target's text holds it: min(1, q / p).
            ratios = (q_label / p_label.clamp(min=torch.finfo(torch.float32).tiny)).clamp(max=1.0)
        return sums.cross_entropy, sums.total_variation, sums.confidence, sums.weight, rates, ratios

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


class EpochLengthSampler(LengthGroupedSampler):
    """transformers' length grouping, drawn from (seed, epoch) and not from a shared stream: a resumed epoch goes on in
    its own order, and all processes agree on it.

    Args:
        lengths (`Sequence[int]`): Tokens of each row.
        batch_size (`int`): Rows of a step.
        seed (`int`): Seed.
        epoch (`Callable`): Says which epoch begins.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int, epoch: Callable[[], int]):
        super().__init__(batch_size, lengths=list(lengths))
        self.seed, self.epoch = seed, epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(hash((self.seed, self.epoch())) % 2**63)
        return iter(get_length_grouped_indices(self.lengths, self.batch_size, generator=generator))


def _collate_any(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return collate_features(rows) if "context" in rows[0] else collate(rows)


class DSparkTrainer(Trainer):
    """transformers' Trainer for a draft; the target stays frozen, outside the modules that are trained and saved.

    Anchors are drawn from (seed, epoch, row), not from a shared stream, so that the same rows give the same loss
    however they are split into micro-batches and processes, and after a resume.

    Args:
        draft (`DSparkDraftModel`): The model to train, in fp32.
        target (`PreTrainedModel`): Its frozen target; moved to the training device.
        args (`DSparkTrainingArguments`): Arguments.
        kwargs (`Any`): As for `Trainer`: `train_dataset`, `eval_dataset` ([`SequenceDataset`]), `callbacks`, ...

    Raises:
        NotImplementedError: If the draft has the slot convention of the original DFlash.
        ValueError: If the draft does not fit the target.
    """

    def __init__(self, draft: DSparkDraftModel, target: PreTrainedModel, args: DSparkTrainingArguments, **kwargs: Any):
        if not draft.config.sample_from_anchor:
            raise NotImplementedError(
                "Drafts are trained with `sample_from_anchor=True` only, where slot 0 predicts the token after the "
                "anchor, got False. Start from a new draft."
            )
        kwargs.setdefault("data_collator", _collate_any)
        super().__init__(model=draft, args=args, **kwargs)
        # The loss is divided by the weights of the whole global batch here, not by the number of micro-batches there.
        self.model_accepts_loss_kwargs = True
        self.target = target.requires_grad_(False).eval()
        if args.place_model_on_device and getattr(target, "hf_device_map", None) is None:
            self.target = self.target.to(args.device)
        self.binding = draft.bind_target(self.target)
        self.loss_weights = LossWeights(
            args.cross_entropy_weight,
            args.total_variation_weight,
            args.confidence_weight if draft.confidence_head is not None else 0.0,
        )
        self._log_sums: dict[str, tuple[LossSums, SlotSums]] = {}

    def blocks_of(self, inputs: dict[str, torch.Tensor], epoch: int) -> AnchorBlocks:
        """The blocks of a batch in an epoch.

        Args:
            inputs (`dict[str, torch.Tensor]`): From [`collate`].
            epoch (`int`): 0-based; -1 in evaluation.

        Returns:
            [`AnchorBlocks`]
        """
        draws = []
        for mask, row_id in zip(inputs["loss_mask"], inputs["row_ids"].tolist(), strict=True):
            seed = hash((self.args.seed, epoch, row_id)) % 2**63
            draws.append(sample_anchors(mask[None], self.args.num_anchors, torch.Generator().manual_seed(seed)))
        width = max(positions.shape[1] for positions, _ in draws)

        def pad(column: int) -> torch.Tensor:
            return torch.cat([torch.nn.functional.pad(d[column], (0, width - d[column].shape[1])) for d in draws])

        block_size = self.draft.config.num_draft_slots
        return label_blocks(inputs["input_ids"], inputs["loss_mask"], pad(0), pad(1), block_size)

    @property
    def draft(self) -> DSparkDraftModel:
        """`DSparkDraftModel`: The model being trained, unwrapped."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def _epoch(self) -> int:
        return int(self.state.epoch or 0)

    def _get_train_sampler(self, train_dataset: Any = None) -> torch.utils.data.Sampler | None:
        """Length grouping that survives a resume; other strategies are the Trainer's."""
        data = self.train_dataset if train_dataset is None else train_dataset
        if not self._groups(data):
            return super()._get_train_sampler(train_dataset)
        rows_per_step = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        return EpochLengthSampler(data.lengths, rows_per_step, self.args.seed, lambda: self._epoch)

    def _get_eval_sampler(self, eval_dataset: Any) -> torch.utils.data.Sampler | None:
        """The same without reading a row; the Trainer's own would read every feature of a cache."""
        if not self._groups(eval_dataset):
            return super()._get_eval_sampler(eval_dataset)
        rows_per_step = self.args.eval_batch_size * self.args.world_size
        return EpochLengthSampler(eval_dataset.lengths, rows_per_step, self.args.seed, lambda: -1)

    def _groups(self, data: Any) -> bool:
        return self.args.train_sampling_strategy == "group_by_length" and hasattr(data, "lengths")

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor | None:
        """The normaliser of a step: the weights of all slots that count, over micro-batches and processes."""
        if not batch_samples:
            return None
        weights = decay_weights(self.draft.config.num_draft_slots, self.args.loss_decay)
        total = sum((self.blocks_of(batch, self._epoch).label_mask.cpu() * weights).sum() for batch in batch_samples)
        return self.accelerator.gather(total.to(device).reshape(1)).sum()

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, dict]:
        """The loss of a micro-batch (Eq 12), over the weights of the whole global batch.

        Args:
            model (`nn.Module`): The draft as the Trainer wrapped it.
            inputs (`dict[str, torch.Tensor]`): From [`collate`].
            return_outputs (`bool`, *optional*, defaults to `False`): Whether to return an (empty) output as well.
            num_items_in_batch (`torch.Tensor`, *optional*): The normaliser; this batch's own weights by default.

        Returns:
            `torch.Tensor`: scalar; with `return_outputs` a tuple with a dict.
        """
        training = model.training
        blocks = self.blocks_of(inputs, self._epoch if training else -1)
        features = cached_features(inputs)
        if features is None:
            features = target_features(self.target, inputs["input_ids"], self.draft.config.target_layer_ids)
        with self.accelerator.autocast():
            hidden = draft_blocks(model, self.binding, inputs["input_ids"], features, blocks)
            objective = BlockObjective(self.draft, self.binding, self.args.loss_decay, self.args.head_chunk_size)
            sums, slots = objective(hidden, inputs["input_ids"], features, blocks)
        self._remember("train" if training else "eval", sums, slots)
        normaliser = num_items_in_batch if num_items_in_batch is not None else sums.weight.detach()
        loss = combine(sums, self.loss_weights, torch.as_tensor(normaliser).clamp(min=1e-8))
        if num_items_in_batch is not None:  # gradients are averaged over processes, the normaliser counts all of them
            loss = loss * self.accelerator.num_processes
        return (loss, {}) if return_outputs else loss

    def prediction_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        prediction_loss_only: bool,  # noqa: ARG002
        ignore_keys: list[str] | None = None,  # noqa: ARG002
    ) -> tuple[torch.Tensor, None, None]:
        """The loss of an evaluation batch; the figures come with the log.

        Args:
            model (`nn.Module`): The draft as the Trainer wrapped it.
            inputs (`dict[str, torch.Tensor]`): From [`collate`].
            prediction_loss_only (`bool`): Not read.
            ignore_keys (`list[str]`, *optional*): Not read.

        Returns:
            `tuple`: the loss and two `None`.
        """
        inputs = self._without_repeats(self._prepare_inputs(inputs))
        with torch.no_grad():
            return self.compute_loss(model, inputs).detach(), None, None

    def _without_repeats(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Several processes fill up their last batch with rows from the start: these count nothing."""
        state, mask = self.accelerator.gradient_state, inputs["loss_mask"]
        if self.accelerator.num_processes == 1 or not state.end_of_dataloader or state.remainder < 1:
            return inputs
        at = self.accelerator.process_index * mask.shape[0] + torch.arange(mask.shape[0], device=mask.device)
        return inputs | {"loss_mask": mask & (at < state.remainder)[:, None]}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the loss terms, acceptance per slot, accepted length and confidence error since the last log.

        The loss of an evaluation is that of all held-out slots together, not the mean over its batches.

        Args:
            logs (`dict[str, float]`): The Trainer's own.
            start_time (`float`, *optional*): The Trainer's own.
        """
        split = "eval" if any(name.startswith("eval_") for name in logs) else "train"
        if split in self._log_sums:
            sums, slots = self._log_sums.pop(split)
            prefix = "eval_" if split == "eval" else ""
            logs |= {prefix + name: value for name, value in self._figures(sums, slots).items()}
            if "eval_loss" in logs:
                logs["eval_loss"] = self._total_loss(logs)
        super().log(logs, start_time)

    def _remember(self, split: str, sums: LossSums, slots: SlotSums) -> None:
        detached = LossSums(*(getattr(sums, name).detach() for name in sums.__dataclass_fields__))
        if split in self._log_sums:
            before = self._log_sums[split]
            detached, slots = before[0] + detached, before[1] + slots
        self._log_sums[split] = (detached, slots)

    def _figures(self, sums: LossSums, slots: SlotSums) -> dict[str, float]:
        def total(value: torch.Tensor) -> torch.Tensor:
            return self.accelerator.reduce(value.float(), reduction="sum")

        weight = total(sums.weight).clamp(min=1e-8)
        count = total(slots.count).clamp(min=1)
        rates = total(slots.acceptance_rate) / count
        figures = {
            "cross_entropy": float(total(sums.cross_entropy) / weight),
            "total_variation": float(total(sums.total_variation) / weight / 2),
            "accepted_length": float(total(slots.accepted_length) / total(slots.num_blocks).clamp(min=1)),
        }
        if self.draft.confidence_head is not None:
            figures["confidence_loss"] = float(total(sums.confidence) / weight)
            figures["confidence_error"] = float(total(slots.confidence_error).sum() / count.sum())
        return figures | {f"acceptance_rate_{slot}": float(rate) for slot, rate in enumerate(rates)}

    def _total_loss(self, logs: dict[str, float]) -> float:
        weights = self.loss_weights
        return (
            weights.cross_entropy * logs["eval_cross_entropy"]
            + weights.total_variation * 2 * logs["eval_total_variation"]
            + weights.confidence * logs.get("eval_confidence_loss", 0.0)
        )
