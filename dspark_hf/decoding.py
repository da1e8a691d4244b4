# SPDX-License-Identifier: Apache-2.0
"""The decoding loop: draft, verify, accept, commit, round after round. One request (R = 1).

It takes the place of transformers' assisted loop for DSpark drafts. What that loop leaves to block ends happens token
by token here (stop strings, custom criteria), and a reused chat cache is continued, not filled twice.

Legend: s text, k drafts, V vocabulary. p is the target's distribution, q the draft's.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.utils import logging

from ._compat import CACHE_KEY, QuantizedLayer
from .candidate_generator import DraftProposal, DSparkCandidateGenerator
from .metrics import AcceptanceStats, RoundRecord, active_collectors
from .modeling_dspark import DSparkDraftModel
from .outputs import DSparkGenerateOutput, OutputLog
from .processors import are_rowwise
from .profiling import profile_for
from .sampling import accept_drafts, select_bonus, verify_block


logger = logging.get_logger("transformers.dspark_hf.decoding")

HOPELESS_ROUNDS, HOPELESS_LENGTH = 16, 1.05
# Rounds that sent drafts, and their tokens, for the warning alone: nothing that is drafted depends on other calls.
_SENT: weakref.WeakKeyDictionary[DSparkDraftModel, tuple[int, int]] = weakref.WeakKeyDictionary()


def decode(
    target: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    assistant_model: DSparkDraftModel,
    streamer: Any = None,
    **model_kwargs: Any,
) -> DSparkGenerateOutput | torch.LongTensor:
    """Generate with a DSpark draft; the text is that of plain generation.

    Called by `generate` in place of transformers' assisted loop, with prepared arguments.

    Args:
        target (`PreTrainedModel`): The model that generates.
        input_ids (`torch.LongTensor` of shape `(1, s)`): Prompt.
        logits_processor (`LogitsProcessorList`): Prepared processors.
        stopping_criteria (`StoppingCriteriaList`): Prepared criteria.
        generation_config (`GenerationConfig`): Prepared config.
        assistant_model (`DSparkDraftModel`): The draft.
        streamer (`BaseStreamer`, *optional*): Receives each round's tokens as one block.
        model_kwargs (`Any`): Keyword arguments of the target's forward: cache, mask, positions, ...

    Returns:
        `torch.LongTensor` of shape `(1, s + new)`, or [`DSparkGenerateOutput`] if `return_dict_in_generate`.

    Raises:
        NotImplementedError: For more than one row.
        ValueError: If the cache cannot take tokens back.
    """
    try:
        _check_batch_and_cache(target, input_ids, generation_config, model_kwargs)
        loop = _Loop(
            target, assistant_model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
        )
        with contextlib.closing(loop.run()) as rounds:
            for new_ids in rounds:
                if streamer is not None:
                    streamer.put(new_ids.cpu())
    except BaseException:
        if streamer is not None:  # a consumer in another thread would wait for ever
            with contextlib.suppress(Exception):
                streamer.end()
        raise
    if streamer is not None:
        streamer.end()
    _warn_if_hopeless(assistant_model, loop.stats)
    if generation_config.return_dict_in_generate:
        return loop.log.finish(loop.input_ids, loop.model_kwargs[CACHE_KEY], CACHE_KEY, loop.stats)
    return loop.input_ids


@dataclass(frozen=True)
class _Verdict:
    """What a verification adds to the text: `new_ids` (1, n), which may end before the bonus token.

    `scores` are the processed logits (1, >= n, V) that the tokens came from; `bonus_token` is None where the text
    ended before it was drawn.
    """

    new_ids: torch.Tensor
    scores: torch.Tensor
    num_accepted: int
    bonus_token: int | None


class _Loop:
    """State of one call."""

    def __init__(self, target, draft, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs):
        self.target = target
        self.input_ids = input_ids
        self.processors = logits_processor
        self.stopping_criteria = stopping_criteria
        self.config = generation_config
        self.model_kwargs = model_kwargs
        self.do_sample = bool(generation_config.do_sample)
        self.generator = DSparkCandidateGenerator(target, draft, generation_config, logits_processor)
        self._use_round_times(draft)
        self.log = OutputLog(generation_config)
        self.stats = AcceptanceStats()
        self.collectors = (self.stats, *active_collectors())
        self.finished = False

    def _use_round_times(self, draft: DSparkDraftModel) -> None:
        """Schedule by the round times of this machine, where they are known or worth measuring."""
        if self.generator.needs_curve:
            length = self.input_ids.shape[1]
            profile = profile_for(self.target, draft, self.config.max_length - length)
            if profile is not None:
                self.generator.use_curve(profile.curve(length))

    def run(self) -> Iterator[torch.Tensor]:
        """Yield the tokens of each round, `(1, n)`, the prefill's one token first."""
        outputs = self._prefill()
        yield self._verify_and_commit(outputs, DraftProposal(self.input_ids[:, :0]), prefill=True).new_ids
        with _past_recording(self.model_kwargs[CACHE_KEY]), self.target._optimize_model_for_decode():
            while not self.finished:
                with self._no_drafts_left_behind():
                    new_ids = self._round()
                yield new_ids

    def _round(self) -> torch.Tensor:
        """One decoding round."""
        start = time.perf_counter()
        anchor_id = int(self.input_ids[0, -1])
        proposal = self.generator.propose(self.input_ids)
        drafted = time.perf_counter()
        outputs = self._forward(proposal.token_ids)
        verified = time.perf_counter()
        verdict = self._verify_and_commit(outputs, proposal)
        record = RoundRecord(
            anchor_id=anchor_id,
            token_ids=tuple(proposal.token_ids[0].tolist()),
            confidence=proposal.confidence,
            num_accepted=verdict.num_accepted,
            bonus_token=verdict.bonus_token,
            num_committed=verdict.new_ids.shape[1],
            draft_s=drafted - start,
            verify_s=verified - drafted,
            round_s=time.perf_counter() - start,
            drafted=proposal.drafted,
        )
        self.generator.observe(record)
        for collector in self.collectors:
            collector.add(record)
        return verdict.new_ids

    @contextlib.contextmanager
    def _no_drafts_left_behind(self) -> Iterator[None]:
        """A criterion or processor that raises leaves a user's cache without the round it broke off."""
        cache = self.model_kwargs[CACHE_KEY]
        length = int(cache.get_seq_length())
        try:
            yield
        except BaseException:
            cache.crop(min(0, length - int(cache.get_seq_length())))
            raise

    def _prefill(self) -> Any:
        """The target over the prompt; what a user's cache already holds is not run again."""
        if self.config.prefill_chunk_size is not None:
            logger.warning_once(
                "With `prefill_chunk_size` the draft sees the last chunk of the prompt only, and is accepted less."
            )
        overrides = self.generator.model_kwargs_overrides
        outputs = self.target._prefill(self.input_ids, self.config, {**self.model_kwargs, **overrides})
        if not outputs[CACHE_KEY].is_croppable:
            raise ValueError(
                f"DSpark takes rejected tokens back out of the cache, which {type(outputs[CACHE_KEY]).__name__} of "
                f"{type(self.target).__name__} does not allow. Use a dynamic cache, or plain generation for this "
                "target."
            )
        self.generator.check_hidden_states(outputs.hidden_states)
        return outputs

    def _forward(self, draft_ids: torch.Tensor) -> Any:
        """The target over the anchor and the drafts."""
        num_drafts = draft_ids.shape[1]
        kwargs = _grow(self.target, {}, dict(self.model_kwargs), num_drafts) if num_drafts else self.model_kwargs
        inputs = self.target.prepare_inputs_for_generation(
            torch.cat([self.input_ids, draft_ids], dim=1),
            next_sequence_length=1 + num_drafts,
            is_first_iteration=False,
            **kwargs,
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = 1 + num_drafts
        outputs = self.target(**(inputs | self.generator.model_kwargs_overrides), return_dict=True)
        if outputs.logits.device.type != "cpu":  # verification waits for the device anyway; here the wait is timed
            torch.accelerator.synchronize(outputs.logits.device)
        return outputs

    def _verify_and_commit(self, outputs: Any, proposal: DraftProposal, prefill: bool = False) -> _Verdict:
        """Accept drafts, end where plain generation would, and bring text, caches and context up to date."""
        num_drafts = proposal.token_ids.shape[1]
        logits = outputs.logits[:, -1 - num_drafts :].to(self.input_ids.device)  # [1, 1 + k, V]
        verdict = self._verify(logits, proposal)
        num_committed = verdict.new_ids.shape[1]
        cache = outputs[CACHE_KEY]
        self.log.add(outputs, cache, logits, verdict.scores, num_committed, prefill)
        # The last committed token is the next anchor: it is not in the cache yet, as after plain generation.
        if not prefill:  # also with nothing to take back: windowed layers drop what left the window
            cache.crop(num_committed - 1 - num_drafts)
        self.input_ids = torch.cat([self.input_ids, verdict.new_ids], dim=1)
        self.model_kwargs = _grow(self.target, outputs, self.model_kwargs, num_committed)
        if not self.finished:
            num_rows = _num_rows(outputs.hidden_states) if prefill else num_committed
            self.generator.add_context(outputs.hidden_states, num_rows, self.model_kwargs)
        return verdict

    def _verify(self, logits: torch.Tensor, proposal: DraftProposal) -> _Verdict:
        """Judge the drafts, and end the text where plain generation would."""
        if self.do_sample or self.processors or self.log.scores is not None:
            scores = logits.to(torch.float32, copy=self.log.logits is not None)
        else:
            scores = logits  # greedy, nothing asked for: the argmax needs no copy
        if self.processors and not are_rowwise(self.processors):
            return self._verify_stepwise(scores, proposal)
        if self.processors:
            scores = self.processors(self.input_ids, scores[0])[None]
        result = verify_block(proposal.token_ids, scores, proposal.draft_logits, self.do_sample)
        num_accepted = int(result.num_accepted)
        new_ids = torch.cat([proposal.token_ids[:, :num_accepted], result.bonus_token[:, None]], dim=1)
        for count in range(1, new_ids.shape[1] + 1):
            if self._stops_after(new_ids[:, :count], scores):
                new_ids = new_ids[:, :count]
                break
        return _Verdict(new_ids, scores, num_accepted, int(result.bonus_token))

    def _verify_stepwise(self, logits: torch.Tensor, proposal: DraftProposal) -> _Verdict:
        """As plain generation runs processors and criteria: in turn, once per token, on its own prefix, no further."""
        draft_ids, draft_logits = proposal.token_ids, proposal.draft_logits
        new_ids, rows, accepted = draft_ids[:, :0], [], True
        while accepted and not self.finished:
            slot = len(rows)
            rows.append(self.processors(torch.cat([self.input_ids, new_ids], dim=1), logits[:, slot]))
            draft_id, row_q, accepted = draft_ids[:, slot : slot + 1], None, False
            if slot < draft_ids.shape[1]:
                row_q = draft_logits[:, slot] if draft_logits is not None else None
                slot_q = row_q[:, None] if row_q is not None else None
                accepted = bool(accept_drafts(draft_id, rows[-1][:, None], slot_q, self.do_sample))
            token = draft_id if accepted else select_bonus(rows[-1], row_q, self.do_sample)[:, None]
            new_ids = torch.cat([new_ids, token], dim=1)
            self._stops_after(new_ids, torch.stack(rows, dim=1))
        num_accepted = new_ids.shape[1] - (0 if accepted else 1)
        return _Verdict(new_ids, torch.stack(rows, dim=1), num_accepted, None if accepted else int(new_ids[0, -1]))

    def _stops_after(self, new_ids: torch.Tensor, scores: torch.Tensor) -> bool:
        """Whether plain generation would end after these tokens of the round; the criteria see what it shows them."""
        scores_so_far = None
        if self.log.scores is not None:
            scores_so_far = self.log.scores + tuple(scores[:, i] for i in range(new_ids.shape[1]))
        text = torch.cat([self.input_ids, new_ids], dim=1)
        self.finished = bool(self.stopping_criteria(text, scores_so_far).all())
        return self.finished


def _grow(target: PreTrainedModel, outputs: Any, model_kwargs: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """Mask, positions and token types for `num_tokens` more tokens, by the target's own rule."""
    token_types = model_kwargs.get("token_type_ids")
    model_kwargs = target._update_model_kwargs_for_generation(outputs, model_kwargs, num_new_tokens=num_tokens)
    if token_types is not None:  # the library repeats the last n types instead of the last one n times
        grown = token_types[:, -1:].expand(-1, num_tokens)
        model_kwargs["token_type_ids"] = torch.cat([token_types, grown], dim=-1)
    return model_kwargs


def _num_rows(hidden_states: tuple[torch.Tensor, ...]) -> int:
    return next(states.shape[1] for states in hidden_states if states is not None)


@contextlib.contextmanager
def _past_recording(cache: Any) -> Iterator[None]:
    """Let windowed layers keep what a rollback needs, and leave a user's cache as it was."""
    before = [(layer, layer.record_past) for layer in cache.layers if hasattr(layer, "record_past")]
    cache.activate_past_recording()
    try:
        yield
    finally:
        for layer, record_past in before:
            layer.record_past = record_past


def _check_batch_and_cache(
    target: PreTrainedModel, input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> None:
    if input_ids.shape[0] != 1:
        raise NotImplementedError(
            f"DSpark generates one row at a time for now, got a batch of {input_ids.shape[0]}. Loop over the rows."
        )
    if model_kwargs.get(CACHE_KEY) is None:
        raise NotImplementedError(
            f"DSpark takes rejected tokens back out of the cache, and {type(target).__name__} has a cache of its own "
            "kind. Use plain generation for this target."
        )
    cache = model_kwargs[CACHE_KEY]
    # Recurrent layers know only after the prefill whether they can be cropped, all others know now.
    is_recurrent = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)
    is_quantised = any(isinstance(layer, QuantizedLayer) for layer in cache.layers)
    if is_quantised or not (cache.is_croppable or is_recurrent):
        kind = generation_config.cache_implementation or type(cache).__name__
        raise ValueError(
            f"DSpark takes rejected tokens back out of the cache, which a cache of type {kind!r} does not allow. Use "
            "a dynamic cache (the default)."
        )


def _warn_if_hopeless(draft: DSparkDraftModel, stats: AcceptanceStats) -> None:
    """Over all calls with a draft: one call soon stops drafting where it does not pay, and has too little to say."""
    sent = [record for record in stats.rounds if record.verify_length]
    rounds, tokens = _SENT.get(draft, (0, 0))
    rounds, tokens = rounds + len(sent), tokens + sum(record.accepted_length for record in sent)
    _SENT[draft] = (rounds, tokens)
    if rounds >= HOPELESS_ROUNDS and tokens < HOPELESS_LENGTH * rounds:
        logger.warning_once(
            "The DSpark draft is almost never accepted; the text is right, but nothing is gained. Likely causes: a "
            "draft made for another target or another chat template or thinking mode, or a checkpoint whose layer "
            "ids or slot convention were written differently. `dspark-hf doctor` looks for the reason."
        )
