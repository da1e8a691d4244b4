# SPDX-License-Identifier: Apache-2.0
"""Checks before a training run writes anything, and of everything that it saves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from huggingface_hub import get_token
from safetensors import safe_open
from torch import nn
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME

from .dataset import TrainingSequence


_SHARDED = "the draft's heads run beside the wrapped model, where sharded weights are not gathered. Start several "
_SHARDED += "processes with `torchrun`, each with a whole draft"
# Options of transformers that a draft's training cannot follow, and why.
_UNUSABLE = {
    "neftune_noise_alpha": "it adds noise to a model's own embedding, and a draft reads that of its target",
    "label_smoothing_factor": "a draft learns from the target's whole distribution, where there is no label to smooth",
    "include_for_metrics": "the figures of a draft are computed without a function for metrics",
    "batch_eval_metrics": "the figures of a draft are computed without a function for metrics",
    "remove_unused_columns": "the losses read columns that the draft's forward does not name",
    "use_liger_kernel": "its kernels replace layers that a draft does not have",
    "bf16_full_eval": "it rounds the draft for good, and the rounded one would be saved. `bf16` alone does not",
    "fp16_full_eval": "it rounds the draft for good, and the rounded one would be saved. `fp16` alone does not",
    "fsdp": _SHARDED,
    "deepspeed": _SHARDED,
    "parallelism_config": _SHARDED,
    "debug": "its hooks read tensors that are no numbers. A loss that is not finite ends training in any case",
}
_COUNTS = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")


def refuse_options(arguments: TrainingArguments) -> None:
    """Refuse options that cannot work, or that would silently do nothing."""
    for name, reason in _UNUSABLE.items():
        value = getattr(arguments, name, None)
        if value or (name == "neftune_noise_alpha" and value is not None):
            raise NotImplementedError(
                f"`{name}` cannot be used to train a draft, got {value!r}: {reason}. Leave it unset."
            )
    for name in _COUNTS:
        if getattr(arguments, name) < 1:
            raise ValueError(f"`{name}` must be >= 1, got {getattr(arguments, name)}.")


def check_run(arguments: TrainingArguments) -> None:
    """Refuse a run whose options would fail only later: on the Hub, in the optimizer, or in the schedule."""
    if arguments.push_to_hub and not (arguments.hub_token or get_token()):
        raise ValueError(
            "`push_to_hub` needs a token, got none. Log in with `hf auth login`, or set `hub_token`; without the "
            "option, nothing is uploaded."
        )
    if arguments.resume_from_checkpoint:
        raise ValueError(
            f"`resume_from_checkpoint` must stay unset, got {arguments.resume_from_checkpoint!r}: a run goes on by "
            "itself from the newest checkpoint in `output_dir`. To start from other weights, use `init_from`."
        )
    try:
        optimizer_class, settings = Trainer.get_optimizer_cls_and_kwargs(arguments)
    except ImportError as error:
        raise ValueError(f"`optim`={arguments.optim.value} needs a package that is missing. {error}") from error
    weight = nn.Parameter(torch.zeros(1))
    if optimizer_class.__module__.startswith("torch.optim"):
        optimizer_class([weight], **settings)  # checks its own settings
    try:
        get_scheduler(
            arguments.lr_scheduler_type,
            torch.optim.SGD([weight]),
            num_warmup_steps=0,
            num_training_steps=1,
            scheduler_specific_kwargs=dict(arguments.lr_scheduler_kwargs or {}),
        )
    except TypeError as error:  # an argument that is missing, or that does not exist
        raise ValueError(
            f"`lr_scheduler_kwargs` do not fit `lr_scheduler_type`={arguments.lr_scheduler_type.value}, got "
            f"{arguments.lr_scheduler_kwargs}: {error}."
        ) from error


def check_token_ids(sequences: Sequence[TrainingSequence], vocab_size: int) -> None:
    """Refuse data with tokens that the target does not have."""
    for number, sequence in enumerate(sequences):
        lowest, highest = min(sequence.input_ids, default=0), max(sequence.input_ids, default=0)
        if lowest < 0 or highest >= vocab_size:
            raise ValueError(
                f"Token ids must lie below the target's vocabulary of {vocab_size}, got "
                f"{highest if highest >= vocab_size else lowest}. The data was made with another target (sequence "
                f"{number}); let this one answer with `dspark-hf prepare`."
            )


def check_weights(model: nn.Module, what: str, remedy: str) -> None:
    """Refuse weights that are NaN or infinite."""
    for name, weight in model.named_parameters():
        is_readable = weight.is_floating_point() and weight.dtype.itemsize > 1 and weight.device.type != "meta"
        if is_readable and not weight.detach().isfinite().all():
            raise ValueError(f"{what} must have finite weights, got NaN or infinity in `{name}`. {remedy}")


def check_checkpoint(folder: Path) -> None:
    """Reject resuming from weights that are NaN or infinite."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                if tensor.is_floating_point() and not tensor.isfinite().all():
                    raise ValueError(
                        f"The checkpoint {folder} must have finite weights, got NaN or infinity in `{name}`: nothing "
                        "good comes of going on from it. Delete it to go on from an earlier one, and lower "
                        "`learning_rate` in another `output_dir` if the loss diverges again."
                    )


def last_checkpoint(output_dir: str | Path) -> Path | None:
    """The newest checkpoint that no kill cut short: the trainer's state is written last."""
    steps = {}
    for folder in Path(output_dir).glob("checkpoint-*"):
        number, state = folder.name.removeprefix("checkpoint-"), folder / TRAINER_STATE_NAME
        if number.isdecimal() and state.is_file() and state.read_text(encoding="utf-8").rstrip().endswith("}"):
            steps[int(number)] = folder
    return steps[max(steps)] if steps else None


def check_can_go_on(checkpoint: Path) -> None:
    """Reject a checkpoint without an optimizer: resuming from it would be a different run."""
    if not (checkpoint / OPTIMIZER_NAME).is_file():
        raise ValueError(
            f"{checkpoint} was saved without the state of its optimizer (`save_only_model`), so its run cannot go on. "
            "Choose another `output_dir`, with `init_from` to start from these weights."
        )
