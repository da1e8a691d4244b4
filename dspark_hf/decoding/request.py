# SPDX-License-Identifier: Apache-2.0
"""One request: its text, its processors and criteria, and its drafting state; and what a pass and a verdict are.

Legend: R requests, s text, k drafts, n new tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from .drafting_state import DraftingState
from .outputs import OutputLog
from .packed_pass import PackedPass
from .processors import mirrored


@dataclass(frozen=True)
class TargetPass:
    """The outputs of one pass of the target."""

    logits: torch.Tensor  # [1, sum of 1 + k, V], the rows of a request together; [1, R, V] after prompts
    hidden_states: tuple[torch.Tensor | None, ...]  # by layer, each [1, N, d], of the tokens of the pass; () if none
    outputs: Any
    starts_over: bool  # whether the pass is over a whole text, as the first one is
    packed: PackedPass | None = None  # positions of the tokens of each request of a batch


@dataclass(frozen=True)
class Verdict:
    """The tokens that a verification adds to a text."""

    new_ids: torch.Tensor  # [1, n], new tokens; they may end before the bonus token
    scores: torch.Tensor | None  # [1, >= n, V], the processed logits that they came from, if the call returns them
    raw_logits: torch.Tensor | None  # [1, >= n, V], the same before the processors, if the call returns them
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
        self.drafting = DraftingState(mirrored(processors))
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

    def stops_after(
        self,
        new_ids: torch.Tensor,  # [1, n]
        scores: torch.Tensor | None,  # [1, >= n, V], processed; read only where the call returns them
    ) -> bool:
        """Whether plain generation would end after these tokens; the criteria get the same inputs as there."""
        scores_so_far = None
        if self.log.scores is not None and scores is not None:
            scores_so_far = self.log.scores + tuple(scores[:, i] for i in range(new_ids.shape[1]))
        text = torch.cat([self.input_ids, new_ids], dim=1)
        return bool(self.stopping_criteria(text, scores_so_far).all())
