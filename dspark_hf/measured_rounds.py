# SPDX-License-Identifier: Apache-2.0
"""Rounds that are run for their time alone, on texts that stay where they are: what a round verifies is taken back.

Legend: R requests, s context tokens, B tokens in a verification pass (the anchors and the drafts).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
    StoppingCriteriaList,
)

from ._compat import CACHE_KEY
from .candidate_generator import DraftProposal, DSparkCandidateGenerator
from .decoding_rows import Row
from .modeling_dspark import DSparkDraftModel
from .packed_target import PackedTarget


NEW_CONTEXT = 2  # tokens a typical round commits, and the next one's drafting takes in


class SingleRounds:
    """Rounds of one request.

    Args:
        target (`PreTrainedModel`): The model that generates.
        draft (`DSparkDraftModel`): Its draft.
        context_length (`int`): s.

    Raises:
        ValueError: If the target's cache cannot take tokens back.
    """

    num_requests = 1

    def __init__(self, target: PreTrainedModel, draft: DSparkDraftModel, context_length: int):
        self.target, self.draft, self.context_length = target, draft, context_length
        self._start = perf_counter()
        self._text, self._config = _synthetic_text(target, draft, context_length)
        self._generator = DSparkCandidateGenerator(target, draft, self._config)
        self._prefill()

    def decoding(self) -> contextlib.AbstractContextManager[None]:
        """What holds from the first round on, as in the decoding loop.

        Returns:
            Context manager.
        """
        return self.target._optimize_model_for_decode()

    @property
    def elapsed_s(self) -> float:
        """`float`: Seconds since the request came."""
        return perf_counter() - self._start

    def _prefill(self) -> None:
        prompt = self._text[:, : self.context_length]
        # As `generate` prepares them: without a mask, for nothing is padded.
        kwargs = {"use_cache": True, CACHE_KEY: DynamicCache(config=text_config(self.target))}
        if "position_ids" in inspect.signature(self.target.forward).parameters:
            kwargs["position_ids"] = torch.arange(self.context_length, device=prompt.device)[None]
        if self.target._supports_logits_to_keep():
            kwargs["logits_to_keep"] = 1
        outputs = self._forward(prompt, kwargs, self.context_length, is_first_iteration=True)
        self._cache = outputs[CACHE_KEY]
        if not self._cache.is_croppable:
            raise ValueError(f"The cache of {type(self.target).__name__} cannot take tokens back.")
        self._generator.check_hidden_states(outputs.hidden_states)
        self._hidden_states = outputs.hidden_states
        self._model_kwargs = self.target._update_model_kwargs_for_generation(outputs, kwargs, num_new_tokens=1)
        self._cache.activate_past_recording()

    def restart(self) -> None:
        """Let a new generator draft from the context alone: rounds lengthen what an old one has read."""
        self._generator = DSparkCandidateGenerator(self.target, self.draft, self._config)
        self._draft(self.context_length)

    def run(self, batch_tokens: int) -> tuple[float, float]:
        """Draft, and verify B tokens.

        Args:
            batch_tokens (`int`): B.

        Returns:
            `tuple[float, float]`: seconds of drafting, and of verification.
        """
        draft_s = self._draft(NEW_CONTEXT)
        start = perf_counter()
        kwargs = dict(self._model_kwargs)
        if batch_tokens > 1:
            kwargs = self.target._update_model_kwargs_for_generation({}, kwargs, num_new_tokens=batch_tokens - 1)
        self._forward(self._text[:, : self.context_length + batch_tokens], kwargs, batch_tokens)
        verify_s = perf_counter() - start
        self._cache.crop(-batch_tokens)
        return draft_s, verify_s

    def draft_alone(self) -> float:
        """Seconds of drafting for one request.

        Returns:
            `float`
        """
        return self._draft(NEW_CONTEXT)

    def _draft(self, num_context: int) -> float:
        self._generator.add_context(self._hidden_states, num_context, self._model_kwargs)
        start = perf_counter()
        proposals = self._generator.propose([self._text[:, : self.context_length + 1]])
        _synchronize(self.draft.device)
        seconds = perf_counter() - start
        _check_drafted(proposals)
        return seconds

    def _forward(
        self, text: torch.Tensor, kwargs: dict[str, Any], num_tokens: int, is_first_iteration: bool = False
    ) -> Any:
        """The target over the last tokens of the text, prepared as the decoding loop prepares it."""
        inputs = self.target.prepare_inputs_for_generation(
            text, next_sequence_length=num_tokens, is_first_iteration=is_first_iteration, **kwargs
        )
        if "logits_to_keep" in inputs and not is_first_iteration:
            inputs["logits_to_keep"] = num_tokens
        outputs = self.target(**(inputs | self._generator.model_kwargs_overrides), return_dict=True)
        _synchronize(outputs.logits.device)
        return outputs


class BatchRounds:
    """Rounds of a batch; a pass of fewer tokens than requests is one of fewer requests.

    Args:
        target (`PreTrainedModel`): The model that generates.
        draft (`DSparkDraftModel`): Its draft.
        context_length (`int`): s, of every request.
        num_requests (`int`): R.

    Raises:
        NotImplementedError: If the target cannot run a batch.
        MemoryError: If the batch does not fit into memory.
    """

    def __init__(self, target: PreTrainedModel, draft: DSparkDraftModel, context_length: int, num_requests: int):
        self.target, self.draft, self.context_length, self.num_requests = target, draft, context_length, num_requests
        self._start = perf_counter()
        self._text, self._config = _synthetic_text(target, draft, context_length)
        prompt = self._text[:, :context_length]
        nothing = (LogitsProcessorList(), StoppingCriteriaList(), self._config.max_length, self._config)
        rows = [Row(index, prompt, *nothing) for index in range(num_requests)]
        self._passes = PackedTarget(target, rows)
        self._passes.use_generator(DSparkCandidateGenerator(target, draft, self._config))
        with self._passes.session():
            self._passes.prefill(rows)
        self._hidden_states = self._passes.hidden_states
        self._passes.cache.commit(range(num_requests), [context_length] * num_requests)

    def decoding(self) -> contextlib.AbstractContextManager[None]:
        """See [`SingleRounds.decoding`]."""
        return self._passes.decoding()

    @property
    def elapsed_s(self) -> float:
        """`float`: Seconds since the requests came."""
        return perf_counter() - self._start

    def restart(self) -> None:
        """Let new generators draft from the context alone."""
        self._generators = {}
        for count in {1, self.num_requests}:
            self._generators[count] = DSparkCandidateGenerator(self.target, self.draft, self._config)
            self._generators[count].add_requests([LogitsProcessorList()] * (count - 1))
            self._draft(count, self.context_length)

    def run(self, batch_tokens: int) -> tuple[float, float]:
        """See [`SingleRounds.run`]; the drafting is that of all requests."""
        draft_s = self._draft(self.num_requests, NEW_CONTEXT)
        count = min(batch_tokens, self.num_requests)
        lengths = [batch_tokens // count + (index < batch_tokens % count) for index in range(count)]
        end = self.context_length
        new_ids = [self._text[:, end : end + length] for length in lengths]
        with self._passes.session():
            start = perf_counter()
            self._passes.run(range(count), new_ids)
            return draft_s, perf_counter() - start

    def draft_alone(self) -> float:
        """See [`SingleRounds.draft_alone`]."""
        return self._draft(1, NEW_CONTEXT)

    def _draft(self, num_requests: int, num_context: int) -> float:
        generator, length = self._generators[num_requests], self.context_length
        spans = [(request, request * length, request * length + num_context) for request in range(num_requests)]
        generator.add_packed_context(self._hidden_states, spans, [0] * num_requests)
        start = perf_counter()
        proposals = generator.propose([self._text[:, : length + 1]] * num_requests)
        _synchronize(self.draft.device)
        seconds = perf_counter() - start
        _check_drafted(proposals)
        return seconds


def text_config(target: PreTrainedModel) -> PreTrainedConfig:
    """The configuration of a target's language model.

    Args:
        target (`PreTrainedModel`): The model that generates.

    Returns:
        `PreTrainedConfig`
    """
    return target.config.get_text_config(decoder=True)


def _synthetic_text(
    target: PreTrainedModel, draft: DSparkDraftModel, context_length: int
) -> tuple[torch.Tensor, GenerationConfig]:
    """A text of context, anchor and drafts, [1, s + 1 + slots], and the config of a call that drafts whole blocks."""
    num_slots = draft.config.num_draft_slots
    device = target.device if target.device.type != "meta" else "cpu"  # on meta: offloaded, its hooks move inputs
    vocab_size = text_config(target).vocab_size
    text = _ordinary_ids(vocab_size, _special_ids(target.config), context_length + num_slots + 1)
    config = GenerationConfig(
        max_length=len(text) + 1,
        do_sample=False,
        num_assistant_tokens=num_slots,
        num_assistant_tokens_schedule="confidence",
    )
    return torch.tensor([text], device=device), config


def _check_drafted(proposals: Sequence[DraftProposal]) -> None:
    """A draft that pauses takes no time, which says nothing about drafting."""
    if not all(proposal.drafted for proposal in proposals):
        raise RuntimeError("the draft's numbers are not finite, so that its blocks are empty")


def _synchronize(device: torch.device) -> None:
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


def _special_ids(config: PreTrainedConfig) -> set[int]:
    """Ids that a config names: ends of text, places of images, ..."""
    found, pending = set(), [config.to_dict()]
    while pending:
        for name, value in pending.pop().items():
            if isinstance(value, dict):
                pending.append(value)
            elif "token" in str(name):
                found |= {i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)}
    return found


def _ordinary_ids(vocab_size: int, special_ids: set[int], count: int) -> list[int]:
    """The same ids every time, spread over the first half of the vocabulary: added tokens stand at its end."""
    ordinary = [i for i in range(vocab_size // 2) if i not in special_ids]
    return [ordinary[k * 7919 % len(ordinary)] for k in range(count)]
