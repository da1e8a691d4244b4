# SPDX-License-Identifier: Apache-2.0
"""Reads tensors of a checkpoint from its safetensors files, one at a time."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from transformers.utils import ADAPTER_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from ...common.model_sources import find_file, find_source, read_config_fields


_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
# Early SpecForge files keep the heads in a container.
OLD_PREFIX = "logit_head."


def hub_arguments(load_arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `from_pretrained` that locate files."""
    return {name: load_arguments[name] for name in _HUB_ARGUMENTS if name in load_arguments}


def read_config_file(name_or_path: str | os.PathLike, load_arguments: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a draft."""
    source = find_source(name_or_path, load_arguments.get("subfolder") or "")
    config = read_config_fields(source, hub_arguments(load_arguments))
    if not config:
        what = "is a PEFT adapter" if find_file(source, ADAPTER_CONFIG_NAME) else "has no config.json"
        raise OSError(f"{name_or_path} {what}. Pass the Hub id or the folder of a draft.")
    return config


@dataclass(frozen=True)
class TensorFiles:
    """The file of each tensor of a checkpoint."""

    paths: dict[str, str]  # name of a tensor to its file, under the names this package uses
    stored_names: dict[str, str]  # the same names to those in the file

    @classmethod
    def find(cls, name_or_path: str | os.PathLike, load_arguments: dict[str, Any]) -> TensorFiles:
        """List the tensors of a checkpoint, in one file or in several."""
        where = hub_arguments(load_arguments)
        path = cached_file(name_or_path, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False, **where)
        if path is not None:
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
            found = dict.fromkeys(names, path)
        else:
            index = cached_file(
                name_or_path, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False, **where
            )
            found = {}
            if index is not None:
                with open(index, encoding="utf-8") as file:
                    shards = json.load(file)["weight_map"]
                local = {shard: cached_file(name_or_path, shard, **where) for shard in sorted(set(shards.values()))}
                found = {name: local[shard] for name, shard in shards.items()}
        own = {name: name.removeprefix(OLD_PREFIX) for name in found}
        return cls({own[name]: path for name, path in found.items()}, {ours: name for name, ours in own.items()})

    def read(self, name: str) -> torch.Tensor:
        """One tensor, bit for bit."""
        with safe_open(self.paths[name], framework="pt") as file:
            return file.get_tensor(self.stored_names[name])

    def shape(self, name: str) -> tuple[int, ...] | None:  # None where there is no such tensor
        """The shape of a tensor, without reading it."""
        if name not in self.paths:
            return None
        with safe_open(self.paths[name], framework="pt") as file:
            return tuple(file.get_slice(self.stored_names[name]).get_shape())

    def read_rows(self, name: str, num_rows: int) -> dict[int, torch.Tensor]:
        """Some rows of a matrix, spread over it."""
        if name not in self.paths:
            return {}
        with safe_open(self.paths[name], framework="pt") as file:
            rows = file.get_slice(self.stored_names[name])
            count = rows.get_shape()[0]
            return {i: rows[i : i + 1][0] for i in range(0, count, max(1, count // num_rows))}
