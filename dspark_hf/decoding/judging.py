# SPDX-License-Identifier: Apache-2.0
"""Judges the drafts of a round: processors, verification and criteria, for all requests at once where they allow it.

Legend: R requests, s text, k drafts of a request, K drafts of all, n new tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

import torch
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from .drafter import DraftProposal
from .processors import are_rowwise, best_tokens
from .request import Request, Verdict
from .verification import (
    accept_drafts,
    logits_to_probs,
    one_hot_probs,
    select_bonus,
    select_token,
    verify_blocks,
)


def judge(
    requests: Sequence[Request],  # [R], of one call: their rules are of the same kinds
    logits: torch.Tensor,  # [1, K + R, V], raw; the rows of a request together
    proposals: Sequence[DraftProposal],  # [R]
    generator: torch.Generator | None = None,  # draws the tokens of rounds without drafts
) -> list[Verdict]:
    """Accept drafts, and end the texts where plain generation would (`finished`)."""
    first, counts = requests[0], [1 + proposal.token_ids.shape[1] for proposal in proposals]
    raw = logits[0].to(first.input_ids.device)
    scores = raw  # greedy, nothing asked for: the argmax needs no copy
    if first.do_sample or first.processors or first.log.scores is not None:
        scores = raw.to(torch.float32, copy=first.log.logits is not None)
    if first.processors and not are_rowwise(first.processors):
        parts = (rows[None].split(counts, dim=1) for rows in (raw, scores))
        return [_judge_stepwise(*part) for part in zip(requests, *parts, proposals, strict=True)]
    if len(scores) == len(requests):
        processed, bonus = _draw(requests, scores, generator)
        num_accepted = [0] * len(requests)
    else:
        if first.processors:
            scores = first.processors(first.input_ids, scores)
        draft_ids = proposals[0].token_ids[0]
        if len(proposals) > 1:
            draft_ids = torch.cat([proposal.token_ids[0] for proposal in proposals])
        draft_logits = _joined([proposal.draft_logits for proposal in proposals])
        lengths, num_copied = [count - 1 for count in counts], [proposal.num_copied for proposal in proposals]
        result = verify_blocks(draft_ids, scores, draft_logits, lengths, first.do_sample, num_copied)
        processed, num_accepted, bonus = scores, result.num_accepted.tolist(), result.bonus_token
    new_ids = [
        torch.cat([proposal.token_ids[:, :count], token[None]], dim=1) if count else token[None]
        for proposal, count, token in zip(proposals, num_accepted, bonus.split(1), strict=True)
    ]
    rows = _rows_of(processed if first.log.scores is not None else None, counts)
    raw_rows = _rows_of(raw if first.log.logits is not None else None, counts)
    kept = _up_to_end(requests, new_ids, rows)
    return [Verdict(*part) for part in zip(kept, rows, raw_rows, num_accepted, bonus.tolist(), strict=True)]


def _rows_of(logits: torch.Tensor | None, counts: Sequence[int]) -> Sequence[torch.Tensor | None]:
    """Logits `(K + R, V)` of each request, `(1, 1 + k, V)`; none where the call does not return them."""
    return [None] * len(counts) if logits is None else logits[None].split(list(counts), dim=1)


def _joined(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:  # of [1, k, V] each: [K, V]
    found = [part[0] for part in parts if part is not None and part.shape[1]]
    if not found:
        return None
    return found[0] if len(found) == 1 else torch.cat(found)


def _draw(
    requests: Sequence[Request], scores: torch.Tensor, generator: torch.Generator | None
) -> tuple[torch.Tensor | None, torch.Tensor]:  # the processed scores [R, V], if they were needed, and tokens [R]
    """The next token of every text, where there are no drafts."""
    first = requests[0]
    # A request alone takes the random numbers that plain generation takes.
    if first.do_sample and first.log.scores is None and len(requests) > 1:
        best = best_tokens(first.processors, first.input_ids, scores)
        if best is not None:
            values, ids = best
            return None, ids.gather(1, select_token(values, True, generator)[:, None])[:, 0]
    if first.processors:
        scores = first.processors(first.input_ids, scores)
    return scores, select_token(scores, first.do_sample, generator)


def _up_to_end(
    requests: Sequence[Request],
    new_ids: Sequence[torch.Tensor],  # [R], each [1, n]
    scores: Sequence[torch.Tensor | None],  # [R], each [1, >= n, V]
) -> list[torch.Tensor]:  # [R], the new tokens that are kept
    """Cut new tokens behind the one that ends a text, and mark the texts that end."""
    limits = [_limit(request, ids.shape[1]) for request, ids in zip(requests, new_ids, strict=True)]
    known = [limit for limit in limits if limit is not None]
    is_end = _are_ends(requests[0], new_ids) if len(known) == len(requests) else None
    kept = []
    for i, (request, ids) in enumerate(zip(requests, new_ids, strict=True)):
        counts = range(1, ids.shape[1] + 1)
        if is_end is None:  # asked as plain generation does, token by token
            stops = (request.stops_after(ids[:, :count], scores[i]) for count in counts)
        else:
            stops = (flag or count >= known[i] for count, flag in zip(counts, is_end[i], strict=True))
        num_kept = next((count for count, stop in zip(counts, stops, strict=True) if stop), None)
        request.finished = num_kept is not None
        kept.append(ids[:, :num_kept])
    return kept


def _limit(request: Request, num_new: int) -> float | None:
    """New tokens after which the length ends a text; None if its criteria read more than this and the last token."""
    length, limit = request.input_ids.shape[1], math.inf
    for rule in request.stopping_criteria:
        if type(rule) is MaxLengthCriteria and length + num_new <= (rule.max_position_embeddings or math.inf):
            limit = min(limit, rule.max_length - length)
        elif type(rule) is not EosTokenCriteria:  # also where a length would be warned about
            return None
    return limit


def _are_ends(request: Request, new_ids: Sequence[torch.Tensor]) -> list[list[bool]]:
    """Whether new tokens of all texts are ends of text, by the criteria that every request has."""
    rules = [rule for rule in request.stopping_criteria if isinstance(rule, EosTokenCriteria)]
    if not rules:
        return [[False] * ids.shape[1] for ids in new_ids]
    tokens = torch.cat(list(new_ids), dim=1).T  # [sum of n, 1]
    remaining = iter(torch.stack([rule(tokens, None) for rule in rules]).any(dim=0).tolist())
    return [list(islice(remaining, ids.shape[1])) for ids in new_ids]


def _judge_stepwise(
    request: Request,
    raw: torch.Tensor,  # [1, 1 + k, V]
    logits: torch.Tensor,  # [1, 1 + k, V], the same in fp32
    proposal: DraftProposal,
) -> Verdict:
    """Run processors and criteria as plain generation does: in turn, once per token, each on its own prefix."""
    draft_ids, num_drawn = proposal.token_ids, proposal.token_ids.shape[1] - proposal.num_copied
    new_ids, accepted = draft_ids[:, :0], True
    rows: list[torch.Tensor] = []
    while accepted and not request.finished:
        slot = len(rows)
        rows.append(request.processors(torch.cat([request.input_ids, new_ids], dim=1), logits[:, slot]))
        draft_id, draft_probs, accepted = draft_ids[:, slot : slot + 1], None, False
        if slot < draft_ids.shape[1]:
            q = proposal.draft_logits[:, slot] if proposal.draft_logits is not None and slot < num_drawn else None
            accepted = bool(accept_drafts(draft_id[0], rows[-1], q, request.do_sample))
            if request.do_sample and not accepted:
                draft_probs = logits_to_probs(q) if q is not None else one_hot_probs(draft_id[0], rows[-1])
        token = draft_id if accepted else select_bonus(rows[-1], draft_probs, request.do_sample)[:, None]
        new_ids = torch.cat([new_ids, token], dim=1)
        request.finished = request.stops_after(new_ids, torch.stack(rows, dim=1))
    num_accepted = new_ids.shape[1] - (0 if accepted else 1)
    bonus_token = None if accepted else int(new_ids[0, -1])
    return Verdict(new_ids, torch.stack(rows, dim=1), raw, num_accepted, bonus_token)
