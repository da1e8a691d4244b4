# SPDX-License-Identifier: Apache-2.0
"""The pictures of an evaluation's report, as SVG to be put into the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from .drafters import PLAIN
from .intervals import Interval
from .load_plot import COLORS, MARKERS
from .statistics import ConfidenceFigures
from .summary import Evaluation
from .tasks import ALL


if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL_INCHES = 4.2


def speedup_plot(evaluation: Evaluation) -> str:
    """Speed-up by task, with intervals, a panel per decoding."""
    tasks = list(dict.fromkeys(entry.task for entry in evaluation.figures))
    height = 1.2 + 0.18 * len(tasks) * (1 + len(_others(evaluation)))
    figure, panels = _panels(evaluation, height)
    for axes, decoding in panels:
        axes.axvline(1, color="0.6", linewidth=1, zorder=0)
        for number, (name, style) in enumerate(_styles(evaluation)):
            chosen = [e for e in evaluation.figures if (e.decoding, e.drafter) == (decoding, name)]
            offset = 0.7 * ((number + 0.5) / len(_others(evaluation)) - 0.5)
            places = [tasks.index(entry.task) + offset for entry in chosen]
            values = [entry.speedup for entry in chosen]
            axes.errorbar(
                [v.value for v in values], places, xerr=_errors(values), label=_plain_text(name), linestyle="", **style
            )
        axes.set_yticks(range(len(tasks)), [_plain_text(task) for task in tasks])
        axes.set(ylim=(len(tasks) - 0.5, -0.5), xlabel="tokens per second over those of plain generation")
    return _finished(figure, panels)


def acceptance_plot(evaluation: Evaluation) -> str:
    """Conditional acceptance by slot, with intervals, a panel per decoding."""
    from matplotlib.ticker import MaxNLocator

    figure, panels = _panels(evaluation, 3.4)
    for axes, decoding in panels:
        for name, style in _styles(evaluation):
            for entry in evaluation.figures:
                if (entry.decoding, entry.drafter, entry.task) == (decoding, name, _widest(evaluation)):
                    rates = entry.conditional_acceptance
                    axes.errorbar(
                        range(len(rates)),
                        [r.value for r in rates],
                        yerr=_errors(rates),
                        label=_plain_text(name),
                        **style,
                    )
        axes.set(xlabel="slot", ylim=(-0.03, 1.03))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0][0].set_ylabel("accepted, once all before it were")
    return _finished(figure, panels)


def length_plot(evaluation: Evaluation) -> str:
    """Speed-up of the first tokens and of whole answers, with intervals, a panel per decoding."""
    figure, panels = _panels(evaluation, 3.4)
    names = list(dict.fromkeys(_length_name(part.num_tokens) for part in evaluation.lengths))
    names.sort(key=lambda name: (name == "all", len(name), name))
    for axes, decoding in panels:
        axes.axhline(1, color="0.6", linewidth=1, zorder=0)
        for name, style in _styles(evaluation):
            chosen = [
                part
                for part in evaluation.lengths
                if (part.decoding, part.drafter, part.task) == (decoding, name, _widest(evaluation))
            ]
            places = [names.index(_length_name(part.num_tokens)) for part in chosen]
            values = [part.speedup for part in chosen]
            axes.errorbar(places, [v.value for v in values], yerr=_errors(values), label=_plain_text(name), **style)
        axes.set_xticks(range(len(names)), names)
        axes.set(xlabel="tokens of the answer, from its start")
    panels[0][0].set_ylabel("speed-up")
    return _finished(figure, panels)


def threshold_plot(evaluation: Evaluation) -> str:
    """The threshold sweep of every draft that sent all slots: acceptance, and what is verified for it."""
    figure = _new_figure(2 * PANEL_INCHES, 3.4)
    rate_axes, cost_axes = figure.subplots(1, 2)
    for entry, color, marker in zip(evaluation.confidence, cycle(COLORS), cycle(MARKERS), strict=False):
        thresholds = [point.threshold for point in entry.thresholds]
        style = {"color": color, "marker": marker, "markersize": 4, "linewidth": 1}
        label = _plain_text(f"{entry.drafter}, {entry.decoding}")
        rate_axes.plot(thresholds, [point.acceptance_rate for point in entry.thresholds], label=label, **style)
        accepted = [point.accepted_length for point in entry.thresholds]
        cost_axes.plot([point.verified_per_token for point in entry.thresholds], accepted, **style)
    rate_axes.set(xlabel="threshold", ylabel="accepted drafts over drafts sent", ylim=(0, 1.03))
    cost_axes.set(xlabel="tokens verified per token", ylabel="accepted length")
    figure.legend(*rate_axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    return _as_address(figure)


def reliability_plot(entry: ConfidenceFigures) -> str:
    """Predicted prefix survival against the observed rate, a panel per slot."""
    figure = _new_figure(2.1 * len(entry.slots), 2.7)
    panels = figure.subplots(1, len(entry.slots), sharex=True, sharey=True, squeeze=False)[0]
    for number, (axes, slot) in enumerate(zip(panels, entry.slots, strict=True)):
        axes.plot([0, 1], [0, 1], color="0.7", linewidth=1, zorder=0)
        axes.plot(
            [part.mean_prediction for part in slot.reliability],
            [part.observed_rate for part in slot.reliability],
            color=COLORS[1],
            marker="o",
            markersize=4,
            linewidth=1,
        )
        axes.set_title(f"slot {number}, ECE {slot.expected_calibration_error:.1%}", fontsize=9)
        axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    panels[0].set_ylabel("observed rate")
    figure.supxlabel("predicted prefix survival", fontsize=9)
    return _as_address(figure)


def _new_figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # takes a second to import; no window and no global state

    return Figure(figsize=(width, height), layout="constrained")


def _panels(evaluation: Evaluation, height: float) -> tuple[Figure, list[tuple[Any, str]]]:
    decodings = list(dict.fromkeys(entry.decoding for entry in evaluation.figures))
    figure = _new_figure(PANEL_INCHES * len(decodings), height)
    panels = figure.subplots(1, len(decodings), sharey=True, squeeze=False)[0]
    for axes, decoding in zip(panels, decodings, strict=True):
        axes.set_title(_plain_text(decoding), fontsize=10)
    return figure, list(zip(panels, decodings, strict=True))


def _finished(figure: Figure, panels: list[tuple[Any, str]]) -> str:
    for axes, _ in panels:
        axes.grid(alpha=0.3)
    handles, labels = panels[0][0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    return _as_address(figure)


def _as_address(figure: Figure) -> str:
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # letters stay letters, which is a third of the size
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def _others(evaluation: Evaluation) -> list[str]:
    return [entry.name for entry in evaluation.drafters if entry.refusal is None and entry.kind != PLAIN]


def _styles(evaluation: Evaluation) -> list[tuple[str, dict[str, Any]]]:
    styles = zip(_others(evaluation), cycle(COLORS[1:]), cycle(MARKERS), strict=False)
    return [
        (name, {"color": color, "marker": marker, "markersize": 4, "linewidth": 1, "capsize": 2})
        for name, color, marker in styles
    ]


def _widest(evaluation: Evaluation) -> str:
    return ALL if len(evaluation.tasks) > 1 else next(iter(evaluation.tasks))


def _length_name(num_tokens: int | None) -> str:
    return "all" if num_tokens is None else str(num_tokens)


def _errors(values: Sequence[Interval]) -> list[list[float]]:
    """Distances to the ends, as matplotlib wants them; NaN draws no bar."""
    return [[max(0.0, v.value - v.low) for v in values], [max(0.0, v.high - v.value) for v in values]]


def _plain_text(text: str) -> str:
    """Without what matplotlib would read as a formula."""
    return text.replace("$", r"\$")
