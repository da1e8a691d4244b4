# SPDX-License-Identifier: Apache-2.0
"""One request: its text, its processors and criteria, and the verdict on its drafts.

Legend: s text, k drafts, n new tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from .drafter import DraftProposal
from .outputs import OutputLog
from .packed_attention import PackedPass
from .processors import are_rowwise
from .verification import accept_drafts, select_bonus, verify_block


@dataclass(frozen=True)
class TargetPass:
    """The outputs of one pass of the target."""

    logits: list[torch.Tensor]  # per request of the pass, [1, 1 + k, V]; [1, 1, V] after a prompt
    hidden_states: tuple[torch.Tensor | None, ...]  # by layer, each [1, N, d], of the tokens of the pass
    outputs: Any
    starts_over: bool  # whether the pass is over a whole text, as the first one is
    packed: PackedPass | None = None  # positions of the tokens of each request of a batch


@dataclass(frozen=True)
class Verdict:
    """The tokens that a verification adds to a text."""

    new_ids: torch.Tensor  # [1, n], new tokens; they may end before the bonus token
    scores: torch.Tensor  # [1, >= n, V], the processed logits that the tokens came from
    raw_logits: torch.Tensor  # [1, >= n, V], the same before the processors
    num_accepted: int  # accepted drafts
    bonus_token: int | None  # None where the text ended before it was drawn


class Request:
    """A text that is being generated."""

    def __init__(
        self,
        index: int,  # its row in the output
        input_ids: torch.Tensor,  # [1, s], prompt
        processors: LogitsProcessorList,  # those with a state are shared with no other row
        stopping_criteria: StoppingCriteriaList,
        max_length: int,  # most tokens of prompt and answer
        generation_config: GenerationConfig,
    ):
        self.index, self.input_ids, self.num_prompt_tokens = index, input_ids, input_ids.shape[1]
        self.processors, self.stopping_criteria, self.max_length = processors, stopping_criteria, max_length
        self.do_sample = bool(generation_config.do_sample)
        self.log = OutputLog(generation_config)
        self.finished = False

    @property
    def num_left(self) -> int:
        """Tokens that the text may still grow by."""
        return self.max_length - self.input_ids.shape[1]

    @property
    def new_ids(self) -> torch.Tensor:  # [n]
        """The answer so far."""
        return self.input_ids[0, self.num_prompt_tokens :]

    def append(self, verdict: Verdict) -> None:
        """Append the tokens of a verification."""
        self.log.add(verdict.raw_logits, verdict.scores, verdict.new_ids.shape[1])
        self.input_ids = torch.cat([self.input_ids, verdict.new_ids], dim=1)

    def judge(
        self,
        logits: torch.Tensor,  # [1, 1 + k, V]
        proposal: DraftProposal,
    ) -> Verdict:
        """Judge the drafts, and end the text where plain generation would (`finished`)."""
        logits = logits.to(self.input_ids.device)
        if self.do_sample or self.processors or self.log.scores is not None:
            scores = logits.to(torch.float32, copy=self.log.logits is not None)
        else:
            scores = logits  # greedy, nothing asked for: the argmax needs no copy
        if self.processors and not are_rowwise(self.processors):
            return self._judge_stepwise(logits, scores, proposal)
        if self.processors:
            scores = self.processors(self.input_ids, scores[0])[None]
        result = verify_block(proposal.token_ids, scores, proposal.draft_logits, self.do_sample)
        num_accepted = int(result.num_accepted)
        new_ids = torch.cat([proposal.token_ids[:, :num_accepted], result.bonus_token[:, None]], dim=1)
        for count in range(1, new_ids.shape[1] + 1):
            if self._stops_after(new_ids[:, :count], scores):
                new_ids = new_ids[:, :count]
                break
        return Verdict(new_ids, scores, logits, num_accepted, int(result.bonus_token))

    def _judge_stepwise(self, raw: torch.Tensor, logits: torch.Tensor, proposal: DraftProposal) -> Verdict:
        """Run processors and criteria as plain generation does: in turn, once per token, each on its own prefix."""
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
        bonus_token = None if accepted else int(new_ids[0, -1])
        return Verdict(new_ids, torch.stack(rows, dim=1), raw, num_accepted, bonus_token)

    def _stops_after(self, new_ids: torch.Tensor, scores: torch.Tensor) -> bool:
        """Whether plain generation would end after these tokens; the criteria get the same inputs as there."""
        scores_so_far = None
        if self.log.scores is not None:
            scores_so_far = self.log.scores + tuple(scores[:, i] for i in range(new_ids.shape[1]))
        text = torch.cat([self.input_ids, new_ids], dim=1)
        self.finished = bool(self.stopping_criteria(text, scores_so_far).all())
        return self.finished
