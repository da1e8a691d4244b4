# SPDX-License-Identifier: Apache-2.0
"""Files of rows as people have them: encodings, line ends, arrays, and what is wrong with a row."""

import json

import pytest

from dspark_hf.common.jsonl import read_json_array, read_json_lines, read_lines
from dspark_hf.common.prompts import read_prompts
from tests.support.scripted import captured_log


@pytest.fixture
def rows(tmp_path):
    """Rows of a file with the given bytes."""

    def read(content, reader=read_json_lines):
        path = tmp_path / "rows.jsonl"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return list(reader(path))

    return read


def values(found):
    return [row.value for row in found]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_encodings_and_line_ends(rows, encoding, end):
    text = end.join(['{"x": "ä\u2028\u0085€"}', "", "  ", '{"x": "\\ud83d\\ude00"}', ""])
    found = rows(text.encode(encoding))
    assert values(found) == [{"x": "ä\u2028\u0085€"}, {"x": "\U0001f600"}]
    assert [row.number for row in found] == [1, 4]


def test_joined_files_have_a_mark_inside(rows):
    part = '{"x": 1}\n'.encode("utf-8-sig")
    assert values(rows(part + part)) == [{"x": 1}, {"x": 1}]


def test_last_line_needs_no_end(rows):
    assert values(rows('{"x": 1}\n{"x": 2}')) == [{"x": 1}, {"x": 2}]


@pytest.mark.parametrize("content", ["", "\n", " \r\n\t\n", b"\xef\xbb\xbf", b"\xff\xfe"])
def test_nothing(rows, content):
    assert rows(content) == []
    assert rows(content, read_json_array) == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"x": ', "each line must be one JSON object, got '{\"x\":' (Expecting value, column"),
        (b'{"x": 1} {"x": 2}', "(Extra data, column 10)"),
        (b'{"x": 1},', "(Extra data, column 9)"),
        (b"[1, 2]", "each row must be a JSON object, got a list. Correct the row."),
        (b'"text"', "got a string."),
        (b"null", "got null."),
        (b"true", "got a boolean."),
        (b"7", "got a number."),
        (b"NaN", "got a number."),
        (
            b'{"x": "\xe9t\xe9"}',
            "the file must be UTF-8, got the byte 0xe9 (invalid continuation byte). Save it as UTF-8.",
        ),
        (b'{"x": "\xed\xa0\xbd"}', "the file must be UTF-8, got the byte 0xed"),
        (b'{"x": "a\tb"}', "(Invalid control character at, column"),
        (b'{"x": "\\ud83d"}', "(half a surrogate pair, \\ud83d, stands alone in a text)"),
        (b'{"\\uDE00": 1}', "(half a surrogate pair, \\ude00, stands alone in a text)"),
        (b'{"x": 1, "y": 2, "x": 3}', "(the key 'x' occurs twice)"),
        (b'{"y": [{"x": 1, "x": 1}]}', "(the key 'x' occurs twice)"),
        (b'{"x": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
        (b'{"x": ' + b"[" * 100_000 + b"}", "(it is nested too deeply)"),
        (b"\0" * 20, "(Expecting value, column 1)"),
        (b"{'x': 1}", "(Expecting property name enclosed in double quotes, column 2)"),
    ],
)
def test_line_with_a_fault_is_named_and_the_others_are_read(rows, line, problem):
    good, bad, last = rows(b'{"x": 1}\n' + line + b'\n{"x": 2}\n')
    assert (good.value, last.value) == ({"x": 1}, {"x": 2})
    assert (bad.value, bad.number) == (None, 2)
    assert problem in bad.problem


def test_bad_pair_in_utf_16(rows):
    content = '{"x": 1}\n{"x": "#"}\n{"x": 2}\n'.encode("utf-16-le").replace(b"#\0", b"\x3d\xd8")
    good, bad, last = rows(b"\xff\xfe" + content)
    assert (good.value, last.value) == ({"x": 1}, {"x": 2})
    assert (bad.value, bad.number) == (None, 2)
    assert "Invalid \\escape" in bad.problem


@pytest.mark.parametrize("reader", [read_json_lines, read_json_array])
@pytest.mark.parametrize(
    "text", ['[{"x": 1}, {"x": 2}]', '[\n {"x": 1},\n\n {\n  "x": 2}\n]\n', '  [{"x": 1},\r\n{"x": 2}]']
)
def test_file_that_is_one_array(rows, reader, text):
    found = rows(text, reader)
    assert values(found) == [{"x": 1}, {"x": 2}]
    assert [(row.unit, row.number) for row in found] == [("row", 1), ("row", 2)]


def test_entry_of_an_array_that_is_no_object(rows):
    good, bad = rows('[{"x": 1}, "x"]')
    assert good.value == {"x": 1}
    assert (bad.unit, bad.number, bad.value) == ("row", 2, None)
    assert "each row must be a JSON object, got a string" in bad.problem


def test_array_with_a_fault_is_named_once(rows):
    (bad,) = rows('[{"x": 1},\n{"x": 1, "x": 2}]')
    assert bad.problem == "the file must be a list of JSON objects, but the key 'x' occurs twice. Correct it."
    (bad,) = rows(b'[{"x": 1},\n{"x": "\xff"}]')
    assert (bad.number, bad.value) == (2, None)


def test_lines_that_are_lists_of_their_own(rows):
    """Line by line, since together they are no JSON; the last one is good."""
    first, second, last = rows('[1]\n[{"x": 1}]\n{"x": 2}\n')
    assert first.problem.startswith("each row must be a JSON object, got a list")
    assert second.problem.startswith("each row must be a JSON object, got a list")
    assert last.value == {"x": 2}


def test_values_that_json_does_not_have_are_null_and_counted(rows):
    with captured_log("transformers.dspark_hf") as messages:
        found = rows('{"x": 1}\n{"x": NaN, "y": [-Infinity, 1]}\n{"x": 1e999}\n')
    assert values(found) == [{"x": 1}, {"x": None, "y": [None, 1]}, {"x": None}]
    (message,) = messages
    assert message.endswith("was read as null in 2 rows, the first being line 2.")


def test_they_are_counted_where_only_the_first_rows_are_taken(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"x": NaN}\n' * 3)
    with captured_log("transformers.dspark_hf") as messages:
        found = read_json_lines(path)
        next(found)
        next(found)
        found.close()
    assert "in 2 rows, the first being line 1" in messages[0]


def test_lines_of_a_text(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_bytes(b"one \r\n\n\xff\ntwo")
    assert [(line.number, line.text, bool(line.problem)) for line in read_lines(path)] == [
        (1, "one", False),
        (2, "", False),
        (3, "", True),
        (4, "two", False),
    ]


def test_prompts_have_the_same_reader(tmp_path):
    """In UTF-16, and as an array in a file of lines."""
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(json.dumps([{"prompt": "one"}, {"prompt": "ä"}]).encode("utf-16"))
    assert [prompt.text for prompt in read_prompts(path)] == ["one", "ä"]
    (tmp_path / "prompts.txt").write_bytes("one\nä\n".encode("utf-16"))
    assert [prompt.text for prompt in read_prompts(tmp_path / "prompts.txt")] == ["one", "ä"]
    path.write_text('{"prompt": "one"}\n{"prompt": "two", "prompt": "three"}\n')
    with pytest.raises(ValueError, match="line 2: each line must be one JSON object, got .+the key 'prompt' occurs"):
        read_prompts(path)
