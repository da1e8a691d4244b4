# SPDX-License-Identifier: Apache-2.0
"""Reliability diagrams of a calibration: predicted prefix survival against what was observed, slot by slot."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.plots import check_can_plot, save_figure
from ..scheduling.calibration import CalibrationReport
from ..scheduling.reliability import ReliabilityBin


if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL_INCHES = 2.6
# Two colours and two markers that also differ in print and to colour-blind readers.
BEFORE = {"color": "#d55e00", "marker": "o", "linestyle": "--", "label": "before"}
AFTER = {"color": "#0072b2", "marker": "s", "linestyle": "-", "label": "after"}


def save_reliability_plot(report: CalibrationReport, path: str | os.PathLike) -> Path:
    """Draw one panel per slot, before and after calibration, and write it to a file."""
    path = check_can_plot(path, "reliability diagram")
    from matplotlib.figure import Figure  # takes a second to import; no window and no global state

    slots = len(report.temperatures)
    figure = Figure(figsize=(PANEL_INCHES * slots, PANEL_INCHES + 0.6), layout="constrained")
    panels = figure.subplots(1, slots, sharex=True, sharey=True, squeeze=False)[0]
    for slot, (axes, before, after) in enumerate(zip(panels, report.before, report.after, strict=True)):
        axes.plot([0, 1], [0, 1], color="0.7", linewidth=1, zorder=0)
        _draw(axes, before.reliability, BEFORE)
        _draw(axes, after.reliability, AFTER)
        errors = f"ECE {before.expected_calibration_error:.1%} → {after.expected_calibration_error:.1%}"
        axes.set_title(f"slot {slot}, T = {report.temperatures[slot]:.2f}\n{errors}", fontsize=9)
        axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    panels[0].set_ylabel("observed rate")
    panels[0].legend(loc="upper left", fontsize=8)
    figure.supxlabel("predicted prefix survival", fontsize=9)
    return save_figure(figure, path)


def _draw(axes: Axes, bins: Sequence[ReliabilityBin], style: dict[str, Any]) -> None:
    points = [(entry.mean_prediction, entry.observed_rate) for entry in bins]
    axes.plot(*zip(*points, strict=True), markersize=4, linewidth=1, **style)
