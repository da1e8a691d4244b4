# SPDX-License-Identifier: Apache-2.0
"""Records of decoding rounds and the figures computed from them. Imports the standard library only.

Every mean pools over rounds ((sum, count) pairs), never over per-prompt means. Slots are 0-based.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RoundRecord:
    """One decoding round: drafting, one verification pass of the target, commitment.

    Args:
        anchor_id (`int`): Last committed token before the round.
        token_ids (`tuple[int, ...]`): Drafts sent to verification.
        confidence (`tuple[float, ...]`):
            c_k of every slot that was drafted, the ones cut before verification included; in [0, 1]; empty without a
            confidence head.
        num_accepted (`int`): Leading drafts that the target accepted.
        bonus_token (`int`, *optional*): The token the target added after them; `None` where the text ended before it
            was drawn.
        num_committed (`int`): Tokens appended to the text: `num_accepted + 1`, or fewer where generation ended.
        draft_s (`float`): Seconds spent drafting.
        verify_s (`float`): Seconds of the target's forward pass.
        round_s (`float`): Seconds of the whole round.
        drafted (`bool`): Whether a block was drafted; `False` where drafts were copied, or drafting does not pay off.
        request (`int`): Row of the batch. The seconds of a batch's round are shared equally among its rows.
        num_copied (`int`): Drafts at the end of `token_ids` that were copied from the text.
    """

    anchor_id: int
    token_ids: tuple[int, ...]
    confidence: tuple[float, ...]
    num_accepted: int
    bonus_token: int | None
    num_committed: int
    draft_s: float = 0.0
    verify_s: float = 0.0
    round_s: float = 0.0
    drafted: bool = True
    request: int = 0
    num_copied: int = 0

    @property
    def verify_length(self) -> int:
        """`int`: Drafts sent to verification (l_r)."""
        return len(self.token_ids)

    @property
    def num_drawn(self) -> int:
        """`int`: Drafts of the block that were sent; those copied from the text come after them."""
        return self.verify_length - self.num_copied

    @property
    def source(self) -> str:
        """`str`: Where the drafts came from: `"block"` or `"copy"`, `"both"` for a block that a copy continues, or
        `"none"` if the round did not draft."""
        if self.drafted:
            return "both" if self.num_copied else "block"
        return "copy" if self.num_copied else "none"

    @property
    def accepted_length(self) -> int:
        """`int`: Tokens of the round, bonus token included (tau)."""
        return self.num_accepted + 1

    def is_full_block(self, num_slots: int) -> bool:
        """Whether the round determines the outcome of every shorter block.

        Every slot was sent and has a confidence, and the text did not end before the last of them was judged. Without
        a bonus token it ended after the last draft counted as accepted.

        Args:
            num_slots (`int`): g.

        Returns:
            `bool`
        """
        is_judged = self.bonus_token is not None or self.num_accepted == num_slots
        is_whole = self.verify_length == len(self.confidence) == num_slots
        return is_judged and is_whole and not self.num_copied

    @property
    def truncated(self) -> bool:
        """`bool`: Whether generation ended inside the round (EOS, length, ...), so that tokens were dropped."""
        return self.num_committed < self.accepted_length


@dataclass
class AcceptanceStats:
    """Pooled figures over rounds, of one `generate` call or of many.

    The prefill, which yields the first token without drafts, is not a round.

    Args:
        rounds (`list[RoundRecord]`, *optional*): The rounds, in order.

    Example:
        >>> stats = AcceptanceStats([RoundRecord(1, (5, 6), (0.9, 0.8), 1, 7, 2), RoundRecord(7, (), (), 0, 4, 1)])
        >>> stats.accepted_length, stats.acceptance_rate, stats.conditional_acceptance
        (1.5, 0.5, [1.0, 0.0])
    """

    rounds: list[RoundRecord] = field(default_factory=list)

    def add(self, record: RoundRecord) -> None:
        """Append one round.

        Args:
            record (`RoundRecord`): The finished round.
        """
        self.rounds.append(record)

    @property
    def num_rounds(self) -> int:
        """`int`: Rounds recorded."""
        return len(self.rounds)

    @property
    def num_committed(self) -> int:
        """`int`: Tokens appended to the text by these rounds."""
        return sum(record.num_committed for record in self.rounds)

    @property
    def num_drafted(self) -> int:
        """`int`: Drafts sent to verification."""
        return sum(record.verify_length for record in self.rounds)

    @property
    def num_verified(self) -> int:
        """`int`: Tokens that the target's forward passes carried: drafts plus one anchor per round."""
        return self.num_drafted + self.num_rounds

    @property
    def num_skipped(self) -> int:
        """`int`: Rounds without drafts, since none would have paid off."""
        return sum(record.source == "none" for record in self.rounds)

    def by_source(self) -> dict[str, AcceptanceStats]:
        """The rounds of each source of drafts that was used.

        Returns:
            `dict[str, AcceptanceStats]`: see [`RoundRecord.source`] for the keys.
        """
        found: dict[str, AcceptanceStats] = {}
        for record in self.rounds:
            found.setdefault(record.source, AcceptanceStats()).add(record)
        return found

    @property
    def num_copied(self) -> int:
        """`int`: Drafts sent to verification that were copied from the text."""
        return sum(record.num_copied for record in self.rounds)

    @property
    def num_copied_accepted(self) -> int:
        """`int`: Copied drafts that the target accepted."""
        return sum(max(0, record.num_accepted - record.num_drawn) for record in self.rounds)

    @property
    def accepted_length(self) -> float:
        """`float`: tau, tokens committed per round, bonus token included (paper, footnote 3); NaN without rounds."""
        return self.num_committed / self.num_rounds if self.rounds else float("nan")

    @property
    def acceptance_rate(self) -> float:
        """`float`: Accepted drafts over drafts sent to verification, in [0, 1]; NaN if nothing was drafted."""
        accepted = sum(record.num_accepted for record in self.rounds)
        return accepted / self.num_drafted if self.num_drafted else float("nan")

    @property
    def conditional_acceptance(self) -> list[float]:
        """`list[float]`: P(slot k accepted | all before it were), over the rounds that sent slot k; NaN if none."""
        return [accepted / reached if reached else float("nan") for reached, accepted in self.slot_counts]

    @property
    def slot_counts(self) -> list[tuple[int, int]]:
        """`list[tuple[int, int]]`: Per slot of a block, rounds that sent it and accepted all before it, and those that
        accepted it as well. Copied drafts are no slots."""
        counts = []
        for slot in range(max((record.num_drawn for record in self.rounds), default=0)):
            reached = [r for r in self.rounds if r.num_drawn > slot and r.num_accepted >= slot]
            counts.append((len(reached), sum(r.num_accepted > slot for r in reached)))
        return counts

    @property
    def mean_verify_length(self) -> float:
        """`float`: Drafts sent to verification per round; NaN without rounds."""
        return self.num_drafted / self.num_rounds if self.rounds else float("nan")

    @property
    def verified_per_token(self) -> float:
        """`float`: Tokens that the target's forward passes carried, per token committed; NaN without any."""
        return self.num_verified / self.num_committed if self.num_committed else float("nan")

    @property
    def draft_s(self) -> float:
        """`float`: Seconds spent drafting."""
        return sum(record.draft_s for record in self.rounds)

    @property
    def verify_s(self) -> float:
        """`float`: Seconds of the target's forward passes."""
        return sum(record.verify_s for record in self.rounds)

    @property
    def round_s(self) -> float:
        """`float`: Seconds of all rounds."""
        return sum(record.round_s for record in self.rounds)

    @property
    def loop_efficiency(self) -> float:
        """`float`: (drafting + target forward) / round seconds, in [0, 1]; NaN without timed rounds."""
        return (self.draft_s + self.verify_s) / self.round_s if self.round_s > 0 else float("nan")


_COLLECTORS: contextvars.ContextVar[tuple[AcceptanceStats, ...]] = contextvars.ContextVar("collectors", default=())


@contextlib.contextmanager
def collect_rounds() -> Iterator[AcceptanceStats]:
    """Collect the rounds of every DSpark `generate` call made inside the `with` block, by this thread or task.

    Returns:
        Context manager yielding [`AcceptanceStats`], which grows while the calls run.

    Example:
        >>> with collect_rounds() as stats:  # doctest: +SKIP
        ...     target.generate(**inputs, assistant_model=draft)
        >>> stats.accepted_length  # doctest: +SKIP
        2.9
    """
    stats = AcceptanceStats()
    token = _COLLECTORS.set((*_COLLECTORS.get(), stats))
    try:
        yield stats
    finally:
        _COLLECTORS.reset(token)


def active_collectors() -> tuple[AcceptanceStats, ...]:
    """The collectors of the `with collect_rounds()` blocks around the caller."""
    return _COLLECTORS.get()
