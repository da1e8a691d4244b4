# SPDX-License-Identifier: Apache-2.0
"""Checks a draft after its weights were read: all present, none extra, all finite, copies in agreement."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from .formats import read_embedding_sample
from .formats.files import TensorFiles, hub_arguments


@contextlib.contextmanager
def readable_errors(source: str) -> Iterator[None]:
    """Turn the low-level errors of unreadable weight files into one with a remedy."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(
            f"The weights of {source} are not a readable safetensors file ({error}). The file is truncated or "
            "corrupt: download or copy it again."
        ) from error


def check_loaded(model: PreTrainedModel, loading_info: dict[str, Any], source: str) -> None:
    """Reject a partly initialised draft."""
    for kind, meaning in (
        ("missing_keys", "lacks tensors that its config asks for"),
        ("unexpected_keys", "has tensors that its config does not account for"),
        ("mismatched_keys", "has tensors of other shapes than its config says"),
    ):
        keys = sorted(str(key) for key in loading_info.get(kind) or ())
        if keys:
            shown = ", ".join(keys[:8]) + (f", ... ({len(keys)} in all)" if len(keys) > 8 else "")
            raise ValueError(
                f"The checkpoint {source} {meaning}: {shown}. Config and weights must come from one draft."
            )
    for name, tensor in model.state_dict().items():
        if tensor.device.type != "meta" and tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(
                f"The checkpoint {source} holds NaN or infinity in {name}. The draft is broken; train it again."
            )
    ids = model.draft_token_ids()
    if ids is not None and (ids.min() < 0 or ids.max() >= model.config.vocab_size or (ids[1:] <= ids[:-1]).any()):
        raise ValueError(
            f"The reduced vocabulary of {source} must map ascending draft ids into [0, {model.config.vocab_size}) "
            f"(`d2t` as offsets), got target ids from {int(ids.min())} to {int(ids.max())}."
        )


def check_copies(model: PreTrainedModel, files: TensorFiles, source: str) -> None:
    """Compare what a checkpoint holds twice, or holds of its target, with the config."""
    config, ids = model.config, model.draft_token_ids()
    whole = (config.vocab_size, config.hidden_size)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        shape = files.shape(name)
        if shape is not None and shape != whole and (name != "lm_head.weight" or ids is None):
            raise ValueError(
                f"The checkpoint {source} has tensors of other shapes than its config says: {name} is {shape}, not "
                f"{whole}. Config and weights must come from one draft."
            )
    if ids is None or "t2d" not in files.paths:
        return
    mask = files.read("t2d")
    if mask.shape != whole[:1] or mask.bool().nonzero().flatten().tolist() != ids.tolist():
        raise ValueError(
            f"The reduced vocabulary of {source} is another in `t2d` than in `d2t`. Config and weights must come from "
            "one draft."
        )


def load_checked(
    load: Callable[..., Any],
    name_or_path: str | os.PathLike,
    model_args: tuple[Any, ...],
    config: PreTrainedConfig,
    load_arguments: dict[str, Any],
) -> Any:
    """Load a draft of any kind completely or not at all: tensors, knobs, and rows that reveal a wrong target."""
    source = str(name_or_path)
    return_info = load_arguments.pop("output_loading_info", False)
    load_arguments.setdefault("use_safetensors", True)  # no pickle
    load_arguments["ignore_mismatched_sizes"] = True  # refused below, with the names
    with readable_errors(source):
        model, info = load(name_or_path, *model_args, config=config, output_loading_info=True, **load_arguments)
    check_loaded(model, info, source)
    check_copies(model, TensorFiles.find(name_or_path, load_arguments), source)
    model.generation_config = _read_generation_config(name_or_path, load_arguments)
    model.embedding_sample = read_embedding_sample(name_or_path, load_arguments)
    return (model, info) if return_info else model


def save_with_knobs(
    model: PreTrainedModel,
    save: Callable[..., None],
    save_directory: str | os.PathLike,
    push_to_hub: bool,
    repo_id: str | None,
    save_arguments: dict[str, Any],
) -> None:
    """Save a draft of any kind in our own layout, and its generation knobs beside it."""
    save_arguments["save_original_format"] = False  # our names, whatever those of the file it was read from
    save(save_directory, **save_arguments)
    if save_arguments.get("is_main_process", True):
        model.generation_config.save_pretrained(save_directory)
    if push_to_hub:  # after the knobs were written, so that they are uploaded too
        names = ("token", "private", "revision", "create_pr")
        hub = {name: save_arguments[name] for name in names if name in save_arguments}
        model.push_to_hub(repo_id or os.path.basename(os.path.normpath(save_directory)), **hub)


def _read_generation_config(name_or_path: str | os.PathLike, load_arguments: dict[str, Any]) -> GenerationConfig:
    """The generation knobs saved with a draft; published drafts have none, and none means unset."""
    try:
        return GenerationConfig.from_pretrained(name_or_path, **hub_arguments(load_arguments))
    except OSError:
        return GenerationConfig()
