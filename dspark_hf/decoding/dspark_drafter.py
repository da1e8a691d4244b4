# SPDX-License-Identifier: Apache-2.0
"""Drafts with a DSpark draft: read context, one parallel pass, the sequential chain, and the cut.

Legend: R requests, c context tokens of one and C of all of them, g block_size, k drafts, m captured layers, d hidden,
V target vocabulary, D draft vocabulary (= V unless reduced). q is the draft's distribution after the mirrored
processors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import CandidateGenerator

from .._compat import hidden_states_of
from ..common.records import RoundRecord
from ..drafts.draft_cache import DraftCache
from ..drafts.modeling_dspark import DSparkDraftModel
from ..drafts.position_limits import position_limits
from ..scheduling.acceptance import AcceptanceHistory
from ..scheduling.curve import SPSCurve
from ..scheduling.gate import DraftingPause
from .criterion import criterion_for, resolve_options
from .drafter import CommittedContext, DraftProposal
from .drafter_inputs import (
    captured_states,
    check_hidden_states,
    context_of_one,
    drafts_within,
    end_token_ids,
    length_to_end,
    num_prompt_tokens,
    over_target_vocabulary,
)
from .drawing import BlockDrawer, DrawnBlocks, warn_not_finite
from .processors import mirrored


@dataclass
class _Request:
    """Drafting state of one request.

    `context` (1, c, m * d) and `positions` (1, c) are those of committed tokens the draft has not read yet, in parts;
    `anchor_position` is (1, 1).
    """

    processors: LogitsProcessorList
    history: AcceptanceHistory | None = None  # None where every draft is sent
    pause: DraftingPause = field(default_factory=DraftingPause)
    context: list[torch.Tensor] = field(default_factory=list)
    positions: list[torch.Tensor] = field(default_factory=list)
    anchor_position: torch.Tensor | None = None

    def add(self, context: torch.Tensor, positions: torch.Tensor) -> None:
        """Append context and its positions, the last of which is the anchor's."""
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
        self.criterion = criterion_for(self.options, draft.config, self.do_sample)
        layers = generation_config.output_hidden_states or hidden_states_of(draft.config.target_layer_ids)
        self.model_kwargs_overrides = {"output_hidden_states": layers}
        self._requests = [self._new_request(logits_processor or LogitsProcessorList())]
        self._draft_token_ids = draft.draft_token_ids()
        self._end_ids = end_token_ids(generation_config)
        self._position_limits = position_limits(target)
        self._cache = DraftCache(draft.config.num_hidden_layers)

    def _new_request(self, processors: LogitsProcessorList) -> _Request:
        history = self.criterion.new_history() if self.criterion is not None else None
        return _Request(mirrored(processors), history)

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

    def read(self, context: CommittedContext) -> None:
        """Read the target's hidden states of the tokens just committed, the new anchors excluded.

        Args:
            context (`CommittedContext`): Of the last pass of the target.
        """
        draft, num_tokens = self.draft, max(span.rows.stop for span in context.spans)
        layer_ids = draft.config.target_layer_ids
        captured = captured_states(context.hidden_states, layer_ids, num_tokens, draft.device, draft.dtype)
        for span in context.spans:
            states, positions = captured[:, span.rows], span.positions.to(draft.device)
            if span.keep is not None:
                keep = span.keep.to(draft.device)
                states, positions = states[:, keep], torch.cat([positions[:, :-1][:, keep], positions[:, -1:]], dim=1)
            self._requests[span.request].add(states, positions)

    def add_context(
        self, hidden_states: tuple[torch.Tensor, ...], num_tokens: int, model_kwargs: dict[str, Any]
    ) -> None:
        """[`read`] after a pass over one request, as the stock loop and tools run it.

        Args:
            hidden_states (`tuple[torch.Tensor]`): The target's, indexed by layer; each `(1, >= num_tokens, d)`.
            num_tokens (`int`): Leading rows to take: the whole prompt at first, then `num_accepted + 1`.
            model_kwargs (`dict[str, Any]`): The loop's, grown to the anchor: `position_ids`, `attention_mask`.
        """
        request = self._requests[0]
        num_before, is_prompt = self._cache.lengths[0] + request.num_waiting, request.anchor_position is None
        self.read(context_of_one(hidden_states, num_tokens, model_kwargs, num_before, is_prompt))

    def add_requests(self, processors: Sequence[LogitsProcessorList]) -> None:
        """Add requests after the present ones.

        Args:
            processors (`Sequence[LogitsProcessorList]`): The prepared processors of each.
        """
        self._requests += [self._new_request(own) for own in processors]
        self._cache.add(len(processors))

    def keep_requests(self, requests: Sequence[int]) -> None:
        """Forget all other requests.

        Args:
            requests (`Sequence[int]`): Requests to keep, in their new order.
        """
        self._requests = [self._requests[request] for request in requests]
        self._cache.keep(requests)

    def propose(
        self, texts: Sequence[torch.Tensor], limits: Sequence[int] | None = None, others_wait: bool = False
    ) -> list[DraftProposal]:
        """Draft the tokens after each request's anchor and cut them where further drafts do not pay off.

        Args:
            texts (`Sequence[torch.LongTensor]` of length R): Each request's text, `(1, s)`, the anchor last.
            limits (`Sequence[int]`, *optional*):
                Tokens that each text may still grow by; what the call's `max_length` leaves without it.
            others_wait (`bool`, *optional*, defaults to `False`):
                Whether other texts take the places of those that end, so that none of these holds up the call.

        Returns:
            `list[DraftProposal]`: empty ones where the length limit leaves no room for a draft, where drafting does
            not pay off, or where the draft's numbers are repeatedly not finite; the context waits then, and is
            caught up with in one pass.
        """
        if limits is None:
            limits = [self.max_length - text.shape[1] for text in texts]
        tokens_left = None if others_wait else limits
        # The target adds one token itself, so a draft at the last free position could never be kept.
        limits = [max(0, min(self.options.num_assistant_tokens, limit - 1)) for limit in limits]
        limits = [
            drafts_within(self._position_limits, limit, text, request.anchor_position)
            for limit, text, request in zip(limits, texts, self._requests, strict=True)
        ]
        pairs = zip(self._requests, limits, strict=True)
        limits = [limit if limit and request.pause.passes() else 0 for request, limit in pairs]
        if max(limits) < 1 or not self._should_draft(tokens_left):
            return [DraftProposal(text[:, :0], drafted=False) for text in texts]
        hidden = self._parallel_stage([text[:, -1:] for text in texts])[:, : max(limits)]  # [R, k, d]
        drawn, confidence = self._sequential_stage(hidden, texts, limits)
        rows, confidence = self._recorded(drawn, confidence)
        lengths = self._cut(drawn, confidence, hidden.shape[1], tokens_left)
        self._note_failures(drawn, rows, lengths, limits)
        proposals = []
        for request, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            row, q = slice(request, request + 1), None
            if drawn.draft_logits is not None:
                q = self._over_target_vocabulary(drawn.draft_logits[row, :length]).to(text.device)
            token_ids, is_drafted = drawn.token_ids[row, :length].to(text.device), limits[request] > 0
            proposals.append(DraftProposal(token_ids, q, rows[request], is_drafted))
        return proposals

    def _should_draft(self, tokens_left: Sequence[int] | None) -> bool:
        return self.criterion is None or self.criterion.should_draft(self._histories, tokens_left)

    @property
    def _histories(self) -> list[AcceptanceHistory]:
        return [request.history for request in self._requests]

    def _recorded(
        self, drawn: DrawnBlocks, confidence: torch.Tensor | None
    ) -> tuple[list[tuple[float, ...]], torch.Tensor | None]:
        """Confidences of the slots that may be sent, for the record, and all of them; NaN is 0: stop here."""
        if confidence is None:
            return [()] * len(drawn.lengths), None
        rows = [row[:length] for row, length in zip(confidence.tolist(), drawn.lengths, strict=True)]
        if any(math.isnan(c) for row in rows for c in row):
            warn_not_finite(self.draft, "confidences")
        confidence = torch.nan_to_num(confidence, nan=0.0)
        return [tuple(0.0 if math.isnan(c) else c for c in row) for row in rows], confidence

    def _note_failures(
        self, drawn: DrawnBlocks, rows: list[tuple[float, ...]], lengths: list[int], limits: list[int]
    ) -> None:
        """Pause requests whose logits are not finite from the first slot on."""
        if any(drawn.overflowed):
            warn_not_finite(self.draft, "logits")
        for request, limit in enumerate(limits):
            if limit:
                no_logits = drawn.overflowed[request] and drawn.lengths[request] == 0
                no_confidence = lengths[request] == 0 and rows[request][:1] == (0.0,)
                self._requests[request].pause.observe(no_logits or no_confidence)

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
    ) -> tuple[DrawnBlocks, torch.Tensor | None]:
        """Sample the slots left to right (Eq 4); with them their confidences [R, k]."""
        head, base_logits = self.draft.markov_head, self.draft.base_logits(hidden, self.binding)
        texts = [text.to(hidden.device) for text in texts]
        processors, vocab_size = [request.processors for request in self._requests], self.draft.config.vocab_size
        drawer = BlockDrawer(texts, processors, limits, self.do_sample, vocab_size, self._draft_token_ids)
        if head is None and not self.do_sample and not self._requests[0].processors:
            drawer.draw_all(base_logits)
            return drawer.finish(), self._confidence(hidden, None)
        state = head.initial_state(hidden[:, 0]) if head is not None else None
        previous, embeddings = torch.cat([text[:, -1] for text in texts]), []
        for slot in range(hidden.shape[1]):
            row = base_logits[:, slot]
            if head is not None:
                embeddings.append(head.markov_w1(previous))
                transition_bias, state = head(embeddings[-1], hidden[:, slot], state)
                row = row + transition_bias
            previous = drawer.draw(row)
            if not drawer.has_open_blocks:
                break
        drawn = drawer.finish()
        embeddings = torch.stack(embeddings, dim=1) if embeddings else None
        return drawn, self._confidence(hidden[:, : drawn.token_ids.shape[1]], embeddings)

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
        drawn: DrawnBlocks,
        confidence: torch.Tensor | None,
        num_slots: int,
        tokens_left: Sequence[int] | None,
    ) -> list[int]:
        """Choose how many drafts of each request to send."""
        lengths = drawn.lengths
        if self.criterion is not None and max(lengths):
            if confidence is None:
                past = [request.history.conditional_acceptance[:num_slots] for request in self._requests]
                confidence = torch.tensor(past)
            # As wide as without dead ends, which depend on the drafts before them: how many slots there are must not
            # tell the scheduler of a slot what its draft leads to.
            confidence = torch.nn.functional.pad(confidence, (0, num_slots - confidence.shape[1]))
            if min(lengths) < num_slots:  # slots that cannot be sent must not consume the budget
                slots = torch.arange(num_slots, device=confidence.device)
                is_kept = slots < torch.tensor(lengths, device=confidence.device)[:, None]
                confidence = confidence.masked_fill(~is_kept, 0.0)
            chosen = self.criterion.verify_lengths(self._histories, confidence, tokens_left).tolist()
            lengths = [min(pair) for pair in zip(chosen, lengths, strict=True)]
        if self._end_ids:
            rows = zip(drawn.token_ids.tolist(), lengths, strict=True)
            lengths = [length_to_end(ids[:length], self._end_ids) for ids, length in rows]
        return lengths

    def _over_target_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """[`over_target_vocabulary`] of the pair."""
        return over_target_vocabulary(logits, self._draft_token_ids, self.draft.config.vocab_size)

    def observe(self, records: Sequence[RoundRecord]) -> None:
        """Let the criterion learn from a finished round.

        Args:
            records (`Sequence[RoundRecord]` of length R): The round of each request.
        """
        if self.criterion is not None:
            self.criterion.observe(self._histories, records)

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
        is_prompt = self._requests[0].anchor_position is None
        num_tokens = num_prompt_tokens(hidden_states) if is_prompt else int(n_last_matches) + 1
        self.add_context(hidden_states, num_tokens, model_kwargs)
        (proposal,) = self.propose([input_ids])
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
