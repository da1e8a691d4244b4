# SPDX-License-Identifier: Apache-2.0
"""Training a draft with transformers' Trainer (paper section 3.3): one forward over all blocks of a batch.

Legend: b batch, s sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel, Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler, get_length_grouped_indices
from transformers.trainer_utils import TrainOutput

from ..drafts.modeling_dspark import DSparkDraftModel
from ..drafts.target_structure import backbone_of
from .arguments import DSparkTrainingArguments
from .blocks import AnchorBlocks, label_blocks, sample_anchors
from .checks import check_checkpoint, check_token_ids, check_weights, last_checkpoint
from .dataset import collate, target_features
from .feature_cache import cached_features, collate_features
from .losses import LossSums, LossWeights, decay_weights
from .objective import BlockObjective, SlotSums, draft_blocks


class EpochLengthSampler(LengthGroupedSampler):
    """transformers' length grouping, drawn from (seed, epoch) and not from a shared stream: a resumed epoch keeps
    its own order, and all processes agree on it.
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
        NotImplementedError: If the draft has the slot convention of the original DFlash, the target has no backbone to
            read hidden states from, or the weights are to be sharded.
        ValueError: If the draft does not fit the target, a weight of either is not finite, or the data has tokens that
            the target does not have.
    """

    def __init__(self, draft: DSparkDraftModel, target: PreTrainedModel, args: DSparkTrainingArguments, **kwargs: Any):
        if not draft.config.sample_from_anchor:
            raise NotImplementedError(
                "Drafts are trained with `sample_from_anchor=True` only, where slot 0 predicts the token after the "
                "anchor, got False. Start from a new draft."
            )
        backbone_of(target)  # refuses what has none
        check_weights(target, "The target", "Load it again, in another dtype, or look for a damaged file.")
        check_weights(draft, "The draft", "Start from another one.")
        for name in ("train_dataset", "eval_dataset"):
            check_token_ids(getattr(kwargs.get(name), "sequences", ()), draft.config.vocab_size)
        kwargs.setdefault("data_collator", _collate_any)
        super().__init__(model=draft, args=args, **kwargs)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:  # by the launcher
            raise NotImplementedError(
                "A draft cannot be trained with sharded weights, got FSDP or DeepSpeed. Use DDP."
            )
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
        self._micro_losses: list[torch.Tensor] = []

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:
        """Train; ends before a step whose loss or gradient is not finite."""
        self._micro_losses.clear()
        if resume_from_checkpoint is True:
            newest = last_checkpoint(self.args.output_dir)
            resume_from_checkpoint = str(newest) if newest is not None else True  # which the Trainer refuses
        if isinstance(resume_from_checkpoint, str):
            check_checkpoint(Path(resume_from_checkpoint))
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def training_step(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of a micro-batch; after the last of a step, its loss and gradient must be finite."""
        loss = super().training_step(model, *args, **kwargs)
        self._micro_losses.append(loss)
        if self.accelerator.sync_gradients:
            self._check_step(torch.stack(self._micro_losses).sum().float())
            self._micro_losses.clear()
        return loss

    def _check_step(self, loss: torch.Tensor) -> None:
        """Share failures between processes, so that none waits for another."""
        figures = {"loss": loss}
        if self.accelerator.scaler is None:  # which tries gradients that overflow in float16, and skips them
            norms = [p.grad.norm().to(loss) for p in self.draft.parameters() if p.grad is not None]
            figures["gradient norm"] = torch.stack([loss.new_zeros(()), *norms]).norm()
        wrong = ~torch.stack(list(figures.values())).isfinite()
        if self.accelerator.reduce(wrong.float(), reduction="sum").any():
            self._stop({name: value.item() for name, value in figures.items()}, self.state.global_step + 1)

    def _stop(self, figures: dict[str, float], step: int) -> NoReturn:
        found = ", ".join(f"{name} {value}" for name, value in figures.items())
        newest = last_checkpoint(self.args.output_dir)
        kept = "no checkpoint was saved before" if newest is None else f"the last checkpoint before is {newest}"
        raise RuntimeError(
            f"Training must have finite figures, got {found} at step {step}. Nothing of it is saved; {kept}. Train in "
            f"another `output_dir` with a lower `learning_rate` than {self.args.learning_rate:g}"
            + (", from that checkpoint with `init_from`." if newest is not None else ".")
        )

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Figures on held-out sequences."""
        figures = super().evaluate(*args, **kwargs)
        wrong = {name: value for name, value in figures.items() if not math.isfinite(value)}
        if wrong:
            self._stop(wrong, self.state.global_step)
        return figures

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the draft, if its weights are finite."""
        newest = last_checkpoint(self.args.output_dir)
        kept = f"; the last checkpoint is {newest}" if newest is not None else ""
        remedy = f"It is not saved{kept}. Train in another `output_dir` with a lower `learning_rate`."
        check_weights(self.draft, "A draft that is saved", remedy)
        super().save_model(output_dir, _internal_call)

    def blocks_of(
        self,
        inputs: dict[str, torch.Tensor],  # from `collate`
        epoch: int,  # 0-based; -1 in evaluation
    ) -> AnchorBlocks:
        """The blocks of a batch in an epoch."""
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
        """The model being trained, unwrapped."""
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
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return EpochLengthSampler(data.lengths, rows_per_step, seed, lambda: self._epoch)

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
        masks = (self.blocks_of(batch, self._epoch).label_mask.cpu() for batch in batch_samples)
        total = torch.stack([(mask * weights).sum() for mask in masks]).sum()
        return self.accelerator.gather(total.to(device).reshape(1)).sum()

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],  # from `collate`
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,  # the normaliser; this batch's own weights by default
    ) -> torch.Tensor | tuple[torch.Tensor, dict]:
        """The loss of a micro-batch (Eq 12), over the weights of the whole global batch."""
        training = model.training
        blocks = self.blocks_of(inputs, self._epoch if training else -1)
        features = cached_features(inputs)
        if features is None:
            features = target_features(self.target, inputs["input_ids"], self.draft.config.target_layer_ids)
        with self.accelerator.autocast():
            hidden = draft_blocks(model, self.binding, inputs["input_ids"], features, blocks)
            objective = BlockObjective(
                self.draft, self.binding, self.args.loss_decay, self.args.head_chunk_size, self.loss_weights
            )
            total, sums, slots = objective(hidden, inputs["input_ids"], features, blocks)
        self._remember("train" if training else "eval", sums, slots)
        normaliser = num_items_in_batch if num_items_in_batch is not None else sums.weight
        loss = total / torch.as_tensor(normaliser).clamp(min=1e-8)
        if num_items_in_batch is not None:  # gradients are averaged over processes, the normaliser counts all of them
            loss = loss * self.accelerator.num_processes
        return (loss, {}) if return_outputs else loss

    def prediction_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],  # from `collate`
        prediction_loss_only: bool,  # noqa: ARG002
        ignore_keys: list[str] | None = None,  # noqa: ARG002
    ) -> tuple[torch.Tensor, None, None]:  # the loss and two None
        """The loss of an evaluation batch; the figures come with the log."""
        inputs = self._without_repeats(self._prepare_inputs(inputs))
        with torch.no_grad():
            loss, _ = self.compute_loss(model, inputs, return_outputs=True)
        return loss.detach(), None, None

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
