# SPDX-License-Identifier: Apache-2.0
"""Where prompts come from: files, a data set, the target; what is refused."""

import json
import sys
import types
from pathlib import Path

import pytest
from rich.progress import Progress

from dspark_hf.training import prepare
from dspark_hf.training.prepare import PrepareJob
from dspark_hf.training.sampling import SamplingSettings
from tests.support.commands import write
from tests.support.models import tiny_target
from tests.support.scripted import captured_log
from tests.support.training import word_tokenizer, words


GREEDY = SamplingSettings(max_new_tokens=3, temperature=0)


def job(tmp_path, **fields) -> PrepareJob:
    defaults = {
        "output": tmp_path / "answers.jsonl",
        "prompt_files": (),
        "dataset": None,
        "num_self_prompts": 0,
        "self_prompt_starts": ("",),
        "sampling": GREEDY,
        "enable_thinking": None,
        "num_rows": 3,
        "limit": None,
    }
    return PrepareJob(**(defaults | fields))


@pytest.fixture(scope="module")
def target():
    target = tiny_target(context_scale=0.2)
    target.config._name_or_path = str(Path("models") / "tiny")
    target.generation_config.eos_token_id = list(range(80, 92))
    return target


def run(job, target, progress=None):
    return job.run_here(target, word_tokenizer(), progress or Progress(disable=True))


def answered(tmp_path):
    """(question, source) of each answered row."""
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    return {(row["messages"][-2]["content"], row["source"]) for row in rows}


def user(*ids):
    return {"role": "user", "content": words(*ids)}


def test_prompts_of_files(tmp_path, target):
    """Prompts, conversations, and conversations answered by someone else, whose answer is dropped."""
    system = {"role": "system", "content": words(50)}
    first = write(tmp_path / "math.jsonl", {"prompt": words(10)}, {"messages": [system, user(11)], "id": 3})
    second = write(tmp_path / "chat.jsonl", {"messages": [user(12), {"role": "assistant", "content": words(60)}]})
    assert run(job(tmp_path, prompt_files=(first, second)), target) == 3
    assert answered(tmp_path) == {("w10", "math"), ("w11", "math"), ("w12", "chat")}
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    by_question = {row["messages"][-2]["content"]: row for row in rows}
    assert by_question["w11"]["messages"][0] == system
    assert by_question["w12"]["messages"][-1]["content"] != "w60"


def test_settings_name_the_target_without_its_folder(tmp_path, target):
    run(job(tmp_path, prompt_files=(write(tmp_path / "p.jsonl", {"prompt": words(10)}),)), target)
    settings = json.loads((tmp_path / "answers.settings.json").read_text())["settings"]
    assert settings["target"] == "tiny"
    assert len(settings["template_sha256"]) == 64


def test_limit(tmp_path, target):
    file = write(tmp_path / "p.jsonl", *({"prompt": words(10 + i)} for i in range(9)))
    assert run(job(tmp_path, prompt_files=(file,), limit=4), target) == 4
    assert {question for question, _ in answered(tmp_path)} == {"w10", "w11", "w12", "w13"}
    assert run(job(tmp_path, prompt_files=(file,), limit=6), target) == 2


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "The row has no prompt: it needs `messages` or `prompt`, got the fields []."),
        ({"text": "w1"}, "The row has no prompt: it needs `messages` or `prompt`, got the fields ['text']."),
        ({"messages": []}, "`messages` must be a list of at least one turn"),
        ({"messages": "text"}, "`messages` must be a list of at least one turn"),
        ({"messages": ["text"]}, "Turn 1 must be an object with a `role`"),
        ({"messages": [{"role": "user"}]}, "`content` of turn 1 must be a text, got null."),
        ({"messages": [{"role": "system", "content": "w1"}]}, "must have one of the user, got none."),
        ({"messages": [{"role": "assistant", "content": "w1"}]}, "`messages` must be a list of at least one turn"),
        (
            {"messages": [{"role": "user", "content": "w1"}] + [{"role": "assistant", "content": "w2"}] * 2},
            "'assistant'",
        ),
        ({"prompt": 7}, "`content` of turn 1 must be a text, got a number."),
        ({"prompt": " "}, "`content` of turn 1 must not be blank"),
        ({"prompt": None}, "The row has no prompt"),
        ({"prompt": "w1", "tools": {}}, "`tools` must be a list of JSON objects"),
        ({"prompt": "w1", "tools": [{"name": "f"}]}, "The chat template ignores `tools`"),
        ('{"prompt": "w1"', 'each line must be one JSON object, got \'{"prompt": "w1"\''),
        ('{"prompt": "w1", "prompt": "w2"}', "the key 'prompt' occurs twice"),
        ('["w1"]', "each row must be a JSON object, got a "),
        ({"prompt": "w1 " * 600}, "A prompt must have at most 512 tokens, got 605."),
    ],
    ids=lambda value: str(value)[:40],
)
def test_row_without_a_prompt_is_left_out(tmp_path, target, row, reason):
    file = write(tmp_path / "p.jsonl", {"prompt": words(10)}, row, {"prompt": words(11)})
    with captured_log() as messages:
        assert run(job(tmp_path, prompt_files=(file,)), target) == 2
    assert {question for question, _ in answered(tmp_path)} == {"w10", "w11"}
    named, counted = messages
    assert named.startswith(f"{file}:2: ")
    assert reason in named
    assert counted == "1 of 3 rows were left out."
    (tmp_path / "answers.jsonl").unlink()
    alone = write(tmp_path / "p.jsonl", row)
    with pytest.raises(ValueError, match=r"^None of 1 rows can be used\. .+p\.jsonl(:1|, row 1): ") as caught:
        run(job(tmp_path, prompt_files=(alone,)), target)
    assert reason in str(caught.value)
    assert not (tmp_path / "answers.jsonl").exists()


def test_answer_of_others_is_dropped_whatever_it_is(tmp_path, target):
    """No text, only calls, or no text at all: the target writes its own."""
    answers = [{"content": None}, {"content": ""}, {"content": 7}, {"content": None, "tool_calls": [{"name": "f"}]}]
    rows = [{"messages": [user(10 + i), {"role": "assistant"} | said]} for i, said in enumerate(answers)]
    assert run(job(tmp_path, prompt_files=(write(tmp_path / "p.jsonl", *rows),)), target) == 4


def test_limit_counts_prompts(tmp_path, target):
    file = write(tmp_path / "p.jsonl", {"x": 1}, {"prompt": words(10)}, {"x": 1}, {"prompt": words(11)}, {"x": 1})
    assert run(job(tmp_path, prompt_files=(file,), limit=2), target) == 2
    assert {question for question, _ in answered(tmp_path)} == {"w10", "w11"}


def test_no_prompts(tmp_path, target):
    with pytest.raises(ValueError, match="There are no prompts. Pass `--prompts`, `--dataset` or `--self-prompts`"):
        run(job(tmp_path), target)
    with pytest.raises(ValueError, match=r"empty\.jsonl has no rows"):
        run(job(tmp_path, prompt_files=(write(tmp_path / "empty.jsonl"),)), target)


def test_prompts_of_the_target(tmp_path, target):
    """They are kept beside the answers, and a second run takes up both."""
    assert run(job(tmp_path, num_self_prompts=4), target) == 4
    prompts = tmp_path / "answers.prompts.jsonl"
    first = prompts.read_text()
    assert len(first.splitlines()) == 4
    assert {source for _, source in answered(tmp_path)} == {"self"}
    assert run(job(tmp_path, num_self_prompts=4), target) == 0
    assert prompts.read_text() == first
    file = write(tmp_path / "p.jsonl", {"prompt": words(10)})
    assert run(job(tmp_path, num_self_prompts=6, prompt_files=(file,)), target) == 3
    assert ("w10", "p") in answered(tmp_path)


def test_prompts_of_a_data_set_are_read_no_further_than_needed(tmp_path, target, monkeypatch):
    read = []

    def load_dataset(name, split, streaming):
        assert (name, split, streaming) == ("some/data", "train", True)
        for i in range(10_000):
            read.append(i)
            yield {"messages": [user(10 + i)]}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert run(job(tmp_path, dataset="some/data", limit=3), target) == 3
    assert len(read) == 3
    assert answered(tmp_path) == {(words(10 + i), "some/data") for i in range(3)}


def test_row_of_a_data_set_without_a_prompt(tmp_path, target, monkeypatch):
    rows = [{"prompt": words(10)}, {"text": "x"}, {"prompt": words(11)}]
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=lambda *_, **__: iter(rows)))
    with captured_log() as messages:
        assert run(job(tmp_path, dataset="some/data"), target) == 2
    assert messages[0].startswith(
        "some/data:1: The row has no prompt: it needs `messages` or `prompt`, got the fields ['text']"
    )


def test_data_sets_need_their_package(tmp_path, target, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r'`--dataset` needs the datasets package: pip install "dspark-hf\[train\]"'):
        run(job(tmp_path, dataset="some/data"), target)


def test_progress_counts_answers(tmp_path, target):
    progress = Progress(disable=True)
    run(job(tmp_path, num_self_prompts=3), target, progress)
    assert [(task.description, task.completed, task.total) for task in progress.tasks] == [
        ("Prompts", 3, 3),
        ("Answers", 3, 3),
    ]


def progress_of(job, target):
    progress = Progress(disable=True)
    added = run(job, target, progress)
    return added, {task.description: (task.completed, task.total) for task in progress.tasks}


def test_progress_is_full_where_an_earlier_run_did_a_part(tmp_path, target):
    """Five prompts, one of them twice and one too long: the second run has two left to answer."""
    file = write(
        tmp_path / "p.jsonl", *({"prompt": words(*ids)} for ids in ((10,), (11,), (12,), (10,), (13, 14, 15)))
    )
    prompts = {"prompt_files": (file,), "max_prompt_tokens": 7}
    assert progress_of(job(tmp_path, limit=1, **prompts), target) == (1, {"Answers": (1, 1)})
    assert progress_of(job(tmp_path, **prompts), target) == (2, {"Answers": (5, 5)})
    assert progress_of(job(tmp_path, **prompts), target) == (0, {"Answers": (5, 5)})
    assert {question for question, _ in answered(tmp_path)} == {"w10", "w11", "w12"}


def test_progress_counts_the_prompts_that_were_there(tmp_path, target):
    run(job(tmp_path, num_self_prompts=2), target)
    found = progress_of(job(tmp_path, num_self_prompts=3), target)
    assert found == (1, {"Prompts": (3, 3), "Answers": (3, 3)})
    assert progress_of(job(tmp_path, num_self_prompts=1), target) == (0, {"Prompts": (1, 1), "Answers": (3, 3)})


def test_longest_prompt(tmp_path, target):
    """The template adds five tokens to a prompt."""
    file = write(tmp_path / "p.jsonl", *({"prompt": words(*range(10, 10 + count))} for count in (1, 2, 3)))
    assert run(job(tmp_path, prompt_files=(file,), max_prompt_tokens=7), target) == 2
    assert answered(tmp_path) == {("w10", "p"), ("w10 w11", "p")}
    with pytest.raises(ValueError, match="`max_prompt_tokens` must be >= 1, got 0"):
        run(job(tmp_path, prompt_files=(file,), max_prompt_tokens=0), target)


def test_server_gets_the_prompts_and_the_settings(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(prepare, "write_answers_from_server", lambda *args, **kwargs: calls.append(args) or 2)
    file = write(tmp_path / "p.jsonl", {"prompt": words(10)}, {"prompt": words(11)}, {"prompt": words(12)})
    added = job(tmp_path, prompt_files=(file,), enable_thinking=False, limit=2).run_at_server(
        "http://server/v1", "org/name", 5, Progress(disable=True)
    )
    assert added == 2
    ((url, model, prompts, output, settings, concurrency),) = calls
    assert (url, model, output, concurrency) == ("http://server/v1", "org/name", tmp_path / "answers.jsonl", 5)
    assert [prompt.messages[0]["content"] for prompt in prompts] == ["w10", "w11"]
    assert (settings.target, settings.sampling, settings.enable_thinking) == ("org/name", GREEDY, False)


def test_server_writes_no_prompts(tmp_path):
    with pytest.raises(ValueError, match="`--self-prompts` needs the target on this machine"):
        job(tmp_path, num_self_prompts=3).run_at_server("http://server/v1", "name", 1, Progress(disable=True))
