# SPDX-License-Identifier: Apache-2.0
"""Computes figures from recorded runs, with pure functions and without a model.

Every mean pools over rounds or tokens, as (sum, count) pairs. The accepted length counts the bonus token (paper,
footnote 3); the pass over the prompt, which yields the first token, is no round.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..common.records import AcceptanceStats, RoundRecord
from ..scheduling.curve import SPSCurve
from ..scheduling.observations import ConfidenceObservations
from ..scheduling.reliability import SurvivalFigures, survival_figures
from ..scheduling.rules import RoundOutlook, ThresholdScheduler
from ..scheduling.simulation import full_blocks
from .drafters import PLAIN
from .intervals import Interval, bootstrap, ratio, ratio_of_ratios
from .record import Run
from .tasks import ALL
from .timed import first_difference, tokens_by_source, totals


LENGTHS = (8, 32, 128)
THRESHOLDS = tuple(round(0.1 * step, 1) for step in range(10))
WORST_SHARE = 0.1


@dataclass(frozen=True)
class Percentiles:
    """The middle and the slow end of a duration."""

    p50: float  # median, in seconds; NaN without any
    p95: float  # 95th percentile, in seconds


@dataclass(frozen=True)
class DrafterFigures:
    """Figures of a drafter on a task in one decoding."""

    task: str  # task, or `"all"`
    decoding: str
    drafter: str
    num_questions: int
    num_answers: int  # answers; a question of several turns has several
    num_tokens: int  # tokens of them
    num_rounds: int
    accepted_length: Interval  # tokens per round, the bonus token included
    conditional_acceptance: tuple[Interval, ...]  # per slot, P(accepted | sent, and all before it accepted)
    acceptance_rate: Interval  # accepted drafts over drafts sent
    verified_per_token: Interval  # tokens that the target's passes carried, per token; prompts left out
    speedup: Interval  # tokens per second over those of plain generation, the prompt's pass included
    tokens_per_s: float  # tokens per second, likewise
    token_latency_s: Percentiles  # seconds per token after the first arrival, over answers
    first_token_s: Percentiles  # seconds to the first token, over answers
    num_different: int | None  # greedy answers that are not plain generation's; None when sampling
    by_source: dict[str, tuple[int, float]]  # source of drafts -> its rounds, and tokens per round


@dataclass(frozen=True)
class LengthSpeedup:
    """Speed-up of the first tokens of an answer."""

    task: str  # task, or `"all"`
    decoding: str
    drafter: str
    num_tokens: int | None  # tokens from the start; None for whole answers
    num_answers: int  # answers that are that long on both sides
    speedup: Interval  # seconds of plain generation over the drafter's, the prompt's pass included


@dataclass(frozen=True)
class QuestionFigures:
    """Figures of a drafter on one question in one decoding, over its turns.

    `first_differences`: per turn, where a greedy answer parts from plain generation's; None where it does not.
    """

    task: str
    index: int  # row in the task
    decoding: str
    drafter: str
    num_tokens: int
    num_rounds: int
    accepted_length: float  # tokens per round; NaN without rounds
    acceptance_rate: float  # accepted drafts over drafts sent; NaN where nothing was drafted
    seconds: float  # of all turns
    speedup: float  # tokens per second over those of plain generation
    first_differences: tuple[int | None, ...]


@dataclass(frozen=True)
class ThresholdPoint:
    """Drafts that a threshold on the confidence would have sent, by replay of full blocks."""

    threshold: float  # a block is cut at the first slot whose confidence is lower
    accepted_length: float  # tokens per round, the bonus token included
    verify_length: float  # drafts sent per round
    acceptance_rate: float  # accepted drafts over drafts sent; NaN where none would be sent
    verified_per_token: float  # tokens that the target's passes would carry, per token


@dataclass(frozen=True)
class ConfidenceFigures:
    """Quality of a draft's confidences, from rounds that sent every slot."""

    decoding: str
    drafter: str
    num_rounds: int  # full blocks
    slots: tuple[SurvivalFigures, ...]  # per slot: ECE, AUC and reliability of the prefix survival
    thresholds: tuple[ThresholdPoint, ...]  # the threshold sweep


@dataclass(frozen=True)
class WorstDecile:
    """The tenth of the questions on which a drafter was accepted least."""

    decoding: str
    drafter: str
    accepted_length: float  # tokens per round, pooled over these questions
    speedup: float  # speed-up, pooled over these questions
    questions: tuple[QuestionFigures, ...]  # the worst first; at least one


class Recording:
    """Runs of one evaluation, by question."""

    def __init__(self, runs: Iterable[Run]):
        self.runs = list(runs)
        self._plain = {(r.question, r.turn, r.decoding): r for r in self.runs if r.drafter == PLAIN}

    @property
    def tasks(self) -> list[str]:
        """The tasks, and `"all"` where there are several."""
        names = list(dict.fromkeys(run.task for run in self.runs))
        return names if len(names) == 1 else [*names, ALL]

    @property
    def decodings(self) -> list[str]:
        """The decodings."""
        return list(dict.fromkeys(run.decoding for run in self.runs))

    def of(self, task: str, decoding: str, drafter: str) -> dict[str, list[Run]]:
        """Runs of a drafter."""
        found: dict[str, list[Run]] = {}
        for run in self.runs:
            if run.decoding == decoding and run.drafter == drafter and task in (ALL, run.task):
                found.setdefault(run.question, []).append(run)
        return {question: sorted(runs, key=lambda run: run.turn) for question, runs in found.items()}

    def plain(self, run: Run) -> Run:
        """Plain generation's answer to the same turn."""
        return self._plain[run.question, run.turn, run.decoding]


def drafter_figures(recording: Recording, task: str, decoding: str, drafter: str) -> DrafterFigures:
    """Pool a drafter's runs."""
    by_question = recording.of(task, decoding, drafter)
    runs = [run for question in by_question.values() for run in question]
    stats = [_pooled(question) for question in by_question.values()]
    slots = [part.slot_counts for part in stats]
    num_slots = max((len(counts) for counts in slots), default=0)
    pooled = _pooled(runs)
    is_greedy = decoding == "greedy"
    return DrafterFigures(
        task=task,
        decoding=decoding,
        drafter=drafter,
        num_questions=len(by_question),
        num_answers=len(runs),
        num_tokens=sum(len(run.token_ids) for run in runs),
        num_rounds=pooled.num_rounds,
        accepted_length=bootstrap(_array([(s.num_committed, s.num_rounds) for s in stats])),
        conditional_acceptance=tuple(
            bootstrap(_array([_slot_sums(counts, slot) for counts in slots])) for slot in range(num_slots)
        ),
        acceptance_rate=bootstrap(_array([(_num_accepted(s), s.num_drafted) for s in stats])),
        verified_per_token=bootstrap(_array([(s.num_verified, s.num_committed) for s in stats])),
        speedup=bootstrap(_array([_speed_sums(recording, q) for q in by_question.values()]), ratio_of_ratios),
        tokens_per_s=float(ratio(_array([_speed_sums(recording, runs)])[0, :2])),
        token_latency_s=_percentiles([run.token_latency_s for run in runs]),
        first_token_s=_percentiles([run.first_token_s for run in runs]),
        num_different=sum(_first_difference(recording, run) is not None for run in runs) if is_greedy else None,
        by_source=tokens_by_source(pooled),
    )


def speedup_by_length(
    recording: Recording, task: str, decoding: str, drafter: str, lengths: Sequence[int] = LENGTHS
) -> list[LengthSpeedup]:  # whole answers last
    """When it pays: the speed-up of the first tokens, and of whole answers.

    What the first 8 tokens of a longer answer took stands for an answer of 8 tokens. Drafting the last of them might
    have been cut shorter; nothing else differs.
    """
    by_question = recording.of(task, decoding, drafter)
    found = []
    for length in lengths:
        sums, num_answers = [], 0
        for runs in by_question.values():
            pairs = [(recording.plain(run).seconds_to(length), run.seconds_to(length)) for run in runs]
            known = [(plain, own) for plain, own in pairs if plain is not None and own is not None]
            num_answers += len(known)
            sums += [np.sum(known, axis=0)] if known else []
        if num_answers:
            found.append(LengthSpeedup(task, decoding, drafter, length, num_answers, bootstrap(_array(sums))))
    whole = bootstrap(_array([_speed_sums(recording, q) for q in by_question.values()]), ratio_of_ratios)
    num_answers = sum(len(runs) for runs in by_question.values())
    return [*found, LengthSpeedup(task, decoding, drafter, None, num_answers, whole)]


def question_figures(recording: Recording, decoding: str, drafter: str) -> list[QuestionFigures]:
    """Figures question by question."""
    found = []
    for runs in recording.of(ALL, decoding, drafter).values():
        stats, sums = _pooled(runs), _speed_sums(recording, runs)
        is_greedy = decoding == "greedy"
        found.append(
            QuestionFigures(
                task=runs[0].task,
                index=runs[0].index,
                decoding=decoding,
                drafter=drafter,
                num_tokens=int(sums[0]),
                num_rounds=stats.num_rounds,
                accepted_length=stats.accepted_length,
                acceptance_rate=stats.acceptance_rate,
                seconds=sums[1],
                speedup=float(ratio_of_ratios(_array(sums))),
                first_differences=tuple(_first_difference(recording, run) if is_greedy else None for run in runs),
            )
        )
    return found


def worst_decile(
    recording: Recording, decoding: str, drafter: str
) -> WorstDecile | None:  # None where there was no round
    """The questions with the lowest accepted length; seconds would vary from run to run."""
    judged = [entry for entry in question_figures(recording, decoding, drafter) if entry.num_rounds]
    if not judged:
        return None
    judged.sort(key=lambda entry: entry.accepted_length)
    worst = judged[: math.ceil(WORST_SHARE * len(judged))]
    by_question = recording.of(ALL, decoding, drafter)
    runs = [run for entry in worst for run in by_question[f"{entry.task}/{entry.index}"]]
    speedup = float(ratio_of_ratios(_array(_speed_sums(recording, runs))))
    return WorstDecile(decoding, drafter, _pooled(runs).accepted_length, speedup, tuple(worst))


def confidence_figures(
    recording: Recording, decoding: str, drafter: str, num_slots: int, thresholds: Sequence[float] = THRESHOLDS
) -> ConfidenceFigures | None:  # None without a full block with confidences
    """Judge the confidences of a drafter that sends every slot. Where a schedule cuts blocks, the full ones that are
    left are those that it believed in, and would flatter.
    """
    runs = [run for question in recording.of(ALL, decoding, drafter).values() for run in question]
    rounds = full_blocks((record for run in runs for record in run.rounds), num_slots)
    if not rounds:
        return None
    slots = survival_figures(ConfidenceObservations.from_rounds(rounds, num_slots))
    return ConfidenceFigures(decoding, drafter, len(rounds), slots, tuple(threshold_sweep(rounds, thresholds)))


def threshold_sweep(rounds: Sequence[RoundRecord], thresholds: Sequence[float] = THRESHOLDS) -> list[ThresholdPoint]:
    """Replay full blocks under thresholds. The cut is causal: it looks at the slots up to its own.

    A replayed round continues as the recorded one did, whatever it would have committed, see
    `dspark_hf.scheduling.simulation`.
    """
    confidence = torch.tensor([record.confidence for record in rounds], dtype=torch.float64)
    accepted = torch.tensor([record.num_accepted for record in rounds])
    outlook = RoundOutlook(SPSCurve.linear(0.0), ())  # a threshold looks at neither
    points = []
    for threshold in thresholds:
        lengths = ThresholdScheduler(threshold).verify_lengths(confidence, outlook)
        num_accepted, num_sent = int(torch.minimum(accepted, lengths).sum()), int(lengths.sum())
        num_tokens, num_verified = num_accepted + len(rounds), num_sent + len(rounds)
        points.append(
            ThresholdPoint(
                threshold=threshold,
                accepted_length=num_tokens / len(rounds),
                verify_length=num_sent / len(rounds),
                acceptance_rate=num_accepted / num_sent if num_sent else math.nan,
                verified_per_token=num_verified / num_tokens,
            )
        )
    return points


def _pooled(runs: Sequence[Run]) -> AcceptanceStats:
    return totals(runs).stats


def _num_accepted(stats: AcceptanceStats) -> int:
    return sum(record.num_accepted for record in stats.rounds)


def _slot_sums(counts: Sequence[tuple[int, int]], slot: int) -> tuple[int, int]:
    reached, accepted = counts[slot] if slot < len(counts) else (0, 0)
    return accepted, reached


def _speed_sums(recording: Recording, runs: Sequence[Run]) -> tuple[float, float, float, float]:
    """Tokens and seconds, and those of plain generation on the same turns."""
    ours, plain = totals(runs), totals(recording.plain(run) for run in runs)
    return ours.num_tokens, ours.seconds, plain.num_tokens, plain.seconds


def _first_difference(recording: Recording, run: Run) -> int | None:
    return first_difference(run.token_ids, recording.plain(run).token_ids)


def _percentiles(seconds: Iterable[float | None]) -> Percentiles:
    known = [value for value in seconds if value is not None]
    if not known:
        return Percentiles(math.nan, math.nan)
    return Percentiles(*(float(value) for value in np.quantile(known, (0.5, 0.95))))


def _array(rows: Sequence) -> np.ndarray:
    return np.asarray(rows, dtype=np.float64)
