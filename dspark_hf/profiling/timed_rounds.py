# SPDX-License-Identifier: Apache-2.0
"""Runs rounds only to time them, on texts that do not grow: verified tokens are rolled back.

Legend: R requests, s context tokens, B tokens in a verification pass (the anchors and the drafts).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from time import perf_counter

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
    StoppingCriteriaList,
)

from ..decoding.drafter import CommittedContext, ContextSpan, DraftProposal
from ..decoding.dspark_drafter import DSparkCandidateGenerator
from ..decoding.packed_runner import PackedRunner
from ..decoding.request import Request, Verdict
from ..decoding.single_runner import SingleRunner, model_kwargs_for
from ..drafts.modeling_dspark import DSparkDraftModel


NEW_CONTEXT = 2  # tokens a typical round commits, and the next one's drafting takes in


class SingleRounds:
    """Rounds of one request."""

    num_requests = 1

    def __init__(self, target: PreTrainedModel, draft: DSparkDraftModel, context_length: int):
        self.target, self.draft, self.context_length = target, draft, context_length
        self._start = perf_counter()
        self._text, self._config = _synthetic_text(target, draft, context_length)
        self._drafter = DSparkCandidateGenerator(target, draft, self._config)
        request, kwargs = _request(0, self._prompt, self._config), model_kwargs_for(target, self._prompt)
        self._runner = SingleRunner(target, request, self._config, kwargs, self._drafter.model_kwargs_overrides)
        prompt = self._runner.prefill([request])
        self._drafter.check_hidden_states(prompt.hidden_states)
        self._hidden_states = prompt.hidden_states
        anchor_id = self._text[:, context_length : context_length + 1]
        verdict = Verdict(anchor_id, None, prompt.logits, 0, None)
        self._runner.commit(prompt, [verdict])
        request.append(verdict)

    @property
    def _prompt(self) -> torch.Tensor:
        return self._text[:, : self.context_length]

    def decoding(self) -> contextlib.AbstractContextManager[None]:
        """Active from the first round on, as in the decoding loop."""
        return self._runner.decoding()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the request came."""
        return perf_counter() - self._start

    def restart(self) -> None:
        """Let a new drafter draft from the context alone: rounds lengthen what an old one has read."""
        self._drafter = DSparkCandidateGenerator(self.target, self.draft, self._config)
        self._draft(self.context_length)

    def run(self, batch_tokens: int) -> tuple[float, float]:  # seconds of drafting, and of verification
        """Draft, and verify B tokens."""
        draft_s = self._draft(NEW_CONTEXT)
        first = self.context_length + 1
        start = perf_counter()
        self._runner.forward([DraftProposal(self._text[:, first : first + batch_tokens - 1])])
        verify_s = perf_counter() - start
        self._runner.cache_for_user.crop(-batch_tokens)
        return draft_s, verify_s

    def draft_alone(self) -> float:
        """Seconds of drafting for one request."""
        return self._draft(NEW_CONTEXT)

    def _draft(self, num_context: int) -> float:
        return _timed_draft(self._drafter, self._hidden_states, self._text, [self.context_length], num_context)


class BatchRounds:
    """Rounds of a batch; a pass of fewer tokens than requests is one of fewer requests."""

    def __init__(self, target: PreTrainedModel, draft: DSparkDraftModel, context_length: int, num_requests: int):
        self.target, self.draft, self.context_length, self.num_requests = target, draft, context_length, num_requests
        self._start = perf_counter()
        self._text, self._config = _synthetic_text(target, draft, context_length)
        requests = [_request(index, self._text[:, :context_length], self._config) for index in range(num_requests)]
        reads = DSparkCandidateGenerator(target, draft, self._config).model_kwargs_overrides
        self._runner = PackedRunner(target, requests, reads)
        with self._runner.running():
            self._hidden_states = self._runner.prefill(requests).hidden_states
        self._runner.cache.commit(range(num_requests), [context_length] * num_requests)
        for request in requests:
            request.input_ids = self._text[:, : context_length + 1]

    def decoding(self) -> contextlib.AbstractContextManager[None]:
        """See [`SingleRounds.decoding`]."""
        return self._runner.decoding()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the requests came."""
        return perf_counter() - self._start

    def restart(self) -> None:
        """Let new drafters draft from the context alone."""
        self._drafters = {}
        for count in {1, self.num_requests}:
            self._drafters[count] = DSparkCandidateGenerator(self.target, self.draft, self._config)
            self._drafters[count].add_requests([LogitsProcessorList()] * (count - 1))
            self._draft(count, self.context_length)

    def run(self, batch_tokens: int) -> tuple[float, float]:
        """See [`SingleRounds.run`]; the drafting is that of all requests."""
        draft_s = self._draft(self.num_requests, NEW_CONTEXT)
        count, first = min(batch_tokens, self.num_requests), self.context_length + 1
        num_drafts = [batch_tokens // count + (index < batch_tokens % count) - 1 for index in range(count)]
        proposals = [DraftProposal(self._text[:, first : first + number]) for number in num_drafts]
        with self._runner.running():
            start = perf_counter()
            self._runner.forward(proposals)
            return draft_s, perf_counter() - start

    def draft_alone(self) -> float:
        """See [`SingleRounds.draft_alone`]."""
        return self._draft(1, NEW_CONTEXT)

    def _draft(self, num_requests: int, num_context: int) -> float:
        lengths = [self.context_length] * num_requests
        return _timed_draft(self._drafters[num_requests], self._hidden_states, self._text, lengths, num_context)


def _request(index: int, prompt: torch.Tensor, config: GenerationConfig) -> Request:
    return Request(index, prompt, LogitsProcessorList(), StoppingCriteriaList(), config.max_length, config)


def _timed_draft(
    drafter: DSparkCandidateGenerator,
    hidden_states: tuple[torch.Tensor, ...],
    text: torch.Tensor,
    lengths: Sequence[int],
    num_context: int,
) -> float:
    """Seconds of drafting after the first tokens of each request, whose states lie one after the other."""
    positions = torch.arange(num_context + 1)[None]
    firsts = [sum(lengths[:index]) for index in range(len(lengths))]
    spans = [ContextSpan(i, slice(first, first + num_context), positions) for i, first in enumerate(firsts)]
    drafter.read(CommittedContext(hidden_states, tuple(spans)))
    start = perf_counter()
    proposals = drafter.propose([text[:, : length + 1] for length in lengths])
    _synchronize(drafter.draft.device)
    seconds = perf_counter() - start
    if not all(proposal.drafted for proposal in proposals):  # a pause takes no time and is not a measurement
        raise RuntimeError("the draft's numbers are not finite, so that its blocks are empty")
    return seconds


def text_config(target: PreTrainedModel) -> PreTrainedConfig:
    """The configuration of a target's language model."""
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
