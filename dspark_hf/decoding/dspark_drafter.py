# SPDX-License-Identifier: Apache-2.0
"""Drafts with a DSpark draft: one parallel pass, the sequential chain, and the cut.

Legend: R requests, D of them that draft, C new context tokens of these, g block_size, k drafts, m captured layers, d
hidden. The distribution q of a draft is the one after the mirrored processors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from ..common.records import RoundRecord
from ..drafts.draft_cache import DraftCache
from ..drafts.modeling_dspark import DSparkDraftModel
from ..scheduling.choice import DraftPlan
from ..scheduling.curve import SPSCurve
from .base_drafter import BaseDrafter, histories_of
from .criterion import criterion_for, resolve_options
from .drafter import DraftProposal
from .drawing import DrawnBlocks, warn_not_finite
from .request import Request


class DSparkCandidateGenerator(BaseDrafter):
    """Drafts blocks of tokens for one `generate` call; all of the call's drafting state lives here.

    It follows transformers' `CandidateGenerator` protocol, so that the stock assisted loop can drive it as well as
    ours.

    Args:
        target (`PreTrainedModel`): The model that generates.
        draft (`DSparkDraftModel`): Its draft.
        generation_config (`GenerationConfig`): The call's prepared config (`do_sample`, `max_length`, EOS).
        logits_processor (`LogitsProcessorList`, *optional*):
            The call's prepared processors, for transformers' own loop; requests bring their own.

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
        super().__init__(target, draft, generation_config, logits_processor)
        self.options = resolve_options(draft.config, draft.generation_config, generation_config)
        self.policy = self.criterion = criterion_for(self.options, draft.config, self.do_sample)
        self.num_drafts = self.options.num_assistant_tokens
        self._cache = DraftCache(draft.config.num_hidden_layers, num_requests=0)

    def _num_cached(self) -> int:
        return self._cache.lengths[0]

    @property
    def needs_curve(self) -> bool:
        """`bool`: Whether measured round times would change what is drafted."""
        return self.criterion.needs_curve

    def use_curve(self, curve: SPSCurve) -> None:
        """Schedule by measured round times; without a call, by those of a typical machine.

        Args:
            curve (`SPSCurve`): Round times of the pair on this machine.
        """
        self.criterion.use_curve(curve)

    def add_requests(self, requests: Sequence[Request]) -> None:
        """Take in requests after the present ones.

        Args:
            requests (`Sequence[Request]`): Requests that begin.
        """
        self._cache.add(len(requests))
        for request in requests:
            request.drafting.history = self.criterion.new_history()

    def keep_requests(self, requests: Sequence[int]) -> None:
        """Forget all other requests.

        Args:
            requests (`Sequence[int]`): Places of the requests to keep, in their new order.
        """
        self._cache.keep(requests)

    def _blocks(
        self,
        requests: Sequence[Request],
        rows: Sequence[int],
        slots: Sequence[int],
        plan: DraftPlan,
        tokens_left: Sequence[int] | None,
    ) -> list[DraftProposal]:
        """Draft blocks in one pass and cut them, see [`BaseDrafter._blocks`]."""
        drafting, slots = [requests[row] for row in rows], [slots[row] for row in rows]
        left = [tokens_left[row] for row in rows] if tokens_left is not None else None
        hidden = self._parallel_stage(drafting, rows)[:, : max(slots)]  # [D, k, d]
        drawn, confidence = self._sequential_stage(drafting, hidden, slots)
        recorded, confidence = self._recorded(drawn, confidence)
        lengths = self._until_end(drawn, self._cut(drafting, drawn, confidence, hidden.shape[1], plan, left))
        no_confidence = [not length and own[:1] == (0.0,) for own, length in zip(recorded, lengths, strict=True)]
        self._note_failures(drafting, drawn, slots, no_confidence)
        return [
            self._proposal(request.input_ids, drawn, place, lengths[place], recorded[place])
            for place, request in enumerate(drafting)
        ]

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

    def _parallel_stage(self, requests: Sequence[Request], rows: Sequence[int]) -> torch.Tensor:
        """One forward over [anchor, mask, ...] and the context since the last; the predicting slots, [D, slots, d]."""
        config, states = self.draft.config, [request.drafting for request in requests]
        anchor_id = torch.cat([request.input_ids[:, -1:] for request in requests])
        masks = anchor_id.new_full((len(requests), config.block_size - 1), config.mask_token_id)
        embeds = self.binding.embed(torch.cat([anchor_id, masks], dim=1))
        context = torch.cat([part for state in states for part in state.context], dim=1)  # [1, C, m * d]
        positions = torch.cat([part for state in states for part in state.positions], dim=1)
        anchors = [state.anchor_position for state in states if state.anchor_position is not None]
        anchor_position = torch.cat(anchors, dim=1)  # [1, R]
        offsets = torch.arange(config.block_size, device=anchor_position.device)
        block_positions = (anchor_position[:, :, None] + offsets).flatten(1)
        self._cache.begin([state.num_waiting for state in states], config.block_size, rows)
        for state in states:
            state.context, state.positions = [], []
        outputs = self.draft(
            noise_embeds=embeds.to(context.device, context.dtype),
            context_hidden_states=context,
            position_ids=torch.cat([positions, block_positions], dim=1),
            cache=self._cache,
        )
        return outputs.last_hidden_state[:, -config.num_draft_slots :]

    def _sequential_stage(
        self, requests: Sequence[Request], hidden: torch.Tensor, slots: Sequence[int]
    ) -> tuple[DrawnBlocks, torch.Tensor | None]:
        """Sample the slots left to right (Eq 4); with them their confidences [R, k]."""
        head, base_logits = self.draft.markov_head, self.draft.base_logits(hidden, self.binding)
        texts = [request.input_ids.to(hidden.device) for request in requests]
        drawer = self._drawer(requests, texts, slots)
        if head is None and not self.do_sample and not requests[0].drafting.processors:
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
        previous_tokens = torch.stack(embeddings, dim=1) if embeddings else None
        return drawn, self._confidence(hidden[:, : drawn.token_ids.shape[1]], previous_tokens)

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
        requests: Sequence[Request],
        drawn: DrawnBlocks,
        confidence: torch.Tensor | None,
        num_slots: int,
        plan: DraftPlan,
        tokens_left: Sequence[int] | None,
    ) -> list[int]:
        """Choose how many drafts of each request to send."""
        lengths, histories = drawn.lengths, histories_of(requests)
        if max(lengths):
            if confidence is None:
                confidence = torch.tensor([own.blocks.conditional_acceptance[:num_slots] for own in histories])
            # As wide as without dead ends, which depend on the drafts before them: how many slots there are must not
            # tell the scheduler of a slot what its draft leads to.
            confidence = torch.nn.functional.pad(confidence, (0, num_slots - confidence.shape[1]))
            if min(lengths) < num_slots:  # slots that cannot be sent must not consume the budget
                slots = torch.arange(num_slots, device=confidence.device)
                is_kept = slots < torch.tensor(lengths, device=confidence.device)[:, None]
                confidence = confidence.masked_fill(~is_kept, 0.0)
            chosen = self.criterion.verify_lengths(histories, confidence, tokens_left, plan).tolist()
            lengths = [min(pair) for pair in zip(chosen, lengths, strict=True)]
        return lengths

    def observe(self, requests: Sequence[Request], records: Sequence[RoundRecord]) -> None:
        """Let the criterion learn from a finished round.

        Args:
            requests (`Sequence[Request]` of length R): The requests of the round.
            records (`Sequence[RoundRecord]` of length R): The round of each.
        """
        self.criterion.observe(histories_of(requests), records)
