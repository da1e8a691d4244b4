# SPDX-License-Identifier: Apache-2.0
"""What drafters of every kind share: context, the way from drawn blocks to proposals, transformers' own protocol.

Legend: R requests, c context tokens of one, k drafts, m captured layers, d hidden, V target vocabulary, D draft
vocabulary (= V unless reduced).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import CandidateGenerator

from .._compat import hidden_states_of
from ..drafts.modeling_dspark import DSparkDraftModel
from ..drafts.modeling_eagle3 import Eagle3DraftModel
from ..drafts.position_limits import position_limits
from ..scheduling.choice import DraftPlan
from ..scheduling.policy import DraftingPolicy
from ..scheduling.request_history import RequestHistory
from .drafter import CommittedContext, DraftProposal
from .drafter_inputs import (
    context_of_one,
    drafts_within,
    end_token_ids,
    length_to_end,
    num_prompt_tokens,
    over_target_vocabulary,
)
from .drawing import BlockDrawer, DrawnBlocks, warn_not_finite
from .request import Request
from .verification import one_hot_probs


class BaseDrafter(CandidateGenerator):
    """Drafts for one `generate` call, driven by our loop or, through `CandidateGenerator`, by the stock one."""

    requires_model_outputs = True
    kind: str  # of the drafts, for messages
    policy: DraftingPolicy  # what is drafted
    num_drafts: int  # most slots of a block

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DSparkDraftModel | Eagle3DraftModel,
        generation_config: GenerationConfig,  # the call's prepared config (`do_sample`, `max_length`, EOS)
        logits_processor: LogitsProcessorList | None = None,  # the call's, for the stock loop, which has no requests
    ):
        self.draft = draft
        self._target_name = type(target).__name__
        self.binding = draft.bind_target(target)
        self.do_sample = bool(generation_config.do_sample)
        self._generation_config, self._processors = generation_config, logits_processor or LogitsProcessorList()
        self._own_request: Request | None = None
        layers = generation_config.output_hidden_states or hidden_states_of(draft.config.target_layer_ids)
        self.model_kwargs_overrides = {"output_hidden_states": layers}
        self._draft_token_ids = draft.draft_token_ids()
        self._end_ids = end_token_ids(generation_config)
        self._position_limits = position_limits(target)

    def _num_cached(self) -> int:
        """Context tokens of the first request that the draft has read."""
        raise NotImplementedError

    # Context

    def check_hidden_states(self, hidden_states: tuple[torch.Tensor | None, ...]) -> None:
        """Reject a target that does not return the hidden states the draft reads."""
        layer_ids, width, target = self.draft.config.target_layer_ids, self.draft.config.hidden_size, self._target_name
        captured = [hidden_states[i + 1] for i in layer_ids if i + 1 < len(hidden_states)]
        found = [states for states in captured if states is not None]
        if len(found) < len(layer_ids):
            returned = f"those of {len(hidden_states) - 1} layers" if hidden_states else "none"
            raise ValueError(
                f"{target} returned no hidden states for `target_layer_ids` {list(layer_ids)}, which {self.kind} "
                f"drafts need, but {returned}. Its forward must honour `output_hidden_states`, one entry for each "
                "layer of its config."
            )
        for states in found:
            if states.ndim != 3 or states.shape[-1] != width:
                raise ValueError(
                    f"{target} returned hidden states of {states.ndim} dimensions and shape {tuple(states.shape)}, "
                    f"and {self.kind} drafts read (1, tokens, {width}). This target cannot have one."
                )

    def read(self, requests: Sequence[Request], context: CommittedContext) -> None:
        """Read the target's hidden states of the tokens just committed, the new anchors excluded."""
        draft, num_tokens = self.draft, max(span.rows.stop for span in context.spans)
        layers = [context.hidden_states[i + 1][:, :num_tokens] for i in draft.config.target_layer_ids]
        captured = torch.cat([states.to(draft.device, draft.dtype) for states in layers], dim=-1)  # [1, N, m * d]
        for span in context.spans:
            state, states = requests[span.request].drafting, captured[:, span.rows]
            positions, state.anchor_position = span.positions.to(draft.device).split([states.shape[1], 1], dim=1)
            if span.keep is not None:
                keep = span.keep.to(draft.device)
                states, positions = states[:, keep], positions[:, keep]
            state.context.append(states)
            state.positions.append(positions)

    def add_context(
        self,
        request: Request,
        hidden_states: tuple[torch.Tensor | None, ...],  # the target's, indexed by layer; each [1, >= num_tokens, d]
        num_tokens: int,  # leading rows to take: the whole prompt at first, then `num_accepted + 1`
        model_kwargs: dict[str, Any],  # the loop's, grown to the anchor: `position_ids`, `attention_mask`
    ) -> None:
        """[`read`] after a pass over the only request, as the stock loop runs it."""
        state = request.drafting
        num_before, is_prompt = self._num_cached() + state.num_waiting, state.anchor_position is None
        self.read([request], context_of_one(hidden_states, num_tokens, model_kwargs, num_before, is_prompt))

    # Proposals

    def add_requests(self, requests: Sequence[Request]) -> None:
        """Take in requests after the present ones."""
        raise NotImplementedError

    def propose(
        self,
        requests: Sequence[Request],  # [R], all of the call that have not ended; each text ends with its anchor
        others_wait: bool = False,  # whether other texts take the places of those that end: none holds up the call
    ) -> list[DraftProposal]:  # [R]
        """Draft after each request's anchor: copy what the text said before, or write a block, as the policy plans it.

        Proposals are empty where the length limit leaves no room for a draft, where neither source pays off, or where
        the draft's numbers are repeatedly not finite; the context waits then, and is caught up with in one pass.
        """
        tokens_left = None if others_wait else [request.num_left for request in requests]
        histories = histories_of(requests)
        lengths = [self._read_text(*pair) for pair in zip(requests, histories, strict=True)]
        limits, slots = self._limits(requests)
        copy_limits = [min(pair) for pair in zip(limits, lengths, strict=True)]
        plan = self.policy.plan(histories, copy_limits, slots, tokens_left)
        rows = [row for row, drafts in enumerate(plan.drafts_block) if drafts]
        blocks = dict(zip(rows, self._blocks(requests, rows, slots, plan, tokens_left) if rows else [], strict=True))
        nothing = [DraftProposal(request.input_ids[:, :0], drafted=False) for request in requests]
        proposals = [blocks.get(row, empty) for row, empty in enumerate(nothing)]
        return self._with_copies(proposals, plan, histories)

    def _blocks(
        self,
        requests: Sequence[Request],  # [R], all of the round
        rows: Sequence[int],  # [D], those that write a block
        slots: Sequence[int],  # [R], drafts that each may make
        plan: DraftPlan,
        tokens_left: Sequence[int] | None,  # [R]
    ) -> list[DraftProposal]:  # [D]
        """Write blocks, cut where further drafts do not pay off."""
        raise NotImplementedError

    def _read_text(self, request: Request, history: RequestHistory) -> int:
        """Let the history read the new tokens; how many tokens may be copied, up to the end of a text."""
        source, options = history.copies, self.policy.copies
        if source is None or options is None:
            return 0
        source.read(request.input_ids[0, source.num_read :].cpu().numpy())
        if not source.match_length:
            return 0
        return length_to_end(source.tokens(options.num_tokens).tolist(), self._end_ids)

    def _limits(self, requests: Sequence[Request]) -> tuple[list[int], list[int]]:
        """Drafts of any kind that the text of each request has room for, and slots that it may draft."""
        copies = self.policy.copies
        most, limits, slots = max(self.num_drafts, copies.num_tokens if copies else 0), [], []
        for request in requests:
            # The target adds one token itself, so a draft at the last free position could never be kept.
            wanted, state = max(0, min(most, request.num_left - 1)), request.drafting
            limits.append(drafts_within(self._position_limits, wanted, request.input_ids, state.anchor_position))
            slots.append(min(limits[-1], self.num_drafts) if limits[-1] and state.pause.passes() else 0)
        return limits, slots

    def _with_copies(
        self,
        proposals: Sequence[DraftProposal],
        plan: DraftPlan,
        histories: Sequence[RequestHistory],
    ) -> list[DraftProposal]:
        """Copy where that is planned, and beyond blocks that agree with a copy."""
        if not any(map(len, plan.copy_acceptance)):
            return list(proposals)
        blocks = [proposal.token_ids[0].tolist() for proposal in proposals]
        joined = []
        copied = self.policy.copied_tokens(histories, plan, blocks)
        for proposal, tokens in zip(proposals, copied, strict=True):
            if tokens:
                ids = torch.tensor([tokens], device=proposal.token_ids.device)
                token_ids = torch.cat([proposal.token_ids, ids], dim=1)
                proposal = dataclasses.replace(proposal, token_ids=token_ids, num_copied=len(tokens))
            joined.append(proposal)
        return joined

    def _drawer(self, requests: Sequence[Request], texts: Sequence[torch.Tensor], slots: Sequence[int]) -> BlockDrawer:
        processors, vocab_size = [request.drafting.processors for request in requests], self.draft.config.vocab_size
        return BlockDrawer(texts, processors, slots, self.do_sample, vocab_size, self._draft_token_ids)

    def _until_end(self, drawn: DrawnBlocks, lengths: Sequence[int]) -> list[int]:
        """Blocks end with the text."""
        if not self._end_ids:
            return list(lengths)
        blocks = zip(drawn.token_ids.tolist(), lengths, strict=True)
        return [length_to_end(ids[:length], self._end_ids) for ids, length in blocks]

    def _note_failures(
        self, requests: Sequence[Request], drawn: DrawnBlocks, slots: Sequence[int], has_failed: Sequence[bool]
    ) -> None:
        """Pause requests whose logits are not finite from the first slot on, or which have failed otherwise."""
        if any(drawn.overflowed):
            warn_not_finite(self.draft, "logits")
        blocks = zip(requests, slots, drawn.overflowed, drawn.lengths, has_failed, strict=True)
        for request, num_slots, overflowed, length, failed in blocks:
            if num_slots:
                request.drafting.pause.observe(failed or (overflowed and length == 0))

    def _proposal(
        self, text: torch.Tensor, drawn: DrawnBlocks, row: int, length: int, confidence: tuple[float, ...] = ()
    ) -> DraftProposal:
        """The first drafts of a block, on the device of its text, [1, s]."""
        block, q = (slice(row, row + 1), slice(length)), None
        if drawn.draft_logits is not None:
            vocab_size = self.draft.config.vocab_size
            q = over_target_vocabulary(drawn.draft_logits[block], self._draft_token_ids, vocab_size).to(text.device)
        return DraftProposal(drawn.token_ids[block].to(text.device), q, confidence)

    # transformers' protocol

    def get_candidates(
        self,
        input_ids: torch.Tensor,  # [1, s]
        model_kwargs: dict[str, Any],
        model_outputs: Any,  # outputs of the target's last forward; None at first
        is_first_iteration: bool,
        n_last_matches: int,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # ids [1, s + k] and logits [1, k, V], or None when greedy
        """transformers' protocol: the text with drafts appended, and the drafts' logits."""
        if is_first_iteration:
            return input_ids, None
        hidden_states = model_outputs.hidden_states or ()
        self.check_hidden_states(hidden_states)
        request = self._stock_request(input_ids)
        is_prompt = request.drafting.anchor_position is None
        num_tokens = num_prompt_tokens(hidden_states) if is_prompt else int(n_last_matches) + 1
        self.add_context(request, hidden_states, num_tokens, model_kwargs)
        (proposal,) = self.propose([request])
        return torch.cat([input_ids, proposal.token_ids], dim=1), self._stock_logits(proposal)

    def _stock_logits(self, proposal: DraftProposal) -> torch.Tensor | None:  # [1, k, V]
        """Logits as the stock loop expects them; without any it draws from p and compares, as is right for copies."""
        if proposal.draft_logits is None or proposal.num_copied == proposal.token_ids.shape[1]:
            return None
        if not proposal.num_copied:
            return proposal.draft_logits
        copied = proposal.token_ids[:, -proposal.num_copied :]
        like = proposal.draft_logits[:, :1].expand(-1, proposal.num_copied, -1)
        return torch.cat([proposal.draft_logits, one_hot_probs(copied, like).log()], dim=1)

    def _stock_request(self, input_ids: torch.Tensor) -> Request:
        """The one text of the stock loop, as a request."""
        if self._own_request is None:
            config, criteria = self._generation_config, StoppingCriteriaList()
            self._own_request = Request(0, input_ids, self._processors, criteria, config.max_length, config)
            self.add_requests([self._own_request])
        self._own_request.input_ids = input_ids
        return self._own_request

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """transformers' protocol; the stock loop does not time its rounds, so nothing is learned from it."""


def histories_of(requests: Sequence[Request]) -> list[RequestHistory]:
    """The histories of requests that the drafter has taken in."""
    histories = [request.drafting.history for request in requests]
    known = [history for history in histories if history is not None]
    if len(known) < len(histories):
        raise RuntimeError("The drafter was not given every request. Call `add_requests` first.")
    return known
