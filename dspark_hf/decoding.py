# SPDX-License-Identifier: Apache-2.0
"""The decoding loop: draft, verify, accept, commit, round after round, for one request or many.

It takes the place of transformers' assisted loop for DSpark drafts. What that loop leaves to block ends happens token
by token here (stop strings, custom criteria), a reused chat cache is continued, not filled twice, and each row of a
batch advances at its own pace: a round verifies the drafts of all of them in one pass of the target.

Legend: R requests, s text, k drafts, V vocabulary. p is the target's distribution, q the draft's.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.utils import logging

from ._compat import CACHE_KEY
from .batch_rows import RowFactory, joined_entries, joined_sequences, row_sink
from .candidate_generator import DraftProposal, DSparkCandidateGenerator
from .decoding_rows import Row, Verdict
from .eagle3 import Eagle3CandidateGenerator, Eagle3DraftModel
from .eagle3.candidate_generator import check_single_row
from .metrics import AcceptanceStats, RoundRecord, active_collectors
from .modeling_dspark import DSparkDraftModel
from .outputs import DSparkGenerateOutput
from .packed_target import PackedTarget, check_batch
from .position_limits import position_limits
from .profiling import profile_for
from .round_check import check_packed_rounds, check_rounds
from .single_target import SingleTarget
from .stream_end import end_quietly
from .waiting_requests import WaitingRequests, take_queue


logger = logging.get_logger("transformers.dspark_hf.decoding")

HOPELESS_ROUNDS, HOPELESS_LENGTH = 16, 1.05
# Rounds that sent drafts, and their tokens, of calls of a pair that were too short to say something alone. They serve
# the warning only: nothing that is drafted depends on other calls.
_short_calls: weakref.WeakKeyDictionary[PreTrainedModel, weakref.WeakKeyDictionary] = weakref.WeakKeyDictionary()


def decode(
    target: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    assistant_model: DSparkDraftModel | Eagle3DraftModel,
    streamer: Any = None,
    **model_kwargs: Any,
) -> DSparkGenerateOutput | torch.LongTensor:
    """Generate with a DSpark draft; every text is that of plain generation.

    Called by `generate` in place of transformers' assisted loop, with prepared arguments.

    Args:
        target (`PreTrainedModel`): The model that generates.
        input_ids (`torch.LongTensor` of shape `(R, s)`): Prompts, left-padded.
        logits_processor (`LogitsProcessorList`): Prepared processors.
        stopping_criteria (`StoppingCriteriaList`): Prepared criteria.
        generation_config (`GenerationConfig`): Prepared config.
        assistant_model (`DSparkDraftModel` or `Eagle3DraftModel`): The draft.
        streamer (`BaseStreamer`, *optional*):
            Receives each round's tokens as one block; a [`RowStreamer`] for a batch.
        model_kwargs (`Any`): Keyword arguments of the target's forward: cache, mask, positions, ...

    Returns:
        `torch.LongTensor` of shape `(R, s + new)`, or [`DSparkGenerateOutput`] if `return_dict_in_generate`. Rows that
        ended sooner are padded on the right, as in plain generation.

    Raises:
        NotImplementedError: If a batch needs what only one row at a time can have.
        ValueError: If the cache cannot take tokens back, or a row has no token.
    """
    try:
        queue, sink = take_queue(), row_sink(streamer, len(input_ids))
        factory = RowFactory(logits_processor, stopping_criteria, generation_config, input_ids.shape[1])
        if len(input_ids) == 1 and queue is None:
            rows = [factory.alone(input_ids)]
            generator = generator_for(target, assistant_model, generation_config, rows[0].processors)
            passes = SingleTarget(target, rows[0], generation_config, model_kwargs)
            check_rounds(target, generator, rows[0].max_length)
        else:
            if isinstance(assistant_model, Eagle3DraftModel):
                check_single_row(len(input_ids), is_queued=queue is not None)
            check_batch(target, generation_config, model_kwargs)
            rows = factory.rows(input_ids, model_kwargs.get("attention_mask"))
            lengths = [(row.num_prompt_tokens, row.max_length) for row in rows]
            waiting = queue.prompt_lengths if queue is not None else []
            lengths += [(length, length + rows[0].num_left) for length in waiting]
            position_limits(target).check_batch(lengths)
            generator = generator_for(target, assistant_model, generation_config, rows[0].processors)
            passes = PackedTarget(target, rows)
            check_packed_rounds(target, generator, max(length for _, length in lengths))
        loop = _Loop(target, assistant_model, rows, passes, generator)
        if queue is not None:
            loop.admit_from(queue, factory)
        with passes.session(), contextlib.closing(loop.run()) as rounds:
            for row, new_ids in rounds:
                sink(row, new_ids)
    except BaseException:
        if streamer is not None:  # a consumer in another thread would wait forever
            end_quietly(streamer)
        raise
    if streamer is not None:
        streamer.end()
    _warn_if_hopeless(target, assistant_model, loop.stats)
    return _as_output(input_ids, rows, generation_config, passes.cache_for_user, loop.stats)


class _Loop:
    """State of one call."""

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DSparkDraftModel | Eagle3DraftModel,
        rows: Sequence[Row],
        passes: SingleTarget | PackedTarget,
        generator: DSparkCandidateGenerator | Eagle3CandidateGenerator,
    ):
        self.target, self.passes = target, passes
        self.rows = list(rows)  # the texts that have not ended
        self.generator = generator
        self.generator.add_requests([row.processors for row in rows[1:]])
        passes.use_generator(self.generator)
        self._use_round_times(draft)
        self.stats = AcceptanceStats()
        self.collectors = (self.stats, *active_collectors())
        self.queue: WaitingRequests | None = None

    def admit_from(self, queue: WaitingRequests, factory: RowFactory) -> None:
        """Give the place of a text that ends to one that waits."""
        self.queue, self.factory = queue, factory

    def _use_round_times(self, draft: DSparkDraftModel) -> None:
        """Schedule by the round times of this machine, where they are known or worth measuring."""
        if self.generator.needs_curve:
            remaining = max(row.num_left for row in self.rows)
            profile = profile_for(self.target, draft, remaining, len(self.rows))
            if profile is not None:
                self.generator.use_curve(profile.curve(max(row.input_ids.shape[1] for row in self.rows)))

    def run(self) -> Iterator[tuple[Row, torch.Tensor]]:
        """Yield the new tokens of rows, `(1, n)`, the prefill's one token first."""
        yield from self._prefill(self.rows)
        self._retire()
        yield from self._admit()
        with self.passes.decoding():
            while self.rows:
                with self.passes.no_drafts_left_behind():
                    new_ids = self._round()
                yield from new_ids
                self._retire()
                yield from self._admit()

    def _prefill(self, rows: Sequence[Row]) -> list[tuple[Row, torch.Tensor]]:
        """The target over the prompts of new rows."""
        logits = self.passes.prefill(rows)
        nothing = [DraftProposal(row.input_ids[:, :0]) for row in rows]
        return self._commit(rows, self._verify(rows, logits, nothing))

    def _round(self) -> list[tuple[Row, torch.Tensor]]:
        """One decoding round: every row drafts, one pass of the target verifies, every row commits."""
        rows, start = self.rows, time.perf_counter()
        anchor_ids = [int(row.input_ids[0, -1]) for row in rows]
        others_wait = self.queue is not None and len(self.queue) > 0
        proposals = self.generator.propose(
            [row.input_ids for row in rows], [row.num_left for row in rows], others_wait
        )
        drafted = time.perf_counter()
        logits = self.passes.verify([proposal.token_ids for proposal in proposals])
        verified = time.perf_counter()
        verdicts = self._verify(rows, logits, proposals)
        new_ids = self._commit(rows, verdicts)
        seconds = (drafted - start, verified - drafted, time.perf_counter() - start)
        parts = zip(rows, anchor_ids, proposals, verdicts, strict=True)
        self._learn([_record(*part, [s / len(rows) for s in seconds]) for part in parts])
        return new_ids

    def _verify(
        self, rows: Sequence[Row], logits: Sequence[torch.Tensor], proposals: Sequence[DraftProposal]
    ) -> list[Verdict]:
        """Accept drafts, and end texts where plain generation would."""
        return [row.verify(own, proposal) for row, own, proposal in zip(rows, logits, proposals, strict=True)]

    def _commit(self, rows: Sequence[Row], verdicts: Sequence[Verdict]) -> list[tuple[Row, torch.Tensor]]:
        """Bring texts, caches and the draft's context up to date."""
        self.passes.commit(verdicts)
        for row, verdict in zip(rows, verdicts, strict=True):
            row.commit(verdict)
        return [(row, verdict.new_ids) for row, verdict in zip(rows, verdicts, strict=True)]

    def _learn(self, records: Sequence[RoundRecord]) -> None:
        """What the round taught, to the generator and to those who count."""
        self.generator.observe(records)
        for record in records:
            for collector in self.collectors:
                collector.add(record)

    def _retire(self) -> None:
        """Rows that ended stop costing."""
        if not any(row.finished for row in self.rows):
            return
        if self.queue is not None:
            self.queue.hand_in([row for row in self.rows if row.finished])
        kept = [i for i, row in enumerate(self.rows) if not row.finished]
        self.rows = [self.rows[i] for i in kept]
        self.passes.keep(kept)
        self.generator.keep_requests(kept)

    def _admit(self) -> Iterator[tuple[Row, torch.Tensor]]:
        """Prefill waiting prompts into the places that became free; their first token may be their last."""
        while self.queue is not None and (waiting := self.queue.take(len(self.rows))):
            rows = [self.factory.row(index, prompt) for index, prompt in waiting]
            self.rows += rows
            self.generator.add_requests([row.processors for row in rows])
            yield from self._prefill(rows)
            self._retire()


def generator_for(
    target: PreTrainedModel,
    draft: DSparkDraftModel | Eagle3DraftModel,
    generation_config: GenerationConfig,
    logits_processor: LogitsProcessorList | None,
) -> DSparkCandidateGenerator | Eagle3CandidateGenerator:
    """The drafting half of a round, by the kind of the draft.

    Args:
        target (`PreTrainedModel`): The model that generates.
        draft (`DSparkDraftModel` or `Eagle3DraftModel`): Its draft.
        generation_config (`GenerationConfig`): The call's prepared config.
        logits_processor (`LogitsProcessorList`, *optional*): The call's prepared processors.

    Returns:
        [`DSparkCandidateGenerator`] or [`Eagle3CandidateGenerator`]
    """
    kind = Eagle3CandidateGenerator if isinstance(draft, Eagle3DraftModel) else DSparkCandidateGenerator
    return kind(target, draft, generation_config, logits_processor)


def _record(
    row: Row, anchor_id: int, proposal: DraftProposal, verdict: Verdict, seconds: Sequence[float]
) -> RoundRecord:
    """The round of one row, with its share of the seconds."""
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
        request=row.index,
    )


def _as_output(
    input_ids: torch.Tensor, rows: Sequence[Row], config: GenerationConfig, cache: Any, stats: AcceptanceStats
) -> DSparkGenerateOutput | torch.LongTensor:
    """What `generate` returns."""
    pad_token = getattr(config, "_pad_token_tensor", None)
    sequences = joined_sequences(input_ids, rows, int(pad_token) if pad_token is not None else 0)
    if not config.return_dict_in_generate:
        return sequences
    return DSparkGenerateOutput(
        sequences=sequences,
        scores=joined_entries([row.log.scores for row in rows]),
        logits=joined_entries([row.log.logits for row in rows]),
        attentions=rows[0].log.attentions,
        hidden_states=rows[0].log.hidden_states,
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
