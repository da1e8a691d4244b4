# SPDX-License-Identifier: Apache-2.0
"""The decoding loop: round after round, for one request or many.

One round, top to bottom (`_Loop._round`):

    drafter.propose   the draft writes a block after each text, and cuts it where going on does not pay
    runner.forward    one pass of the target over every anchor and its drafts
    request.judge     the one rule that accepts drafts; the text ends where plain generation would end it
    runner.commit     caches take back what was rejected; what is left is context for the draft
    request.append    the text grows
    drafter.read      the draft takes in the context
    drafter.observe   ... and learns from the round; the round is recorded

It takes the place of transformers' assisted loop. What that loop leaves to block ends happens token by token here
(stop strings, custom criteria), a reused chat cache is continued, not filled twice, and every request of a batch
advances at its own pace: a round verifies the drafts of all of them in one pass.

Legend: R requests, s text, k drafts, n new tokens, V vocabulary. p is the target's distribution, q the draft's.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.utils import logging

from .._compat import CACHE_KEY
from ..common.records import AcceptanceStats, RoundRecord, active_collectors
from ..drafts.modeling_dspark import DSparkDraftModel
from ..drafts.modeling_eagle3 import Eagle3DraftModel
from ..drafts.position_limits import position_limits
from .batch import RequestFactory, joined_entries, joined_sequences
from .drafter import Drafter, DraftProposal
from .dspark_drafter import DSparkCandidateGenerator
from .eagle3_drafter import Eagle3CandidateGenerator, check_single_row
from .outputs import DSparkGenerateOutput
from .packed_runner import PackedRunner, check_batch
from .request import Request, TargetPass, Verdict
from .round_check import check_packed_rounds, check_rounds
from .single_runner import SingleRunner
from .stream_end import end_quietly
from .streaming import row_sink
from .waiting_requests import WaitingRequests, queue_of


logger = logging.get_logger("transformers.dspark_hf.decoding.loop")

HOPELESS_ROUNDS, HOPELESS_LENGTH = 16, 1.05
# Rounds that sent drafts, and their tokens, of calls of a pair that were too short to say something alone. They serve
# the warning only: nothing that is drafted depends on other calls.
_short_calls: weakref.WeakKeyDictionary[PreTrainedModel, weakref.WeakKeyDictionary] = weakref.WeakKeyDictionary()


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
) -> DSparkGenerateOutput | torch.LongTensor:  # [R, s + new], or `DSparkGenerateOutput` if `return_dict_in_generate`
    """Generate with a DSpark draft; every text is that of plain generation.

    Called by `generate` in place of transformers' assisted loop, with prepared arguments.
    """
    try:
        sink = row_sink(streamer, len(input_ids))
        factory = RequestFactory(logits_processor, stopping_criteria, generation_config, input_ids.shape[1])
        queue = queue_of(streamer)
        prepare = _one_request if len(input_ids) == 1 and queue is None else _batch
        requests, drafter, runner = prepare(
            target, assistant_model, input_ids, factory, generation_config, model_kwargs, queue
        )
        loop = _Loop(requests, drafter, runner, queue, factory)
        if round_times is not None and drafter.needs_curve:
            loop.use_round_times(lambda remaining: round_times(target, assistant_model, remaining, len(requests)))
        with runner.running(), contextlib.closing(loop.run()) as rounds:
            for request, new_ids in rounds:
                sink(request, new_ids)
    except BaseException:
        if streamer is not None:  # a consumer in another thread would wait forever
            end_quietly(streamer)
        raise
    if streamer is not None:
        streamer.end()
    _warn_if_hopeless(target, assistant_model, loop.stats)
    return _as_output(input_ids, requests, generation_config, runner.cache_for_user, loop.stats)


def _one_request(
    target: PreTrainedModel,
    draft: DSparkDraftModel | Eagle3DraftModel,
    input_ids: torch.Tensor,
    factory: RequestFactory,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    queue: None,  # noqa: ARG001
) -> tuple[list[Request], Drafter, SingleRunner]:
    """One request with everything that plain generation offers: any cache, any input."""
    request = factory.only(input_ids)
    drafter = generator_for(target, draft, generation_config, request.processors)
    runner = SingleRunner(target, request, generation_config, model_kwargs, drafter.model_kwargs_overrides)
    check_rounds(target, drafter, request.max_length)
    return [request], drafter, runner


def _batch(
    target: PreTrainedModel,
    draft: DSparkDraftModel | Eagle3DraftModel,
    input_ids: torch.Tensor,
    factory: RequestFactory,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    queue: WaitingRequests | None,
) -> tuple[list[Request], Drafter, PackedRunner]:
    """Requests that share their passes, and others that wait for their places."""
    if isinstance(draft, Eagle3DraftModel):
        check_single_row(len(input_ids), is_queued=queue is not None)
    check_batch(target, generation_config, model_kwargs)
    requests = factory.all(input_ids, model_kwargs.get("attention_mask"))
    lengths = [(request.num_prompt_tokens, request.max_length) for request in requests]
    waiting = queue.prompt_lengths if queue is not None else []
    lengths += [(length, length + requests[0].num_left) for length in waiting]
    position_limits(target).check_batch(lengths)
    drafter = generator_for(target, draft, generation_config, requests[0].processors)
    drafter.add_requests([request.processors for request in requests[1:]])
    runner = PackedRunner(target, requests, drafter.model_kwargs_overrides)
    check_packed_rounds(target, drafter, max(longest for _, longest in lengths))
    return requests, drafter, runner


class _Loop:
    """The rounds of one call."""

    def __init__(
        self,
        requests: Sequence[Request],
        drafter: Drafter,
        runner: SingleRunner | PackedRunner,
        queue: WaitingRequests | None,
        factory: RequestFactory,
    ):
        self.requests = list(requests)  # those that have not ended
        self.drafter, self.runner, self.queue, self.factory = drafter, runner, queue, factory
        self.stats = AcceptanceStats()
        self.collectors = (self.stats, *active_collectors())

    def use_round_times(self, profile_of: Callable[[int], Any]) -> None:
        """Schedule by the round times of this machine, where they are known or worth measuring."""
        profile = profile_of(max(request.num_left for request in self.requests))
        if profile is not None:
            self.drafter.use_curve(profile.curve(max(request.input_ids.shape[1] for request in self.requests)))

    def run(self) -> Iterator[tuple[Request, torch.Tensor]]:
        """Yield requests with their new tokens, [1, n], the prefill's one token first."""
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
        """The target over the prompts of new requests."""
        target_pass = self.runner.prefill(requests)
        self.drafter.check_hidden_states(target_pass.hidden_states)
        nothing = [DraftProposal(request.input_ids[:, :0]) for request in requests]
        verdicts = _judge(requests, target_pass, nothing)
        return self._commit(requests, target_pass, verdicts)

    def _round(self) -> list[tuple[Request, torch.Tensor]]:
        """One decoding round: every request drafts, one pass of the target verifies, every text grows."""
        requests, start = self.requests, time.perf_counter()
        anchor_ids = [int(request.input_ids[0, -1]) for request in requests]
        texts, limits = [request.input_ids for request in requests], [request.num_left for request in requests]
        proposals = self.drafter.propose(texts, limits, others_wait=self.queue is not None and len(self.queue) > 0)
        drafted = time.perf_counter()
        target_pass = self.runner.forward(proposals)
        verified = time.perf_counter()
        verdicts = _judge(requests, target_pass, proposals)
        new_ids = self._commit(requests, target_pass, verdicts)
        seconds = (drafted - start, verified - drafted, time.perf_counter() - start)
        parts = zip(requests, anchor_ids, proposals, verdicts, strict=True)
        self._learn([_record(*part, [s / len(requests) for s in seconds]) for part in parts])
        return new_ids

    def _commit(
        self, requests: Sequence[Request], target_pass: TargetPass, verdicts: Sequence[Verdict]
    ) -> list[tuple[Request, torch.Tensor]]:
        """Bring caches, texts and the draft's context up to date."""
        context = self.runner.commit(target_pass, verdicts)
        for request, verdict in zip(requests, verdicts, strict=True):
            request.append(verdict)
        if context.spans:
            self.drafter.read(context)
        return [(request, verdict.new_ids) for request, verdict in zip(requests, verdicts, strict=True)]

    def _learn(self, records: Sequence[RoundRecord]) -> None:
        """What the round taught, to the drafter and to those who count."""
        self.drafter.observe(records)
        for record in records:
            for collector in self.collectors:
                collector.add(record)

    def _retire(self) -> None:
        """Requests that ended stop costing."""
        if not any(request.finished for request in self.requests):
            return
        if self.queue is not None:
            self.queue.hand_in([request for request in self.requests if request.finished])
        kept = [i for i, request in enumerate(self.requests) if not request.finished]
        self.requests = [self.requests[i] for i in kept]
        self.runner.keep(kept)
        self.drafter.keep_requests(kept)

    def _admit(self) -> Iterator[tuple[Request, torch.Tensor]]:
        """Prefill waiting prompts into the places that became free; their first token may be their last."""
        while self.queue is not None and (waiting := self.queue.take(len(self.requests))):
            requests = [self.factory.one(index, prompt) for index, prompt in waiting]
            self.requests += requests
            self.drafter.add_requests([request.processors for request in requests])
            yield from self._prefill(requests)
            self._retire()


def _judge(requests: Sequence[Request], target_pass: TargetPass, proposals: Sequence[DraftProposal]) -> list[Verdict]:
    """Accept drafts, and end texts where plain generation would."""
    parts = zip(requests, target_pass.logits, proposals, strict=True)
    return [request.judge(logits, proposal) for request, logits, proposal in parts]


def generator_for(
    target: PreTrainedModel,
    draft: DSparkDraftModel | Eagle3DraftModel,
    generation_config: GenerationConfig,
    logits_processor: LogitsProcessorList | None,
) -> DSparkCandidateGenerator | Eagle3CandidateGenerator:
    """The drafting half of a round, by the kind of the draft."""
    kind = Eagle3CandidateGenerator if isinstance(draft, Eagle3DraftModel) else DSparkCandidateGenerator
    return kind(target, draft, generation_config, logits_processor)


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
    )


def _as_output(
    input_ids: torch.Tensor, requests: Sequence[Request], config: GenerationConfig, cache: Any, stats: AcceptanceStats
) -> DSparkGenerateOutput | torch.LongTensor:
    """What `generate` returns."""
    pad_token = getattr(config, "_pad_token_tensor", None)
    sequences = joined_sequences(input_ids, requests, int(pad_token) if pad_token is not None else 0)
    if not config.return_dict_in_generate:
        return sequences
    return DSparkGenerateOutput(
        sequences=sequences,
        scores=joined_entries([request.log.scores for request in requests]),
        logits=joined_entries([request.log.logits for request in requests]),
        attentions=requests[0].log.attentions,
        hidden_states=requests[0].log.hidden_states,
        acceptance_stats=stats,
        **{CACHE_KEY: cache},
    )


def _warn_if_hopeless(
    target: PreTrainedModel, draft: DSparkDraftModel | Eagle3DraftModel, stats: AcceptanceStats
) -> None:
    """By the rounds of this call; a call that soon stops drafting has too few, and counts together with the next."""
    sent = [record for record in stats.rounds if record.verify_length]
    calls, rounds, tokens = 1, len(sent), sum(record.accepted_length for record in sent)
    pairs = _short_calls.setdefault(target, weakref.WeakKeyDictionary())
    if rounds < HOPELESS_ROUNDS:
        earlier = pairs.pop(draft, (0, 0, 0))
        calls, rounds, tokens = (own + more for own, more in zip((calls, rounds, tokens), earlier, strict=True))
        if rounds < HOPELESS_ROUNDS:
            pairs[draft] = (calls, rounds, tokens)
            return
    if tokens < HOPELESS_LENGTH * rounds:
        where = "this call" if calls == 1 else f"the last {calls} calls"
        logger.warning(
            f"The draft is almost never accepted: {rounds} rounds of {where} sent drafts and brought "
            f"{tokens / rounds:.2f} tokens each, where plain generation brings 1. The target still decides every "
            "token, but nothing is gained. Likely causes: a draft made for another target or another chat template or "
            "thinking mode, or a checkpoint whose layer ids or slot convention were written differently. "
            "`dspark-hf doctor` looks for the reason."
        )
