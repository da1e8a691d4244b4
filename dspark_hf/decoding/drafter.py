# SPDX-License-Identifier: Apache-2.0
"""The interface of the decoding loop and a drafter: proposals one way, committed context the other.

Legend: R requests, N tokens of a pass of the target, k drafts, m captured layers, d hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..common.records import RoundRecord
from ..scheduling.curve import SPSCurve
from .request import Request


@dataclass(frozen=True)
class DraftProposal:
    """The drafts of one request that a round sends to verification.

    Args:
        token_ids (`torch.LongTensor` of shape `(1, k)`): Drafts, k >= 0, on the device of the text.
        draft_logits (`torch.Tensor` of shape `(1, k - num_copied, V)`, *optional*):
            Exactly the logits the drafts were sampled from, fp32; `None` when greedy, or if all are copied.
        confidence (`tuple[float, ...]`): c of every slot drafted, cut ones included; empty without a confidence head.
        drafted (`bool`): Whether a block was drafted; `False` if drafts are copied, drafting does not pay off or no
            draft could be kept.
        num_copied (`int`): Drafts at the end that were copied from the text: their q is one-hot.
    """

    token_ids: torch.Tensor
    draft_logits: torch.Tensor | None = None
    confidence: tuple[float, ...] = ()
    drafted: bool = True
    num_copied: int = 0


@dataclass(frozen=True)
class ContextSpan:
    """The committed tokens of one request in a pass of the target, its new anchor excluded."""

    request: int  # index of the request among those that run
    rows: slice  # its rows of the hidden states, n of them
    positions: torch.Tensor  # [1, n + 1], positions in its text, the anchor's last
    keep: torch.Tensor | None = None  # [n], False where a prompt is padded; None: nowhere


@dataclass(frozen=True)
class CommittedContext:
    """The hidden states of a target pass, and which of them are committed context for the draft."""

    hidden_states: tuple[torch.Tensor | None, ...]  # by layer, each [1, N, d]; None for layers that were not asked for
    spans: tuple[ContextSpan, ...]  # one for each request that continues


class Drafter(Protocol):
    """Drafts for all requests of a call; what it knows of one lies in `Request.drafting`, so only caches take indices.

    Every method with requests is given all that have not ended, in one order.
    """

    @property
    def model_kwargs_overrides(self) -> dict[str, Any]:
        """Keyword arguments of the target's forward that return what the draft reads."""

    @property
    def needs_curve(self) -> bool:
        """Whether measured round times would change what is drafted."""

    def use_curve(self, curve: SPSCurve) -> None:
        """Schedule by measured round times."""

    def check_hidden_states(self, hidden_states: tuple[torch.Tensor | None, ...]) -> None:
        """Reject a target that does not return the hidden states that the draft reads."""

    def add_requests(self, requests: Sequence[Request]) -> None:
        """Take in requests after the present ones."""

    def keep_requests(self, requests: Sequence[int]) -> None:
        """Forget all other requests."""

    def propose(self, requests: Sequence[Request], others_wait: bool = False) -> list[DraftProposal]:
        """Draft after each text, whose last token is the anchor, within the tokens that it may still grow by."""

    def read(self, requests: Sequence[Request], context: CommittedContext) -> None:
        """Read the target's hidden states of committed tokens."""

    def observe(self, requests: Sequence[Request], records: Sequence[RoundRecord]) -> None:
        """Learn from a finished round."""
