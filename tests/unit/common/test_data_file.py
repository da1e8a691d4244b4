# SPDX-License-Identifier: Apache-2.0
"""The file of rows that grows, and its settings beside it."""

import json

import pytest

from dspark_hf.common.data_file import DataFile, RefusedFile
from dspark_hf.training.answers import PrepareSettings
from dspark_hf.training.sampling import SamplingSettings
from tests.support.commands import read


SETTINGS = PrepareSettings("tiny", SamplingSettings(max_new_tokens=6, temperature=0))
GREEDY = SETTINGS.sampling


def test_rows_are_there_again(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    file = DataFile(path, SETTINGS)
    assert file.keys == set()
    file.append({"key": "a", "text": "ä\n"})
    file.append({"key": "b"})
    assert path.read_bytes() == '{"key": "a", "text": "ä\\n"}\n{"key": "b"}\n'.encode()
    assert DataFile(path, SETTINGS).keys == file.keys == {"a", "b"}


def test_settings_stand_beside_it(tmp_path):
    DataFile(tmp_path / "rows.jsonl", SETTINGS)
    recorded = json.loads((tmp_path / "rows.settings.json").read_text())
    assert recorded["settings"]["target"] == "tiny"
    assert recorded["settings"]["sampling"]["max_new_tokens"] == 6
    assert set(recorded["versions"]) == {"dspark_hf", "transformers"}


@pytest.mark.parametrize("half", [b'{"key": "b", "te', b'{"key": "b"}', b"\xc3", b"{"])
def test_half_a_line_is_removed(tmp_path, half):
    path = tmp_path / "rows.jsonl"
    DataFile(path, SETTINGS).append({"key": "a"})
    with path.open("ab") as file:
        file.write(half)
    again = DataFile(path, SETTINGS)
    assert again.keys == {"a"}
    again.append({"key": "c"})
    assert [row["key"] for row in read(path)] == ["a", "c"]


def test_other_settings_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    DataFile(path, SETTINGS).append({"key": "a"})
    content = path.read_bytes()
    warm = PrepareSettings("tiny", SamplingSettings(max_new_tokens=6, temperature=0.5), enable_thinking=False)
    with pytest.raises(ValueError, match=r"made with other settings \(enable_thinking, sampling\): .+another output"):
        DataFile(path, warm)
    with pytest.raises(ValueError, match=r"\(target\): {'target': 'tiny'}, got {'target': 'large'}"):
        DataFile(path, PrepareSettings("large", GREEDY))
    assert path.read_bytes() == content


def test_other_settings_are_right_before_there_are_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    DataFile(path, SETTINGS)
    DataFile(path, PrepareSettings("large", GREEDY)).append({"key": "a"})
    with pytest.raises(ValueError, match="made with other settings"):
        DataFile(path, SETTINGS)


def test_a_file_of_something_else_is_not_touched(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("my notes")
    with pytest.raises(ValueError, match=r"rows\.settings\.json beside it does not.+Choose another output"):
        DataFile(path, SETTINGS)
    assert path.read_text() == "my notes"


@pytest.mark.parametrize("line", [b"my notes", b'{"text": "without a key"}', b'{"key": 7}', b'{"key": "\xff"}', b"[]"])
def test_a_line_that_is_no_row_is_named(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    DataFile(path, SETTINGS).append({"key": "a"})
    content = path.read_bytes() + line + b"\n" + b'{"key": "b"}\n'
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"rows\.jsonl has a line that is no recorded run \(line 2: .+Remove"):
        DataFile(path, SETTINGS)
    assert path.read_bytes() == content


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '"settings"'])
def test_settings_that_cannot_be_read(tmp_path, text):
    path = tmp_path / "rows.jsonl"
    DataFile(path, SETTINGS).append({"key": "a"})
    (tmp_path / "rows.settings.json").write_text(text)
    with pytest.raises(ValueError, match=r"rows\.settings\.json must hold the settings of a run"):
        DataFile(path, SETTINGS)


def test_what_was_refused_belongs_to_its_answers(tmp_path):
    output = DataFile(tmp_path / "rows.jsonl", SETTINGS)
    output.append({"key": "a"})
    RefusedFile(output).append({"key": "b", "reason": "too long"})
    assert read(tmp_path / "rows.refused.jsonl") == [{"key": "b", "reason": "too long"}]
    assert RefusedFile(output).keys == {"b"}
    assert RefusedFile(output, ask_again=True).keys == set()
    assert not (tmp_path / "rows.refused.jsonl").exists()
    RefusedFile(output).append({"key": "b"})
    output.path.unlink()
    assert RefusedFile(DataFile(output.path, SETTINGS)).keys == set()
