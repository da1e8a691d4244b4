# SPDX-License-Identifier: Apache-2.0

import sys

import pytest

from dspark_hf.common.plots import check_can_plot
from dspark_hf.evaluation.reliability_plot import save_reliability_plot
from dspark_hf.scheduling.calibration import CalibrationReport
from dspark_hf.scheduling.reliability import ReliabilityBin, SurvivalFigures


def figures(error: float, *points: tuple[float, float]) -> SurvivalFigures:
    return SurvivalFigures(error, 0.01, 0.8, 0.1, tuple(ReliabilityBin(x, y, 50) for x, y in points))


REPORT = CalibrationReport(
    temperatures=(2.0, 0.75),
    before=(figures(0.08, (0.1, 0.3), (0.9, 0.7)), figures(0.03, (0.2, 0.25))),
    after=(figures(0.01, (0.3, 0.3), (0.7, 0.7)), figures(0.02, (0.2, 0.2))),
    conditional_acceptance=(0.5, 0.4),
    num_rounds=100,
    num_check_rounds=100,
)


def test_svg_has_a_panel_for_each_slot(tmp_path):
    path = save_reliability_plot(REPORT, tmp_path / "new" / "plot.svg")
    assert path == tmp_path / "new" / "plot.svg"
    drawing = path.read_text(encoding="utf-8")  # matplotlib keeps texts as comments beside their outlines
    for text in ("slot 0, T = 2.00", "ECE 8.0% → 1.0%", "slot 1, T = 0.75", "ECE 3.0% → 2.0%", "before", "after"):
        assert f"<!-- {text}" in drawing or f"\n{text}" in drawing, text
    assert drawing.count('<g id="axes_') == 2
    assert [entry.name for entry in path.parent.iterdir()] == ["plot.svg"]


def test_png(tmp_path):
    path = save_reliability_plot(REPORT, str(tmp_path / "plot.png"))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_other_endings_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must be a .png or .svg file, got 'plot.jpg'"):
        save_reliability_plot(REPORT, "plot.jpg")
    with pytest.raises(ValueError, match="png"):
        check_can_plot(tmp_path / "plot", "reliability diagram")


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RuntimeError, match=r'pip install "dspark-hf\[eval\]"'):
        save_reliability_plot(REPORT, "plot.png")
