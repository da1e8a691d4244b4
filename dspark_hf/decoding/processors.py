# SPDX-License-Identifier: Apache-2.0
"""Selects which logits processors also run on the draft.

A processor of the target's runs once per committed token, on the very prefix plain generation would give it, so that
stateful ones (watermarks, guidance, grammars) behave as in plain generation. On the draft they affect acceptance only,
so only those known to be pure functions of (ids, scores) are mirrored there.
"""

from __future__ import annotations

import torch
from transformers import LogitsProcessorList
from transformers.generation import TopKLogitsWarper, logits_process


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

# It looks for a fixed number of tokens, which there must be.
_WIDE = tuple(getattr(logits_process, name) for name in ("TopHLogitsWarper",) if hasattr(logits_process, name))
# Tokens taken beside the top k, since all tokens that equal the last of them stay.
_TIES = 12


def are_rowwise(processors: LogitsProcessorList) -> bool:
    """Whether every processor reads nothing but the scores of its own row."""
    return all(type(processor) in _ROWWISE for processor in processors)


def best_tokens(
    processors: LogitsProcessorList,  # rowwise ones
    input_ids: torch.Tensor,  # [1, s], a text, which they do not read
    scores: torch.Tensor,  # [N, V]
) -> tuple[torch.Tensor, torch.Tensor] | None:  # scores and ids of tokens, [N, n] each; None without a top k
    """What the processors leave of every row, if one of them leaves the best k tokens: the others cost no time.

    Sorting a vocabulary for top-p, and a random number for each of its tokens, take longer than many a layer.
    """
    cut = next((i for i, own in enumerate(processors) if type(own) is TopKLogitsWarper), None)
    if cut is None or any(isinstance(own, _WIDE) for own in processors[cut:]):
        return None
    scores = LogitsProcessorList(processors[:cut])(input_ids, scores)
    top_k, num = processors[cut].top_k, processors[cut].top_k + _TIES
    best = scores.topk(min(num, scores.shape[-1]))
    while best.values.shape[-1] < scores.shape[-1] and (best.values[:, top_k - 1] == best.values[:, -1]).any():
        num *= 4
        best = scores.topk(min(num, scores.shape[-1]))
    ids = best.indices.sort(dim=-1).values  # of equal scores the first ids count, as in the whole row
    return LogitsProcessorList(processors[cut:])(input_ids, scores.gather(-1, ids)), ids


def mirrored(processors: LogitsProcessorList) -> LogitsProcessorList:  # order kept
    """The processors that also shape the draft's distribution: transformers' own, without the stateful ones."""
    return LogitsProcessorList(
        processor
        for processor in processors
        if type(processor).__module__ == logits_process.__name__ and not isinstance(processor, _STATEFUL)
    )
