# SPDX-License-Identifier: Apache-2.0
"""A row's own versions of the processors and criteria that `generate` prepared for a whole batch.

Plain generation pads the prompts of a batch to one length, and rules that count tokens or keep the prompts include the
padding and the other rows. Here a row is generated as a separate text, so its rules must be those that it would have
alone.
"""

from __future__ import annotations

import copy

import torch
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation import MaxLengthCriteria, logits_process


# Attributes that hold a length counted from the start of a padded row.
_LENGTHS = {
    logits_process.MinLengthLogitsProcessor: "min_length",
    logits_process.MinNewTokensLengthLogitsProcessor: "prompt_length_to_skip",
    logits_process.ForcedEOSTokenLogitsProcessor: "max_length",
    logits_process.ExponentialDecayLengthPenalty: "regulation_start",
    logits_process.SuppressTokensAtBeginLogitsProcessor: "begin_index",
    MaxLengthCriteria: "max_length",
}


def own_rule(
    rule: LogitsProcessor | StoppingCriteria,
    prompt: torch.Tensor,  # [1, s], the row's prompt, without padding
    shift: int,  # length of the padded prompts less s
    index: int,
) -> LogitsProcessor | StoppingCriteria:
    """A row's own version of a processor or criterion; the same object if nothing in it depends on a row."""
    if isinstance(rule, logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor):
        raise NotImplementedError(
            "DSpark applies `guidance_scale` to one row at a time, got a batch. Generate one row at a time."
        )
    if isinstance(rule, logits_process.SynthIDTextWatermarkLogitsProcessor):  # it remembers the text
        return copy.deepcopy(rule)
    own = copy.copy(rule)
    if isinstance(rule, logits_process.PrefixConstrainedLogitsProcessor):
        allowed, number = rule._prefix_allowed_tokens_fn, index // rule._num_beams  # of the prompt, as plainly
        own._prefix_allowed_tokens_fn, own._num_beams = lambda _, ids: allowed(number, ids), 1
    elif isinstance(rule, logits_process.EncoderRepetitionPenaltyLogitsProcessor):
        own.encoder_input_ids = prompt
    elif isinstance(rule, logits_process.EncoderNoRepeatNGramLogitsProcessor):
        own.batch_size, own.generated_ngrams = 1, logits_process._get_ngrams(rule.ngram_size, prompt, 1)
    elif isinstance(rule, logits_process.RepetitionPenaltyLogitsProcessor):
        ignored = rule.prompt_ignore_length  # `generate` gives each row's padding, a user perhaps a number
        if isinstance(ignored, torch.Tensor):
            ignored = int(ignored[index]) if index < len(ignored) else 0
        own.prompt_ignore_length = max(0, ignored - shift) if ignored is not None else None
    elif type(rule) in _LENGTHS:
        name = _LENGTHS[type(rule)]
        setattr(own, name, getattr(own, name) - shift)
    else:
        return rule
    return own
