# SPDX-License-Identifier: Apache-2.0
"""Caches target features on disk, so that only the first epoch runs the target.

A folder of safetensors shards with a manifest: O(d) per token, checksummed, resumable, and tied to one target, one
list of layers and one list of sequences.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from .dataset import SequenceDataset, TargetFeatures, collate, target_features


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Config fields that do not affect hidden states, or differ between machines and releases.
_SAYS_NOTHING = re.compile(
    r"^_|version|dtype|use_cache|architectures|output_|return_dict|label|problem_type|chunk_size_feed_forward|"
    r"initializer|init_std|dropout|pdrop|_token_id|name_or_path|is_encoder_decoder|_implementation|loss"
)
# Two machines, or two kernels, round differently; another RoPE, window or adapter moves hidden states far more.
_TOLERANCE, _TOLERATED_ROUNDINGS = 1e-2, 8


def target_fingerprint(target: PreTrainedModel) -> str:  # SHA-256 in hex
    """Hash that distinguishes targets of one shape, fine-tuned ones too: architecture, and values of every weight."""
    digest = hashlib.sha256(type(target).__name__.encode())
    for name, parameter in target.named_parameters():
        if parameter.device.type == "meta":  # offloaded
            continue
        values = parameter.detach().flatten()
        digest.update(name.encode())
        digest.update(values[:: max(1, values.shape[0] // 64)].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _weights_digest(target: PreTrainedModel) -> str:
    """Hash over every bit of every weight: sums of bit patterns, which are exact in any order and on any machine."""
    digest = hashlib.sha256()
    for name, parameter in target.named_parameters():
        if parameter.device.type == "meta":  # offloaded
            continue
        bits = parameter.detach().contiguous().view(_INTEGERS[parameter.dtype.itemsize]).flatten()
        total = sum(part.sum(dtype=torch.int64).item() for part in bits.split(1 << 22))
        digest.update(f"{name} {total}\n".encode())
    return digest.hexdigest()


def _config_fields(target: PreTrainedModel) -> dict[str, Any]:
    """The config fields that affect a target's hidden states, in JSON's types."""
    fields = json.loads(json.dumps(target.config.get_text_config(decoder=True).to_dict(), default=str))
    return {name: fields[name] for name in fields if not _SAYS_NOTHING.search(name)}


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Mean relative distance of hidden states `(s, m, d)` over tokens and layers."""
    ours, theirs = ours.float(), theirs.float()
    return ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-20)).mean().item()


class FeatureCache(Dataset):
    """The rows of a [`SequenceDataset`] with their target features, computed once and kept in a folder.

    `on_shard`: called with (shards done, shards in all) after each shard.
    """

    def __init__(
        self,
        folder: Path,  # where the shards are; continued if a killed run left some
        dataset: SequenceDataset,
        target: PreTrainedModel,
        target_layer_ids: Sequence[int],  # layers to capture
        shard_size: int = 64,  # sequences per file
        batch_size: int = 8,  # sequences per forward of the target
        on_shard: Callable[[int, int], None] | None = None,
    ):
        self.folder, self.dataset, self.shard_size = Path(folder), dataset, shard_size
        self.folder.mkdir(parents=True, exist_ok=True)
        sequences = json.dumps([[q.input_ids, q.num_prompt_tokens] for q in dataset.sequences])
        self.identity: dict[str, Any] = {
            "target": target_fingerprint(target),
            "weights": _weights_digest(target),
            "config": _config_fields(target),
            "target_layer_ids": list(target_layer_ids),
            "sequences": hashlib.sha256(sequences.encode()).hexdigest(),
            "shard_size": shard_size,
            "dtype": str(target.dtype),
        }
        self._open: dict[int, Any] = {}
        self.checksums = self._read_manifest()
        num_shards = -(-len(dataset) // shard_size)
        missing = [shard for shard in range(num_shards) if str(shard) not in self.checksums]
        for shard in sorted(set(range(num_shards)) - set(missing)):
            self._check_shard(shard)
        self._check_features(target)
        for shard in range(num_shards):
            if shard in missing:
                self._write_shard(shard, target, target_layer_ids, batch_size)
            if on_shard is not None:
                on_shard(shard + 1, num_shards)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}  # workers of a data loader open the files again

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence, known without reading a feature."""
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
        found = manifest["identity"]
        theirs, ours = (_flat(identity) for identity in (found, self.identity))
        # A field that one side does not know comes from another release; the features are compared in any case.
        for name in ours:
            if name in theirs and theirs[name] != ours[name]:
                raise ValueError(
                    f"The feature cache {self.folder} was made with another `{name}`: {theirs[name]!r}, now "
                    f"{ours[name]!r}. Features of one target or data set say nothing about another; choose another "
                    "folder."
                )
        return manifest["checksums"]

    def _check_features(self, target: PreTrainedModel) -> None:
        """Recompute the shortest and the longest cached sequence, to detect changes that no config shows."""
        there = [i for i in range(len(self)) if str(i // self.shard_size) in self.checksums]
        if not there:
            return
        layer_ids, lengths = self.identity["target_layer_ids"], self.lengths
        for index in sorted({min(there, key=lengths.__getitem__), max(there, key=lengths.__getitem__)}):
            row = self[index]
            fresh = target_features(target, torch.tensor([row["input_ids"]]), layer_ids)
            tolerance = max(_TOLERANCE, _TOLERATED_ROUNDINGS * torch.finfo(row["last"].dtype).eps)
            for name, states in (("context", fresh.context_hidden_states), ("last", fresh.last_hidden_states)):
                shape = (row["length"], -1, row["last"].shape[-1])
                distance = _distance(row[name].view(shape), states[0].cpu().view(shape))
                if not distance <= tolerance:
                    raise ValueError(
                        f"The feature cache {self.folder} was made with other hidden states: those of sequence "
                        f"{index} lie {distance:.2g} of their length apart, more than {tolerance:.2g}. Weights and "
                        "config are the same, but another RoPE, window, cap or adapter is at work; choose another "
                        "folder."
                    )

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
                    _check_finite(tensors[f"{name}.{row['row_id']}"], row["row_id"])
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


def collate_features(
    rows: Sequence[dict[str, Any]],
) -> dict[str, torch.Tensor]:  # as `collate`, and `context` [b, s, m * d] and `last` [b, s, d]
    """[`collate`], with the features of cached rows."""
    pad = torch.nn.utils.rnn.pad_sequence
    features = {name: pad([row[name] for row in rows], batch_first=True) for name in ("context", "last")}
    return collate(rows) | features


def cached_features(inputs: dict[str, torch.Tensor]) -> TargetFeatures | None:
    """The features of a batch, if it was made from a cache."""
    if "context" not in inputs:
        return None
    return TargetFeatures(inputs["context"], inputs["last"])


def _check_finite(states: torch.Tensor, row_id: int) -> None:
    if not states.isfinite().all():
        raise ValueError(
            f"The target's hidden states must be finite to be kept, got NaN or infinity for sequence {row_id}. Load "
            "the target in another dtype (bfloat16 instead of float16), or look for damaged weights."
        )


def _flat(identity: dict[str, Any]) -> dict[str, Any]:
    """The fields of the config beside the others, as `config.NAME`."""
    config = {f"config.{name}": value for name, value in identity.get("config", {}).items()}
    return {name: value for name, value in identity.items() if name != "config"} | config


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
