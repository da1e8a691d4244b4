# SPDX-License-Identifier: Apache-2.0
"""Seconds of drafting, and of verification passes of 1, 2, ... tokens, for one request at a given context length.

Timing only. Where curves are kept and when they are measured is the business of `profiling`.

Legend: s context tokens, B tokens in a verification pass (the anchor and B - 1 drafts).
"""

from __future__ import annotations

import contextlib
import inspect
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedConfig, PreTrainedModel

from ._compat import CACHE_KEY
from .candidate_generator import DSparkCandidateGenerator
from .modeling_dspark import DSparkDraftModel
from .scheduling import SPSCurve


MIN_REPEATS = 2  # however slow the machine
NEW_CONTEXT = 2  # tokens a typical round commits, and the next one's drafting takes in
PATIENCE = 4  # budgets that the warm-up may take


@dataclass(frozen=True)
class MeasuredCurve:
    """Round times at one context length, and how far single measurements lay apart.

    Args:
        context_length (`int`): Tokens in the target's cache.
        curve (`SPSCurve`): Medians; those of verification made monotone by [`isotonic`].
        verify_spread_s (`tuple[tuple[float, float], ...]`): Lower and upper quartile for each B of the curve, seconds.
        draft_spread_s (`tuple[float, float]`): Likewise of drafting.
        num_repeats (`int`): Measurements behind each B.
    """

    context_length: int
    curve: SPSCurve
    verify_spread_s: tuple[tuple[float, float], ...]
    draft_spread_s: tuple[float, float]
    num_repeats: int


def batch_points(num_draft_slots: int) -> tuple[int, ...]:
    """The B that are measured: 1 to 9, then the ends of kernel tiles (multiples of 8) and what follows them.

    Args:
        num_draft_slots (`int`): Most drafts of a round.

    Returns:
        `tuple[int, ...]`, ascending from 1 to `num_draft_slots + 1`.
    """
    last = num_draft_slots + 1
    return tuple(b for b in range(1, last + 1) if b <= 9 or b % 8 in (0, 1) or b == last)


def isotonic(medians: Sequence[float]) -> tuple[float, ...]:
    """The nearest curve that does not fall (least squares): more tokens take no less time.

    Neighbours that fall get their common mean, so that a median that is too high by chance raises only itself and
    those that it stands out from, not the rest of the curve.

    Args:
        medians (`Sequence[float]`): Seconds, by ascending B.

    Returns:
        `tuple[float, ...]`, as long as `medians`.
    """
    pools: list[list[float]] = []
    for median in medians:
        pools.append([median])
        while len(pools) > 1 and statistics.fmean(pools[-2]) > statistics.fmean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return tuple(statistics.fmean(pool) for pool in pools for _ in pool)


def measure_curves(
    target: PreTrainedModel,
    draft: DSparkDraftModel,
    context_lengths: Sequence[int] = (256,),
    num_repeats: int = 7,
    budget_s: float | None = None,
    on_progress: Callable[[], None] | None = None,
) -> tuple[MeasuredCurve, ...]:
    """Time rounds on synthetic text, greedily, as the decoding loop runs them.

    The token counts take turns, so that a machine that slows down does not favour any of them; one pass over all of
    them warms up. Every round drafts whole blocks, whatever the draft's knobs say. Neither random state nor models are
    changed.

    Args:
        target (`PreTrainedModel`): The model that generates.
        draft (`DSparkDraftModel`): Its draft.
        context_lengths (`Sequence[int]`, *optional*, defaults to `(256,)`):
            Tokens in the cache, one curve for each; cut to what the target's positions allow.
        num_repeats (`int`, *optional*, defaults to 7): Measurements behind each median.
        budget_s (`float`, *optional*):
            Seconds after which no further repeat is begun, once there are two; a warm-up that takes four times as
            long ends the measurement.
        on_progress (`Callable`, *optional*): Called after each pass over the token counts, the warm-up included.

    Returns:
        `tuple[MeasuredCurve, ...]`, by ascending context length.

    Raises:
        ValueError: If a length or the number of repeats is too small, target and draft do not fit, or the target's
            cache cannot take tokens back.
        NotImplementedError: If the target cannot have a DSpark draft.
        RuntimeError: If the warm-up takes far more than the budget.
    """
    if num_repeats < MIN_REPEATS:
        raise ValueError(f"`num_repeats` must be >= {MIN_REPEATS}, got {num_repeats}.")
    if not context_lengths or min(context_lengths) < NEW_CONTEXT:
        raise ValueError(f"`context_lengths` must be one or more lengths >= {NEW_CONTEXT}, got {context_lengths}.")
    draft.bind_target(target)
    points = batch_points(draft.config.num_draft_slots)
    longest = getattr(_text_config(target), "max_position_embeddings", None)
    limit = max(NEW_CONTEXT, longest - points[-1]) if isinstance(longest, int) else max(context_lengths)
    lengths = sorted({min(length, limit) for length in context_lengths})
    share_s = budget_s / len(lengths) if budget_s is not None else None
    with torch.no_grad(), _random_state_kept(target, draft):
        return tuple(
            _measure(_Rounds(target, draft, length), points, num_repeats, share_s, on_progress) for length in lengths
        )


def _measure(
    rounds: _Rounds,
    points: tuple[int, ...],
    num_repeats: int,
    budget_s: float | None,
    on_progress: Callable[[], None] | None,
) -> MeasuredCurve:
    """The curve at one context length."""
    verify_s: dict[int, list[float]] = {b: [] for b in points}
    draft_s: list[float] = []
    with rounds.target._optimize_model_for_decode():
        for repeat in range(-1, num_repeats):  # number -1 warms up
            if budget_s is not None and repeat >= MIN_REPEATS and rounds.elapsed_s > budget_s:
                break
            rounds.restart()
            for b in points if repeat % 2 else reversed(points):  # what ran before has an effect, too
                if budget_s is not None and repeat < 0 and rounds.elapsed_s > PATIENCE * budget_s:
                    raise RuntimeError(f"the warm-up alone takes more than {PATIENCE * budget_s:.3g} s")
                drafting, verifying = rounds.run(b)
                if repeat >= 0:
                    draft_s.append(drafting)
                    verify_s[b].append(verifying)
            if on_progress is not None:
                on_progress()
    spreads = tuple(_quartiles(verify_s[b]) for b in points)
    medians = isotonic([statistics.median(verify_s[b]) for b in points])
    return MeasuredCurve(
        rounds.context_length,
        SPSCurve(points, medians, statistics.median(draft_s)),
        spreads,
        _quartiles(draft_s),
        len(verify_s[points[0]]),
    )


class _Rounds:
    """Rounds of one request that stays where it is: what a round verifies is taken back after it."""

    def __init__(self, target: PreTrainedModel, draft: DSparkDraftModel, context_length: int):
        self.target, self.draft, self.context_length = target, draft, context_length
        self._start = perf_counter()
        num_slots = draft.config.num_draft_slots
        device = target.device if target.device.type != "meta" else "cpu"  # on meta: offloaded, its hooks move inputs
        text = _ordinary_ids(
            _text_config(target).vocab_size, _special_ids(target.config), context_length + num_slots + 1
        )
        self._text = torch.tensor([text], device=device)  # [1, s + 1 + num_slots]: context, anchor, drafts
        self._config = GenerationConfig(
            max_length=self._text.shape[1] + 1,
            do_sample=False,
            num_assistant_tokens=num_slots,
            num_assistant_tokens_schedule="confidence",
        )
        self._generator = DSparkCandidateGenerator(target, draft, self._config)
        self._prefill()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the request came."""
        return perf_counter() - self._start

    def _prefill(self) -> None:
        prompt = self._text[:, : self.context_length]
        # As `generate` prepares them: without a mask, for nothing is padded.
        kwargs = {"use_cache": True, CACHE_KEY: DynamicCache(config=_text_config(self.target))}
        if "position_ids" in inspect.signature(self.target.forward).parameters:
            kwargs["position_ids"] = torch.arange(self.context_length, device=prompt.device)[None]
        if self.target._supports_logits_to_keep():
            kwargs["logits_to_keep"] = 1
        outputs = self._forward(prompt, kwargs, self.context_length, is_first_iteration=True)
        self._cache = outputs[CACHE_KEY]
        if not self._cache.is_croppable:
            raise ValueError(f"The cache of {type(self.target).__name__} cannot take tokens back.")
        self._generator.check_hidden_states(outputs.hidden_states)
        self._hidden_states = outputs.hidden_states
        self._model_kwargs = self.target._update_model_kwargs_for_generation(outputs, kwargs, num_new_tokens=1)
        self._cache.activate_past_recording()

    def restart(self) -> None:
        """Let a new generator draft from the context alone: rounds lengthen what an old one has read."""
        self._generator = DSparkCandidateGenerator(self.target, self.draft, self._config)
        self._draft(self.context_length)

    def run(self, batch_tokens: int) -> tuple[float, float]:
        """Draft, and verify B tokens.

        Returns:
            `tuple[float, float]`: seconds of drafting, and of verification.
        """
        draft_s = self._draft(NEW_CONTEXT)
        start = perf_counter()
        kwargs = dict(self._model_kwargs)
        if batch_tokens > 1:
            kwargs = self.target._update_model_kwargs_for_generation({}, kwargs, num_new_tokens=batch_tokens - 1)
        self._forward(self._text[:, : self.context_length + batch_tokens], kwargs, batch_tokens)
        verify_s = perf_counter() - start
        self._cache.crop(-batch_tokens)
        return draft_s, verify_s

    def _draft(self, num_context: int) -> float:
        self._generator.add_context(self._hidden_states, num_context, self._model_kwargs)
        start = perf_counter()
        self._generator.propose(self._text[:, : self.context_length + 1])
        _synchronize(self.draft.device)
        return perf_counter() - start

    def _forward(
        self, text: torch.Tensor, kwargs: dict[str, Any], num_tokens: int, is_first_iteration: bool = False
    ) -> Any:
        """The target over the last tokens of the text, prepared as the decoding loop prepares it."""
        inputs = self.target.prepare_inputs_for_generation(
            text, next_sequence_length=num_tokens, is_first_iteration=is_first_iteration, **kwargs
        )
        if "logits_to_keep" in inputs and not is_first_iteration:
            inputs["logits_to_keep"] = num_tokens
        outputs = self.target(**(inputs | self._generator.model_kwargs_overrides), return_dict=True)
        _synchronize(outputs.logits.device)
        return outputs


def _text_config(target: PreTrainedModel) -> PreTrainedConfig:
    return target.config.get_text_config(decoder=True)


def _quartiles(seconds: Sequence[float]) -> tuple[float, float]:
    lower, _, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return lower, upper


def _synchronize(device: torch.device) -> None:
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


def _special_ids(config: PreTrainedConfig) -> set[int]:
    """Ids that a config names: ends of text, places of images, ..."""
    found, pending = set(), [config.to_dict()]
    while pending:
        for name, value in pending.pop().items():
            if isinstance(value, dict):
                pending.append(value)
            elif "token" in str(name):
                found |= {i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)}
    return found


def _ordinary_ids(vocab_size: int, special_ids: set[int], count: int) -> list[int]:
    """The same ids every time, spread over the first half of the vocabulary: added tokens stand at its end."""
    ordinary = [i for i in range(vocab_size // 2) if i not in special_ids]
    return [ordinary[k * 7919 % len(ordinary)] for k in range(count)]


def _random_state_kept(*models: PreTrainedModel) -> contextlib.AbstractContextManager[None]:
    """Nothing is drawn, except by the dropout of a model in training mode."""
    if not any(model.training for model in models):
        return contextlib.nullcontext()
    devices = sorted({str(model.device) for model in models} - {"cpu", "meta"})
    device_type = torch.device(devices[0]).type if devices else "cuda"
    return torch.random.fork_rng(devices, device_type=device_type)
