# SPDX-License-Identifier: Apache-2.0
"""Readers of draft checkpoints: pure mappings from a foreign config.json to [`DSparkConfig`], one file per format.

All supported formats share the tensor names of our own, so only the configuration is translated. A format is told by
what is in the config, never by a class name alone (two projects use the same one), and what a file leaves open is an
error, never a guess: a wrong guess does not crash, it silently accepts nothing.
"""

from __future__ import annotations

import os
from typing import Any

from transformers import PreTrainedConfig

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


__all__ = ["convert_config", "hub_arguments", "read_config"]
