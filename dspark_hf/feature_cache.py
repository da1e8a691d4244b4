# SPDX-License-Identifier: Apache-2.0
"""Target features on disk, so that only the first epoch pays for the target's forward.

A folder of safetensors shards with a manifest: O(d) per token, checksummed, resumable, and tied to one target, one
list of layers and one list of sequences.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from .data import SequenceDataset, TargetFeatures, collate, target_features


def target_fingerprint(target: PreTrainedModel) -> str:
    """Hash that tells targets of one shape apart, fine-tuned ones too: the architecture, and values of every weight.

    Args:
        target (`PreTrainedModel`): The target.

    Returns:
        `str`: SHA-256 in hex.
    """
    digest = hashlib.sha256(type(target).__name__.encode())
    for name, parameter in target.named_parameters():
        if parameter.device.type == "meta":  # offloaded
            continue
        values = parameter.detach().flatten()
        digest.update(name.encode())
        digest.update(values[:: max(1, values.shape[0] // 64)].float().cpu().numpy().tobytes())
    return digest.hexdigest()


class FeatureCache(Dataset):
    """The rows of a [`SequenceDataset`] with their target features, computed once and kept in a folder.

    Args:
        folder (`Path`): Where the shards are; continued if a killed run left some.
        dataset (`SequenceDataset`): The sequences.
        target (`PreTrainedModel`): The target.
        target_layer_ids (`Sequence[int]`): Layers to capture.
        shard_size (`int`, *optional*, defaults to 64): Sequences per file.
        batch_size (`int`, *optional*, defaults to 8): Sequences per forward of the target.
        on_shard (`Callable`, *optional*): Called with (shards done, shards in all) after each shard.

    Raises:
        ValueError: If the folder was made by another target, other layers or other sequences, or a shard is damaged.
        OSError: If a shard cannot be written; the shards before it stay valid.
    """

    def __init__(
        self,
        folder: Path,
        dataset: SequenceDataset,
        target: PreTrainedModel,
        target_layer_ids: Sequence[int],
        shard_size: int = 64,
        batch_size: int = 8,
        on_shard: Callable[[int, int], None] | None = None,
    ):
        self.folder, self.dataset, self.shard_size = Path(folder), dataset, shard_size
        self.folder.mkdir(parents=True, exist_ok=True)
        sequences = json.dumps([[q.input_ids, q.num_prompt_tokens] for q in dataset.sequences])
        self.identity = {
            "target": target_fingerprint(target),
            "target_layer_ids": list(target_layer_ids),
            "sequences": hashlib.sha256(sequences.encode()).hexdigest(),
            "shard_size": shard_size,
            "dtype": str(target.dtype),
        }
        self.checksums = self._read_manifest()
        num_shards = -(-len(dataset) // shard_size)
        for shard in range(num_shards):
            if str(shard) in self.checksums:
                self._check_shard(shard)
            else:
                self._write_shard(shard, target, target_layer_ids, batch_size)
            if on_shard is not None:
                on_shard(shard + 1, num_shards)
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def lengths(self) -> list[int]:
        """`list[int]`: Tokens of each sequence, known without reading a feature."""
        return self.dataset.lengths

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"Row {index} of {len(self)}.")  # ends iteration
        shard = index // self.shard_size
        if shard not in self._open:
            self._open[shard] = safe_open(self._path(shard), framework="pt")
        file = self._open[shard]
        features = {"context": file.get_tensor(f"context.{index}"), "last": file.get_tensor(f"last.{index}")}
        return self.dataset[index] | features

    def _path(self, shard: int) -> Path:
        return self.folder / f"features-{shard:05d}.safetensors"

    def _read_manifest(self) -> dict[str, str]:
        path = self.folder / "manifest.json"
        if not path.exists():
            return {}
        manifest = json.loads(path.read_text())
        for name, value in self.identity.items():
            if manifest["identity"].get(name) != value:
                raise ValueError(
                    f"The feature cache {self.folder} was made with another `{name}`: "
                    f"{manifest['identity'].get(name)!r}, now {value!r}. Features of one target or data set say "
                    "nothing about another; choose another folder."
                )
        return manifest["checksums"]

    def _check_shard(self, shard: int) -> None:
        path = self._path(shard)
        if not path.exists() or _sha256(path) != self.checksums[str(shard)]:
            raise ValueError(
                f"The feature cache file {path} is missing or damaged. Delete the folder, or that file's entry."
            )

    def _write_shard(
        self, shard: int, target: PreTrainedModel, target_layer_ids: Sequence[int], batch_size: int
    ) -> None:
        end = min((shard + 1) * self.shard_size, len(self.dataset))
        # Neighbours in length share a forward, so that little padding is computed.
        rows = sorted((self.dataset[i] for i in range(shard * self.shard_size, end)), key=lambda row: row["length"])
        tensors = {}
        for begin in range(0, len(rows), batch_size):
            batch = rows[begin : begin + batch_size]
            features = target_features(target, collate(batch)["input_ids"], target_layer_ids)
            for index, row in enumerate(batch):
                for name, states in (
                    ("context", features.context_hidden_states),
                    ("last", features.last_hidden_states),
                ):
                    tensors[f"{name}.{row['row_id']}"] = states[index, : row["length"]].cpu().clone()
        temporary = self._path(shard).with_suffix(".tmp")
        try:
            save_file(tensors, temporary)
        except Exception as error:
            temporary.unlink(missing_ok=True)
            raise OSError(
                f"The feature cache could not write {self._path(shard)} ({error}). Is the disk full? Shards before it "
                "are intact; the same command continues."
            ) from error
        self.checksums[str(shard)] = _sha256(temporary)
        os.replace(temporary, self._path(shard))
        manifest = self.folder / "manifest.tmp"
        manifest.write_text(json.dumps({"identity": self.identity, "checksums": self.checksums}))
        os.replace(manifest, self.folder / "manifest.json")


def collate_features(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """[`collate`], with the features of cached rows.

    Args:
        rows (`Sequence[dict[str, Any]]`): From [`FeatureCache`].

    Returns:
        `dict[str, torch.Tensor]`: as [`collate`], and `context` `(b, s, m * d)` and `last` `(b, s, d)`.
    """
    pad = torch.nn.utils.rnn.pad_sequence
    features = {name: pad([row[name] for row in rows], batch_first=True) for name in ("context", "last")}
    return collate(rows) | features


def cached_features(inputs: dict[str, torch.Tensor]) -> TargetFeatures | None:
    """The features of a batch, if it was made from a cache.

    Args:
        inputs (`dict[str, torch.Tensor]`): A batch.

    Returns:
        [`TargetFeatures`] or `None`.
    """
    if "context" not in inputs:
        return None
    return TargetFeatures(inputs["context"], inputs["last"])


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
