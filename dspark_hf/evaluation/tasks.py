# SPDX-License-Identifier: Apache-2.0
"""Evaluation tasks: well-known ones by name, or a user's own file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.prompts import BUILTIN_PROMPTS, read_prompt_rows, row_prompt


BUILTIN = "builtin"
ALL = "all"  # the tasks taken together
FILE_ENDINGS = (".txt", ".json", ".jsonl")
# Asked for by the paper's evaluation as well: without it a model may answer a sum with a number alone.
REASONING = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Question:
    """One conversation to be had with the target."""

    task: str  # task that it belongs to
    index: int  # its row in the task's data, from 0
    turns: tuple[str, ...]  # the user's messages; the target's answers stand between them
    system: str | None = None  # system message

    @property
    def key(self) -> str:
        """Names the question within an evaluation."""
        return f"{self.task}/{self.index}"


@dataclass(frozen=True)
class TaskSource:
    """The source of a named task's prompts, and how a row becomes a prompt."""

    path: str  # data set of the Hub, or a builder of `datasets`
    split: str
    to_turns: Callable[[dict[str, Any]], Sequence[str]]  # row -> the user's messages
    name: str | None = None  # configuration of the data set
    data_files: str | None = None  # one file of it, where the others hold something else

    @property
    def load_arguments(self) -> dict[str, Any]:
        """Arguments of `datasets.load_dataset`."""
        arguments = {"path": self.path, "name": self.name, "data_files": self.data_files, "split": self.split}
        return {name: value for name, value in arguments.items() if value is not None}


def _code(text: str) -> str:
    return f"Complete this Python function, and explain it in one sentence:\n```python\n{text.strip()}\n```"


def _instruction(row: dict[str, Any]) -> list[str]:
    return [f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]]


def _contest(row: dict[str, Any]) -> list[str]:
    code = row.get("starter_code")
    begin = f"\n\nBegin with this code:\n```python\n{code}\n```" if code else ""
    return [f"Solve this problem with a Python program.\n\n{row['question_content']}{begin}"]


TASKS: dict[str, TaskSource] = {
    "gsm8k": TaskSource("openai/gsm8k", "test", lambda row: [row["question"] + REASONING], name="main"),
    "math500": TaskSource("HuggingFaceH4/MATH-500", "test", lambda row: [row["problem"] + REASONING]),
    "aime25": TaskSource("math-ai/aime25", "test", lambda row: [row["problem"] + REASONING]),
    "mbpp": TaskSource(
        "google-research-datasets/mbpp", "test", lambda row: [row.get("prompt") or row["text"]], name="sanitized"
    ),
    "humaneval": TaskSource("openai/openai_humaneval", "test", lambda row: [_code(row["prompt"])]),
    # The data set's own loader is a script, which `datasets` no longer runs; this is its last release's file.
    "livecodebench": TaskSource(
        "json", "train", _contest, data_files="hf://datasets/livecodebench/code_generation_lite/test6.jsonl"
    ),
    "mt-bench": TaskSource("HuggingFaceH4/mt_bench_prompts", "train", lambda row: row["prompt"]),
    "alpaca": TaskSource("tatsu-lab/alpaca", "train", _instruction),
    "arena-hard-v2": TaskSource(
        "lmarena-ai/arena-hard-auto",
        "train",
        lambda row: [row["prompt"]],
        data_files="data/arena-hard-v2.0/question.jsonl",
    ),
}


@dataclass(frozen=True)
class TaskData:
    """The questions of one task that are asked."""

    name: str  # the task
    questions: tuple[Question, ...]  # questions, at least one
    num_available: int  # questions that the task has

    @property
    def fingerprint(self) -> str:
        """Hash of the questions, so that an evaluation is not continued with others."""
        texts = [[question.index, question.system, list(question.turns)] for question in self.questions]
        return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


def load_tasks(names: Sequence[str], limit: int | None = None) -> list[TaskData]:  # in the order of `names`
    """Load tasks by name, or from files."""
    if limit is not None and limit < 1:
        raise ValueError(f"`limit` must be >= 1, got {limit}. Omit it for all questions.")
    if not names:
        raise ValueError(f"An evaluation needs at least one task, got none. {_choices()}")
    titles = [_title(name) for name in names]
    if ALL in titles:
        raise ValueError(
            f"A task's name must not be {ALL!r}, which in the report names the pool of all tasks. Rename the file, or "
            "name each task."
        )
    twice = sorted({title for title in titles if titles.count(title) > 1})
    if twice:
        raise ValueError(f"Tasks must have different names, got {twice} more than once. Rename a file.")
    return [_load_task(name, title, limit) for name, title in zip(names, titles, strict=True)]


def questions_from_rows(task: str, rows: Iterable[dict[str, Any]]) -> list[Question]:
    """Rows of a named task's data set as questions."""
    questions = []
    for index, row in enumerate(rows):
        try:
            turns = tuple(TASKS[task].to_turns(row))
        except KeyError as error:
            raise ValueError(
                f"Row {index} of {TASKS[task].path!r} has no column {error}, got {sorted(row)}. The data set was "
                "changed: pass a file of your own instead."
            ) from error
        questions.append(Question(task, index, turns))
    return questions


def read_questions(path: Path) -> list[Question]:
    """The questions of a user's file."""
    return [_row_question(path, index, *row) for index, row in enumerate(read_prompt_rows(path))]


def _row_question(path: Path, index: int, where: str, row: dict[str, Any]) -> Question:
    row_prompt(where, row)  # refuses a row without a prompt
    system = None
    if "prompt" in row:
        turns = [row["prompt"]]
    elif isinstance(row.get("messages"), list):
        said = [message for message in row["messages"] if isinstance(message, dict)]
        turns = [message.get("content") for message in said if message.get("role") == "user"]
        system = next((message.get("content") for message in said if message.get("role") == "system"), None)
    else:
        turns = row["turns"]
    if not all(isinstance(text, str) and text.strip() for text in [*turns, *([] if system is None else [system])]):
        raise ValueError(f"{where}: each turn must be a text, got {turns!r}. Write it in quotes.")
    return Question(path.stem, index, tuple(turns), system)


def _title(name: str) -> str:
    return Path(name).stem if _is_file(name) else name


def _is_file(name: str) -> bool:
    is_named = name in TASKS or name == BUILTIN
    return not is_named and (Path(name).suffix.lower() in FILE_ENDINGS or Path(name).is_file())


def _load_task(name: str, title: str, limit: int | None) -> TaskData:
    if name == BUILTIN:
        questions = [Question(BUILTIN, index, (prompt.text,)) for index, prompt in enumerate(BUILTIN_PROMPTS)]
    elif name in TASKS:
        questions = questions_from_rows(name, _fetch(name))
    elif _is_file(name):
        questions = read_questions(Path(name))
    else:
        raise ValueError(f"There is no task {name!r}. {_choices()}")
    return TaskData(title, tuple(_spread(questions, limit)), len(questions))


def _choices() -> str:
    return f"Name one of {', '.join([BUILTIN, *TASKS])}, or a file (.jsonl, .json or .txt) of your own."


def _spread(questions: list[Question], limit: int | None) -> list[Question]:
    if limit is None or limit >= len(questions):
        return questions
    return [questions[number * len(questions) // limit] for number in range(limit)]


def _fetch(name: str) -> Iterable[dict[str, Any]]:
    source = TASKS[name]
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise RuntimeError(
            f'The task {name} needs the datasets package, which is not installed: pip install "dspark-hf[eval]".'
        ) from error
    try:
        return load_dataset(**source.load_arguments)
    # The library's own errors for a missing network, a missing data set and a changed one have these ancestors.
    except (OSError, ValueError, RuntimeError) as error:
        raise OSError(
            f"The task {name} is {source.data_files or source.path!r} of the Hub, which could not be loaded "
            f"({' '.join(str(error).split())}). Check the network, or pass a file with `turns` instead."
        ) from error
