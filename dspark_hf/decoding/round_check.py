# SPDX-License-Identifier: Apache-2.0
"""Checks a target once with a round over fixed tokens: one pass must give the same logits as single steps.

If a text can outgrow a sliding window, the round begins after an invented past that is longer than the window: random
keys and values cost one pass over a few tokens, a real past a long prefill.

Legend: h key-value heads, e head width, L tokens of the invented past, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import Cache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..drafts.position_limits import position_limits
from ..drafts.target_probe import can_run, closeness_for, once, position_kwargs, probe_ids
from .drafter import Drafter, DraftProposal
from .packed_cache import RowCache
from .packed_runner import PackedRunner
from .request import Request, TargetPass, Verdict
from .single_runner import SingleRunner, grow, model_kwargs_for


# A longer past would take seconds, and more memory than a check should.
LONGEST_PAST = 8192
PLAIN = "Use plain generation for this target."
ONE_ROW = "Generate one row at a time."
# What the forward of a target raises where it cannot.
_OWN_ERRORS = (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError)
_Past = dict[int, tuple[torch.Tensor, torch.Tensor]]  # by layer: keys and values, each [1, h, L, e]


def check_rounds(target: PreTrainedModel, drafter: Drafter, max_length: int) -> None:
    """Check that a target verifies drafts of one request as it would generate them."""
    _check(_verified, PLAIN, target, drafter, max_length)


def check_packed_rounds(target: PreTrainedModel, drafter: Drafter, max_length: int) -> None:
    """[`check_rounds`], and the same for a batch of two."""
    _check(_verified, PLAIN, target, drafter, max_length)
    _check(_check_packed, ONE_ROW, target, drafter, max_length)


def _check(
    check: Callable[[PreTrainedModel, Drafter, int], Any],
    remedy: str,
    target: PreTrainedModel,
    drafter: Drafter,
    max_length: int,
) -> None:
    if not can_run(target):
        return
    length = _past_length(target, max_length)
    reads = str(drafter.model_kwargs_overrides)

    def passes() -> bool:
        try:
            with torch.no_grad():
                check(target, drafter, length)
        except (NotImplementedError, torch.OutOfMemoryError):
            raise
        except _OWN_ERRORS as error:
            raise NotImplementedError(
                f"DSpark verifies several tokens in one pass that goes on from a cache, which "
                f"{type(target).__name__} does not run: {type(error).__name__}: {str(error).rstrip('.')}. {remedy}"
            ) from error
        return True

    once(target, (check.__name__, target.dtype, target.config._attn_implementation, reads, length), passes)


def _past_length(target: PreTrainedModel, max_length: int) -> int:
    """Beyond the longest window that a text of the call outgrows; 0 where there is none."""
    layers = DynamicCache(config=target.config.get_text_config(decoder=True)).layers
    windows = [layer.sliding_window for layer in layers if isinstance(layer, DynamicSlidingWindowLayer)]
    length = max((window + 3 for window in windows if window < min(max_length, LONGEST_PAST)), default=0)
    if not length:  # most targets: nothing to look up in every call
        return 0
    allowed = position_limits(target).most_drafts(length + 3)
    return length if allowed is None or allowed >= 2 else 0


def _verified(target: PreTrainedModel, drafter: Drafter, length: int) -> tuple[torch.Tensor, _Past]:
    """Two tokens and the past, then three of which two are taken back, then these one by one; [3, V] of the three."""
    ids = probe_ids(target)
    request, reads = _request(0, ids[:, :2]), drafter.model_kwargs_overrides
    runner = SingleRunner(target, request, GenerationConfig(), model_kwargs_for(target, ids[:, :2]), reads)
    prompt = runner.prefill([request])
    drafter.check_hidden_states(prompt.hidden_states)
    past = _invent_past(runner.cache_for_user, length)
    if past:
        request.input_ids = torch.cat([ids[:, :2], ids[:, :1].expand(1, length)], dim=1)
        runner.model_kwargs = grow(target, {}, runner.model_kwargs, length)
    _commit(runner, [request], prompt, [ids[:, 2:3]])
    with runner.decoding():
        together = runner.forward([DraftProposal(ids[:, 3:])])
        _commit(runner, [request], together, [ids[:, 3:4]])
        fourth = runner.forward([DraftProposal(ids[:, :0])])
        _commit(runner, [request], fourth, [ids[:, 4:5]])
        fifth = runner.forward([DraftProposal(ids[:, :0])])
    logits = together.logits[0]  # [3, V]
    _compare(target, logits[1:], torch.cat([fourth.logits[0], fifth.logits[0]]))
    return logits, past


def _check_packed(target: PreTrainedModel, drafter: Drafter, length: int) -> None:
    """Prompts of two tokens, with the past, and of one; then three tokens and two."""
    expected, past = _verified(target, drafter, length)
    ids = probe_ids(target)
    positions = position_kwargs(target, ids.shape[1], ids.device)
    alone = target(input_ids=ids, use_cache=False, return_dict=True, **positions).logits[0, 1:3]
    expected = torch.cat([expected, alone])
    requests = [_request(0, ids[:, :2]), _request(1, ids[:, :1])]
    runner = PackedRunner(target, requests, drafter.model_kwargs_overrides)
    with runner.running():
        _commit(runner, requests, runner.prefill(requests), [ids[:, 2:3], ids[:, 1:2]])
        if past:
            _put_past(runner.cache, past, length)
        logits = runner.forward([DraftProposal(ids[:, 3:]), DraftProposal(ids[:, 2:3])]).logits
    _compare(target, logits[0], expected, remedy=ONE_ROW)


def _compare(target: PreTrainedModel, logits: torch.Tensor, expected: torch.Tensor, remedy: str = PLAIN) -> None:
    if not closeness_for(target).accepts(logits, expected):
        raise NotImplementedError(
            f"DSpark verifies several tokens in one pass, in which {type(target).__name__} gets other logits than one "
            f"token at a time. {remedy}"
        )


def _invent_past(cache: Cache, length: int) -> _Past:
    """Append random keys and values like those of the prompt; none where layers keep more than these."""
    # Layers without the attribute are none that attend; layers that share the keys of others hold nothing.
    layers = {i: layer for i, layer in enumerate(cache.layers) if getattr(layer, "is_initialized", True)}
    if not length or any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers.values()):
        return {}
    generator = torch.Generator().manual_seed(0)

    def like(states: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(*states.shape[:2], length, states.shape[3], generator=generator).to(states)
        return drawn * states.std() + states.mean()

    past = {i: (like(layer.keys), like(layer.values)) for i, layer in layers.items()}
    for i, (keys, values) in past.items():
        cache.update(keys, values, i)
    return past


def _put_past(cache: RowCache, past: _Past, length: int) -> None:
    """The same behind the two tokens of the first row."""
    for i, (keys, values) in past.items():
        layer = cache.layers[i]
        layer.reserve(len(cache.lengths), length + 2)
        layer.keys[0, :, 2 : length + 2] = keys[0]
        layer.values[0, :, 2 : length + 2] = values[0]
    cache.lengths[0] += length


def _request(index: int, prompt: torch.Tensor) -> Request:
    return Request(index, prompt, LogitsProcessorList(), StoppingCriteriaList(), 2**31, GenerationConfig())


def _commit(
    runner: SingleRunner | PackedRunner,
    requests: Sequence[Request],
    target_pass: TargetPass,
    new_ids: Sequence[torch.Tensor],
) -> None:
    """Commit the given tokens, whatever the logits are."""
    verdicts = [Verdict(ids, None, target_pass.logits, ids.shape[1] - 1, int(ids[0, -1])) for ids in new_ids]
    runner.commit(target_pass, verdicts)
    for request, verdict in zip(requests, verdicts, strict=True):
        request.append(verdict)
