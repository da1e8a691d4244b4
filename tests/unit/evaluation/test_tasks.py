# SPDX-License-Identifier: Apache-2.0

import json
import sys

import pytest

from dspark_hf.common.prompts import BUILTIN_PROMPTS
from dspark_hf.evaluation.tasks import TASKS, Question, TaskData, load_tasks, questions_from_rows, read_questions


TURNS = {"turns": ["First?", "And then?"]}
MESSAGES = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Somebody else's answer"},
        {"role": "user", "content": "Bye"},
    ]
}
# A row of each data set, with the columns that are used and one that is not.
ROWS = {
    "gsm8k": ({"question": "How many?", "answer": "3"}, "How many?\nPlease reason step by step"),
    "math500": ({"problem": "Find x.", "level": 1}, "Find x.\nPlease reason step by step"),
    "aime25": ({"problem": "Find y.", "answer": "1"}, "Find y.\nPlease reason step by step"),
    "mbpp": ({"prompt": "Write a function.", "code": "def f"}, "Write a function."),
    "humaneval": ({"prompt": "def f():\n", "test": ""}, "Complete this Python function"),
    "livecodebench": ({"question_content": "Sort.", "starter_code": "class S:"}, "Solve this problem"),
    "alpaca": ({"instruction": "Translate.", "input": "Hund", "output": ""}, "Translate.\n\nHund"),
    "arena-hard-v2": ({"prompt": "Write a poem.", "uid": "1"}, "Write a poem."),
}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_files_hold_turns_messages_or_prompts(tmp_path):
    path = write(tmp_path / "mine.jsonl", TURNS, MESSAGES, {"prompt": "Just this."})
    assert read_questions(path) == [
        Question("mine", 0, ("First?", "And then?")),
        Question("mine", 1, ("Hello", "Bye"), "Be brief."),
        Question("mine", 2, ("Just this.",)),
    ]
    (tmp_path / "list.json").write_text(json.dumps([TURNS]))
    assert read_questions(tmp_path / "list.json") == [Question("list", 0, ("First?", "And then?"))]
    (tmp_path / "lines.txt").write_text("One\n\nTwo\n")
    assert [q.turns for q in read_questions(tmp_path / "lines.txt")] == [("One",), ("Two",)]


def test_a_byte_order_mark_and_blank_lines_do_no_harm(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(TURNS).encode() + b"\r\n\r\n" + json.dumps({"prompt": "x"}).encode())
    assert [question.turns for question in read_questions(path)] == [("First?", "And then?"), ("x",)]


def test_one_reader_reads_the_files_of_all_commands(tmp_path):
    """UTF-16, a list in a file of lines, a value that JSON does not have; a key that occurs twice is refused."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps([TURNS, {"prompt": "x", "score": float("nan")}]).encode("utf-16"))
    assert [question.turns for question in read_questions(path)] == [("First?", "And then?"), ("x",)]
    path.write_text('{"prompt": "x"}\n{"prompt": "x", "prompt": "y"}\n')
    with pytest.raises(ValueError, match="line 2: .+the key 'prompt' occurs twice"):
        read_questions(path)


def test_a_limit_spreads_over_the_file(tmp_path):
    path = write(tmp_path / "ordered.jsonl", *({"prompt": f"question {i}"} for i in range(10)))
    (task,) = load_tasks([str(path)], limit=4)
    assert [question.index for question in task.questions] == [0, 2, 5, 7]
    assert task.num_available == 10
    assert len(load_tasks([str(path)])[0].questions) == len(load_tasks([str(path)], limit=99)[0].questions) == 10


def test_the_fingerprint_is_that_of_the_questions(tmp_path):
    path = write(tmp_path / "a.jsonl", TURNS, MESSAGES)
    first, again = (load_tasks([str(path)])[0].fingerprint for _ in range(2))
    assert first == again
    questions = read_questions(path)
    for changed in (questions[:1], questions[::-1], [questions[0], Question("a", 1, ("Hello", "Bye"))]):
        assert TaskData("a", tuple(changed), 2).fingerprint != first


def test_builtin_prompts_are_a_task():
    (task,) = load_tasks(["builtin"])
    assert [question.turns[0] for question in task.questions] == [prompt.text for prompt in BUILTIN_PROMPTS]
    assert task.questions[3].key == "builtin/3"


@pytest.mark.parametrize("task", sorted(ROWS))
def test_rows_of_named_tasks_become_prompts(task):
    row, beginning = ROWS[task]
    (question,) = questions_from_rows(task, [row])
    assert len(question.turns) == 1
    assert question.turns[0].startswith(beginning)
    assert next(iter(row.values())).strip() in question.turns[0]
    assert (question.task, question.index) == (task, 0)


def test_mt_bench_has_two_turns():
    (question,) = questions_from_rows("mt-bench", [{"prompt": ["One", "Two"], "category": "writing"}])
    assert question.turns == ("One", "Two")


def test_every_named_task_says_where_it_is():
    assert sorted([*ROWS, "mt-bench"]) == sorted(TASKS)
    assert TASKS["gsm8k"].load_arguments == {"path": "openai/gsm8k", "name": "main", "split": "test"}
    assert TASKS["livecodebench"].load_arguments["data_files"].startswith("hf://datasets/livecodebench/")


# Bad input


def test_a_changed_data_set_is_named():
    with pytest.raises(ValueError, match=r"Row 1 of 'openai/gsm8k' has no column 'question', got \['text'\]"):
        questions_from_rows("gsm8k", [{"question": "a"}, {"text": "b"}])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "at least one task, got none. Name one of builtin, gsm8k"),
        (["gsm9k"], "no task 'gsm9k'. Name one of builtin, gsm8k"),
        (["builtin", "builtin"], r"\['builtin'\] more than once"),
    ],
)
def test_tasks_that_cannot_be(names, message):
    with pytest.raises(ValueError, match=message):
        load_tasks(names)


def test_two_files_of_one_name(tmp_path):
    (tmp_path / "other").mkdir()
    paths = [write(folder / "chat.jsonl", TURNS) for folder in (tmp_path, tmp_path / "other")]
    with pytest.raises(ValueError, match=r"\['chat'\] more than once. Rename a file"):
        load_tasks([str(path) for path in paths])


def test_no_task_is_called_as_their_pool(tmp_path):
    path = write(tmp_path / "all.jsonl", TURNS)
    for name in (str(path), "all"):
        with pytest.raises(ValueError, match="must not be 'all', which in the report names the pool"):
            load_tasks(["builtin", name])


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        load_tasks([str(tmp_path / "nowhere.jsonl")])
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="at least one prompt, got none"):
        load_tasks([str(tmp_path / "empty.jsonl")])
    (tmp_path / "table.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match=r"must end in \.txt, \.json or \.jsonl"):
        load_tasks([str(tmp_path / "table.csv")])
    write(tmp_path / "broken.jsonl", TURNS).open("a").write('{"turns": \n')
    with pytest.raises(ValueError, match="line 2: each line must be one JSON object"):
        load_tasks([str(tmp_path / "broken.jsonl")])


@pytest.mark.parametrize("row", [{"turns": ["Fine", 3]}, {"turns": ["Fine", " "]}])
def test_every_turn_must_be_a_text(row, tmp_path):
    with pytest.raises(ValueError, match="line 2: each turn must be a text"):
        load_tasks([str(write(tmp_path / "a.jsonl", TURNS, row))])


def test_a_limit_below_one():
    with pytest.raises(ValueError, match="`limit` must be >= 1, got 0"):
        load_tasks(["builtin"], limit=0)


def test_a_data_set_without_a_network():
    with pytest.raises(OSError, match=r"The task gsm8k is 'openai/gsm8k' of the Hub, .* or pass a file with `turns`"):
        load_tasks(["gsm8k"])


def test_a_data_set_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RuntimeError, match=r'pip install "dspark-hf\[eval\]"'):
        load_tasks(["gsm8k"])
