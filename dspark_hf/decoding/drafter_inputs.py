# SPDX-License-Identifier: Apache-2.0
"""Shared by all kinds of drafts: knobs, context of one request, vocabularies and ends of text.

Legend: d hidden, V target vocabulary, D draft vocabulary (= V unless reduced).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from .._compat import LIBRARY_DEFAULTS
from ..drafts.position_limits import PositionLimits
from .drafter import CommittedContext, ContextSpan


def chosen_knob(
    name: str, draft_config: GenerationConfig, call_config: GenerationConfig | None
) -> Any:  # None if the user set none
    """A drafting knob: the call's own value, else that of the draft's `generation_config`.

    transformers fills 20 tokens, threshold 0.4 and "constant" into every call, so in a call these values are treated
    as not set by the user; on the draft every value counts.
    """
    call_value = getattr(call_config, name, None)
    if call_value is not None and call_value != LIBRARY_DEFAULTS.get(name):
        return call_value
    return getattr(draft_config, name, None)


def end_token_ids(generation_config: GenerationConfig) -> frozenset[int]:
    """The tokens that end a text of a call."""
    eos_token_id = getattr(generation_config, "_eos_token_tensor", None)
    return frozenset(eos_token_id.flatten().tolist() if eos_token_id is not None else ())


def length_to_end(token_ids: Sequence[int], end_ids: frozenset[int]) -> int:
    """Number of drafts up to the first that ends the text, after which nothing is kept."""
    return next((slot + 1 for slot, token in enumerate(token_ids) if token in end_ids), len(token_ids))


def drafts_within(
    limits: PositionLimits,
    most: int,  # drafts that are wanted at most
    text: torch.Tensor,  # [1, s], the text, padding included, the anchor last
    anchor_position: torch.Tensor | None,  # [1, 1], its position in the text, padding left out; None: as many
) -> int:
    """`most` drafts, or as many as the target's positions allow."""
    if limits == PositionLimits() or most < 1:
        return most
    # Some targets count positions, some the length of the padded text.
    num_counted = text.shape[1] if anchor_position is None else int(anchor_position) + 1
    allowed = (limits.most_drafts(length) for length in (text.shape[1], num_counted))
    return min([most, *(count for count in allowed if count is not None)])


def context_of_one(
    hidden_states: tuple[torch.Tensor | None, ...],  # the target's, indexed by layer; each [1, >= num_tokens, d]
    num_tokens: int,
    model_kwargs: dict[str, Any],
    num_before: int,
    is_prompt: bool,  # whether they are the prompt, which may be padded on the left
) -> CommittedContext:
    """The committed tokens of a pass over one request."""
    position_ids, mask, keep = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask"), None
    if is_prompt and mask is not None and mask.ndim == 2:
        keep = mask[0, -num_tokens - 1 : -1].bool()
    if position_ids is None:
        counted = torch.ones(num_tokens, dtype=torch.long) if keep is None else keep.long()
        positions = num_before + torch.nn.functional.pad(counted.cumsum(0), (1, 0))[None]  # padding has no positions
    else:  # of three dimensions, text positions come first, then the rows of multimodal RoPE
        positions = (position_ids[0] if position_ids.ndim == 3 else position_ids)[:1, -num_tokens - 1 :]
    return CommittedContext(hidden_states, (ContextSpan(0, slice(0, num_tokens), positions, keep),))


def num_prompt_tokens(hidden_states: tuple[torch.Tensor | None, ...]) -> int:
    """Tokens of the pass that hidden states are of."""
    return next(states.shape[1] for states in hidden_states if states is not None)


def over_target_vocabulary(
    logits: torch.Tensor,  # [..., D]
    draft_token_ids: torch.Tensor | None,  # [D]
    vocab_size: int,  # V
) -> torch.Tensor:  # [..., V]
    """Spread logits over the target's vocabulary; ids outside a reduced draft vocabulary get probability 0."""
    if logits.shape[-1] == vocab_size:
        return logits
    full = logits.new_full((*logits.shape[:-1], vocab_size), float("-inf"))
    full[..., draft_token_ids] = logits
    return full
