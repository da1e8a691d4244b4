# SPDX-License-Identifier: Apache-2.0
"""Chooses how many drafts each request sends, and whether to draft at all, from numbers only, without a model."""

from .curve import SPSCurve
from .policy import CopyOptions, DraftingPolicy
from .rules import (
    CapacityScheduler,
    FixedScheduler,
    LookaheadScheduler,
    PrefixScheduler,
    RoundOutlook,
    Scheduler,
    ThresholdScheduler,
    all_rules,
    mean_survival,
    prefix_survival,
)
from .weights import batch_speedup_share, request_weights


__all__ = [
    "CapacityScheduler",
    "CopyOptions",
    "DraftingPolicy",
    "FixedScheduler",
    "LookaheadScheduler",
    "PrefixScheduler",
    "RoundOutlook",
    "SPSCurve",
    "Scheduler",
    "ThresholdScheduler",
    "all_rules",
    "batch_speedup_share",
    "mean_survival",
    "prefix_survival",
    "request_weights",
]
