# SPDX-License-Identifier: Apache-2.0
"""Arguments of a training run: transformers' own, with the paper's recipe as defaults."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import TrainingArguments

from .checks import refuse_options
from .losses import decay_weights


@dataclass
class DSparkTrainingArguments(TrainingArguments):
    """Arguments of [`DSparkTrainer`]: transformers' `TrainingArguments`, with the paper's recipe as defaults.

    Different from the parent: `learning_rate` 6e-4, cosine schedule with 4 % warm-up, no weight decay, length
    grouping, columns kept, losses logged as they are, and `ddp_find_unused_parameters` off: the heads run outside the
    wrapped forward, where the search would take them for unused.

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
        NotImplementedError: If an option of the parent cannot be used to train a draft.
    """

    learning_rate: float = 6e-4
    lr_scheduler_type: str = "cosine"
    warmup_steps: float = 0.04
    weight_decay: float = 0.0
    remove_unused_columns: bool = False
    train_sampling_strategy: str = "group_by_length"
    ddp_find_unused_parameters: bool | None = False
    logging_nan_inf_filter: bool = False
    num_anchors: int = field(default=512, metadata={"help": "Most blocks per sequence."})
    loss_decay: float = field(default=4.0, metadata={"help": "Slots over which the weight of a slot falls by e."})
    cross_entropy_weight: float = field(default=0.1, metadata={"help": "Weight of the cross entropy."})
    total_variation_weight: float = field(default=0.9, metadata={"help": "Weight of the L1 distance."})
    confidence_weight: float = field(default=1.0, metadata={"help": "Weight of the confidence loss."})
    head_chunk_size: int = field(default=1024, metadata={"help": "Slots whose logits exist at once."})

    def __post_init__(self) -> None:
        refuse_options(self)
        if not torch.accelerator.is_available():
            self.dataloader_pin_memory = False  # without an accelerator, pinning only causes a warning
        super().__post_init__()
        for name in ("num_anchors", "head_chunk_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be >= 1, got {getattr(self, name)}.")
        for name in ("cross_entropy_weight", "total_variation_weight", "confidence_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` must be >= 0, got {getattr(self, name)}. 0 leaves that term out.")
        decay_weights(1, self.loss_decay)
