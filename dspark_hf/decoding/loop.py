# SPDX-License-Identifier: Apache-2.0
"""The decoding loop: round after round, for one request or many.

One round, top to bottom (`Loop._round`):

    drafter.propose   each text gets drafts: a copy of what it said before, or a block of the draft, cut where further
                      drafts do not pay off
    runner.forward    one pass of the target over every anchor and its drafts
    judge             the one rule that accepts drafts; the text ends where plain generation would end it
    runner.commit     caches drop rejected tokens; the rest is context for the draft
    request.append    the text grows
    drafter.read      the draft reads the context
    drafter.observe   the drafter learns from the round, which is recorded

It replaces transformers' assisted loop. Stop strings and custom criteria are evaluated token by token, not only at the
end of a block. A reused chat cache is continued, not filled twice. Every request of a batch advances at its own pace:
a round verifies the drafts of all of them in one pass.

Legend: R requests, s text, k drafts, n new tokens, V vocabulary. p is the target's distribution, q the draft's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from ..common.records import AcceptanceStats, RoundRecord, active_collectors
from ..drafts.modeling_dspark import DSparkDraftModel
from ..drafts.modeling_eagle3 import Eagle3DraftModel
from .batch import RequestFactory, as_output
from .call import Call, prepare_call
from .drafter import DraftProposal
from .hopeless import warn_if_hopeless
from .judging import judge
from .outputs import DSparkGenerateOutput
from .request import Request, TargetPass, Verdict
from .stream_end import end_quietly
from .streaming import row_sink
from .waiting_requests import queue_of


def decode(
    target: PreTrainedModel,
    input_ids: torch.LongTensor,  # [R, s], prompts, left-padded
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    assistant_model: DSparkDraftModel | Eagle3DraftModel,
    streamer: Any = None,
    round_times: Callable[..., Any] | None = None,
    **model_kwargs: Any,
) -> DSparkGenerateOutput | torch.Tensor:  # [R, s + new], or `DSparkGenerateOutput` if `return_dict_in_generate`
    """Generate with a DSpark draft; every text is that of plain generation.

    Called by `generate` in place of transformers' assisted loop, with prepared arguments.
    """
    try:
        sink, queue = row_sink(streamer, len(input_ids)), queue_of(streamer)
        factory = RequestFactory(logits_processor, stopping_criteria, generation_config, input_ids.shape[1])
        call = prepare_call(target, assistant_model, input_ids, factory, generation_config, model_kwargs, queue)
        stats = AcceptanceStats()
        loop = Loop(call, (stats, *active_collectors()))
        if round_times is not None and call.drafter.needs_curve:
            loop.use_round_times(lambda remaining: round_times(target, assistant_model, remaining, len(call.requests)))
        with call.runner.running(), contextlib.closing(loop.run()) as rounds:
            for request, new_ids in rounds:
                sink(request, new_ids)
    except BaseException:
        if streamer is not None:  # a consumer in another thread would wait forever
            end_quietly(streamer)
        raise
    if streamer is not None:
        streamer.end()
    warn_if_hopeless(target, assistant_model, stats)
    return as_output(input_ids, call.requests, generation_config, call.runner.cache_for_user, stats)


class Loop:
    """The rounds of one call."""

    def __init__(self, call: Call, collectors: Sequence[AcceptanceStats] = ()):
        self.requests = list(call.requests)  # those that have not ended
        self.drafter, self.runner, self.queue, self.factory = call.drafter, call.runner, call.queue, call.factory
        self.generator, self.collectors = call.generator, collectors

    def use_round_times(self, profile_of: Callable[[int], Any]) -> None:
        """Schedule by the round times of this machine, if they are known or worth measuring."""
        profile = profile_of(max(request.num_left for request in self.requests))
        if profile is not None:
            self.drafter.use_curve(profile.curve(max(request.input_ids.shape[1] for request in self.requests)))

    def run(self) -> Generator[tuple[Request, torch.Tensor], None, None]:
        """Yield requests with their new tokens, [1, n], the prefill's one token first."""
        if self.requests:
            yield from self._prefill(self.requests)
            self._retire()
        yield from self._admit()
        with self.runner.decoding():
            while self.requests:
                with self.runner.rollback_on_error():
                    new_ids = self._round()
                yield from new_ids
                self._retire()
                yield from self._admit()

    def _prefill(self, requests: Sequence[Request]) -> list[tuple[Request, torch.Tensor]]:
        """Run the target over the prompts of new requests."""
        target_pass = self.runner.prefill(requests)
        self.drafter.check_hidden_states(target_pass.hidden_states)
        nothing = [DraftProposal(request.input_ids[:, :0]) for request in requests]
        verdicts = judge(requests, target_pass.logits, nothing, self.generator)
        return self._commit(requests, target_pass, verdicts)

    def _round(self) -> list[tuple[Request, torch.Tensor]]:
        """One decoding round: every request drafts, one pass of the target verifies, every text grows."""
        requests, start = self.requests, time.perf_counter()
        anchor_ids = [int(request.input_ids[0, -1]) for request in requests]
        proposals = self.drafter.propose(requests, others_wait=self.queue is not None and self.queue.others_wait)
        drafted = time.perf_counter()
        target_pass = self.runner.forward(proposals)
        verified = time.perf_counter()
        verdicts = judge(requests, target_pass.logits, proposals, self.generator)
        new_ids = self._commit(requests, target_pass, verdicts)
        seconds = (drafted - start, verified - drafted, time.perf_counter() - start)
        parts = zip(requests, anchor_ids, proposals, verdicts, strict=True)
        self._learn([_record(*part, [s / len(requests) for s in seconds]) for part in parts])
        return new_ids

    def _commit(
        self, requests: Sequence[Request], target_pass: TargetPass, verdicts: Sequence[Verdict]
    ) -> list[tuple[Request, torch.Tensor]]:
        """Update caches, texts and the draft's context."""
        context = self.runner.commit(target_pass, verdicts)
        for request, verdict in zip(requests, verdicts, strict=True):
            request.append(verdict)
        if context.spans:
            self.drafter.read(self.requests, context)
        return [(request, verdict.new_ids) for request, verdict in zip(requests, verdicts, strict=True)]

    def _learn(self, records: Sequence[RoundRecord]) -> None:
        """Pass the round to the drafter and to the collectors."""
        self.drafter.observe(self.requests, records)
        for record in records:
            for collector in self.collectors:
                collector.add(record)

    def _retire(self) -> None:
        """Drop requests that ended, so that they cost nothing."""
        if not any(request.finished for request in self.requests):
            return
        kept = [i for i, request in enumerate(self.requests) if not request.finished]
        self.requests = [self.requests[i] for i in kept]
        self.runner.keep(kept)
        self.drafter.keep_requests(kept)

    def _admit(self) -> Iterator[tuple[Request, torch.Tensor]]:
        """Prefill waiting prompts into free places; their first token may be their last."""
        while self.queue is not None and (waiting := self.queue.take(len(self.requests))):
            requests = [self.factory.one(index, prompt) for index, prompt in waiting]
            self.requests += requests
            self.drafter.add_requests(requests)
            yield from self._prefill(requests)
            self._retire()


def _record(
    request: Request, anchor_id: int, proposal: DraftProposal, verdict: Verdict, seconds: Sequence[float]
) -> RoundRecord:
    """The round of one request, with its share of the seconds."""
    draft_s, verify_s, round_s = seconds
    return RoundRecord(
        anchor_id=anchor_id,
        token_ids=tuple(proposal.token_ids[0].tolist()),
        confidence=proposal.confidence,
        num_accepted=verdict.num_accepted,
        bonus_token=verdict.bonus_token,
        num_committed=verdict.new_ids.shape[1],
        draft_s=draft_s,
        verify_s=verify_s,
        round_s=round_s,
        drafted=proposal.drafted,
        request=request.index,
        num_copied=proposal.num_copied,
    )
