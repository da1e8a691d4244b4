# SPDX-License-Identifier: Apache-2.0
"""Warns about a draft whose blocks are almost never accepted; copies are not its own."""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.utils import logging

from ..common.records import AcceptanceStats
from ..drafts.target_probe import findings_of


logger = logging.get_logger("transformers.dspark_hf.decoding.hopeless")

HOPELESS_ROUNDS, HOPELESS_LENGTH = 32, 1.05  # where copies take what is easy, a good draft may fail many times


def warn_if_hopeless(target: PreTrainedModel, draft: PreTrainedModel, stats: AcceptanceStats) -> None:
    """Warn if the drafts of this call were almost never accepted; calls with too few rounds are counted together.

    The counts of such short calls stay with the target. They serve the warning only: nothing that is drafted depends
    on other calls.
    """
    sent = [record for record in stats.rounds if record.num_drawn]
    calls, rounds, tokens = 1, len(sent), sum(1 + min(record.num_accepted, record.num_drawn) for record in sent)
    short_calls, key = findings_of(target), ("short calls", id(draft))
    if rounds < HOPELESS_ROUNDS:
        earlier = short_calls.pop(key, (0, 0, 0))
        calls, rounds, tokens = (own + more for own, more in zip((calls, rounds, tokens), earlier, strict=True))
        if rounds < HOPELESS_ROUNDS:
            short_calls[key] = (calls, rounds, tokens)
            return
    if tokens < HOPELESS_LENGTH * rounds:
        where = "this call" if calls == 1 else f"the last {calls} calls"
        logger.warning(
            f"The draft is almost never accepted: {rounds} rounds of {where} sent drafts and brought "
            f"{tokens / rounds:.2f} tokens each, where plain generation brings 1. The target still decides every "
            "token, but nothing is gained. Likely causes: a draft made for another target or another chat template or "
            "thinking mode, or a checkpoint whose layer ids or slot convention were written differently. "
            "`dspark-hf doctor` looks for the reason."
        )
