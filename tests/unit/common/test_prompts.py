# SPDX-License-Identifier: Apache-2.0
import json
import re
from collections import Counter
from dataclasses import FrozenInstanceError

import pytest

from dspark_hf.common.prompts import BUILTIN_PROMPTS, Prompt, read_prompts


@pytest.fixture
def write(tmp_path):
    """Writes `content` (text, bytes, or rows to be dumped one a line) to a file and returns its path."""

    def write_file(name, content):
        path = tmp_path / name
        if isinstance(content, list):
            content = "\n".join(json.dumps(row) for row in content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return path

    return write_file


def message_of(path):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the callers look at the whole message
        read_prompts(path)
    return str(caught.value)


def test_builtin_prompts_are_four_distinct_ones_of_each_domain():
    assert Counter(prompt.domain for prompt in BUILTIN_PROMPTS) == {"math": 4, "code": 4, "chat": 4}
    assert len({prompt.text for prompt in BUILTIN_PROMPTS}) == 12
    assert all(prompt.text == prompt.text.strip() and len(prompt.text) > 20 for prompt in BUILTIN_PROMPTS)


def test_prompt_is_frozen():
    with pytest.raises(FrozenInstanceError):
        BUILTIN_PROMPTS[0].text = "other"


def test_txt_takes_one_prompt_a_line_and_skips_blank_ones(write):
    path = write("prompts.txt", "Add 2 and 3.\r\n\n   \n  Why is the sky blue?  \n")
    assert read_prompts(path) == [Prompt("general", "Add 2 and 3."), Prompt("general", "Why is the sky blue?")]


def test_txt_keeps_unicode_line_separators_inside_a_prompt(write):
    assert read_prompts(write("prompts.txt", "one\u2028two\n")) == [Prompt("general", "one\u2028two")]


def test_byte_order_mark_is_not_part_of_the_first_prompt(write):
    assert read_prompts(write("prompts.txt", b"\xef\xbb\xbfHello.\n")) == [Prompt("general", "Hello.")]


def test_jsonl_takes_prompt_messages_and_turns(write):
    rows = [
        {"prompt": "a", "domain": "math"},
        {"turns": ["b", "not this"], "category": "writing"},
        {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "c"}, {"role": "user"}]},
    ]
    expected = [Prompt("math", "a"), Prompt("writing", "b"), Prompt("general", "c")]
    assert read_prompts(str(write("rows.jsonl", rows))) == expected


def test_json_takes_a_list_of_rows_and_uppercase_ending(write):
    path = write("rows.JSON", '[\n  {"prompt": "a"},\n  {"turns": ["b"]}\n]\n')
    assert read_prompts(path) == [Prompt("general", "a"), Prompt("general", "b")]


def test_jsonl_keeps_line_separators_inside_strings_and_line_breaks_of_the_prompt(write):
    path = write("rows.jsonl", '{"prompt": "a\u2028b\\nc"}\n')
    assert read_prompts(path) == [Prompt("general", "a\u2028b\nc")]


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl", "empty.json"])
@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_file_is_refused(write, name, content):
    path = write(name, content)
    assert message_of(path) == (
        f"{path}: a prompt file must hold at least one prompt, got none. Add one prompt a line."
    )


def test_malformed_jsonl_names_file_line_and_value(write):
    path = write("rows.jsonl", '{"prompt": "a"}\n\n{"prompt": "b"\n')
    message = message_of(path)
    assert message.startswith(f'{path}, line 3: each line must be one JSON object, got \'{{"prompt": "b"\'')
    assert "name the file .txt" in message


def test_malformed_json_names_file_line_and_value(write):
    path = write("rows.json", '[\n  {"prompt": "a"},\n  {"prompt": b}\n]')
    message = message_of(path)
    assert message.startswith(f"{path}, line 3: the file must be valid JSON, got '{{\"prompt\": b}}'")
    assert "name the file .jsonl" in message


def test_truncated_json_names_the_last_line(write):
    assert ", line 2: the file must be valid JSON" in message_of(write("rows.json", '[\n{"prompt": "a"'))


def test_json_object_instead_of_list_is_refused(write):
    message = message_of(write("rows.json", '{"prompt": "a"}'))
    assert "the file must be a list of JSON objects, got an object. Put [ and ] around the rows." in message


@pytest.mark.parametrize(
    ("row", "kind"),
    [("text", "a string"), (["a"], "a list"), (3, "a number"), (True, "a boolean"), (None, "null")],
)
def test_row_that_is_no_object_is_refused(write, row, kind):
    path = write("rows.jsonl", [{"prompt": "a"}, row])
    assert message_of(path).startswith(f"{path}, line 2: each row must be a JSON object, got {kind}.")


@pytest.mark.parametrize(
    "row",
    [
        {"question": "a"},
        {"prompt": ""},
        {"prompt": "  "},
        {"prompt": 3},
        {"turns": []},
        {"turns": "a"},
        {"turns": [{"role": "user"}]},
        {"messages": []},
        {"messages": [{"role": "assistant", "content": "a"}]},
        {"messages": [{"role": "user"}]},
        {"messages": ["a"]},
    ],
)
def test_row_without_a_prompt_names_line_and_row(write, row):
    path = write("rows.jsonl", [{"prompt": "a"}, row])
    message = message_of(path)
    assert message.startswith(f"{path}, line 2: a row must have a `prompt` string, ")
    assert json.dumps(row) in message
    assert 'Write it as {"prompt": "..."}.' in message


def test_row_without_a_prompt_in_json_names_the_row(write):
    path = write("rows.json", '[{"prompt": "a"}, {"text": "b"}]')
    assert message_of(path).startswith(f"{path}, row 2: a row must have")


def test_long_row_is_shortened_in_the_message(write):
    message = message_of(write("rows.jsonl", [{"text": "x" * 500}]))
    assert "x" * 60 in message
    assert "x" * 80 not in message


def test_domain_must_be_a_string(write):
    path = write("rows.jsonl", [{"prompt": "a", "domain": 7}])
    assert message_of(path) == f"{path}, line 1: `domain` must be a string, got 7. Put it in quotes."


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl", "prompts.json"])
def test_file_that_is_not_utf8_names_line_and_byte(write, name):
    path = write(name, b'{"prompt": "first"}\n{"prompt": "second \xe9t\xe9"}\n')
    message = message_of(path)
    assert message.startswith(f"{path}, line 2: the file must be UTF-8, got the byte 0xe9")
    assert "Save it as UTF-8." in message


def test_missing_file_is_refused(tmp_path):
    path = tmp_path / "nowhere.txt"
    with pytest.raises(FileNotFoundError, match=re.escape(f"must exist, got {str(path)!r}. Check the path.")):
        read_prompts(path)


def test_folder_is_refused(tmp_path):
    folder = tmp_path / "folder.txt"
    folder.mkdir()
    with pytest.raises(FileNotFoundError, match="must exist"):
        read_prompts(folder)


@pytest.mark.parametrize("name", ["prompts.csv", "prompts"])
def test_other_ending_is_refused(write, name):
    path = write(name, "a\n")
    assert message_of(path).startswith(f"A prompt file must end in .txt, .json or .jsonl, got {str(path)!r}.")
