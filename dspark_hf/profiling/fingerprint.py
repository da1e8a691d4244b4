# SPDX-License-Identifier: Apache-2.0
"""Fingerprint of everything that round times depend on: the machine, the set-up of both models, and their shapes."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..decoding.packed_attention import PackedAttention
from ..drafts.modeling_dspark import DSparkDraftModel
from ..drafts.target_structure import value_over_layers


_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
_TARGET_FIELDS = (
    *_SIZES,
    "vocab_size",
    "moe_intermediate_size",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "sliding_window",
)
_DRAFT_FIELDS = (
    *_SIZES,
    "block_size",
    "num_draft_slots",
    "draft_vocab_size",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "sliding_window",
)


def fingerprint(target: PreTrainedModel, draft: DSparkDraftModel, num_requests: int = 1) -> dict[str, Any]:
    """The factors of round times, in JSON's types: machine, threads, dtypes, kernels, and the shapes of both models.

    Of the versions only torch's is part of it, without its last number: kernels come from there.
    """
    devices = [*_devices(target), *_devices(draft)]
    uses_cpu = any(name in (_cpu_name(), "disk", "offloaded") for name in devices)
    return {
        "device": " + ".join(_devices(target)),
        "num_threads": torch.get_num_threads() if uses_cpu else None,
        "dtype": _dtype(target),
        "attention": PackedAttention(target).own_implementation,
        "target": {"class": type(target).__name__}
        | _present(target.config.get_text_config(decoder=True), _TARGET_FIELDS)
        | {"quantization": _quantization(target)},
        "draft": {
            "device": " + ".join(_devices(draft)),
            "dtype": _dtype(draft),
            "attention": draft.config._attn_implementation,
        }
        | _present(draft.config, _DRAFT_FIELDS)
        | {"num_captured_layers": len(draft.config.target_layer_ids)},
        "torch": ".".join(torch.__version__.split(".")[:2]),
    } | ({"num_requests": num_requests} if num_requests > 1 else {})


def setup(target: PreTrainedModel, draft: DSparkDraftModel) -> tuple:
    """All of a fingerprint that can differ between calls with one target, and the draft's folder; in microseconds."""
    first, draft_first = next(target.parameters()), next(draft.parameters())
    return (
        torch.get_num_threads(),
        *(first.dtype, first.device, PackedAttention(target).own_implementation),
        *(draft_first.dtype, draft_first.device, draft.config._attn_implementation, draft.name_or_path),
        *(getattr(draft.config, name, None) for name in _DRAFT_FIELDS),
        len(draft.config.target_layer_ids),
    )


def _present(config: Any, names: Sequence[str]) -> dict[str, Any]:
    values = {name: value_over_layers(config, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _dtype(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def _quantization(target: PreTrainedModel) -> str | None:
    config = getattr(target.config, "quantization_config", None)
    if config is None:
        return None
    values = config if isinstance(config, dict) else config.to_dict()
    return json.dumps(values, sort_keys=True, default=str)


def _devices(model: PreTrainedModel) -> list[str]:
    """Names of the devices that hold a model."""
    places = getattr(model, "hf_device_map", None) or {}
    if len(places) < 2:  # not split, and then it may have moved since
        places = {"": model.device}
    return sorted(_device_name(place) for place in set(places.values()))


def _device_name(place: int | str | torch.device) -> str:
    if place == "disk":
        return "disk"
    device = torch.device(place)
    if device.type == "meta":
        return "offloaded"
    if device.type == "cpu":
        return _cpu_name()
    name = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return name(device) if name is not None else f"{device.type} of {_cpu_name()}"


@lru_cache
def _cpu_name() -> str:
    """Model of the CPU; virtual machines hide its name but not its numbers."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = dict(re.findall(r"^(model name|cpu family|model)\s*: (.+)$", text, re.MULTILINE))
    if "model name" not in found:
        return platform.processor() or platform.machine()
    return f"{found['model name']} (family {found.get('cpu family')}, model {found.get('model')})"
