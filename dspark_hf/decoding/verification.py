# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens, and the one rule that accepts or rejects drafts. Imports torch only.

p is the target's distribution, q the draft's, both after every logits processor. Greedy decoding is the limit where
p and q are one-hot; it never needs a softmax. The q of a copied draft is one-hot as well: it is accepted with
probability p(x), and the residual is p without x. Legend: R requests, K drafts of all of them, D of these drawn from
the draft's logits, the others copied, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class VerificationResult:
    """The result of one verification."""

    num_accepted: torch.Tensor  # [R], accepted drafts per request, bonus token excluded
    bonus_token: torch.Tensor  # [R], the token that the target adds after the accepted drafts


def logits_to_probs(
    logits: torch.Tensor,  # [..., V], processed logits (temperature and the like already applied)
    do_sample: bool = True,  # False for greedy decoding, the limit T = 0
) -> torch.Tensor:  # [..., V], fp32: softmax, or one-hot at the argmax when greedy
    """The distribution that tokens are drawn from."""
    if do_sample:
        return torch.softmax(logits, dim=-1, dtype=torch.float32)
    return one_hot_probs(argmax_token(logits), logits)


def argmax_token(
    logits: torch.Tensor,  # [..., V]
) -> torch.Tensor:  # [...], the first of equal maxima, as `argmax`
    """The greedy choice, `logits.argmax(-1)`; on a CPU several times faster for a vocabulary in half precision."""
    return logits.max(dim=-1).indices


def select_token(
    logits: torch.Tensor,  # [R, V], processed logits, fp32 when sampling
    do_sample: bool,
    generator: torch.Generator | None = None,
) -> torch.Tensor:  # [R]
    """Draw one token per row."""
    if not do_sample:
        return argmax_token(logits)
    return torch.multinomial(logits_to_probs(logits), num_samples=1, generator=generator).squeeze(-1)


def draw_token(
    logits: torch.Tensor,  # [R, V], processed logits, fp32 when sampling
    do_sample: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[`select_token`] for drafts, whose logits may be no distribution: reports it instead of raising.

    A target's tokens are drawn by [`select_token`], which raises as plain generation does.

    Returns tokens [R], any valid ones where nothing can be drawn, and a number for each row, [R], which is finite if
    the row was a distribution: without NaN and +inf and with at least one number.
    """
    if not do_sample:
        best = logits.max(dim=-1)  # NaN and inf win
        return best.indices, best.values
    probs = logits_to_probs(logits)
    witness = probs[:, 0].clone()  # one NaN or inf, or nothing but -inf, makes all of them NaN
    # What `torch.multinomial` does for one draw, without its check, which kills the process on an accelerator.
    race = torch.empty_like(probs).exponential_()
    return torch.div(probs, race, out=race).argmax(dim=-1), witness


def accept_drafts(
    draft_ids: torch.Tensor,  # [K], drafts
    target_logits: torch.Tensor,  # [K, V], processed logits of the target at the drafts' positions
    draft_logits: torch.Tensor | None,  # [D, V], processed logits of the drawn drafts, in order; None: none are
    do_sample: bool,
    is_copied: torch.Tensor | None = None,  # [K]; None: all if there are no `draft_logits`, otherwise none
) -> torch.Tensor:  # [K]
    """Judge each draft on its own, as if all before it were accepted (paper section 3; rejection sampling).

    Sampling accepts x with probability min(1, p(x) / q(x)); greedy decoding accepts the argmax of the target.
    """
    if not do_sample:
        return argmax_token(target_logits) == draft_ids
    index = draft_ids.unsqueeze(-1)
    log_ratio = target_logits.gather(-1, index).squeeze(-1) - target_logits.logsumexp(dim=-1)  # q = 1 for copies
    if draft_logits is not None:
        drawn = slice(None) if is_copied is None else ~is_copied
        log_q = draft_logits.gather(-1, index[drawn]).squeeze(-1) - draft_logits.logsumexp(dim=-1)
        log_ratio[drawn] -= log_q
    return torch.rand_like(log_ratio) < log_ratio.exp()


def select_bonus(
    target_logits: torch.Tensor,  # [R, V], processed logits of the target after the accepted drafts
    draft_probs: torch.Tensor | None,  # [R, V], q of the rejected drafts, 0 where none was rejected; None: none was
    do_sample: bool,
) -> torch.Tensor:  # [R]
    """Draw the token after the accepted drafts: from norm(max(p - q, 0)) where a draft was rejected, else from p."""
    if not do_sample or draft_probs is None:
        return select_token(target_logits, do_sample)
    target_probs = logits_to_probs(target_logits)
    residual = (target_probs - draft_probs).clamp_(min=0)
    # p == q up to rounding: a rejection then has probability ~0, and p itself is the right limit.
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, target_probs)
    return torch.multinomial(residual, num_samples=1).squeeze(-1)


def one_hot_probs(
    token_ids: torch.Tensor,  # [...]
    like: torch.Tensor,  # [..., V]
) -> torch.Tensor:  # [..., V], fp32
    """All probability on one token: greedy decoding, and the q of copied drafts."""
    return torch.zeros_like(like, dtype=torch.float32).scatter_(-1, token_ids.unsqueeze(-1), 1.0)


def verify_blocks(
    draft_ids: torch.Tensor,  # [K], the drafts of all requests, those of one request together
    target_logits: torch.Tensor,  # [K + R, V], of each request the row of its anchor, then those of its drafts
    draft_logits: torch.Tensor | None,  # [D, V]
    lengths: Sequence[int],  # [R], drafts of each request; they sum to K >= 1
    do_sample: bool,
    num_copied: Sequence[int] | None = None,  # [R], drafts at the end of each that are copied; None: all or none
) -> VerificationResult:
    """Accept the longest prefix of the drafts of each request, and add the target's own token (paper section 3)."""
    length = torch.tensor(lengths, device=draft_ids.device)  # [R]
    first = length.cumsum(0) - length  # [R], the first draft of each request
    number = torch.arange(len(lengths), device=draft_ids.device)  # [R], anchors before it
    if len(lengths) == 1:  # its rows are there without a copy
        judges: slice | torch.Tensor = slice(0, -1)
    else:
        judges = torch.arange(len(draft_ids), device=draft_ids.device) + number.repeat_interleave(length)  # [K]
    is_copied = _copied(lengths, num_copied, draft_logits, draft_ids.device)
    if do_sample:
        accepted = accept_drafts(draft_ids, target_logits[judges], draft_logits, do_sample, is_copied)
    else:
        selected = argmax_token(target_logits)  # [K + R]
        accepted = selected[judges] == draft_ids
    if len(lengths) == 1:
        num_accepted = accepted.cumprod(dim=0).sum(dim=0, keepdim=True)
    else:
        blocks = torch.nn.utils.rnn.pad_sequence(accepted.split(list(lengths)), batch_first=True)  # [R, most drafts]
        num_accepted = blocks.cumprod(dim=-1).sum(dim=-1)
    row = first + number + num_accepted  # [R]
    if not do_sample:
        return VerificationResult(num_accepted, selected[row])
    if len(lengths) == 1 and int(num_accepted) == len(draft_ids):
        return VerificationResult(num_accepted, select_bonus(target_logits[row], None, do_sample))
    slot = (first + num_accepted).clamp(max=len(draft_ids) - 1)  # where none was rejected, any
    if draft_logits is None:
        draft_probs = one_hot_probs(draft_ids[slot], target_logits[row])
    elif is_copied is None:
        draft_probs = logits_to_probs(draft_logits[slot])
    else:
        drawn = ((~is_copied).cumsum(0) - 1).clamp(min=0)  # [K], place among the drawn drafts
        one_hot = one_hot_probs(draft_ids[slot], target_logits[row])
        draft_probs = torch.where(is_copied[slot, None], one_hot, logits_to_probs(draft_logits[drawn[slot]]))
    draft_probs = draft_probs.masked_fill(~(num_accepted < length)[:, None], 0.0)
    return VerificationResult(num_accepted, select_bonus(target_logits[row], draft_probs, do_sample))


def _copied(
    lengths: Sequence[int], num_copied: Sequence[int] | None, draft_logits: torch.Tensor | None, device: torch.device
) -> torch.Tensor | None:  # [K]; None where all are copied or none
    if num_copied is None or draft_logits is None or not any(num_copied):
        return None
    pairs = zip(lengths, num_copied, strict=True)
    flags = [slot >= length - count for length, count in pairs for slot in range(length)]
    return torch.tensor(flags, device=device)
