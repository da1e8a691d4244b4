# SPDX-License-Identifier: Apache-2.0
"""Target, draft and tokenizer of a command. Names, dtype and device are checked before anything large is loaded."""

from __future__ import annotations

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.thinking import choose_thinking, has_thinking_switch, with_thinking
from ..default_pair import ensure_default_target, load_default_pair
from ..drafts.modeling_dspark import DSparkDraftModel
from ..drafts.target_loading import find_target, load_target_model, load_target_tokenizer
from .options import errors


DTYPES = ("bfloat16", "float16", "float32")


def load_target(
    target: str | None, dtype: str, device: str | None, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Target and tokenizer; the default target where none is named."""
    transformers.logging.disable_progress_bar()
    chosen_dtype, chosen_device = parse_dtype(dtype), choose_device(device)
    source = find_target(target if target is not None else ensure_default_target(), trust_remote_code)
    tokenizer = load_target_tokenizer(source)
    return load_target_model(source, chosen_dtype).to(chosen_device), tokenizer


def load_draft(draft: str, dtype: str, device: str | None, **stated: object) -> DSparkDraftModel:
    """A draft; `stated` is what its config leaves open."""
    transformers.logging.disable_progress_bar()
    chosen_dtype, chosen_device = parse_dtype(dtype), choose_device(device)
    return DSparkDraftModel.from_pretrained(draft, dtype=chosen_dtype, **stated).to(chosen_device)


def load_pair(
    target: str | None, draft: str | None, dtype: str, device: str | None, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, DSparkDraftModel, PreTrainedTokenizerBase]:
    """Target, draft and tokenizer; those of the default pair where none is named."""
    if target is not None and draft is None:
        raise ValueError("A draft fits one target only: `--target` needs `--draft` as well.")
    if draft is None:
        transformers.logging.disable_progress_bar()
        return load_default_pair(dtype=parse_dtype(dtype), device=choose_device(device))
    draft_model = load_draft(draft, dtype, device)  # first: it is small, and its name may be wrong
    model, tokenizer = load_target(target, dtype, device, trust_remote_code)
    return model, draft_model, tokenizer


def parse_dtype(name: str) -> torch.dtype:
    """The dtype of a name."""
    if name not in DTYPES:
        raise ValueError(f"`--dtype` must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, got {name!r}.")
    return getattr(torch, name)


def choose_device(name: str | None) -> str:
    """The device named, if it is there, or CUDA where there is one."""
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:  # its message lists every backend there has ever been
        raise ValueError(f"`--device` must be a device such as cpu, cuda, cuda:1 or mps, got {name!r}.") from error
    if device.type == "meta":
        raise ValueError("`--device` must be a device that computes, such as cpu or cuda, got 'meta'.")
    try:
        torch.empty(0, device=device)
    # torch has no one type for a device that it was not built for, or does not find.
    except (RuntimeError, AssertionError, NotImplementedError, AttributeError, ImportError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ValueError(
            f"`--device` must be a device of this machine, got {name!r} ({reason}). Leave it out to take CUDA where "
            "there is one, else the CPU."
        ) from error
    return name


def check_prompting(raw: bool, enable_thinking: bool | None) -> None:
    """Refuse a thinking switch for prompts that go without the chat template."""
    if raw and enable_thinking is not None:
        option = "--enable-thinking" if enable_thinking else "--no-thinking"
        raise ValueError(
            f"`{option}` is a switch of the chat template, which `--raw` leaves out, got both. Give one of them."
        )


def prompting_tokenizer(
    tokenizer: PreTrainedTokenizerBase, draft: DSparkDraftModel, enable_thinking: bool | None, raw: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer with its thinking switch as asked for, else as the draft was trained, which is said."""
    if raw:
        return tokenizer
    chosen = choose_thinking(tokenizer, enable_thinking, draft.config.training_info)
    if enable_thinking is None and chosen is not None and has_thinking_switch(tokenizer):
        errors.print(f"Prompts have thinking {'on' if chosen else 'off'}, as the draft was trained.", highlight=False)
    return with_thinking(tokenizer, chosen)
