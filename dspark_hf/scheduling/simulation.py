# SPDX-License-Identifier: Apache-2.0
"""Simulates a scheduler under load: recorded rounds of many requests, replayed against a round-time curve. Imports no
model code.

Legend: R requests at a time, g slots per block, B tokens in a verification pass, T recorded rounds.

A recording contains the outcome of every slot of a block, so it also determines that of any shorter block. Three
things are approximate; consider them when reading a result:

- A replayed request continues with its next recorded round, whatever the scheduler let it commit. A live request that
  committed fewer tokens would draft from an earlier position, usually one where the draft does well.
- The time of a round depends on B only. Longer texts, and more caches to read for more requests, cost nothing.
- Drafting takes `SPSCurve.draft_s`, however many requests draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from ..common.records import RoundRecord
from .acceptance import AcceptanceHistory
from .curve import SPSCurve
from .rules import RoundOutlook, Scheduler, mean_survival


PLAIN = "plain"


@dataclass(frozen=True)
class LoadReport:
    """The result of one policy with R requests.

    Args:
        policy (`str`): Name of the policy.
        num_requests (`int`): R.
        num_rounds (`int`): Rounds that were replayed; every request takes part in each.
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
        return self.num_tokens / (self.num_rounds * self.num_requests)

    @property
    def verify_length(self) -> float:
        """`float`: Drafts sent per request and round."""
        return self.num_verified / (self.num_rounds * self.num_requests) - 1

    @property
    def verified_per_round(self) -> float:
        """`float`: Mean B."""
        return self.num_verified / self.num_rounds

    @property
    def verified_per_token(self) -> float:
        """`float`: Tokens verified per token committed; 1 without drafts."""
        return self.num_verified / self.num_tokens


def simulate_load(
    rounds: Sequence[Sequence[RoundRecord]],
    curve: SPSCurve,
    scheduler: Scheduler | None,
    num_requests: int,
    num_rounds: int | None = None,
    policy: str | None = None,
) -> LoadReport:
    """Replay recorded rounds of `num_requests` concurrent requests under one scheduler.

    In each round the scheduler sees the confidences of the R current records, and the acceptance of each slot in the
    rounds so far. A request commits `min(num_accepted, verify_length) + 1` tokens, and the round takes
    `curve.round_s(R + drafts sent)` seconds. The recordings form one ring, in order; the requests start at equal
    distances on it, and each moves on by one record per round. If there are more requests than records,
    some replay the same records in step, so record more than you simulate. The module lists what is approximate.

    Args:
        rounds (`Sequence[Sequence[RoundRecord]]`):
            The rounds of each recorded text, in order. Every record must be of a full block, see [`full_blocks`].
        curve (`SPSCurve`): Round times, measured or given.
        scheduler (`Scheduler`, *optional*):
            The policy, fresh (it may remember rounds). `None` decodes without drafts, in `curve.verify(R)` seconds.
        num_requests (`int`): R.
        num_rounds (`int`, *optional*): Rounds to replay; T without it, in which every request meets every record once.
        policy (`str`, *optional*): Name for the report; the scheduler's class without it.

    Returns:
        [`LoadReport`]

    Raises:
        ValueError: If there are no records, a record is not of a full block or has another number of slots than the
            first, or a count is below 1.

    Example:
        >>> record = RoundRecord(1, (5, 6), (0.9, 0.8), num_accepted=1, bonus_token=7, num_committed=2)
        >>> report = simulate_load([[record]], SPSCurve.linear(0.1), FixedScheduler(2), num_requests=4)
        >>> report.num_tokens, report.num_verified, report.seconds
        (8, 12, 2.1)
    """
    confidence, num_accepted = _recording(rounds)
    num_records = len(num_accepted)
    num_rounds = num_records if num_rounds is None else num_rounds
    for name, value in (("num_requests", num_requests), ("num_rounds", num_rounds)):
        if value < 1:
            raise ValueError(f"`{name}` must be >= 1, got {value}.")
    if scheduler is None:
        seconds, count = num_rounds * curve.verify(num_requests), num_rounds * num_requests
        return LoadReport(policy or PLAIN, num_requests, num_rounds, count, count, seconds)
    positions = torch.arange(num_requests) * num_records // num_requests
    acceptance, num_tokens, num_verified, seconds = _SlotAcceptance(confidence.shape[1]), 0, 0, 0.0
    for _ in range(num_rounds):
        lengths = scheduler.verify_lengths(confidence[positions], RoundOutlook(curve, acceptance.survival()))
        accepted = torch.minimum(num_accepted[positions], lengths)
        acceptance.observe(accepted, lengths)
        batch_tokens = num_requests + int(lengths.sum())
        num_tokens += num_requests + int(accepted.sum())
        num_verified += batch_tokens
        seconds += curve.round_s(batch_tokens)
        positions = (positions + 1) % num_records
    return LoadReport(policy or type(scheduler).__name__, num_requests, num_rounds, num_tokens, num_verified, seconds)


def sweep(
    rounds: Sequence[Sequence[RoundRecord]],
    curve: SPSCurve,
    schedulers: dict[str, Callable[[], Scheduler | None]],
    request_counts: Sequence[int],
    num_rounds: int | None = None,
) -> list[LoadReport]:  # policy by policy, each in the order of `request_counts`
    """[`simulate_load`] for every policy and every number of requests."""
    return [
        simulate_load(rounds, curve, make_scheduler(), num_requests, num_rounds, policy)
        for policy, make_scheduler in schedulers.items()
        for num_requests in request_counts
    ]


def full_blocks(records: Iterable[RoundRecord], num_slots: int) -> list[RoundRecord]:  # in order
    """Drop rounds that cannot be replayed: blocks cut short, and rounds that did not judge every slot they reached."""
    return [record for record in records if record.is_full_block(num_slots)]


class _SlotAcceptance:
    """Acceptance of each slot given those before it, over all rounds that sent it. A replay mixes its texts, so there
    is no drift that would need a decaying mean."""

    def __init__(self, num_slots: int) -> None:
        self._slots = torch.arange(num_slots)
        self._reached, self._accepted = torch.zeros(2, num_slots)

    def observe(self, accepted: torch.Tensor, lengths: torch.Tensor) -> None:
        self._reached += (torch.minimum(accepted + 1, lengths)[:, None] > self._slots).sum(dim=0)
        self._accepted += (accepted[:, None] > self._slots).sum(dim=0)

    def survival(self) -> tuple[float, ...]:
        weight = AcceptanceHistory.PRIOR_ACCEPTANCE_ROUNDS
        rates = (self._accepted + weight * AcceptanceHistory.PRIOR_ACCEPTANCE) / (self._reached + weight)
        return mean_survival(rates.tolist())


def _recording(rounds: Sequence[Sequence[RoundRecord]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Confidences `(T, g)` and accepted drafts `(T,)`."""
    records = [record for text in rounds for record in text]
    if not records:
        raise ValueError("`rounds` must hold at least one record, got none. Record a text with every slot sent.")
    for index, record in enumerate(records):
        refusal = _refusal(record, records[0].verify_length)
        if refusal is not None:
            raise ValueError(f"Every record must be of a full block; record {index} {refusal}")
    confidence = torch.tensor([record.confidence for record in records], dtype=torch.float32)
    return confidence, torch.tensor([record.num_accepted for record in records])


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
