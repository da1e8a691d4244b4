# SPDX-License-Identifier: Apache-2.0
"""Readers of draft checkpoints: pure mappings from a foreign config.json to [`DSparkConfig`], one file per format.

All supported formats share the tensor names of our own, so only the configuration is translated. A format is told by
what is in the config, never by a class name alone (two projects use the same one), and what a file leaves open is an
error, never a guess: a wrong guess does not crash, it silently accepts nothing.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_NAME, cached_file

from ..configuration_dspark import DSparkConfig
from . import deepspec, speculators
from .refusals import refuse


_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def read_config(name_or_path: str | os.PathLike, load_arguments: dict[str, Any]) -> DSparkConfig:
    """The configuration of a draft checkpoint in any supported format.

    Args:
        name_or_path (`str` or `os.PathLike`): Hub id or folder.
        load_arguments (`dict[str, Any]`): Arguments of `from_pretrained`; those that find files are used.

    Returns:
        [`DSparkConfig`]

    Raises:
        OSError: If there is no config.json.
        ValueError: If the config is not a draft's, or lacks a field that cannot be guessed.
        NotImplementedError: If the format is known but not supported.
    """
    config, _ = PreTrainedConfig.get_config_dict(name_or_path, **hub_arguments(load_arguments))
    if not config:
        raise OSError(f"{name_or_path} has no config.json. Pass the Hub id or the folder of a draft.")
    return convert_config(config, str(name_or_path))


def hub_arguments(load_arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `from_pretrained` that say where files are found.

    Args:
        load_arguments (`dict[str, Any]`): All of them.

    Returns:
        `dict[str, Any]`
    """
    return {name: load_arguments[name] for name in _HUB_ARGUMENTS if name in load_arguments}


def convert_config(config: dict[str, Any], source: str) -> DSparkConfig:
    """Translate a config.json.

    Args:
        config (`dict[str, Any]`): Contents of config.json.
        source (`str`): Where it came from, for messages.

    Returns:
        [`DSparkConfig`]

    Raises:
        ValueError: If the config is not a draft's, or lacks a field that cannot be guessed.
        NotImplementedError: If the format is known but not supported.
    """
    if config.get("model_type") == DSparkConfig.model_type:
        return DSparkConfig.from_dict(config)
    for reader in (speculators, deepspec):
        if reader.matches(config):
            return reader.to_config(config, source)
    raise refuse(config, source)


def read_embedding_sample(
    name_or_path: str | os.PathLike, load_arguments: dict[str, Any], num_rows: int = 16
) -> dict[int, torch.Tensor]:
    """Some rows of the frozen target embedding that published drafts carry: they tell whether a target is theirs.

    Args:
        name_or_path (`str` or `os.PathLike`): Hub id or folder.
        load_arguments (`dict[str, Any]`): Arguments of `from_pretrained`; those that find files are used.
        num_rows (`int`, *optional*, defaults to 16): Rows to read, spread over the vocabulary.

    Returns:
        `dict[int, torch.Tensor]`: token id to row `(d,)`; empty where the checkpoint has no embedding or many files.
    """
    path = cached_file(
        name_or_path,
        SAFE_WEIGHTS_NAME,
        _raise_exceptions_for_missing_entries=False,
        **hub_arguments(load_arguments),
    )
    if path is None:
        return {}
    with safe_open(path, framework="pt") as file:
        if "embed_tokens.weight" not in file.keys():  # noqa: SIM118 (the file is no dictionary)
            return {}
        rows = file.get_slice("embed_tokens.weight")
        count = rows.get_shape()[0]
        return {i: rows[i : i + 1][0] for i in range(0, count, max(1, count // num_rows))}


__all__ = ["convert_config", "hub_arguments", "read_config", "read_embedding_sample"]
