# SPDX-License-Identifier: Apache-2.0
"""Drafts with an Eagle3 draft: one pass over the committed tokens, then one per draft token.

Legend: c context tokens, k drafts, m captured layers, d hidden, V target vocabulary, D draft vocabulary (= V unless
reduced). q is the draft's distribution after the mirrored processors. One request at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import CandidateGenerator

from .._compat import hidden_states_of
from ..common.records import RoundRecord
from ..drafts.configuration_eagle3 import Eagle3Config
from ..drafts.modeling_eagle3 import Eagle3DraftModel
from ..drafts.position_limits import position_limits
from ..scheduling.curve import SPSCurve
from ..scheduling.gate import DraftingPause
from .drafter import CommittedContext, DraftProposal
from .drafter_inputs import (
    captured_states,
    check_hidden_states,
    chosen_knob,
    context_of_one,
    drafts_within,
    end_token_ids,
    length_to_end,
    num_prompt_tokens,
    over_target_vocabulary,
)
from .drawing import BlockDrawer, DrawnBlocks, warn_not_finite
from .processors import mirrored


def resolve_num_drafts(
    config: Eagle3Config, draft_generation_config: GenerationConfig, call_config: GenerationConfig | None = None
) -> int:  # at least 1
    """Drafts per round: the call's own value, else that of the draft's `generation_config`, else `ttt_length`.

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
    num_drafts = chosen("num_assistant_tokens")
    if num_drafts is None:
        return config.ttt_length
    if type(num_drafts) is not int or num_drafts < 1:
        raise ValueError(
            f"`num_assistant_tokens` must be an integer >= 1, got {num_drafts!r}. The draft was trained to make "
            f"{config.ttt_length}."
        )
    return num_drafts


def check_single_row(num_rows: int, is_queued: bool = False) -> None:
    """Reject a batch; called before anything is generated."""
    if num_rows != 1 or is_queued:
        got = "rows that wait" if num_rows == 1 else f"{num_rows} rows (a batch, or `num_return_sequences`)"
        raise NotImplementedError(
            f"Eagle3 drafts one row at a time, got {got}. Call `generate` once per row, or use a DSpark draft."
        )


@dataclass(frozen=True)
class _Context:
    """Target states of tokens just committed: [1, c, m * d], their positions [1, c], and which are no padding [c]."""

    hidden_states: torch.Tensor
    positions: torch.Tensor
    keep: torch.Tensor


class Eagle3CandidateGenerator(CandidateGenerator):
    """Drafts tokens one by one for one `generate` call; all of the call's drafting state lives here.

    It follows transformers' `CandidateGenerator` protocol, so that the stock assisted loop can drive it as well as
    ours.
    """

    requires_model_outputs = True

    def __init__(
        self,
        target: PreTrainedModel,
        draft: Eagle3DraftModel,
        generation_config: GenerationConfig,  # the call's prepared config (`do_sample`, `max_length`, EOS)
        logits_processor: LogitsProcessorList | None = None,
    ):
        self.draft = draft
        self._target_name = type(target).__name__
        self.binding = draft.bind_target(target)
        self.num_drafts = resolve_num_drafts(draft.config, draft.generation_config, generation_config)
        self.do_sample = bool(generation_config.do_sample)
        self.max_length = generation_config.max_length
        layers = generation_config.output_hidden_states or hidden_states_of(draft.config.target_layer_ids)
        self.model_kwargs_overrides = {"output_hidden_states": layers}
        self._processors = mirrored(logits_processor or LogitsProcessorList())
        self._pause = DraftingPause()
        self._draft_token_ids = draft.draft_token_ids()
        self._end_ids = end_token_ids(generation_config)
        self._position_limits = position_limits(target)
        self._cache = DynamicCache()
        self._context: list[_Context] = []
        self._anchor_position: torch.Tensor | None = None

    @property
    def needs_curve(self) -> bool:
        """Measured round times never change what is drafted."""
        return False

    def use_curve(self, curve: SPSCurve) -> None:
        """No-op: nothing is scheduled."""

    def observe(self, records: Sequence[RoundRecord]) -> None:
        """No-op: nothing is learned from a finished round."""

    def add_requests(self, processors: Sequence[LogitsProcessorList]) -> None:
        """Reject a second request."""
        check_single_row(1 + len(processors))

    def keep_requests(self, requests: Sequence[int]) -> None:
        """No-op: the one request ends with the call."""

    def check_hidden_states(self, hidden_states: tuple[torch.Tensor, ...] | None) -> None:
        """Check that the target returned the hidden states the draft reads."""
        config = self.draft.config
        check_hidden_states(
            hidden_states, config.target_layer_ids, config.hidden_size, self._target_name, kind="Eagle3"
        )

    def read(self, context: CommittedContext) -> None:
        """Read the target's hidden states of the tokens just committed, the new anchor excluded."""
        (span,), draft = context.spans, self.draft
        layer_ids = draft.config.target_layer_ids
        states = captured_states(context.hidden_states, layer_ids, span.rows.stop, draft.device, draft.dtype)
        states, positions = states[:, span.rows], span.positions.to(draft.device)
        keep = torch.ones(states.shape[1], dtype=torch.bool) if span.keep is None else span.keep
        self._anchor_position = positions[:, -1:]
        self._context.append(_Context(states, positions[:, :-1], keep.to(draft.device)))

    def add_context(
        self,
        hidden_states: tuple[torch.Tensor, ...],  # the target's, indexed by layer; each [1, >= num_tokens, d]
        num_tokens: int,  # leading rows to take: the whole prompt at first, then `num_accepted + 1`
        model_kwargs: dict[str, Any],
    ) -> None:
        """[`read`] after a pass over one request, as the stock loop and tools run it."""
        num_before = self._cache.get_seq_length() + sum(context.keep.shape[0] for context in self._context)
        is_prompt = self._anchor_position is None
        self.read(context_of_one(hidden_states, num_tokens, model_kwargs, num_before, is_prompt))

    def propose(
        self,
        texts: Sequence[torch.Tensor],  # 1 of [1, s], the anchor last
        limits: Sequence[int] | None = None,
        others_wait: bool = False,  # noqa: ARG002
    ) -> list[DraftProposal]:  # [1], empty where the length limit leaves no room for a draft
        """Draft the tokens after the anchor."""
        (input_ids,) = texts
        room = limits[0] if limits is not None else self.max_length - input_ids.shape[1]
        # The target adds one token itself, so a draft at the last free position could never be kept.
        limit = drafts_within(self._position_limits, min(self.num_drafts, room - 1), input_ids, self._anchor_position)
        if limit < 1 or not self._pause.passes():
            return [DraftProposal(input_ids[:, :0], drafted=False)]
        hidden, position = self._read_context(input_ids)
        committed = self._cache.get_seq_length()
        drawn = self._draft_chain(input_ids, hidden, position, limit)
        self._cache.crop(committed - self._cache.get_seq_length())  # drafted tokens get the target's states
        self._pause.observe(failed=drawn.overflowed[0] and drawn.lengths[0] == 0)
        if drawn.overflowed[0]:
            warn_not_finite(self.draft, "logits")
        length = length_to_end(drawn.token_ids[0, : drawn.lengths[0]].tolist(), self._end_ids)
        draft_logits = None
        if drawn.draft_logits is not None:
            ids, vocab_size = self._draft_token_ids, self.draft.config.vocab_size
            draft_logits = over_target_vocabulary(drawn.draft_logits[:, :length], ids, vocab_size).to(input_ids.device)
        return [DraftProposal(drawn.token_ids[:, :length].to(input_ids.device), draft_logits)]

    def _read_context(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass over all context since the last; the newest output and its position, [1, 1, d] and [1, 1]."""
        hidden_states, positions, keep = (
            torch.cat([getattr(context, name) for context in self._context], dim=dim)
            for name, dim in (("hidden_states", 1), ("positions", 1), ("keep", 0))
        )
        self._context = []
        # Each state goes with the token after it, the last with the anchor. A prompt of embeddings has no ids.
        num_known = min(keep.shape[0], input_ids.shape[1])
        next_ids = input_ids[:, -num_known:].to(keep.device)
        hidden_states, positions, keep = hidden_states[:, -num_known:], positions[:, -num_known:], keep[-num_known:]
        outputs = self._step(next_ids[:, keep], self.draft.project(hidden_states[:, keep]), positions[:, keep])
        return outputs[:, -1:], positions[:, -1:]

    def _step(self, ids: torch.Tensor, hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The draft over some tokens and the states before them, [1, q, d]."""
        embeds = self.binding.embed(ids).to(hidden_states.device, hidden_states.dtype)
        return self.draft(embeds, hidden_states, positions, cache=self._cache).last_hidden_state

    def _draft_chain(
        self, input_ids: torch.Tensor, hidden: torch.Tensor, position: torch.Tensor, limit: int
    ) -> DrawnBlocks:
        """Draw up to `limit` tokens, each from the output of the step before."""
        text, vocab_size = input_ids.to(hidden.device), self.draft.config.vocab_size
        drawer = BlockDrawer([text], [self._processors], [limit], self.do_sample, vocab_size, self._draft_token_ids)
        for slot in range(limit):
            token_id = drawer.draw(self.draft.draft_logits(hidden[:, -1], self.binding))
            if slot + 1 == limit or not drawer.has_open_blocks:
                break
            hidden = self._step(token_id[:, None], hidden, position + slot + 1)
        return drawer.finish()

    def get_candidates(
        self,
        input_ids: torch.LongTensor,  # [1, s]
        model_kwargs: dict[str, Any],
        model_outputs: Any,  # outputs of the target's last forward; None at first
        is_first_iteration: bool,
        n_last_matches: int,
        **_: Any,
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:  # ids [1, s + k] and logits [1, k, V], or None when greedy
        """transformers' protocol: the text with drafts appended, and the drafts' logits."""
        if is_first_iteration:
            return input_ids, None
        hidden_states = model_outputs.hidden_states
        self.check_hidden_states(hidden_states)
        is_prompt = self._anchor_position is None
        num_tokens = num_prompt_tokens(hidden_states) if is_prompt else int(n_last_matches) + 1
        self.add_context(hidden_states, num_tokens, model_kwargs)
        (proposal,) = self.propose([input_ids])
        logits = proposal.draft_logits if proposal.token_ids.shape[1] else None
        return torch.cat([input_ids, proposal.token_ids], dim=1), logits

    def update_candidate_strategy(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, num_matches: int
    ) -> None:
        """transformers' protocol; nothing is learned from a round."""
