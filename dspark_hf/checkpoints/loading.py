# SPDX-License-Identifier: Apache-2.0
"""What must hold of a draft after its weights were read: all of them, none extra, all finite, copies in agreement."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from .files import TensorFiles


@contextlib.contextmanager
def readable_errors(source: str) -> Iterator[None]:
    """Turn the low-level errors of unreadable weight files into one that says what to do.

    Args:
        source (`str`): Where the weights come from.

    Raises:
        ValueError: In place of a `SafetensorError`.
    """
    try:
        yield
    except SafetensorError as error:
        raise ValueError(
            f"The weights of {source} are not a readable safetensors file ({error}). The file is truncated or "
            "corrupt: download or copy it again."
        ) from error


def check_loaded(model: nn.Module, loading_info: dict[str, Any], source: str) -> None:
    """Refuse a partly initialised draft.

    Args:
        model (`nn.Module`): The loaded draft.
        loading_info (`dict[str, Any]`): Second value of `from_pretrained(output_loading_info=True)`.
        source (`str`): Where the weights came from.

    Raises:
        ValueError: If a tensor is missing, unexpected, of another shape, or not finite; or an id of a reduced draft
            vocabulary lies outside the target's.
    """
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


def check_copies(model: nn.Module, files: TensorFiles, source: str) -> None:
    """Compare what a checkpoint holds twice, or holds of its target, with the config.

    Args:
        model (`nn.Module`): The loaded draft.
        files (`TensorFiles`): Its tensors on disk.
        source (`str`): Where the weights came from.

    Raises:
        ValueError: If the target's embedding or LM head is of another shape than the config says, or the membership
            mask of a reduced vocabulary names other tokens than its map.
    """
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
