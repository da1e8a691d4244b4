# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import sys
from xml.etree import ElementTree

import pytest

from dspark_hf.evaluation import load_plot
from dspark_hf.evaluation.load_plot import save_load_plot
from dspark_hf.scheduling.simulation import LoadReport


REPORTS = [
    LoadReport(policy, n, num_rounds=10 * n, num_tokens=20 * n, num_verified=30 * n, seconds=1.0 + n / 8)
    for policy in ("plain", "look-ahead")
    for n in (1, 4, 16)
]


def drawn(monkeypatch, reports, path):
    """The two panels, as matplotlib has them when the file is written."""
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **kwargs: figures.append(self) or save(self, *args, **kwargs)
    )
    assert save_load_plot(reports, path) == path
    return figures[0].axes


def test_lines_hold_the_figures_of_the_reports(monkeypatch, tmp_path):
    speed, budget = drawn(monkeypatch, [*REPORTS[3:], *reversed(REPORTS[:3])], tmp_path / "new" / "load.svg")
    for axes in (speed, budget):
        assert [line.get_label() for line in axes.lines] == ["look-ahead", "plain"]
    for line, policy in zip(speed.lines, ("look-ahead", "plain"), strict=True):
        expected = [r for r in REPORTS if r.policy == policy]  # by the number of requests
        assert line.get_xdata().tolist() == [r.user_tokens_per_s for r in expected]
        assert line.get_ydata().tolist() == [r.tokens_per_s for r in expected]
    assert budget.lines[0].get_xdata().tolist() == [1, 4, 16]
    assert budget.lines[0].get_ydata().tolist() == [3.0, 3.0, 3.0]
    assert [label.get_text() for label in budget.get_xticklabels()] == ["1", "4", "16"]


def test_files(tmp_path):
    save_load_plot(REPORTS, tmp_path / "load.svg")
    assert ElementTree.parse(tmp_path / "load.svg").getroot().tag.endswith("svg")
    save_load_plot(REPORTS, str(tmp_path / "load.PNG"))
    assert (tmp_path / "load.PNG").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["load.PNG", "load.svg"]  # no half-written ones


def test_a_failed_write_leaves_the_old_picture(monkeypatch, tmp_path):
    path = tmp_path / "load.svg"
    path.write_text("old")

    def fail(source, destination):
        raise OSError("full")

    with monkeypatch.context() as patch:
        patch.setattr(load_plot.os, "replace", fail)
        with pytest.raises(OSError, match="full"):
            save_load_plot(REPORTS, path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["load.svg"]


def test_many_policies_keep_apart(monkeypatch, tmp_path):
    reports = [LoadReport(f"fixed {n}", 1, 10, 20, 30, 1.0 + n) for n in range(20)]
    speed, _ = drawn(monkeypatch, reports, tmp_path / "load.svg")
    assert len({(line.get_color(), line.get_marker()) for line in speed.lines}) == 20


def test_wrong_input(tmp_path):
    with pytest.raises(ValueError, match="`reports` must hold at least one report, got none"):
        save_load_plot([], tmp_path / "load.svg")
    with pytest.raises(ValueError, match=r"must be a .png or .svg file, got .*load.pdf"):
        save_load_plot(REPORTS, tmp_path / "load.pdf")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RuntimeError, match=r'pip install "dspark-hf\[eval\]"'):
        save_load_plot(REPORTS, tmp_path / "load.svg")
