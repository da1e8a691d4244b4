# SPDX-License-Identifier: Apache-2.0
"""Selects which logits processors also run on the draft.

A processor of the target's runs once per committed token, on the very prefix plain generation would give it, so that
stateful ones (watermarks, guidance, grammars) behave as in plain generation. On the draft they affect acceptance only,
so only those known to be pure functions of (ids, scores) are mirrored there.
"""

from __future__ import annotations

from transformers import LogitsProcessorList
from transformers.generation import logits_process


# They read the scores of a row and nothing else: all rows of a verification go through in one call.
_ROWWISE_NAMES = (
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TopHLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
)
_ROWWISE = tuple(getattr(logits_process, name) for name in _ROWWISE_NAMES if hasattr(logits_process, name))
_STATEFUL = (
    logits_process.SynthIDTextWatermarkLogitsProcessor,
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor,
)


def are_rowwise(processors: LogitsProcessorList) -> bool:
    """Whether every processor reads nothing but the scores of its own row."""
    return all(type(processor) in _ROWWISE for processor in processors)


def mirrored(processors: LogitsProcessorList) -> LogitsProcessorList:  # order kept
    """The processors that also shape the draft's distribution: transformers' own, without the stateful ones."""
    return LogitsProcessorList(
        processor
        for processor in processors
        if type(processor).__module__ == logits_process.__name__ and not isinstance(processor, _STATEFUL)
    )
