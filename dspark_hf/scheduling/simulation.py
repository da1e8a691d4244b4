# SPDX-License-Identifier: Apache-2.0
"""Replays recorded texts under a drafting policy, against a round-time curve: the policy that a call runs, with its
history, correction, gate, copies and weights, and no clock. Imports no model code.

Legend: R requests at a time, g slots per block, B tokens in a verification pass.

A recording contains a text and what the draft proposed at each of its places, so it determines the outcome of every
block, of any shorter one, and of every copy. Two things are approximate; consider them when reading a result:

- Where blocks were recorded once a round only, a replayed request that stands between them takes the last before.
- The time of a round depends on B and R only. Longer texts cost nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from ..common.records import AcceptanceStats, RoundRecord
from .acceptance import AcceptanceHistory
from .choice import DraftPlan
from .curve import SPSCurve
from .policy import DraftingPolicy
from .request_history import RequestHistory


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


@dataclass(frozen=True)
class RecordedBlock:
    """What the draft proposed at a place of a text.

    Args:
        place (`int`): Tokens of the text when it was drafted, the anchor included.
        token_ids (`tuple[int, ...]`): Its drafts.
        confidence (`tuple[float, ...]`): c_k of each.
        num_accepted (`int`): Leading drafts that the target accepted, or would have.
    """

    place: int
    token_ids: tuple[int, ...]
    confidence: tuple[float, ...]
    num_accepted: int


@dataclass(frozen=True)
class RecordedText:
    """A text of the target, and the blocks that the draft proposed along it.

    Args:
        token_ids (`tuple[int, ...]`): Prompt and answer.
        num_prompt_tokens (`int`): Tokens before the first round, the anchor included; at least 1.
        blocks (`tuple[RecordedBlock, ...]`): By ascending place, the first after `num_prompt_tokens` tokens.
    """

    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    blocks: tuple[RecordedBlock, ...]

    @classmethod
    def from_rounds(cls, rounds: Sequence[RoundRecord]) -> RecordedText:
        """The text of an answer's rounds that sent full blocks; of the prompt its last token only.

        Args:
            rounds (`Sequence[RoundRecord]`): The rounds, in order, see [`full_blocks`]; at least one.

        Returns:
            [`RecordedText`]

        Raises:
            ValueError: If a round does not say what would have become of every shorter block.
        """
        ids, blocks = [rounds[0].anchor_id], []
        for index, record in enumerate(rounds):
            refusal = _refusal(record)
            if refusal is not None:
                raise ValueError(f"Every record must be of a full block; record {index} {refusal}")
            blocks.append(RecordedBlock(len(ids), record.token_ids, record.confidence, record.num_accepted))
            bonus = record.bonus_token if record.bonus_token is not None else -1
            ids += [*record.token_ids[: record.num_accepted], bonus]
        return cls(tuple(ids), 1, tuple(blocks))


def replay(
    texts: Sequence[RecordedText],
    curve: SPSCurve,
    policy: DraftingPolicy | None,
    num_requests: int = 1,
    max_new_tokens: float = math.inf,
    request_s: float = 0.0,
    name: str | None = None,
) -> LoadReport:
    """Replay recorded texts, `num_requests` at a time; the others take the places of those that end.

    Args:
        texts (`Sequence[RecordedText]`): Recorded texts, their blocks of one draft and never cut.
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
        ValueError: If there are no blocks, a block has another number of slots than the first or not as many
            confidences, or `num_requests` is below 1.

    Example:
        >>> record = RoundRecord(1, (5, 6), (0.9, 0.8), num_accepted=1, bonus_token=7, num_committed=2)
        >>> policy = DraftingPolicy(FixedScheduler(2), num_slots=2)
        >>> text = RecordedText.from_rounds([record, record])
        >>> report = replay([text] * 4, SPSCurve.linear(0.1), policy, num_requests=4)
        >>> report.num_tokens, report.num_verified, report.seconds
        (16, 24, 4.2)
    """
    num_slots = _checked_slots(texts, num_requests)
    new_history = policy.new_history if policy else lambda: RequestHistory(AcceptanceHistory(num_slots))
    waiting = [_Replayed(text, max_new_tokens, new_history()) for text in texts if text.blocks]
    running, waiting = waiting[:num_requests], waiting[num_requests:]
    stats, seconds = AcceptanceStats(), 0.0
    while running:
        others_wait = bool(waiting) or math.isinf(max_new_tokens)
        tokens_left = None if others_wait else [int(text.num_left) for text in running]
        records = _round(policy, running, tokens_left, num_slots)
        num_tokens = len(running) + sum(record.verify_length for record in records)
        verify_s = curve.verify(num_tokens) + request_s * len(running)
        num_drafting = sum(record.drafted for record in records)
        draft_s = curve.for_requests(num_drafting).draft_s if num_drafting else 0.0
        shares = [part / len(running) for part in (draft_s, verify_s)]
        records = [replace(own, draft_s=shares[0], verify_s=shares[1], round_s=sum(shares)) for own in records]
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


class _Replayed:
    """A request that is replayed."""

    def __init__(self, text: RecordedText, max_tokens: float, history: RequestHistory):
        self.text, self.history = text, history
        self.places = [block.place for block in text.blocks]
        self.place = self.start = text.num_prompt_tokens
        self.limit = self.start + max_tokens
        self.end = min(len(text.token_ids), self.limit)
        if history.copies is not None:
            history.copies.read(text.token_ids[: self.place])

    @property
    def block(self) -> RecordedBlock:
        """The block recorded where the text stands, or last before it."""
        return self.text.blocks[bisect_right(self.places, self.place) - 1]

    @property
    def num_left(self) -> float:
        """Tokens that the text may still grow by; where it ends by itself is not known ahead."""
        return self.limit - self.place

    @property
    def has_ended(self) -> bool:
        return self.place >= self.end

    def num_right(self, copied: Sequence[int]) -> int:
        """Leading tokens of a copy that the text goes on with."""
        actual = self.text.token_ids[self.place : self.place + len(copied)]
        pairs = enumerate(zip(copied, actual, strict=False))
        return next((i for i, (own, right) in pairs if own != right), min(len(copied), len(actual)))

    def advance(self, num_sent: int, copied: Sequence[int], is_drafted: bool) -> RoundRecord:
        """Accept what was accepted of so many drafts of the block and so many copied tokens after them."""
        block, anchor_id = self.block, self.text.token_ids[self.place - 1]
        num_accepted = min(block.num_accepted, num_sent)
        if num_accepted == num_sent and copied:
            everything = [*block.token_ids[:num_sent], *copied]
            num_accepted = max(num_sent, self.num_right(everything)) if num_sent else self.num_right(copied)
        num_accepted = min(num_accepted, int(self.end - self.place) - 1)
        new_ids = self.text.token_ids[self.place : self.place + num_accepted + 1]
        self.place += num_accepted + 1
        if self.history.copies is not None:
            self.history.copies.read(new_ids)
        return RoundRecord(
            anchor_id,
            (*block.token_ids[:num_sent], *copied),
            block.confidence if is_drafted else (),
            num_accepted,
            bonus_token=0,
            num_committed=num_accepted + 1,
            drafted=is_drafted,
            num_copied=len(copied),
        )


def _round(
    policy: DraftingPolicy | None, texts: Sequence[_Replayed], tokens_left: Sequence[int] | None, num_slots: int
) -> list[RoundRecord]:
    """The rounds of all texts, without their seconds."""
    if policy is None:
        return [text.advance(0, (), is_drafted=False) for text in texts]
    histories = [text.history for text in texts]
    most = [int(min(text.num_left - 1, 2**31)) for text in texts]
    plan = policy.plan(histories, most, [min(limit, num_slots) for limit in most], tokens_left)
    lengths = _block_lengths(policy, texts, plan, tokens_left, num_slots)
    blocks = [text.block.token_ids[:length] for text, length in zip(texts, lengths, strict=True)]
    copied = policy.copied_tokens(histories, plan, blocks)
    parts = zip(texts, lengths, copied, plan.drafts_block, strict=True)
    return [text.advance(length, tokens, drafts) for text, length, tokens, drafts in parts]


def _block_lengths(
    policy: DraftingPolicy,
    texts: Sequence[_Replayed],
    plan: DraftPlan,
    tokens_left: Sequence[int] | None,
    num_slots: int,
) -> list[int]:
    """Drafts that each text sends of its block; 0 without one."""
    lengths, rows = [0] * len(texts), [row for row, drafts in enumerate(plan.drafts_block) if drafts]
    if rows:
        drafting = [texts[row] for row in rows]
        limits = torch.tensor([min(text.num_left - 1, len(text.block.token_ids)) for text in drafting]).long()
        confidence = torch.zeros(len(rows), num_slots)
        for own, text in zip(confidence, drafting, strict=True):
            own[: len(text.block.confidence)] = torch.tensor(text.block.confidence)
        confidence = confidence * (torch.arange(num_slots) < limits[:, None])
        histories = [text.history for text in drafting]
        left = [tokens_left[row] for row in rows] if tokens_left is not None else None
        chosen = torch.minimum(policy.verify_lengths(histories, confidence, left, plan), limits)
        for row, length in zip(rows, chosen.tolist(), strict=True):
            lengths[row] = length
    return lengths


def _checked_slots(texts: Sequence[RecordedText], num_requests: int) -> int:
    """The number of slots of the recorded blocks."""
    if num_requests < 1:
        raise ValueError(f"`num_requests` must be >= 1, got {num_requests}.")
    blocks = [block for text in texts for block in text.blocks]
    if not blocks:
        raise ValueError("`texts` must hold at least one block, got none. Record a text with every slot sent.")
    counts = {len(block.confidence) for block in blocks}
    if len(counts) > 1 or 0 in counts:
        raise ValueError(
            f"All blocks must have a confidence for each slot, and as many slots, got {sorted(counts)}. Take the "
            "recordings of one draft with a confidence head."
        )
    return counts.pop()


def _refusal(record: RoundRecord) -> str | None:
    """The reason why a record does not determine the outcome of every shorter block."""
    if not record.confidence:
        return "has no confidences. Record rounds that draft, with a draft that has a confidence head."
    if record.verify_length < len(record.confidence):
        return (
            f"sent {record.verify_length} of {len(record.confidence)} drafts, and what became of the others is not "
            'known. Record with the schedule "constant" and without a threshold.'
        )
    if record.num_copied:
        return "goes on with copied drafts. Record with `prompt_lookup_num_tokens` 0."
    if record.bonus_token is None and record.num_accepted < record.verify_length:
        return (
            f"is of a text that ended at draft {record.num_accepted}, before the next was judged. Take the "
            "`full_blocks`."
        )
    return None
