# SPDX-License-Identifier: Apache-2.0
"""All figures of one evaluation, in one object: what the report, the files and the terminal show."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..common.files import json_values
from .drafters import PLAIN, LoadedDrafter
from .evaluate import Settings
from .intervals import Interval
from .record import Run
from .statistics import (
    ConfidenceFigures,
    DrafterFigures,
    LengthSpeedup,
    QuestionFigures,
    Recording,
    WorstDecile,
    confidence_figures,
    drafter_figures,
    question_figures,
    speedup_by_length,
    worst_decile,
)
from .tasks import ALL, TaskData


@dataclass(frozen=True)
class DrafterEntry:
    """A drafter as the report names it."""

    name: str
    kind: str
    path: str | None  # model that drafts
    knobs: dict[str, Any]  # knobs that were given
    note: str  # a limit of its figures
    refusal: str | None  # why it does not apply to the target


@dataclass(frozen=True)
class Evaluation:
    """Figures of one evaluation.

    Args:
        settings (`Settings`): What it was made with.
        tasks (`dict[str, tuple[int, int]]`): Task -> questions asked, and those that it has.
        drafters (`tuple[DrafterEntry, ...]`): Every drafter, those that do not apply included.
        figures (`tuple[DrafterFigures, ...]`): Per decoding, task and drafter.
        lengths (`tuple[LengthSpeedup, ...]`): When it pays.
        confidence (`tuple[ConfidenceFigures, ...]`): Of the drafters that send every slot.
        worst (`tuple[WorstDecile, ...]`): The questions of least acceptance.
        questions (`tuple[QuestionFigures, ...]`): Question by question.
        prompts (`dict[str, str]`): Key of a question -> its first message.
    """

    settings: Settings
    tasks: dict[str, tuple[int, int]]
    drafters: tuple[DrafterEntry, ...]
    figures: tuple[DrafterFigures, ...]
    lengths: tuple[LengthSpeedup, ...]
    confidence: tuple[ConfidenceFigures, ...]
    worst: tuple[WorstDecile, ...]
    questions: tuple[QuestionFigures, ...]
    prompts: dict[str, str]

    @property
    def different(self) -> list[QuestionFigures]:
        """`list[QuestionFigures]`: Greedy answers that part from plain generation's."""
        return [entry for entry in self.questions if any(index is not None for index in entry.first_differences)]

    def sentences(self) -> list[str]:
        """The results as sentences.

        Returns:
            `list[str]`: one for each decoding and drafter, over all tasks.
        """
        task = ALL if len(self.tasks) > 1 else next(iter(self.tasks))
        found = []
        for entry in self.figures:
            if entry.task == task and entry.drafter != PLAIN:
                lengths = [
                    part
                    for part in self.lengths
                    if (part.task, part.decoding, part.drafter) == (task, entry.decoding, entry.drafter)
                ]
                parts = [f"{_extent(part)} {interval_text(part.speedup)}, {verdict(part.speedup)}" for part in lengths]
                found.append(f"{entry.drafter}, {entry.decoding}, speed-up: {'; '.join(parts)}.")
        return found

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain values for JSON.

        Returns:
            `dict[str, Any]`: `None` in the place of NaN.
        """
        return json_values(dataclasses.asdict(self)) | {"sentences": self.sentences()}


def summarize_runs(
    runs: Sequence[Run], settings: Settings, tasks: Sequence[TaskData], drafters: Sequence[LoadedDrafter]
) -> Evaluation:
    """Compute every figure of an evaluation.

    Args:
        runs (`Sequence[Run]`): From [`evaluate`].
        settings (`Settings`): What they were made with.
        tasks (`Sequence[TaskData]`): The tasks.
        drafters (`Sequence[LoadedDrafter]`): The drafters, from [`warm_up`].

    Returns:
        [`Evaluation`]
    """
    recording = Recording(runs)
    active = [loaded for loaded in drafters if loaded.refusal is None]
    others = [loaded for loaded in active if loaded.drafter.kind != PLAIN]
    cells = [(task, decoding) for decoding in recording.decodings for task in recording.tasks]
    pairs = [(decoding, loaded) for decoding in recording.decodings for loaded in others]
    judged = [
        confidence_figures(recording, decoding, loaded.name, loaded.num_slots)
        for decoding, loaded in pairs
        if loaded.sends_every_slot and loaded.num_slots
    ]
    worst = [worst_decile(recording, decoding, loaded.name) for decoding, loaded in pairs]
    return Evaluation(
        settings=settings,
        tasks={task.name: (len(task.questions), task.num_available) for task in tasks},
        drafters=tuple(_entry(loaded) for loaded in drafters),
        figures=tuple(drafter_figures(recording, *cell, loaded.name) for cell in cells for loaded in active),
        lengths=tuple(
            part for cell in cells for loaded in others for part in speedup_by_length(recording, *cell, loaded.name)
        ),
        confidence=tuple(entry for entry in judged if entry is not None),
        worst=tuple(entry for entry in worst if entry is not None),
        questions=tuple(
            entry
            for decoding in recording.decodings
            for loaded in active
            for entry in question_figures(recording, decoding, loaded.name)
        ),
        prompts={question.key: question.turns[0] for task in tasks for question in task.questions},
    )


def verdict(speedup: Interval) -> str:
    """The conclusion that a speed-up's interval allows."""
    if math.isnan(speedup.low):
        return "too few questions to say"
    if speedup.low > 1:
        return "faster than plain generation"
    if speedup.high < 1:
        return "slower than plain generation"
    return "no difference shown"


def interval_text(
    interval: Interval, digits: int = 2
) -> str:  # such as `"1.31 [1.10, 1.52]"`; `"-"` where there is no figure
    """A figure with its interval, for people."""
    if math.isnan(interval.value):
        return "-"
    ends = "" if math.isnan(interval.low) else f" [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"
    return f"{interval.value:.{digits}f}{ends}"


def _extent(part: LengthSpeedup) -> str:
    return "whole answers" if part.num_tokens is None else f"first {part.num_tokens} tokens"


def _entry(loaded: LoadedDrafter) -> DrafterEntry:
    drafter = loaded.drafter
    return DrafterEntry(drafter.name, drafter.kind, drafter.path, dict(drafter.knobs), loaded.note, loaded.refusal)
