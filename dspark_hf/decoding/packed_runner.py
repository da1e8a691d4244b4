# SPDX-License-Identifier: Apache-2.0
"""The target's passes over a batch: new tokens of all texts packed into one row, keys and values in a row per text.

A pass costs the sum of the tokens that it verifies. See `single_runner` for one request, which supports all that
plain generation does.

Legend: R requests, N packed tokens, k drafts, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from .._compat import CACHE_KEY
from ..drafts.target_structure import layers_of
from .drafter import CommittedContext, ContextSpan, DraftProposal
from .packed_attention import PackedAttention, check_layers
from .packed_cache import RowCache
from .packed_pass import PackedPass, packed_pass
from .request import Request, TargetPass, Verdict


TEXT_INPUTS = ("attention_mask", "position_ids", "logits_to_keep", "use_cache", CACHE_KEY)


class PackedRunner:
    """Runs the target for a batch."""

    cache_for_user = None  # of no use to plain generation

    def __init__(self, target: PreTrainedModel, requests: Sequence[Request], reads: dict[str, Any]):
        check_layers(target)
        check_memory(target, requests)
        self.target, self.reads = target, reads
        config = target.config.get_text_config(decoder=True)
        self.cache = RowCache(config.num_hidden_layers, 0)
        self.requests: list[Request] = []

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Active during the whole call: the target uses packed attention."""
        return PackedAttention(self.target)

    def decoding(self) -> contextlib.AbstractContextManager[None]:
        """No-op from the first round on: experts stay as for prompts, since passes are as long."""
        return contextlib.nullcontext()

    def rollback_on_error(self) -> contextlib.AbstractContextManager[None]:
        """No-op: the cache ends with the call."""
        return contextlib.nullcontext()

    def prefill(self, requests: Sequence[Request]) -> TargetPass:  # logits [1, R, V], those after the prompts
        """Run the target over the prompts of new requests, which are added after the present ones."""
        first = len(self.requests)
        self.requests += requests
        self.cache.add(len(requests))
        new = range(first, len(self.requests))
        packed, outputs = self._run(new, [request.input_ids for request in requests], last_only=True)
        return TargetPass(outputs.logits, outputs.hidden_states or (), outputs, starts_over=True, packed=packed)

    def forward(self, proposals: Sequence[DraftProposal]) -> TargetPass:  # logits [1, sum of 1 + k, V]
        """Run the target over the anchor and the drafts of the first requests."""
        pairs = zip(self.requests, proposals, strict=False)
        new_ids = [torch.cat([request.input_ids[:, -1:], own.token_ids], dim=1) for request, own in pairs]
        packed, outputs = self._run(range(len(proposals)), new_ids)
        return TargetPass(outputs.logits, outputs.hidden_states or (), outputs, starts_over=False, packed=packed)

    def commit(self, target_pass: TargetPass, verdicts: Sequence[Verdict]) -> CommittedContext:
        """Keep the committed tokens of the pass."""
        packed = target_pass.packed
        if packed is None:
            raise TypeError("A pass over packed requests has their positions, got one without.")
        # Of a prompt every token; of a round the anchor and what was accepted: the last committed token is the next
        # anchor, which the target has not seen.
        kept = packed.counts if target_pass.starts_over else [verdict.new_ids.shape[1] for verdict in verdicts]
        self.cache.commit(packed.rows, kept)
        spans, first = [], 0
        for index, start, count, num_kept in zip(packed.rows, packed.starts, packed.counts, kept, strict=True):
            if not self.requests[index].finished:
                positions = torch.arange(start, start + num_kept + 1)[None]
                spans.append(ContextSpan(index, slice(first, first + num_kept), positions))
            first += count
        return CommittedContext(target_pass.hidden_states, tuple(spans))

    def keep(self, requests: Sequence[int]) -> None:
        """Forget all other requests, so that ended ones cost nothing."""
        self.requests = [self.requests[index] for index in requests]
        self.cache.keep(requests)

    def _run(
        self, indices: Sequence[int], new_ids: Sequence[torch.Tensor], last_only: bool = False
    ) -> tuple[PackedPass, Any]:
        """One forward over the new ids of some requests, (1, n) each; what it adds to the cache counts when committed.

        The logits of the outputs are (1, N, V), or with `last_only` (1, A, V), on the device of the ids.
        """
        device, counts = self.target.device, [ids.shape[1] for ids in new_ids]
        keep: dict[str, Any] = {}
        try:
            packed = self.cache.begin(indices, counts, device)
            if self.target._supports_logits_to_keep():
                keep["logits_to_keep"] = packed.last_indices if last_only else 0
            with packed_pass(packed):
                outputs = self.target(
                    input_ids=torch.cat(list(new_ids), dim=1).to(device),
                    position_ids=packed.positions[None],
                    attention_mask=packed.stand_in_mask,
                    use_cache=True,
                    return_dict=True,
                    **{CACHE_KEY: self.cache},
                    **keep,
                    **self.reads,
                )
        except torch.OutOfMemoryError as error:
            longest = max(self.cache.lengths[index] + n for index, n in zip(indices, counts, strict=True))
            raise _too_large(len(self.requests), longest) from error
        if device.type != "cpu":  # verification waits for the device anyway; here the wait is timed
            torch.accelerator.synchronize(device)
        if last_only and not keep:
            outputs.logits = outputs.logits[:, packed.last_indices]
        outputs.logits = outputs.logits.to(new_ids[0].device)
        return packed, outputs


def check_batch(target: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Reject a batch that uses options supported for single rows only."""
    inputs = sorted(
        key
        for key, value in model_kwargs.items()
        if key not in TEXT_INPUTS and value is not None and not (isinstance(value, dict) and not value)
    )
    cache = model_kwargs.get(CACHE_KEY)
    implementation = generation_config.cache_implementation
    reason = None
    if generation_config.return_dict_in_generate and (
        generation_config.output_attentions or generation_config.output_hidden_states
    ):
        reason = "`output_scores` and `output_logits`, not attentions or hidden states"
    elif inputs:
        reason = f"text inputs, and got {inputs}"
    elif cache is not None and cache.get_seq_length():
        reason = f"an empty cache, and got one of {cache.get_seq_length()} tokens"
    elif implementation not in (None, "dynamic"):
        reason = f"the default cache, and got `cache_implementation`={implementation!r}"
    elif len(set((getattr(target, "hf_device_map", None) or {}).values())) > 1:
        reason = f"a target on one device, and got one on {sorted(set(map(str, target.hf_device_map.values())))}"
    elif generation_config.prefill_chunk_size is not None:
        reason = "whole prompts, and got `prefill_chunk_size`"
    if reason is not None:
        raise NotImplementedError(
            f"For a batch DSpark works with {reason}. Generate one row at a time, or without `assistant_model`."
        )


def check_memory(target: PreTrainedModel, requests: Sequence[Request]) -> None:
    """Reject prompts whose keys and values alone do not fit into memory."""
    layers = layers_of(target.config.get_text_config(decoder=True))
    width = sum(layer.num_key_value_heads * layer.head_dim for layer in layers)  # of the keys of a token
    longest = max((request.input_ids.shape[1] for request in requests), default=0)
    needed = 2 * width * target.dtype.itemsize * len(requests) * longest
    available = _available_bytes(target.device)
    if available is not None and needed > available:
        raise _too_large(len(requests), longest, (needed, available))


def _too_large(num_rows: int, longest: int, needed_and_available: tuple[int, int] | None = None) -> MemoryError:
    figures = ""
    if needed_and_available is not None:
        figures = " ({:.1f} of {:.1f} GiB)".format(*(count / 2**30 for count in needed_and_available))
    return MemoryError(
        f"Keys and values of {num_rows} rows with up to {longest} tokens do not fit into memory{figures}. Take fewer "
        "rows, or `generate_many` with a smaller `max_batch`."
    )


def _available_bytes(device: torch.device) -> int | None:
    """Free memory of a device; None if unknown."""
    if device.type == "cuda":
        return (
            torch.cuda.mem_get_info(device)[0]
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
    if device.type != "cpu":
        return None
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
