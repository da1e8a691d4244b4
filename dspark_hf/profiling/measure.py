# SPDX-License-Identifier: Apache-2.0
"""Seconds of drafting, and of verification passes of 1, 2, ... tokens, for some requests at a given context length.

Timing only. `profile` decides where curves are kept and when they are measured.

Legend: R requests, s context tokens, B tokens in a verification pass (the anchors and the drafts).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..drafts.modeling_dspark import DSparkDraftModel
from ..drafts.target_probe import random_state_kept
from ..drafts.target_structure import longest_position
from ..scheduling.copying import MOST_COPIES
from ..scheduling.curve import SPSCurve
from .timed_rounds import NEW_CONTEXT, TimedRounds, text_config


MIN_REPEATS = 2  # however slow the machine
PATIENCE = 4  # budgets that the warm-up may take


@dataclass(frozen=True)
class MeasuredCurve:
    """Round times at one context length, and how far single measurements lay apart."""

    context_length: int  # tokens in the target's cache
    curve: SPSCurve  # medians; those of verification smoothed by `without_noise`
    verify_spread_s: tuple[tuple[float, float], ...]  # lower and upper quartile for each B of the curve, seconds
    draft_spread_s: tuple[float, float]  # likewise of drafting
    num_repeats: int  # measurements behind each B


def batch_points(num_draft_slots: int, num_requests: int = 1) -> tuple[int, ...]:
    """The B that are measured: 1 to 9, then the ends of kernel tiles (multiples of 8) and what follows them, up to the
    longest copy or block.

    Of a batch: the passes without drafts, with half of a block's drafts and with all, and those of the fewer requests
    that are left as texts end.
    """
    last = max(num_draft_slots, MOST_COPIES) + 1
    if num_requests > 1:
        last = num_requests * (num_draft_slots + 1)
        return tuple(sorted({1, -(-num_requests // 2), num_requests, (num_requests + last) // 2, last}))
    return tuple(b for b in range(1, last + 1) if b <= 9 or b % 8 in (0, 1) or b == last)


def without_noise(medians: Sequence[float], spreads: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """Medians as a curve that does not fall, but where it falls by more than the measurements spread.

    More tokens usually take more time, so a fall is noise, and neighbours get their common mean (least squares). But
    some kernels are faster for more tokens: in float32 on a CPU, six can take less time than two. A median that lies
    further from that mean than its own quartiles do from each other, and than those of most others, stays.
    """
    from scipy.optimize import isotonic_regression  # half a second to import

    rising = isotonic_regression(medians).x.tolist()
    widths = [high - low for low, high in spreads]
    noise = [max(width, statistics.median(widths)) for width in widths]
    return tuple(
        own if abs(own - mean) > width else mean for own, mean, width in zip(medians, rising, noise, strict=True)
    )


def measure_curves(
    target: PreTrainedModel,
    draft: DSparkDraftModel,
    context_lengths: Sequence[int] = (256,),
    num_repeats: int = 7,
    budget_s: float | None = None,  # seconds after which no further repeat is begun, once there are two
    on_progress: Callable[[], None] | None = None,
    num_requests: int = 1,
) -> tuple[MeasuredCurve, ...]:  # by ascending context length
    """Time rounds on synthetic text, greedily, as the decoding loop runs them.

    The token counts take turns, so that a machine that slows down does not favour any of them; one pass over all of
    them warms up. Every round drafts whole blocks, whatever the draft's knobs say. Neither random state nor models are
    changed.
    """
    if num_repeats < MIN_REPEATS:
        raise ValueError(f"`num_repeats` must be >= {MIN_REPEATS}, got {num_repeats}.")
    if not context_lengths or min(context_lengths) < NEW_CONTEXT:
        raise ValueError(f"`context_lengths` must be one or more lengths >= {NEW_CONTEXT}, got {context_lengths}.")
    if num_requests < 1:
        raise ValueError(f"`num_requests` must be >= 1, got {num_requests}.")
    draft.bind_target(target)
    points = batch_points(draft.config.num_draft_slots, num_requests)
    longest = longest_position(text_config(target))
    limit = max(context_lengths) if longest is None else max(NEW_CONTEXT, longest - points[-1])
    lengths = sorted({min(length, limit) for length in context_lengths})
    share_s = budget_s / len(lengths) if budget_s is not None else None
    with torch.no_grad(), random_state_kept(target, draft):
        return tuple(
            _measure(TimedRounds(target, draft, length, num_requests), points, num_repeats, share_s, on_progress)
            for length in lengths
        )


def _measure(
    rounds: TimedRounds,
    points: tuple[int, ...],
    num_repeats: int,
    budget_s: float | None,
    on_progress: Callable[[], None] | None,
) -> MeasuredCurve:
    """The curve at one context length."""
    verify_s: dict[int, list[float]] = {b: [] for b in points}
    draft_s: list[float] = []
    alone_s: list[float] = []
    with rounds.decoding():
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
            if rounds.num_requests > 1 and repeat >= 0:
                alone_s.append(rounds.draft_alone())
            if on_progress is not None:
                on_progress()
    spreads = tuple(_quartiles(verify_s[b]) for b in points)
    medians = without_noise([statistics.median(verify_s[b]) for b in points], spreads)
    drafting, request_s = statistics.median(draft_s), 0.0
    if alone_s:
        alone = min(statistics.median(alone_s), drafting)
        drafting, request_s = alone, (drafting - alone) / (rounds.num_requests - 1)
    return MeasuredCurve(
        rounds.context_length,
        SPSCurve(points, medians, drafting, request_s),
        spreads,
        _quartiles(draft_s),
        len(verify_s[points[0]]),
    )


def _quartiles(seconds: Sequence[float]) -> tuple[float, float]:
    lower, _, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return lower, upper
