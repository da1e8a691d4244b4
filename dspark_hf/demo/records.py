# SPDX-License-Identifier: Apache-2.0
"""Frozen snapshots of a comparison, made by the session and shown by the page."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.records import AcceptanceStats, RoundRecord
from ..evaluation.compare import first_difference
from .settings import RunSettings


ACCEPTED, COPIED, CORRECTION, BONUS, PLAIN = "accepted", "copied", "correction", "bonus", "plain"
ORIGINS = (ACCEPTED, COPIED, CORRECTION, BONUS, PLAIN)
REJECTED, UNJUDGED = "rejected", "not reached"


@dataclass(frozen=True)
class Token:
    """One token of a text and where it came from.

    `origin`: one of `ORIGINS`: an accepted draft of the block, an accepted copy from the text, the target's correction
    of a rejected draft, the target's bonus after drafts accepted whole, or a step of the target alone.
    """

    token_id: int
    text: str  # what it adds to the text; empty where it holds only part of a character
    origin: str = PLAIN
    slot: int | None = None  # slot of an accepted draft, or of the draft that was corrected
    confidence: float | None = None  # the draft's confidence in that slot, in [0, 1]
    round_index: int | None = None  # the round that committed it; None for the prefill and without a draft


@dataclass(frozen=True)
class Side:
    """One of the two texts."""

    tokens: tuple[Token, ...] = ()  # new tokens
    seconds: float = 0.0  # wall clock so far, prefill included
    rounds: tuple[RoundRecord, ...] = ()  # rounds so far; empty without a draft
    finished: bool = False  # whether `generate` has returned

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of the new tokens."""
        return tuple(token.token_id for token in self.tokens)

    @property
    def text(self) -> str:
        """The text, special tokens included."""
        return "".join(token.text for token in self.tokens)

    @property
    def tokens_per_s(self) -> float | None:
        """New tokens per second; `None` before the first."""
        return len(self.tokens) / self.seconds if self.tokens else None

    @property
    def stats(self) -> AcceptanceStats:
        """Figures of the rounds."""
        return AcceptanceStats(list(self.rounds))


@dataclass(frozen=True)
class Progress:
    """A comparison at one moment."""

    settings: RunSettings  # what was asked for
    plain: Side | None = None  # without the draft; None before its turn
    dspark: Side | None = None  # with it; None before its turn
    stopped: bool = False  # whether the visitor ended it

    @property
    def phase(self) -> str:
        """`"waiting"`, `"plain"`, `"dspark"`, `"stopped"` or `"done"`."""
        if self.stopped:
            return "stopped"
        if self.dspark is not None:
            return "done" if self.dspark.finished else "dspark"
        return "plain" if self.plain is not None else "waiting"

    @property
    def speedup(self) -> float | None:
        """DSpark's tokens per second over plain generation's, so far."""
        plain, dspark = (side.tokens_per_s if side is not None else None for side in (self.plain, self.dspark))
        return dspark / plain if plain and dspark else None

    @property
    def first_difference(self) -> int | None:
        """Index of the first token that differs, in the part that both sides have written."""
        if self.plain is None or self.dspark is None:
            return None
        plain, dspark = self.plain.token_ids, self.dspark.token_ids
        if self.phase != "done":
            length = min(len(plain), len(dspark))
            plain, dspark = plain[:length], dspark[:length]
        return first_difference(plain, dspark)

    @property
    def identical(self) -> bool:
        """Whether both texts are complete and the same, token by token."""
        return self.phase == "done" and self.first_difference is None


def tokens_of_round(
    token_ids: tuple[int, ...], texts: tuple[str, ...], record: RoundRecord | None, round_index: int | None
) -> tuple[Token, ...]:
    """Name the origin of the tokens that one step committed."""
    if record is None:
        return tuple(Token(token_id, text) for token_id, text in zip(token_ids, texts, strict=True))
    tokens = []
    for slot, (token_id, text) in enumerate(zip(token_ids, texts, strict=True)):
        confidence = record.confidence[slot] if slot < min(record.num_drawn, len(record.confidence)) else None
        if slot < record.num_accepted:
            origin = ACCEPTED if slot < record.num_drawn else COPIED
            tokens.append(Token(token_id, text, origin, slot, confidence, round_index))
        elif slot < record.verify_length:
            tokens.append(Token(token_id, text, CORRECTION, slot, confidence, round_index))
        else:
            origin = BONUS if record.verify_length else PLAIN
            tokens.append(Token(token_id, text, origin, round_index=round_index))
    return tuple(tokens)


def draft_outcome(record: RoundRecord, slot: int) -> str:
    """The outcome of one draft of a round."""
    if slot < record.num_accepted:
        return ACCEPTED
    return REJECTED if slot == record.num_accepted and record.bonus_token is not None else UNJUDGED
