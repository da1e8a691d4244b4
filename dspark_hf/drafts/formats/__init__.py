# SPDX-License-Identifier: Apache-2.0
"""Readers of draft checkpoints: pure mappings from another project's config.json to ours, one file each.

All supported formats use our tensor names, so only the configuration is translated. A format is recognised by the
contents of the config, never by a class name alone (two projects use the same one). A field that a file leaves open is
an error, never a guess: a wrong guess does not crash, but no draft is accepted. `dspark_hf.export` writes formats.
A config.json is read as one kind of draft, DSpark or Eagle3, and refused by name if it is of the other.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from ..configuration_draft import DraftConfig
from ..configuration_dspark import DSparkConfig
from ..configuration_eagle3 import Eagle3Config
from . import deepspec, deepspec_gemma4, dflash, eagle3, speculators
from .agreement import check_agrees, given, readable_type_errors
from .fields import OPEN_FIELDS, ConfigFile
from .files import TensorFiles, hub_arguments, read_config_file
from .refusals import refuse


_READERS = (speculators, dflash, deepspec, deepspec_gemma4)


def read_config(
    name_or_path: str | os.PathLike,
    load_arguments: dict[str, Any],
    stated: dict[str, Any] | None = None,
    config_class: type[DraftConfig] = DSparkConfig,
) -> DraftConfig:
    """The configuration of a draft checkpoint of one kind, in any supported format."""
    return convert_config(read_config_file(name_or_path, load_arguments), str(name_or_path), stated, config_class)


def convert_config(
    config: dict[str, Any],
    source: str,
    stated: dict[str, Any] | None = None,
    config_class: type[DraftConfig] = DSparkConfig,
) -> DraftConfig:
    """Translate a config.json."""
    stated = given(stated)
    with readable_type_errors(source):
        file = ConfigFile(config, source, stated)
        ours = _read_eagle3(file) if config_class is Eagle3Config else _read(file)
    check_agrees(ours, stated, source)
    return ours


def _read(file: ConfigFile) -> DSparkConfig:
    if file.fields.get("model_type") == DSparkConfig.model_type:
        return DSparkConfig.from_dict(file.fields)
    for reader in _READERS:
        if reader.matches(file.fields):
            return reader.to_config(file)
    if eagle3.matches(file.fields):
        raise ValueError(f"{file.source} is an Eagle3 draft. Load it with Eagle3DraftModel.from_pretrained.")
    raise refuse(file.fields, file.source)


def _read_eagle3(file: ConfigFile) -> Eagle3Config:
    if is_dspark(file.fields):
        raise ValueError(f"{file.source} is a DSpark draft. Load it with DSparkDraftModel.from_pretrained.")
    return Eagle3Config.from_dict(eagle3.to_fields(file))


def is_dspark(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of a DSpark draft, in any supported format."""
    return config.get("model_type") == DSparkConfig.model_type or any(reader.matches(config) for reader in _READERS)


def read_embedding_sample(
    name_or_path: str | os.PathLike, load_arguments: dict[str, Any], num_rows: int = 16
) -> dict[int, torch.Tensor]:  # token id to row [d]; empty where the checkpoint has no embedding
    """Some rows of the frozen target embedding in published drafts, to recognise their target."""
    rows = TensorFiles.find(name_or_path, load_arguments).read_rows("embed_tokens.weight", num_rows)
    # Some writers left the rows unset because they are read from the target.
    return {i: row for i, row in rows.items() if torch.isfinite(row).all()}


__all__ = ["OPEN_FIELDS", "convert_config", "hub_arguments", "is_dspark", "read_config", "read_embedding_sample"]
