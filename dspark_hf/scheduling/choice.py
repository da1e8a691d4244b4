# SPDX-License-Identifier: Apache-2.0
"""Chooses the source of each request's drafts before a round: nothing, a copy of the text, or a block of the draft.

A copy costs no pass of the draft and its tokens are known, so it is decided here with its length. A block is decided
here by what blocks brought in the past, and cut when its confidences are known. Either choice rests on earlier rounds
and on the committed text alone, which keeps sampled text exact. Imports no model code.

Legend: R requests, k copied tokens, g slots per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .curve import SPSCurve
from .rules import lengths_of_likeliest


@dataclass(frozen=True)
class DraftPlan:
    """What each request of a round drafts."""

    copy_lengths: tuple[int, ...]  # [R], tokens to copy
    drafts_block: tuple[bool, ...]  # [R], whether the draft writes a block
    # Per request, P(copy k accepted | all before it were), of as many tokens as may be copied, chosen or not.
    copy_acceptance: tuple[np.ndarray, ...]

    @property
    def other_tokens(self) -> int:
        """Tokens that the pass verifies for requests without a block: their anchors and copies."""
        pairs = zip(self.copy_lengths, self.drafts_block, strict=True)
        return sum(1 + length for length, drafts in pairs if not drafts)

    @property
    def other_gain(self) -> float:
        """Tokens that these requests are expected to get."""
        parts = zip(self.copy_acceptance, self.copy_lengths, self.drafts_block, strict=True)
        return sum(1 + float(rates[:length].cumprod().sum()) for rates, length, drafts in parts if not drafts)


def choose(
    copy_acceptance: Sequence[np.ndarray],  # [R], P(copy k accepted | all before it were); empty: nothing to copy
    block_survival: Sequence[Sequence[float]],  # [R], expected prefix survival of the slots; empty: may not draft
    weights: Sequence[float],  # [R], value of one more token of each request
    curve: SPSCurve,
) -> DraftPlan:
    """The plan with the most expected tokens per second.

    A request that may draft copies or drafts: whether blocks are worth their time at all is the gate's question, which
    also has to find out when they are again.
    """
    copies = _weighted([rates.cumprod() for rates in copy_acceptance], weights)
    blocks = _weighted([np.asarray(slots) for slots in block_survival], weights)
    may_draft = np.array([len(slots) > 0 for slots in block_survival])
    lengths, rate = _best_round(copies, curve)
    must_draft = may_draft & (lengths == 0)
    drafts = must_draft | (may_draft & _prefers_block(copies, blocks, curve, rate))
    if drafts.any():
        width = max(copies.shape[1], blocks.shape[1])
        mixed = np.where(drafts[:, None], _widened(blocks, width), _widened(copies, width))
        mixed_lengths, mixed_rate = _best_round(mixed, curve, curve.for_requests(int(drafts.sum())).draft_s)
        if must_draft.any() or mixed_rate > rate:
            lengths = np.where(drafts, 0, mixed_lengths)
        else:
            drafts = np.zeros_like(drafts)
    return DraftPlan(tuple(lengths.tolist()), tuple(drafts.tolist()), tuple(copy_acceptance))


def extensions(
    tails: Sequence[np.ndarray],  # [R], survival of the copies after a block that agrees with them; empty: none
    curve: SPSCurve,
    draft_s: float,
    num_tokens: int,  # tokens of the pass so far
    gain: float,  # tokens that the round is expected to bring so far
) -> tuple[int, ...]:  # [R], tokens to copy
    """Copies beyond blocks, as many as make the most expected tokens per second."""
    survival = _weighted(tails, [1.0] * len(tails))
    lengths, _ = _best_round(survival, curve, draft_s, num_tokens, gain)
    return tuple(lengths.tolist())


def _prefers_block(copies: np.ndarray, blocks: np.ndarray, curve: SPSCurve, rate: float) -> np.ndarray:  # [R]
    """Whether a block is worth more to a request than a copy, at the time that one more token takes."""
    num_requests = len(copies)
    if num_requests == 1:
        return np.array([True])  # the rates of the two rounds decide
    more = num_requests * max(1, blocks.shape[1])
    token_s = max(0.0, curve.verify(num_requests + more) - curve.verify(num_requests)) / more
    gains = (np.maximum(option - rate * token_s, 0.0).sum(axis=1) for option in (copies, blocks))
    of_copy, of_block = gains
    return of_block - rate * curve.draft_request_s > of_copy


def _best_round(
    survival: np.ndarray,  # [R, n]
    curve: SPSCurve,
    draft_s: float = 0.0,
    num_tokens: int | None = None,  # tokens of the pass besides these drafts; the anchors by default
    gain: float | None = None,  # expected tokens besides
) -> tuple[np.ndarray, float]:
    """Drafts of each request, [R], in the round with the most tokens per second, and these."""
    first = len(survival) if num_tokens is None else num_tokens
    descending = -np.sort(-survival[survival > 0], axis=None)
    tokens = (first if gain is None else gain) + np.concatenate([[0.0], descending.cumsum()])
    rates = tokens / (draft_s + curve.verify_table(first, first + len(descending)))
    count = int(rates.argmax())
    return lengths_of_likeliest(survival, count).numpy(), float(rates[count])


def _weighted(rows: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """Expected weighted tokens of each draft, [R, longest]; 0 where there is none."""
    table = np.zeros((len(rows), max(len(row) for row in rows)))
    for place, (row, weight) in enumerate(zip(rows, weights, strict=True)):
        table[place, : len(row)] = weight * row
    return table


def _widened(survival: np.ndarray, width: int) -> np.ndarray:
    return np.pad(survival, ((0, 0), (0, width - survival.shape[1])))
