# SPDX-License-Identifier: Apache-2.0
"""Replays of more and more requests as a picture: the paper's figures 7 (throughput against the speed of each user)
and 8 (verification budget against load) in small."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.plots import check_can_plot, save_figure
from ..scheduling.simulation import LoadReport


if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL_INCHES = 4.5
# Told apart by readers who do not see all colours, and in print.
COLORS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def save_load_plot(reports: Sequence[LoadReport], path: str | os.PathLike) -> Path:
    """Draw reports of replays, one line per policy, and write the picture to a file.

    On the left, throughput against the speed of one user: each marker is a number of requests, more to the left the
    more there are; higher and further right is better. On the right, what a request has verified per round.
    """
    if not reports:
        raise ValueError("`reports` must hold at least one report, got none. Pass those of `simulation.replay`.")
    path = check_can_plot(path, "load plot")
    from matplotlib.figure import Figure  # takes a second to import; no window and no global state

    figure = Figure(figsize=(2 * PANEL_INCHES, PANEL_INCHES), layout="constrained")
    speed, budget = figure.subplots(1, 2)
    policies = dict.fromkeys(report.policy for report in reports)
    for policy, color, marker in zip(policies, cycle(COLORS), cycle(MARKERS), strict=False):
        chosen = sorted((r for r in reports if r.policy == policy), key=lambda report: report.num_requests)
        style = {
            "color": color,
            "marker": marker,
            "markersize": 5,
            "fillstyle": "none",
            "linewidth": 1,
        }  # lines overlap
        speed.plot([r.user_tokens_per_s for r in chosen], [r.tokens_per_s for r in chosen], label=policy, **style)
        budget.plot([r.num_requests for r in chosen], [1 + r.verify_length for r in chosen], label=policy, **style)
    speed.set(xlabel="tokens per second of one request", ylabel="tokens per second of all", ylim=(0, None))
    budget.set(xlabel="requests", ylabel="tokens verified per request and round", ylim=(0, None))
    _label_counts(budget, sorted({report.num_requests for report in reports}))
    figure.legend(*speed.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return save_figure(figure, path)


def _label_counts(axes: Axes, counts: Sequence[int]) -> None:
    """Doubling steps at equal distances, with the counts themselves below them."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
