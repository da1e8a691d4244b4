# SPDX-License-Identifier: Apache-2.0
"""Runs rounds only to time them, on texts that do not grow: verified tokens are rolled back.

Legend: R requests, s context tokens, B tokens in a verification pass (the anchors and the drafts).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from time import perf_counter
from typing import Any

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
from ..scheduling.copying import MOST_COPIES


NEW_CONTEXT = 2  # tokens a typical round commits, and the next one's drafting takes in


class TimedRounds:
    """Rounds of some requests; a pass of fewer tokens than requests is one of fewer requests."""

    def __init__(self, target: PreTrainedModel, draft: DSparkDraftModel, context_length: int, num_requests: int):
        self.target, self.draft, self.context_length, self.num_requests = target, draft, context_length, num_requests
        self._start = perf_counter()
        self._text, self._config = _synthetic_text(target, draft, context_length)
        prompt, anchor_id = self._text[:, :context_length], self._text[:, context_length : context_length + 1]
        requests = self._requests_of(num_requests, prompt)
        drafter = DSparkCandidateGenerator(target, draft, self._config)
        self._runner = self._runner_of(requests, drafter.model_kwargs_overrides)
        with self._runner.running():
            prefill = self._runner.prefill(requests)
        drafter.check_hidden_states(prefill.hidden_states)
        self._hidden_states = prefill.hidden_states
        verdicts = [Verdict(anchor_id, None, prefill.logits, 0, None)] * num_requests
        self._runner.commit(prefill, verdicts)
        for request, verdict in zip(requests, verdicts, strict=True):
            request.append(verdict)

    def _requests_of(self, count: int, text: torch.Tensor) -> list[Request]:
        rules, config = (LogitsProcessorList(), StoppingCriteriaList()), self._config
        return [Request(index, text, *rules, config.max_length, config) for index in range(count)]

    def _runner_of(self, requests: Sequence[Request], reads: dict[str, Any]) -> SingleRunner | PackedRunner:
        if self.num_requests > 1:
            return PackedRunner(self.target, requests, reads)
        (request,) = requests
        kwargs = model_kwargs_for(self.target, request.input_ids)
        return SingleRunner(self.target, request, self._config, kwargs, reads)

    def decoding(self) -> contextlib.AbstractContextManager[None]:
        """Active from the first round on, as in the decoding loop."""
        return self._runner.decoding()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the requests came."""
        return perf_counter() - self._start

    def restart(self) -> None:
        """Let new drafters draft from the context alone: rounds lengthen what an old one has read."""
        self._drafters, text = {}, self._text[:, : self.context_length + 1]
        for count in {1, self.num_requests}:
            drafter = DSparkCandidateGenerator(self.target, self.draft, self._config)
            requests = self._requests_of(count, text)
            drafter.add_requests(requests)
            self._drafters[count] = (drafter, requests)
            self._draft(count, self.context_length)

    def run(self, batch_tokens: int) -> tuple[float, float]:  # seconds of drafting, and of verification
        """Draft for all requests, and verify B tokens."""
        draft_s = self._draft(self.num_requests, NEW_CONTEXT)
        count, first = min(batch_tokens, self.num_requests), self.context_length + 1
        num_drafts = [batch_tokens // count + (index < batch_tokens % count) - 1 for index in range(count)]
        proposals = [DraftProposal(self._text[:, first : first + number]) for number in num_drafts]
        with self._runner.running():
            start = perf_counter()
            self._runner.forward(proposals)
            verify_s = perf_counter() - start
        if self._runner.cache_for_user is not None:  # a batch's own cache forgets what is not committed
            self._runner.cache_for_user.crop(-batch_tokens)
        return draft_s, verify_s

    def draft_alone(self) -> float:
        """Seconds of drafting for one request."""
        return self._draft(1, NEW_CONTEXT)

    def _draft(self, num_requests: int, num_context: int) -> float:
        """Seconds of drafting after the first tokens of each request, whose states lie one after the other."""
        (drafter, requests), positions = self._drafters[num_requests], torch.arange(num_context + 1)[None]
        firsts = [index * self.context_length for index in range(num_requests)]
        spans = [ContextSpan(i, slice(first, first + num_context), positions) for i, first in enumerate(firsts)]
        drafter.read(requests, CommittedContext(self._hidden_states, tuple(spans)))
        start = perf_counter()
        proposals = drafter.propose(requests)
        _synchronize(self.draft.device)
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
    """A text of context, anchor and drafts, [1, s + 1 + k], and the config of a call that drafts whole blocks."""
    num_slots = draft.config.num_draft_slots
    num_drafts = max(num_slots, MOST_COPIES)
    device = target.device if target.device.type != "meta" else "cpu"  # on meta: offloaded, its hooks move inputs
    vocab_size = text_config(target).vocab_size
    text = _ordinary_ids(vocab_size, _special_ids(target.config), context_length + num_drafts + 1)
    config = GenerationConfig(
        max_length=len(text) + 1,
        do_sample=False,
        num_assistant_tokens=num_slots,
        num_assistant_tokens_schedule="confidence",
        prompt_lookup_num_tokens=0,
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
