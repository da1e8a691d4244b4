# SPDX-License-Identifier: Apache-2.0
"""The drafting half of a round: context in, one parallel pass, the sequential chain, and where to cut it.

Legend: R requests, c context tokens of one and C of all of them, g block_size, k drafts, m captured layers, d hidden,
V target vocabulary, D draft vocabulary (= V unless reduced). q is the draft's distribution after the mirrored
processors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import CandidateGenerator

from ._compat import hidden_states_of
from .draft_cache import DraftCache
from .drafting_steps import (
    captured_states,
    check_hidden_states,
    context_positions,
    drafts_within,
    end_token_ids,
    length_to_end,
    num_prompt_tokens,
    over_target_vocabulary,
)
from .metrics import RoundRecord
from .modeling_dspark import DSparkDraftModel
from .position_limits import position_limits
from .processors import are_rowwise, mirrored
from .sampling import argmax_token, select_token
from .scheduling import SPSCurve
from .stopping_criteria import AdaptiveConfidenceCriteria, resolve_options, scheduler_for


@dataclass(frozen=True)
class DraftProposal:
    """What a round sends to verification for one request.

    Args:
        token_ids (`torch.LongTensor` of shape `(1, k)`): Drafts, k >= 0, on the device of the text.
        draft_logits (`torch.Tensor` of shape `(1, k, V)`, *optional*):
            Exactly the logits the drafts were sampled from, fp32; `None` when greedy.
        confidence (`tuple[float, ...]`): c of every slot drafted, cut ones included; empty without a confidence head.
        drafted (`bool`): Whether a block was drafted; `False` where drafting does not pay or no draft could be kept.
    """

    token_ids: torch.Tensor
    draft_logits: torch.Tensor | None = None
    confidence: tuple[float, ...] = ()
    drafted: bool = True


@dataclass
class _Request:
    """One request's side of the drafting.

    `context` (1, c, m * d) and `positions` (1, c) are those of committed tokens the draft has not read yet, in parts;
    `anchor_position` is (1, 1).
    """

    processors: LogitsProcessorList
    context: list[torch.Tensor] = field(default_factory=list)
    positions: list[torch.Tensor] = field(default_factory=list)
    anchor_position: torch.Tensor | None = None

    def add(self, context: torch.Tensor, positions: torch.Tensor) -> None:
        """Take in context and its positions, the anchor's last."""
        self.context.append(context)
        self.positions.append(positions[:, :-1])
        self.anchor_position = positions[:, -1:]

    @property
    def num_waiting(self) -> int:
        """Context tokens the draft has not read yet."""
        return sum(part.shape[1] for part in self.context)


class DSparkCandidateGenerator(CandidateGenerator):
    """Drafts blocks of tokens for one `generate` call; all of the call's drafting state lives here.

    It follows transformers' `CandidateGenerator` protocol, so that the stock assisted loop can drive it as well as
    ours.

    Args:
        target (`PreTrainedModel`): The model that generates.
        draft (`DSparkDraftModel`): Its draft.
        generation_config (`GenerationConfig`): The call's prepared config (`do_sample`, `max_length`, EOS).
        logits_processor (`LogitsProcessorList`, *optional*): The call's prepared processors, for one request.

    Raises:
        NotImplementedError: If the target is no decoder-only language model.
        ValueError: If target and draft do not fit, or a knob is out of range.
    """

    requires_model_outputs = True

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DSparkDraftModel,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList | None = None,
    ):
        self.draft = draft
        self._target_name = type(target).__name__
        self.binding = draft.bind_target(target)
        self.options = resolve_options(draft.config, draft.generation_config, generation_config)
        self.do_sample = bool(generation_config.do_sample)
        self.max_length = generation_config.max_length
        self.criterion = self._build_criterion()
        layers = generation_config.output_hidden_states or hidden_states_of(draft.config.target_layer_ids)
        self.model_kwargs_overrides = {"output_hidden_states": layers}
        self._requests = [_Request(mirrored(logits_processor or LogitsProcessorList()))]
        self._rowwise = are_rowwise(self._requests[0].processors)
        self._draft_token_ids = draft.draft_token_ids()
        self._end_ids = end_token_ids(generation_config)
        self._position_limits = position_limits(target)
        self._cache = DraftCache(draft.config.num_hidden_layers)
        self._saw_prompt = False

    def _build_criterion(self) -> AdaptiveConfidenceCriteria | None:
        scheduler = scheduler_for(self.options, self.do_sample)
        if scheduler is None:
            return None
        config = self.draft.config
        return AdaptiveConfidenceCriteria(
            scheduler,
            config.num_draft_slots,
            acceptance_prior=config.acceptance_prior,
            learn_times=not self.do_sample,
            may_skip=self.options.confidence_threshold is None and self.options.schedule == "hardware",
        )

    @property
    def needs_curve(self) -> bool:
        """`bool`: Whether measured round times would change what is drafted."""
        return self.criterion is not None and self.criterion.needs_curve

    def use_curve(self, curve: SPSCurve) -> None:
        """Schedule by measured round times; without a call, by those of a typical machine.

        Args:
            curve (`SPSCurve`): Round times of the pair on this machine.
        """
        if self.criterion is not None:
            self.criterion.use_curve(curve)

    def check_hidden_states(self, hidden_states: tuple[torch.Tensor, ...] | None) -> None:
        """Check that the target returned the hidden states the draft reads.

        Args:
            hidden_states (`tuple[torch.Tensor]`, *optional*): The target's, indexed by layer.

        Raises:
            ValueError: If they are missing, or not of shape `(1, tokens, d)`.
        """
        config = self.draft.config
        check_hidden_states(
            hidden_states, config.target_layer_ids, config.hidden_size, self._target_name, kind="DSpark"
        )

    def add_context(
        self, hidden_states: tuple[torch.Tensor, ...], num_tokens: int, model_kwargs: dict[str, Any]
    ) -> None:
        """Take in the target's hidden states of the tokens just committed, the new anchor excluded.

        Args:
            hidden_states (`tuple[torch.Tensor]`): The target's, indexed by layer; each `(1, >= num_tokens, d)`.
            num_tokens (`int`): Leading rows to take: the whole prompt at first, then `num_accepted + 1`.
            model_kwargs (`dict[str, Any]`): The loop's, grown to the anchor: `position_ids`, `attention_mask`.
        """
        context = self._captured(hidden_states, num_tokens)
        num_before = self._cache.lengths[0] + self._requests[0].num_waiting
        positions = context_positions(model_kwargs, num_tokens, num_before, self.draft.device)
        mask = model_kwargs.get("attention_mask")
        if mask is not None and not self._saw_prompt and mask.ndim == 2:  # a left-padded prompt
            keep = mask[0, -num_tokens - 1 : -1].bool().to(context.device)
            context, positions = context[:, keep], torch.cat([positions[:, :-1][:, keep], positions[:, -1:]], dim=1)
        self._saw_prompt = True
        self._requests[0].add(context, positions)

    def _captured(self, hidden_states: tuple[torch.Tensor, ...], num_tokens: int) -> torch.Tensor:
        """The layers that the draft reads, side by side, [1, num_tokens, m * d]."""
        layer_ids, draft = self.draft.config.target_layer_ids, self.draft
        return captured_states(hidden_states, layer_ids, num_tokens, draft.device, draft.dtype)

    def add_packed_context(
        self, hidden_states: tuple[torch.Tensor, ...], spans: Sequence[tuple[int, int, int]], starts: Sequence[int]
    ) -> None:
        """[`add_context`] of several requests, whose tokens lie one after the other.

        Args:
            hidden_states (`tuple[torch.Tensor]`): The target's, indexed by layer; each `(1, tokens, d)`.
            spans (`Sequence[tuple[int, int, int]]`): Requests, and where their tokens to take begin and end.
            starts (`Sequence[int]`): Position of each span's first token in its text.
        """
        packed = self._captured(hidden_states, max(end for _, _, end in spans))
        for (request, first, end), start in zip(spans, starts, strict=True):
            positions = torch.arange(start, start + end - first + 1, device=packed.device)[None]
            self._requests[request].add(packed[:, first:end], positions)

    def add_requests(self, processors: Sequence[LogitsProcessorList]) -> None:
        """Let more requests join, behind the present ones.

        Args:
            processors (`Sequence[LogitsProcessorList]`): The prepared processors of each.
        """
        self._requests += [_Request(mirrored(own)) for own in processors]
        self._cache.add(len(processors))
        if self.criterion is not None:
            self.criterion.add_requests(len(processors))

    def keep_requests(self, requests: Sequence[int]) -> None:
        """Forget all other requests.

        Args:
            requests (`Sequence[int]`): Requests to keep, in their new order.
        """
        self._requests = [self._requests[request] for request in requests]
        self._cache.keep(requests)
        if self.criterion is not None:
            self.criterion.keep_requests(requests)

    def propose(
        self, texts: Sequence[torch.Tensor], limits: Sequence[int] | None = None, others_wait: bool = False
    ) -> list[DraftProposal]:
        """Draft the tokens after each request's anchor and cut them where going on does not pay.

        Args:
            texts (`Sequence[torch.LongTensor]` of length R): Each request's text, `(1, s)`, the anchor last.
            limits (`Sequence[int]`, *optional*):
                Tokens that each text may still grow by; what the call's `max_length` leaves without it.
            others_wait (`bool`, *optional*, defaults to `False`):
                Whether other texts take the places of those that end, so that none of these holds up the call.

        Returns:
            `list[DraftProposal]`: empty ones where the length limit leaves no room for a draft, or where drafting
            does not pay; the context waits then, and is caught up with in one pass.
        """
        if limits is None:
            limits = [self.max_length - text.shape[1] for text in texts]
        tokens_left = None if others_wait else limits
        # The target adds one token itself, so a draft in the last free place could never be kept.
        limits = [max(0, min(self.options.num_assistant_tokens, limit - 1)) for limit in limits]
        limits = [
            drafts_within(self._position_limits, limit, text, request.anchor_position)
            for limit, text, request in zip(limits, texts, self._requests, strict=True)
        ]
        if max(limits) < 1 or (self.criterion is not None and not self.criterion.worth_drafting(tokens_left)):
            return [DraftProposal(text[:, :0], drafted=False) for text in texts]
        hidden = self._parallel_stage([text[:, -1:] for text in texts])[:, : max(limits)]  # [R, k, d]
        token_ids, draft_logits, confidence, kept = self._sequential_stage(hidden, texts, limits)
        lengths = self._cut(token_ids, confidence, kept, tokens_left)
        proposals = []
        for request, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            row, q = slice(request, request + 1), None
            if draft_logits is not None:
                q = self._over_target_vocabulary(draft_logits[row, :length]).to(text.device)
            c = tuple(confidence[request, : kept[request]].tolist()) if confidence is not None else ()
            proposals.append(DraftProposal(token_ids[row, :length].to(text.device), q, c, limits[request] > 0))
        return proposals

    def _parallel_stage(self, anchor_ids: Sequence[torch.Tensor]) -> torch.Tensor:
        """One forward over [anchor, mask, ...] and the context since the last; the predicting slots, [R, slots, d]."""
        config, requests = self.draft.config, self._requests
        anchor_id = torch.cat(list(anchor_ids))
        masks = anchor_id.new_full((len(requests), config.block_size - 1), config.mask_token_id)
        embeds = self.binding.embed(torch.cat([anchor_id, masks], dim=1))
        context = torch.cat([part for request in requests for part in request.context], dim=1)  # [1, C, m * d]
        positions = torch.cat([part for request in requests for part in request.positions], dim=1)
        anchor_position = torch.cat([request.anchor_position for request in requests], dim=1)  # [1, R]
        offsets = torch.arange(config.block_size, device=anchor_position.device)
        block_positions = (anchor_position[:, :, None] + offsets).flatten(1)
        self._cache.begin([request.num_waiting for request in requests], config.block_size)
        for request in requests:
            request.context, request.positions = [], []
        outputs = self.draft(
            noise_embeds=embeds.to(context.device, context.dtype),
            context_hidden_states=context,
            position_ids=torch.cat([positions, block_positions], dim=1),
            cache=self._cache,
        )
        return outputs.last_hidden_state[:, -config.num_draft_slots :]

    def _sequential_stage(
        self, hidden: torch.Tensor, texts: Sequence[torch.Tensor], limits: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, list[int]]:
        """Sample the slots left to right (Eq 4): tokens [R, k], the logits they came from, confidences [R, k].

        The fourth are the limits, lower where a constraint allows nothing that is in a reduced draft vocabulary.
        """
        head, base_logits = self.draft.markov_head, self.draft.base_logits(hidden, self.binding)
        if head is None and not self.do_sample and not self._requests[0].processors:
            token_ids = self._to_target_ids(argmax_token(base_logits))
            return token_ids, None, self._confidence(hidden, None), limits
        state = head.initial_state(hidden[:, 0]) if head is not None else None
        texts = [text.to(hidden.device) for text in texts]
        previous = torch.cat([text[:, -1] for text in texts])
        tokens, rows, embeddings = [], [], []
        for slot in range(hidden.shape[1]):
            row = base_logits[:, slot]
            if head is not None:
                embeddings.append(head.markov_w1(previous))
                transition_bias, state = head(embeddings[-1], hidden[:, slot], state)
                row = row + transition_bias
            row = self._process(texts, row)
            if not self._rowwise:
                row, limits = _without_dead_ends(row, limits, slot)
                if max(limits) <= slot:
                    break
            previous = select_token(row, self.do_sample)
            if row.shape[-1] != self.draft.config.vocab_size:
                previous = self._to_target_ids(previous)
            tokens.append(previous)
            if self.do_sample:
                rows.append(row)
            if not self._rowwise:
                texts = [torch.cat([text, previous[i : i + 1, None]], dim=1) for i, text in enumerate(texts)]
        if not tokens:
            return previous[:, None][:, :0], None, None, limits
        embeddings = torch.stack(embeddings[: len(tokens)], dim=1) if embeddings else None
        confidence = self._confidence(hidden[:, : len(tokens)], embeddings)
        return torch.stack(tokens, dim=1), torch.stack(rows, dim=1) if rows else None, confidence, limits

    def _process(self, texts: Sequence[torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        """Mirrored processors on one slot's logits (R, D); over the draft vocabulary where they allow it."""
        processors = self._requests[0].processors
        if self.do_sample or processors:
            row = row.float()
        if not processors:
            return row
        if self._rowwise:  # the same for every request, and they do not read the text
            return processors(texts[0], row)
        full = self._over_target_vocabulary(row)
        parts = zip(self._requests, texts, full.split(1), strict=True)
        return torch.cat([request.processors(text, part) for request, text, part in parts])

    def _confidence(self, hidden: torch.Tensor, embeddings: torch.Tensor | None) -> torch.Tensor | None:
        if self.draft.confidence_head is None:
            return None
        logits = self.draft.confidence_head(hidden, embeddings).float()
        temperatures = self.draft.config.confidence_temperatures
        if temperatures is not None:  # sequential temperature scaling, by `dspark-hf calibrate`
            logits = logits / logits.new_tensor(temperatures[: logits.shape[-1]])
        return torch.sigmoid(logits)

    def _cut(
        self,
        token_ids: torch.Tensor,
        confidence: torch.Tensor | None,
        limits: Sequence[int],
        tokens_left: Sequence[int] | None,
    ) -> list[int]:
        """How many drafts of each request to send."""
        lengths = list(limits)
        if self.criterion is not None and token_ids.shape[1]:
            if confidence is None:
                confidence = self.criterion.stand_in_confidence(token_ids.shape[1])
            if min(limits) < token_ids.shape[1]:  # slots that cannot be sent must not use up the budget
                slots = torch.arange(token_ids.shape[1], device=confidence.device)
                confidence = confidence * (slots < torch.tensor(limits, device=confidence.device)[:, None])
            chosen = self.criterion.verify_lengths(confidence, tokens_left).tolist()
            lengths = [min(pair) for pair in zip(chosen, limits, strict=True)]
        if self._end_ids:
            rows = zip(token_ids.tolist(), lengths, strict=True)
            lengths = [length_to_end(ids[:length], self._end_ids) for ids, length in rows]
        return lengths

    def _to_target_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return ids if self._draft_token_ids is None else self._draft_token_ids[ids]

    def _over_target_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """[`over_target_vocabulary`] of the pair."""
        return over_target_vocabulary(logits, self._draft_token_ids, self.draft.config.vocab_size)

    def observe(self, records: Sequence[RoundRecord]) -> None:
        """Let the criterion learn from a finished round.

        Args:
            records (`Sequence[RoundRecord]` of length R): What became of each request.
        """
        if self.criterion is not None:
            self.criterion.observe(records)

    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any],
        model_outputs: Any,
        is_first_iteration: bool,
        n_last_matches: int,
        **_: Any,
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """transformers' protocol: the text with drafts appended, and the drafts' logits.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, s)`): Text so far.
            model_kwargs (`dict[str, Any]`): The loop's keyword arguments for the target.
            model_outputs (`ModelOutput`, *optional*): Outputs of the target's last forward; `None` at first.
            is_first_iteration (`bool`): Whether the target has not run yet; nothing is drafted then.
            n_last_matches (`int`): Drafts accepted in the last round.

        Returns:
            `tuple`: ids of shape `(1, s + k)` and logits of shape `(1, k, V)`, or `None` when greedy.
        """
        if is_first_iteration:
            return input_ids, None
        hidden_states = model_outputs.hidden_states
        self.check_hidden_states(hidden_states)
        num_tokens = int(n_last_matches) + 1
        if not self._saw_prompt:
            num_tokens = num_prompt_tokens(hidden_states)
        self.add_context(hidden_states, num_tokens, model_kwargs)
        proposal = self.propose([input_ids])[0]
        logits = proposal.draft_logits if proposal.token_ids.shape[1] else None
        return torch.cat([input_ids, proposal.token_ids], dim=1), logits

    def update_candidate_strategy(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, num_matches: int
    ) -> None:
        """transformers' protocol; the stock loop does not time its rounds, so nothing is learned from it.

        Args:
            input_ids (`torch.LongTensor`): Not read.
            scores (`torch.FloatTensor`): Not read.
            num_matches (`int`): Not read.
        """


def _without_dead_ends(row: torch.Tensor, limits: list[int], slot: int) -> tuple[torch.Tensor, list[int]]:
    """End the blocks of requests for which no token is left, and give their logits a form that can be drawn from."""
    alive = torch.isfinite(row).any(dim=-1)
    if bool(alive.all()):
        return row, limits
    limits = [limit if ok else min(limit, slot) for limit, ok in zip(limits, alive.tolist(), strict=True)]
    return torch.where(alive[:, None], row, torch.zeros_like(row)), limits
