# SPDX-License-Identifier: Apache-2.0
"""What the drafts of one request were worth so far. Imports no model code."""

from __future__ import annotations

from ..common.records import RoundRecord
from .acceptance import AcceptanceHistory
from .copying import CopySource


class RequestHistory:
    """The past of a request, by the source of its drafts: blocks by slot, copies by the length of the match."""

    def __init__(self, blocks: AcceptanceHistory, copies: CopySource | None = None):
        self.blocks, self.copies = blocks, copies  # without copies where copying is off
        self._rounds = AcceptanceHistory.PRIOR_ROUNDS
        self._tokens = self._rounds * (1 + blocks.conditional_acceptance[0])

    @property
    def tokens_per_round(self) -> float:
        """Recent mean of the tokens of a round with drafts."""
        return self._tokens / self._rounds

    def observe(self, record: RoundRecord) -> None:
        """Learn from a round."""
        if record.source != "none":
            self._rounds = AcceptanceHistory.DECAY * self._rounds + 1
            self._tokens = AcceptanceHistory.DECAY * self._tokens + record.accepted_length
        if record.drafted:
            self.blocks.observe(record)
