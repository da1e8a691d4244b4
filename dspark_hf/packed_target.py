# SPDX-License-Identifier: Apache-2.0
"""The target's passes over a batch: new tokens of all texts packed into one row, keys and values in a row per text.

A pass costs the sum of the tokens that it verifies. See `single_target` for one request, which keeps everything that
plain generation offers there.

Legend: R requests, N packed tokens, k drafts, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ._compat import CACHE_KEY
from .candidate_generator import DSparkCandidateGenerator
from .decoding_rows import Row, Verdict
from .packed_attention import attention_packed, check_layers, packed_pass
from .row_cache import RowCache
from .target_structure import layers_of


TEXT_INPUTS = ("attention_mask", "position_ids", "logits_to_keep", "use_cache", CACHE_KEY)


class PackedTarget:
    """The target's side of a batch.

    Args:
        target (`PreTrainedModel`): The model that generates.
        rows (`Sequence[Row]` of length R): The requests to begin with; prompts without padding.

    Raises:
        NotImplementedError: If the target's layers do not allow it.
        MemoryError: If the prompts alone do not fit into memory.
    """

    cache_for_user = None  # of no use to plain generation

    def __init__(self, target: PreTrainedModel, rows: Sequence[Row]):
        check_layers(target)
        check_memory(target, rows)
        self.target = target
        config = target.config.get_text_config(decoder=True)
        self.cache = RowCache(config.num_hidden_layers, 0)
        self.rows: list[Row] = []

    def use_generator(self, generator: DSparkCandidateGenerator) -> None:
        """Hand the captured hidden states of every pass to the drafting half.

        Args:
            generator (`DSparkCandidateGenerator`): The call's.
        """
        self.generator = generator

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """What must hold while the target runs for this batch."""
        with attention_packed(self.target):
            yield

    def decoding(self) -> contextlib.AbstractContextManager[None]:
        """What must hold from the first round on: nothing. Experts stay as for prompts, since passes are as long.

        Returns:
            Context manager.
        """
        return contextlib.nullcontext()

    def no_drafts_left_behind(self) -> contextlib.AbstractContextManager[None]:
        """Nobody sees this cache after an error.

        Returns:
            Context manager.
        """
        return contextlib.nullcontext()

    def prefill(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """The target over the prompts of new requests, which come behind the present ones.

        Args:
            rows (`Sequence[Row]`): New requests.

        Returns:
            `list[torch.Tensor]`, each `(1, 1, V)`: the logits after each prompt.
        """
        first = len(self.rows)
        self.rows += rows
        self.cache.add(len(rows))
        self._requests, self._is_prefill = list(range(first, len(self.rows))), True
        logits = self.run(self._requests, [row.input_ids for row in rows], last_only=True)
        self.generator.check_hidden_states(self.hidden_states)
        return [logits[:, i : i + 1] for i in range(len(rows))]

    def verify(self, draft_ids: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The target over every request's anchor and drafts.

        Args:
            draft_ids (`Sequence[torch.LongTensor]` of length R): Each `(1, k)`.

        Returns:
            `list[torch.Tensor]`, each `(1, 1 + k, V)`.
        """
        self._requests, self._is_prefill = list(range(len(self.rows))), False
        new = [torch.cat([row.input_ids[:, -1:], ids], dim=1) for row, ids in zip(self.rows, draft_ids, strict=True)]
        logits = self.run(self._requests, new)
        return list(logits.split([ids.shape[1] for ids in new], dim=1))

    def commit(self, verdicts: Sequence[Verdict]) -> None:
        """Keep what was committed of the tokens of the pass, and hand its hidden states to the drafting half.

        Args:
            verdicts (`Sequence[Verdict]`): Of the requests of the pass.
        """
        # Of a prompt every token; of a round the anchor and what was accepted: the last committed token is the next
        # anchor, which the target has not seen.
        kept = self._pass.counts if self._is_prefill else [verdict.new_ids.shape[1] for verdict in verdicts]
        self.cache.commit(self._requests, kept)
        spans, starts, first = [], [], 0
        for request, start, count, num_kept in zip(
            self._requests, self._pass.starts, self._pass.counts, kept, strict=True
        ):
            if not self.rows[request].finished:
                spans.append((request, first, first + num_kept))
                starts.append(start)
            first += count
        if spans:
            self.generator.add_packed_context(self.hidden_states, spans, starts)

    def keep(self, requests: Sequence[int]) -> None:
        """Forget all other requests: rows that ended cost nothing any more.

        Args:
            requests (`Sequence[int]`): Requests to keep, in their new order.
        """
        self.rows = [self.rows[request] for request in requests]
        self.cache.keep(requests)

    def run(self, requests: Sequence[int], new_ids: Sequence[torch.Tensor], last_only: bool = False) -> torch.Tensor:
        """One forward of the target; what it adds to the cache counts once it is committed.

        Args:
            requests (`Sequence[int]` of length A): Requests that get tokens.
            new_ids (`Sequence[torch.LongTensor]` of length A): Their tokens, each `(1, n)`.
            last_only (`bool`, *optional*, defaults to `False`): Whether only the last token of each needs logits.

        Returns:
            `torch.Tensor` of shape `(1, N, V)`, or `(1, A, V)` with `last_only`.
        """
        device, counts = self.target.device, [ids.shape[1] for ids in new_ids]
        keep: dict[str, Any] = {}
        try:
            self._pass = self.cache.begin(requests, counts, device)
            if self.target._supports_logits_to_keep():
                keep["logits_to_keep"] = self._pass.last_indices if last_only else 0
            with packed_pass(self._pass):
                outputs = self.target(
                    input_ids=torch.cat(list(new_ids), dim=1).to(device),
                    position_ids=self._pass.positions[None],
                    attention_mask=self._pass.stand_in_mask,
                    use_cache=True,
                    return_dict=True,
                    **{CACHE_KEY: self.cache},
                    **keep,
                    **self.generator.model_kwargs_overrides,
                )
        except torch.OutOfMemoryError as error:
            longest = max(self.cache.lengths[request] + n for request, n in zip(requests, counts, strict=True))
            raise _too_large(len(self.rows), longest) from error
        self.hidden_states = outputs.hidden_states
        if device.type != "cpu":  # verification waits for the device anyway; here the wait is timed
            torch.accelerator.synchronize(device)
        logits = outputs.logits
        if last_only and not keep:
            logits = logits[:, self._pass.last_indices]
        return logits.to(new_ids[0].device)


def check_batch(target: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Refuse a batch that needs what only one row at a time can have.

    Args:
        target (`PreTrainedModel`): The model that generates.
        generation_config (`GenerationConfig`): The call's prepared config.
        model_kwargs (`dict[str, Any]`): As `generate` prepared them.

    Raises:
        NotImplementedError: With what it is.
    """
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


def check_memory(target: PreTrainedModel, rows: Sequence[Row]) -> None:
    """Refuse prompts whose keys and values alone do not fit into memory.

    Args:
        target (`PreTrainedModel`): The model that generates.
        rows (`Sequence[Row]`): The requests.

    Raises:
        MemoryError: With the figures.
    """
    layers = layers_of(target.config.get_text_config(decoder=True))
    width = sum(layer.num_key_value_heads * layer.head_dim for layer in layers)  # of the keys of a token
    longest = max(row.input_ids.shape[1] for row in rows)
    needed = 2 * width * target.dtype.itemsize * len(rows) * longest
    available = _available_bytes(target.device)
    if available is not None and needed > available:
        raise _too_large(len(rows), longest, needed, available)


def _too_large(num_rows: int, longest: int, needed: int | None = None, available: int | None = None) -> MemoryError:
    figures = f" ({needed / 2**30:.1f} of {available / 2**30:.1f} GiB)" if needed is not None else ""
    return MemoryError(
        f"Keys and values of {num_rows} rows with up to {longest} tokens do not fit into memory{figures}. Take fewer "
        "rows, or `generate_many` with a smaller `max_batch`."
    )


def _available_bytes(device: torch.device) -> int | None:
    """Free memory of a device; None where it cannot be told."""
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
