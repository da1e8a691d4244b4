# SPDX-License-Identifier: Apache-2.0
"""Small files are replaced in one step."""

import os

import pytest

from dspark_hf.common.files import write_text


def test_contents_are_replaced(tmp_path):
    path = tmp_path / "a.json"
    for text in ("one", "zwei ä"):
        write_text(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_failure_leaves_the_old_contents_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_text(path, "old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]
