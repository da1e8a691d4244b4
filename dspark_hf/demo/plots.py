# SPDX-License-Identifier: Apache-2.0
"""Rounds as the tables that the plots draw."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from ..common.records import AcceptanceStats, RoundRecord
from .records import ACCEPTED, REJECTED, UNJUDGED, draft_outcome


DRAFTS, COPIES, OWN = "accepted drafts", "accepted copies", "target's own token"
NUM_BINS = 5


def tokens_per_round(rounds: Sequence[RoundRecord]) -> pd.DataFrame:  # columns `round` (from 1), `tokens` and `origin`
    """Tokens that each round committed, by origin: their sum is the round's accepted length."""
    rows = []
    for number, record in enumerate(rounds, start=1):
        accepted = min(record.num_accepted, record.num_committed)
        drawn = min(accepted, record.num_drawn)
        counts = {DRAFTS: drawn, COPIES: accepted - drawn, OWN: record.num_committed - accepted}
        rows += [(number, count, origin) for origin, count in counts.items()]
    return pd.DataFrame(rows, columns=["round", "tokens", "origin"])


def confidence_outcomes(rounds: Sequence[RoundRecord]) -> pd.DataFrame:
    """Number of drafts of each confidence that the target accepted; only drafts that it judged count."""
    counts = {(low, outcome): 0 for low in range(NUM_BINS) for outcome in (ACCEPTED, REJECTED)}
    for record in rounds:
        for slot, confidence in enumerate(record.confidence[: record.num_drawn]):
            outcome = draft_outcome(record, slot)
            if outcome == UNJUDGED:
                continue
            counts[min(int(confidence * NUM_BINS), NUM_BINS - 1), outcome] += 1
    width = 100 // NUM_BINS
    rows = [(f"{low * width}–{low * width + width} %", count, outcome) for (low, outcome), count in counts.items()]
    return pd.DataFrame(rows, columns=["confidence", "drafts", "outcome"])


def acceptance_by_slot(rounds: Sequence[RoundRecord]) -> pd.DataFrame:
    """Acceptance of each slot given that all slots before it were accepted."""
    rows = [
        (f"slot {slot}", 100 * accepted / reached, reached)
        for slot, (reached, accepted) in enumerate(AcceptanceStats(list(rounds)).slot_counts)
        if reached
    ]
    return pd.DataFrame(rows, columns=["slot", "accepted", "rounds"])
