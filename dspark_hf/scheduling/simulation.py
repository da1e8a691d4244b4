# SPDX-License-Identifier: Apache-2.0
"""Replays recorded rounds under a drafting policy, against a round-time curve: the policy that a call runs, with its
history, correction, gate and weights, and no clock. Imports no model code.

Legend: R requests at a time, g slots per block, B tokens in a verification pass.

A recording contains the outcome of every slot of a block, so it also determines that of any shorter block. Two things
are approximate; consider them when reading a result:

- A shorter block moves the next anchor, and with it the next block. A replayed request takes the block that was
  recorded where it stands, or last before it.
- The time of a round depends on B and R only. Longer texts cost nothing.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ..common.records import AcceptanceStats, RoundRecord
from .acceptance import AcceptanceHistory
from .curve import SPSCurve
from .policy import DraftingPolicy


PLAIN = "plain"


@dataclass(frozen=True)
class LoadReport:
    """The result of one policy with R requests at a time.

    Args:
        policy (`str`): Name of the policy.
        num_requests (`int`): R, most requests at a time.
        num_rounds (`int`): Rounds of all requests: a round of three requests counts three times.
        num_tokens (`int`): Tokens committed, bonus tokens included, of all requests.
        num_verified (`int`): Tokens that the verification passes carried: drafts, and one anchor per request.
        seconds (`float`): Time of all rounds by the curve.
    """

    policy: str
    num_requests: int
    num_rounds: int
    num_tokens: int
    num_verified: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """`float`: Throughput, of all requests together."""
        return self.num_tokens / self.seconds

    @property
    def user_tokens_per_s(self) -> float:
        """`float`: Speed of one request."""
        return self.tokens_per_s / self.num_requests

    @property
    def accepted_length(self) -> float:
        """`float`: Tokens per request and round, bonus token included."""
        return self.num_tokens / self.num_rounds

    @property
    def verify_length(self) -> float:
        """`float`: Drafts sent per request and round."""
        return self.num_verified / self.num_rounds - 1

    @property
    def verified_per_token(self) -> float:
        """`float`: Tokens verified per token committed; 1 without drafts."""
        return self.num_verified / self.num_tokens


def replay(
    texts: Sequence[Sequence[RoundRecord]],
    curve: SPSCurve,
    policy: DraftingPolicy | None,
    num_requests: int = 1,
    max_new_tokens: float = math.inf,
    request_s: float = 0.0,
    name: str | None = None,
) -> LoadReport:
    """Replay the recorded rounds of texts, `num_requests` at a time; the others take the places of those that end.

    Args:
        texts (`Sequence[Sequence[RoundRecord]]`):
            The rounds of each recorded text, in order. Every record must be of a full block, see [`full_blocks`].
        curve (`SPSCurve`): Round times that the replay charges; the policy schedules by its own.
        policy (`DraftingPolicy`, *optional*): Fresh (it learns). `None` decodes without drafts.
        num_requests (`int`, *optional*, defaults to 1): R.
        max_new_tokens (`float`, *optional*): Most tokens of a text; all that were recorded without it.
        request_s (`float`, *optional*, defaults to 0.0): Seconds that a pass takes for each request besides its
            tokens.
        name (`str`, *optional*): Name for the report; the scheduler's class without it.

    Returns:
        [`LoadReport`]

    Raises:
        ValueError: If there are no records, a record is not of a full block or has another number of slots than the
            first, or `num_requests` is below 1.

    Example:
        >>> record = RoundRecord(1, (5, 6), (0.9, 0.8), num_accepted=1, bonus_token=7, num_committed=2)
        >>> policy = DraftingPolicy(FixedScheduler(2), num_slots=2)
        >>> report = replay([[record, record]] * 4, SPSCurve.linear(0.1), policy, num_requests=4)
        >>> report.num_tokens, report.num_verified, report.seconds
        (16, 24, 4.2)
    """
    num_slots = _checked_slots(texts, num_requests)
    new_history = policy.new_history if policy else lambda: AcceptanceHistory(num_slots)
    waiting = [_Text(text, max_new_tokens, new_history()) for text in texts if text]
    running, waiting = waiting[:num_requests], waiting[num_requests:]
    stats, seconds = AcceptanceStats(), 0.0
    while running:
        others_wait = bool(waiting) or math.isinf(max_new_tokens)
        tokens_left = None if others_wait else [int(text.num_left) for text in running]
        lengths, is_drafted = _drafts(policy, running, tokens_left, num_slots)
        verify_s = curve.verify(len(running) + sum(lengths)) + request_s * len(running)
        draft_s = curve.for_requests(len(running)).draft_s if is_drafted else 0.0
        share = (draft_s / len(running), verify_s / len(running))
        records = [text.advance(n, share, is_drafted) for text, n in zip(running, lengths, strict=True)]
        if policy is not None:
            policy.observe([text.history for text in running], records)
        stats.rounds += records
        seconds += draft_s + verify_s
        running = [text for text in running if not text.has_ended]
        free = num_requests - len(running)
        running, waiting = running + waiting[:free], waiting[free:]
    name = name or (type(policy.scheduler).__name__ if policy else PLAIN)
    return LoadReport(name, num_requests, stats.num_rounds, stats.num_committed, stats.num_verified, seconds)


def full_blocks(records: Iterable[RoundRecord], num_slots: int) -> list[RoundRecord]:  # in order
    """Drop rounds that cannot be replayed: blocks cut short, and rounds that did not judge every slot they reached."""
    return [record for record in records if record.is_full_block(num_slots)]


class _Text:
    """A request that is replayed."""

    def __init__(self, rounds: Sequence[RoundRecord], max_tokens: float, history: AcceptanceHistory):
        self.rounds, self.ends = rounds, list(accumulate(record.accepted_length for record in rounds))
        self.num_tokens, self.max_tokens, self.history = 0, max_tokens, history

    @property
    def block(self) -> RoundRecord:
        """The block recorded where the text stands, or last before it."""
        return self.rounds[bisect_right(self.ends, self.num_tokens)]

    @property
    def num_left(self) -> int | float:
        """Tokens that the text may still grow by."""
        return self.max_tokens - self.num_tokens

    @property
    def has_ended(self) -> bool:
        return self.num_tokens >= min(self.max_tokens, self.ends[-1])

    def advance(self, num_sent: int, seconds: tuple[float, float], is_drafted: bool) -> RoundRecord:
        """Accept what was accepted of so many drafts."""
        block = self.block
        num_accepted = min(block.num_accepted, num_sent)
        self.num_tokens += num_accepted + 1
        return dataclasses.replace(
            block,
            token_ids=block.token_ids[:num_sent],
            num_accepted=num_accepted,
            bonus_token=0,
            num_committed=num_accepted + 1,
            draft_s=seconds[0],
            verify_s=seconds[1],
            round_s=sum(seconds),
            drafted=is_drafted,
        )


def _drafts(
    policy: DraftingPolicy | None, texts: Sequence[_Text], tokens_left: Sequence[int] | None, num_slots: int
) -> tuple[list[int], bool]:
    """Drafts that each text sends, and whether any were made."""
    histories = [text.history for text in texts]
    if policy is None or not policy.should_draft(histories, tokens_left):
        return [0] * len(texts), False
    limits = torch.tensor([min(text.num_left - 1, num_slots) for text in texts]).long()
    confidence = torch.tensor([text.block.confidence for text in texts])
    confidence = confidence * (torch.arange(num_slots) < limits[:, None])
    lengths = policy.verify_lengths(histories, confidence, tokens_left)
    return torch.minimum(lengths, limits).tolist(), True


def _checked_slots(texts: Sequence[Sequence[RoundRecord]], num_requests: int) -> int:
    """The number of slots of the recorded blocks."""
    if num_requests < 1:
        raise ValueError(f"`num_requests` must be >= 1, got {num_requests}.")
    records = [record for text in texts for record in text]
    if not records:
        raise ValueError("`texts` must hold at least one record, got none. Record a text with every slot sent.")
    num_slots = records[0].verify_length
    for index, record in enumerate(records):
        refusal = _refusal(record, num_slots)
        if refusal is not None:
            raise ValueError(f"Every record must be of a full block; record {index} {refusal}")
    return num_slots


def _refusal(record: RoundRecord, num_slots: int) -> str | None:
    """The reason why a record does not determine the outcome of every shorter block."""
    if not record.confidence:
        return "has no confidences. Record rounds that draft, with a draft that has a confidence head."
    if record.verify_length < len(record.confidence):
        return (
            f"sent {record.verify_length} of {len(record.confidence)} drafts, and what became of the others is not "
            'known. Record with the schedule "constant" and without a threshold.'
        )
    if record.verify_length != num_slots:
        return f"has {record.verify_length} slots instead of {num_slots}. Take the `full_blocks` of one draft."
    if record.bonus_token is None and record.num_accepted < num_slots:
        return (
            f"is of a text that ended at draft {record.num_accepted}, before the next was judged. Take the "
            "`full_blocks`."
        )
    return None
