# SPDX-License-Identifier: Apache-2.0
"""Drafts with a DSpark draft: one parallel pass, the sequential chain, and the cut.

Legend: R requests, C new context tokens of all of them, g block_size, k drafts, m captured layers, d hidden. The
distribution q of a draft is the one after the mirrored processors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from ..common.records import RoundRecord
from ..drafts.draft_cache import DraftCache
from ..drafts.modeling_dspark import DSparkDraftModel
from ..scheduling.acceptance import AcceptanceHistory
from ..scheduling.curve import SPSCurve
from .base_drafter import BaseDrafter, DraftingState
from .criterion import criterion_for, resolve_options
from .drafter import DraftProposal
from .drawing import DrawnBlocks, warn_not_finite


class DSparkCandidateGenerator(BaseDrafter):
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

    kind = "DSpark"

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DSparkDraftModel,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList | None = None,
    ):
        super().__init__(target, draft, generation_config)
        self.options = resolve_options(draft.config, draft.generation_config, generation_config)
        self.criterion = criterion_for(self.options, draft.config, self.do_sample)
        self._requests = [self._new_state(logits_processor)]
        self._cache = DraftCache(draft.config.num_hidden_layers)

    def _new_state(self, processors: LogitsProcessorList | None) -> DraftingState:
        state = super()._new_state(processors)
        state.history = self.criterion.new_history() if self.criterion is not None else None
        return state

    def _num_cached(self) -> int:
        return self._cache.lengths[0]

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

    def add_requests(self, processors: Sequence[LogitsProcessorList]) -> None:
        """Add requests after the present ones.

        Args:
            processors (`Sequence[LogitsProcessorList]`): The prepared processors of each.
        """
        self._requests += [self._new_state(own) for own in processors]
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
        tokens_left = self._tokens_left(texts, limits)
        slots = self._slots(texts, tokens_left, self.options.num_assistant_tokens)
        if others_wait:
            tokens_left = None
        if max(slots) < 1 or not self._should_draft(tokens_left):
            return [DraftProposal(text[:, :0], drafted=False) for text in texts]
        hidden = self._parallel_stage([text[:, -1:] for text in texts])[:, : max(slots)]  # [R, k, d]
        drawn, confidence = self._sequential_stage(hidden, texts, slots)
        rows, confidence = self._recorded(drawn, confidence)
        lengths = self._until_end(drawn, self._cut(drawn, confidence, hidden.shape[1], tokens_left))
        no_confidence = [not length and row[:1] == (0.0,) for row, length in zip(rows, lengths, strict=True)]
        self._note_failures(drawn, slots, no_confidence)
        return [
            self._proposal(text, drawn, row, lengths[row], rows[row], drafted=slots[row] > 0)
            for row, text in enumerate(texts)
        ]

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
        self, hidden: torch.Tensor, texts: Sequence[torch.Tensor], slots: Sequence[int]
    ) -> tuple[DrawnBlocks, torch.Tensor | None]:
        """Sample the slots left to right (Eq 4); with them their confidences [R, k]."""
        head, base_logits = self.draft.markov_head, self.draft.base_logits(hidden, self.binding)
        texts = [text.to(hidden.device) for text in texts]
        drawer = self._drawer(texts, slots)
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
        return lengths

    def observe(self, records: Sequence[RoundRecord]) -> None:
        """Let the criterion learn from a finished round.

        Args:
            records (`Sequence[RoundRecord]` of length R): The round of each request.
        """
        if self.criterion is not None:
            self.criterion.observe(self._histories, records)
