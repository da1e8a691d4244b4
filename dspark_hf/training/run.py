# SPDX-License-Identifier: Apache-2.0
"""Runs `dspark-hf train`: from answered conversations to a saved draft."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.utils import logging

from ..common.chat import template_hash
from ..common.chat_tokens import end_token_ids, generation_end_ids
from ..common.files import write_text
from ..common.versions import library_versions
from ..drafts.configuration_dspark import DSparkConfig
from ..drafts.modeling_dspark import DSparkDraftModel
from .arguments import DSparkTrainingArguments
from .checks import check_can_go_on, check_checkpoint, check_run, check_token_ids, last_checkpoint
from .dataset import SequenceDataset, TrainingSequence, choose_vocabulary, encode_rows, find_mask_token_id
from .feature_cache import FeatureCache
from .trainer import DSparkTrainer
from .warm_start import (
    copy_target_head,
    reduce_vocabulary,
    scale_final_norm,
    start_from_bigrams,
    start_from_target_layers,
)


logger = logging.get_logger("transformers.dspark_hf.training.run")


@dataclass
class DataArguments:
    """Where the data is.

    Args:
        data (`list[str]`): JSON Lines files of answered conversations, as `dspark-hf prepare` writes them.
        max_length (`int`, *optional*, defaults to 4096): Longest sequence, in tokens.
        held_out (`float`, *optional*, defaults to 0.05): Share of the sequences kept for evaluation, in [0, 1).
        feature_cache (`str`, *optional*): Folder for the target's hidden states; without one they are computed online.
        enable_thinking (`bool`, *optional*): The chat template's thinking switch.
    """

    data: list[str] = field(metadata={"help": "JSON Lines files of answered conversations."})
    max_length: int = field(default=4096, metadata={"help": "Longest sequence, in tokens."})
    held_out: float = field(default=0.05, metadata={"help": "Share of the sequences kept for evaluation."})
    feature_cache: str | None = field(default=None, metadata={"help": "Folder for the target's hidden states."})
    enable_thinking: bool | None = field(default=None, metadata={"help": "The chat template's thinking switch."})


@dataclass
class DraftArguments:
    """What draft to train; ablations are settings here. Defaults are for a small target.

    Args:
        draft_num_layers (`int`, *optional*, defaults to 2): Draft layers.
        block_size (`int`, *optional*, defaults to 7): Slots per block.
        num_taps (`int`, *optional*, defaults to 5): Target layers to read.
        markov_rank (`int`, *optional*, defaults to 256): Rank of the sequential head; 0 for DFlash.
        markov_head_type (`str`, *optional*, defaults to `"vanilla"`): `"vanilla"`, `"gated"` or `"rnn"`.
        confidence_head (`bool`, *optional*, defaults to `True`): Whether to train one.
        draft_vocab_size (`int`, *optional*): Size of a reduced draft vocabulary, chosen from the answers.
        train_lm_head (`bool`, *optional*, defaults to `False`): Whether a reduced LM head is trained, or stays the
            target's.
        mask_token_id (`int`, *optional*): An unused embedding row; found by itself where possible.
        bigram_start (`bool`, *optional*, defaults to `True`): Start the sequential head from bigrams of the answers.
        target_layer_start (`bool`, *optional*, defaults to `False`): Start the draft's layers from the target's last
            ones.
        init_from (`str`, *optional*): Draft to continue from, Hub id or folder. Its shape is kept, whatever the
            arguments above say; only `draft_vocab_size` still cuts a whole vocabulary down.
    """

    draft_num_layers: int = field(default=2, metadata={"help": "Draft layers."})
    block_size: int = field(default=7, metadata={"help": "Slots per block."})
    num_taps: int = field(default=5, metadata={"help": "Target layers to read."})
    markov_rank: int = field(default=256, metadata={"help": "Rank of the sequential head; 0 for DFlash."})
    markov_head_type: str = field(default="vanilla", metadata={"help": "vanilla, gated or rnn."})
    confidence_head: bool = field(default=True, metadata={"help": "Whether to train a confidence head."})
    draft_vocab_size: int | None = field(default=None, metadata={"help": "Size of a reduced draft vocabulary."})
    train_lm_head: bool = field(default=False, metadata={"help": "Whether a reduced LM head is trained."})
    mask_token_id: int | None = field(default=None, metadata={"help": "An unused embedding row."})
    bigram_start: bool = field(default=True, metadata={"help": "Start the sequential head from bigrams."})
    target_layer_start: bool = field(default=False, metadata={"help": "Start the layers from the target's last ones."})
    init_from: str | None = field(default=None, metadata={"help": "Draft to go on with, Hub id or folder."})


def train_draft(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data_arguments: DataArguments,
    draft_arguments: DraftArguments,
    arguments: DSparkTrainingArguments,
) -> tuple[DSparkDraftModel, dict[str, float]]:
    """Train a draft and save it to `arguments.output_dir`; a run that was killed resumes from its last checkpoint.

    Args:
        target (`PreTrainedModel`): The frozen target.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        data_arguments (`DataArguments`): Where the data is.
        draft_arguments (`DraftArguments`): What to train.
        arguments (`DSparkTrainingArguments`): How.

    Returns:
        `tuple`: the draft, and its figures on the held-out sequences.

    Raises:
        ValueError: If the data, the draft or the folder's earlier run do not fit, or a weight is not finite.
        RuntimeError: If the loss, a gradient norm or a held-out figure is not finite; no such draft is saved.
    """
    check_run(arguments)
    train, held_out = read_sequences(tokenizer, data_arguments, generation_end_ids(target))
    check_token_ids([*train, *held_out], target.config.get_text_config(decoder=True).vocab_size)
    set_seed(arguments.seed)
    draft = new_draft(target, tokenizer, train, draft_arguments)
    draft.config.training_info = _training_info(
        tokenizer, data_arguments, draft_arguments, train, draft.config.block_size
    )
    train_data, held_out_data = (SequenceDataset(part, data_arguments.max_length) for part in (train, held_out))
    num_dropped = train_data.num_dropped + held_out_data.num_dropped
    if num_dropped:
        logger.warning(f"{num_dropped} sequences are left out: too little of an answer within `max_length`.")
    checkpoint = last_checkpoint(arguments.output_dir)
    if checkpoint is not None:
        _check_same_run(checkpoint, draft.config)
        check_can_go_on(checkpoint)
        check_checkpoint(checkpoint)
    # First, since it refuses what cannot be trained before features are written.
    trainer = DSparkTrainer(draft, target, arguments, train_dataset=train_data, eval_dataset=held_out_data)
    if data_arguments.feature_cache is not None:
        trainer.train_dataset, trainer.eval_dataset = (
            _with_features(Path(data_arguments.feature_cache) / name, part, target, draft.config.target_layer_ids)
            for name, part in (("train", train_data), ("held_out", held_out_data))
        )
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint is not None else None)
    figures = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        write_text(Path(arguments.output_dir, "held_out.json"), json.dumps(figures, indent=2))
    return draft, figures


@contextlib.contextmanager
def own_process_group() -> Iterator[None]:
    """Destroy the process group at the end, if it was made inside; one that the caller made is the caller's.

    The training arguments make it under a launcher. Left alone, its threads can abort a process that exits. After an
    error it is left alone, since the other processes may wait in it forever.
    """
    distributed = torch.distributed
    made_before = distributed.is_available() and distributed.is_initialized()
    yield
    if distributed.is_available() and distributed.is_initialized() and not made_before:
        distributed.destroy_process_group()


def read_sequences(
    tokenizer: PreTrainedTokenizerBase, arguments: DataArguments, end_ids: Collection[int] = ()
) -> tuple[list[TrainingSequence], list[TrainingSequence]]:  # training and held-out sequences
    """Read the data and set a part aside, the same one in every run over the same rows."""
    if not 0 < arguments.held_out < 1:
        raise ValueError(f"`held_out` must lie in (0, 1), got {arguments.held_out}.")
    paths = [Path(path) for path in arguments.data]
    sequences = encode_rows(paths, tokenizer, arguments.enable_thinking, end_ids)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(sequences), generator=generator).tolist()
    count = max(1, round(arguments.held_out * len(sequences)))
    if count >= len(sequences):
        raise ValueError(f"{len(sequences)} sequences cannot be split into training and held-out ones. Add data.")
    return [sequences[i] for i in sorted(order[count:])], [sequences[i] for i in sorted(order[:count])]


def new_draft(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sequences: list[TrainingSequence],
    arguments: DraftArguments,
) -> DSparkDraftModel:  # fp32, on the CPU
    """A fresh draft for a target, with the starting values asked for."""
    if arguments.init_from is not None:
        return _earlier_draft(target, tokenizer, sequences, arguments, arguments.init_from)
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    mask_token_id = arguments.mask_token_id
    if mask_token_id is None:
        mask_token_id = find_mask_token_id(tokenizer, vocab_size, sequences)
    config = DSparkConfig.from_target(
        target.config,
        mask_token_id=mask_token_id,
        num_hidden_layers=arguments.draft_num_layers,
        num_taps=arguments.num_taps,
        block_size=arguments.block_size,
        markov_rank=arguments.markov_rank,
        markov_head_type=arguments.markov_head_type,
        enable_confidence_head=arguments.confidence_head,
        confidence_head_with_markov=arguments.confidence_head and arguments.markov_rank > 0,
        draft_vocab_size=arguments.draft_vocab_size,
    )
    draft = DSparkDraftModel(config)
    if config.draft_vocab_size is not None:
        copy_target_head(draft, target, _kept_ids(target, tokenizer, sequences, config.draft_vocab_size))
        draft.own_head.requires_grad_(arguments.train_lm_head)
    if arguments.target_layer_start:
        start_from_target_layers(draft, target)
    else:
        scale_final_norm(draft, target)
    if arguments.bigram_start and config.markov_rank:
        start_from_bigrams(draft, sequences)
    return draft


def _earlier_draft(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sequences: list[TrainingSequence],
    arguments: DraftArguments,
    source: str,
) -> DSparkDraftModel:
    draft = DSparkDraftModel.from_pretrained(source, dtype=torch.float32)
    draft.bind_target(target)  # refuses another target's draft
    wanted, found = arguments.draft_vocab_size, draft.config.draft_vocab_size
    if wanted is not None and found is None:
        draft = reduce_vocabulary(draft, target, _kept_ids(target, tokenizer, sequences, wanted))
    elif wanted is not None and wanted != found:
        raise ValueError(
            f"`draft_vocab_size` must be that of `init_from`, {found}, or unset, got {wanted}: a reduced vocabulary "
            "is not changed again."
        )
    if draft.lm_head is not None:
        draft.lm_head.requires_grad_(arguments.train_lm_head)
    # Measured on the earlier draft, and no longer true of this one.
    for name in ("confidence_temperatures", "acceptance_prior", "copy_prior", "calibration_info"):
        setattr(draft.config, name, None)
    return draft


def _kept_ids(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sequences: list[TrainingSequence], size: int
) -> list[int]:
    kept_ids, coverage = choose_vocabulary(sequences, size, sorted(end_token_ids(target, tokenizer)))
    logger.warning(f"The reduced vocabulary of {len(kept_ids)} tokens covers {coverage:.2%} of the answers.")
    return kept_ids


def _training_info(
    tokenizer: PreTrainedTokenizerBase,
    data_arguments: DataArguments,
    draft_arguments: DraftArguments,
    sequences: list[TrainingSequence],
    block_size: int,
) -> dict[str, Any]:
    return {
        "chat_template_sha256": template_hash(tokenizer),
        "enable_thinking": data_arguments.enable_thinking,
        "num_sequences": len(sequences),
        "num_answer_tokens": sum(len(q.input_ids) - q.num_prompt_tokens for q in sequences),
        "data_files": [Path(path).name for path in data_arguments.data],
        "block_size": block_size,
        "bigram_start": draft_arguments.bigram_start,
        "target_layer_start": draft_arguments.target_layer_start,
        "init_from": Path(draft_arguments.init_from).name if draft_arguments.init_from is not None else None,
        "versions": library_versions(),
        "date": datetime.date.today().isoformat(),
    }


def _with_features(
    folder: Path, dataset: SequenceDataset, target: PreTrainedModel, target_layer_ids: list[int]
) -> FeatureCache:
    """One process at a time: the first one writes what is missing, the others find it."""
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        return FeatureCache(folder, dataset, target, target_layer_ids)


def _check_same_run(checkpoint: Path, config: DSparkConfig) -> None:
    found, wanted = (_identity(c) for c in (DSparkConfig.from_pretrained(checkpoint), config))
    different = sorted(name for name in wanted if found.get(name) != wanted[name])
    if different:
        raise ValueError(
            f"{checkpoint.parent} holds a run with other settings: { {name: found.get(name) for name in different} }, "
            f"got { {name: wanted[name] for name in different} }. Choose another `output_dir`, or repeat the settings "
            "of that run to go on with it."
        )


def _identity(config: DSparkConfig) -> dict[str, Any]:
    """The settings that must not change when a run resumes: the draft and its data."""
    info = config.training_info or {}
    learned = ("training_info", "confidence_temperatures", "acceptance_prior", "copy_prior", "calibration_info")
    of_every_config = {own.name for own in fields(PreTrainedConfig)}
    names = sorted({own.name for own in fields(DSparkConfig)} - of_every_config - {*learned})
    data = ("chat_template_sha256", "enable_thinking", "num_sequences", "num_answer_tokens")
    target = {"target_name_or_path": Path(config.target_name_or_path or "").name}  # a target may be moved
    return {name: getattr(config, name) for name in names} | target | {name: info.get(name) for name in data}
