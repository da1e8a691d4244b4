# SPDX-License-Identifier: Apache-2.0
"""Drafts with an Eagle3 draft: one pass over the committed tokens, then one per draft token.

Legend: c context tokens, k drafts, m captured layers, d hidden, V target vocabulary, D draft vocabulary (= V unless
reduced). q is the draft's distribution after the mirrored processors. One request at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel

from ..common.records import RoundRecord
from ..drafts.configuration_eagle3 import Eagle3Config
from ..drafts.modeling_eagle3 import Eagle3DraftModel
from ..scheduling.choice import DraftPlan
from ..scheduling.curve import SPSCurve
from ..scheduling.policy import CopyOptions, DraftingPolicy
from ..scheduling.rules import FixedScheduler
from .base_drafter import BaseDrafter, histories_of
from .criterion import resolve_copies
from .drafter import CommittedContext, DraftProposal
from .drafter_inputs import chosen_knob
from .drawing import DrawnBlocks
from .request import Request


def resolve_eagle3(
    config: Eagle3Config, draft_generation_config: GenerationConfig, call_config: GenerationConfig | None = None
) -> tuple[int, CopyOptions | None]:
    """Drafts per block, at least 1, and how drafts are copied: the call's own values, else those of the draft's
    `generation_config`, else `ttt_length` and by the expected tokens per second.

    Values that transformers fills into every call are treated as not set by the user.
    """

    def chosen(name: str) -> Any:
        return chosen_knob(name, draft_generation_config, call_config)

    threshold = chosen("assistant_confidence_threshold")
    if threshold:
        raise ValueError(
            "`assistant_confidence_threshold` needs a confidence head, which Eagle3 drafts do not have; got "
            f"{threshold!r}. Unset it, or limit the drafts with `num_assistant_tokens`."
        )
    schedule = chosen("num_assistant_tokens_schedule")
    if schedule not in (None, "constant"):
        raise ValueError(
            f"`num_assistant_tokens_schedule` must be 'constant' with an Eagle3 draft, got {schedule!r}: there are no "
            "confidences to schedule by. Unset it, or set `num_assistant_tokens`."
        )
    copies = resolve_copies(schedule != "constant", None, draft_generation_config, call_config)
    num_drafts = chosen("num_assistant_tokens")
    if num_drafts is None:
        return config.ttt_length, copies
    if type(num_drafts) is not int or num_drafts < 1:
        raise ValueError(
            f"`num_assistant_tokens` must be an integer >= 1, got {num_drafts!r}. The draft was trained to make "
            f"{config.ttt_length}."
        )
    return num_drafts, copies


def check_single_row(num_rows: int, is_queued: bool = False) -> None:
    """Reject a batch; called before anything is generated."""
    if num_rows != 1 or is_queued:
        got = "rows that wait" if num_rows == 1 else f"{num_rows} rows (a batch, or `num_return_sequences`)"
        raise NotImplementedError(
            f"Eagle3 drafts one row at a time, got {got}. Call `generate` once per row, or use a DSpark draft."
        )


class Eagle3CandidateGenerator(BaseDrafter):
    """Drafts tokens one by one for one `generate` call; all of the call's drafting state lives here."""

    kind = "Eagle3"

    def __init__(
        self,
        target: PreTrainedModel,
        draft: Eagle3DraftModel,
        generation_config: GenerationConfig,  # the call's prepared config (`do_sample`, `max_length`, EOS)
        logits_processor: LogitsProcessorList | None = None,
    ):
        super().__init__(target, draft, generation_config, logits_processor)
        self.num_drafts, copies = resolve_eagle3(draft.config, draft.generation_config, generation_config)
        every_draft, learns = FixedScheduler(self.num_drafts), not self.do_sample
        self.policy = DraftingPolicy(every_draft, self.num_drafts, learn_times=learns, copies=copies)
        self._num_requests = 0
        self._cache = DynamicCache()
        self._is_text = torch.zeros(0, dtype=torch.bool)  # [c], of all tokens that wait: False for padding

    def _num_cached(self) -> int:
        return self._cache.get_seq_length()

    @property
    def needs_curve(self) -> bool:
        """Measured round times never change what is drafted."""
        return False

    def use_curve(self, curve: SPSCurve) -> None:
        """No-op: blocks are not scheduled."""

    def observe(self, requests: Sequence[Request], records: Sequence[RoundRecord]) -> None:
        """Learn how much of the blocks and of the copies survives, to choose between them."""
        self.policy.observe(histories_of(requests), records)

    def add_requests(self, requests: Sequence[Request]) -> None:
        """Take in the only request, and reject a second one."""
        self._num_requests += len(requests)
        check_single_row(self._num_requests)
        for request in requests:
            request.drafting.history = self.policy.new_history()

    def keep_requests(self, requests: Sequence[int]) -> None:
        """No-op: the one request ends with the call."""

    def read(self, requests: Sequence[Request], context: CommittedContext) -> None:
        """Read the target's hidden states of the tokens just committed, the new anchor excluded."""
        super().read(requests, context)
        (span,) = context.spans
        is_text = span.keep.cpu() if span.keep is not None else torch.ones(span.positions.shape[1] - 1).bool()
        self._is_text = torch.cat([self._is_text, is_text])

    def _blocks(
        self,
        requests: Sequence[Request],  # [1]
        rows: Sequence[int],  # noqa: ARG002
        slots: Sequence[int],
        plan: DraftPlan,  # noqa: ARG002
        tokens_left: Sequence[int] | None,  # noqa: ARG002
    ) -> list[DraftProposal]:  # [1]
        """Draft the tokens after the anchor, all of them, see [`BaseDrafter._blocks`]."""
        (request,) = requests
        hidden, position = self._read_context(request)
        committed = self._cache.get_seq_length()
        drawn = self._draft_chain(request, hidden, position, slots)
        self._cache.crop(committed - self._cache.get_seq_length())  # drafted tokens get the target's states
        self._note_failures(requests, drawn, slots, has_failed=[False])
        (length,) = self._until_end(drawn, drawn.lengths)
        return [self._proposal(request.input_ids, drawn, 0, length)]

    def _read_context(self, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass over all context since the last; the newest output and its position, [1, 1, d] and [1, 1]."""
        state = request.drafting
        # Each state goes with the token after it, the last with the anchor. A prompt of embeddings has no ids.
        next_ids = request.input_ids[:, -self._is_text.shape[0] :]
        next_ids = next_ids[:, self._is_text[-next_ids.shape[1] :]]
        states, positions = (
            torch.cat(parts, dim=1)[:, -next_ids.shape[1] :] for parts in (state.context, state.positions)
        )
        state.context, state.positions, self._is_text = [], [], self._is_text[:0]
        outputs = self._step(next_ids, self.draft.project(states), positions)
        return outputs[:, -1:], positions[:, -1:]

    def _step(self, ids: torch.Tensor, hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The draft over some tokens and the states before them, [1, q, d]."""
        embeds = self.binding.embed(ids).to(hidden_states.device, hidden_states.dtype)
        return self.draft(embeds, hidden_states, positions, cache=self._cache).last_hidden_state

    def _draft_chain(
        self, request: Request, hidden: torch.Tensor, position: torch.Tensor, slots: Sequence[int]
    ) -> DrawnBlocks:
        """Draw the tokens, each from the output of the step before."""
        drawer = self._drawer([request], [request.input_ids.to(hidden.device)], slots)
        for slot in range(slots[0]):
            token_id = drawer.draw(self.draft.draft_logits(hidden[:, -1], self.binding))
            if slot + 1 == slots[0] or not drawer.has_open_blocks:
                break
            hidden = self._step(token_id[:, None], hidden, position + slot + 1)
        return drawer.finish()
