# SPDX-License-Identifier: Apache-2.0
"""Wrong values on the command line: exit status 2, a sentence, no traceback, and nothing written before it."""

import json

import pytest
from typer.testing import CliRunner

from dspark_hf.cli import app
from tests.support.models import random_draft, tiny_target
from tests.support.training import word_tokenizer, words


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A pair and files of every kind, right and wrong."""
    place = tmp_path_factory.mktemp("place")
    tiny_target().save_pretrained(place / "target")
    word_tokenizer().save_pretrained(place / "target")
    random_draft().save_pretrained(place / "draft")
    rows = [{"prompt": words(10 + i, 11)} for i in range(4)]
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    turns = [{"role": "user", "content": "w9"}, {"role": "assistant", "content": words(*range(10, 30))}]
    (place / "answers.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 4)
    (place / "file").write_text("x")
    for name in ("folder", "full"):
        (place / name).mkdir()
    (place / "full" / "notes.txt").write_text("x")
    return place


COMMANDS = {
    "compare": "compare w10 --target target --draft draft --max-new-tokens 4",
    "generate": "generate w10 --target target --draft draft --max-new-tokens 4",
    "calibrate": "calibrate --prompts prompts.jsonl --target target --draft draft --max-new-tokens 48",
    "profile": "profile --target target --draft draft --context-lengths 8 --repeats 2",
    "demo": "demo --target target --draft draft",
    "doctor": "doctor target draft --no-speed --max-new-tokens 4",
    "eval": "eval prompts.jsonl --target target --draft draft --limit 1 --temperatures 0 --max-new-tokens 4",
    "prepare": "prepare --target target --prompts prompts.jsonl --rows 2 --max-new-tokens 4",
    "train": "train --target target --data answers.jsonl --use_cpu --report_to none --disable_tqdm true",
    "convert": "convert draft --target target",
}
OUTPUTS = {
    "calibrate": "-o new",
    "profile": "-o new",
    "eval": "-o new",
    "prepare": "-o new",
    "train": "--output_dir new",
    "convert": "--to dspark -o new",
}


def refused(place, monkeypatch, line, status=2):
    """What is said on standard error, in one line; there is nothing new afterwards."""
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    result = CliRunner().invoke(app, line.split(" "), env={"COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"})
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    assert sorted(place.rglob("*")) == before
    return " ".join(result.stderr.replace("─", "").split())  # without the frame around errors of usage


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "convert"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--dtype int8", "`--dtype` must be bfloat16, float16 or float32, got 'int8'."),
        ("--device gpu", "`--device` must be a device such as cpu, cuda, cuda:1 or mps, got 'gpu'."),
        ("--device meta", "`--device` must be a device that computes, such as cpu or cuda, got 'meta'."),
        ("--device cuda:99", "`--device` must be a device of this machine, got 'cuda:99'"),
    ],
)
def test_dtypes_and_devices(name, options, said, place, monkeypatch):
    message = refused(place, monkeypatch, f"{COMMANDS[name]} {OUTPUTS.get(name, '')} {options}".replace("  ", " "))
    assert said in message
    assert len(message) < 400


VALUES = [
    ("compare", "--temperature inf", "A temperature must be a finite number >= 0, got inf"),
    ("generate", "--temperature 1 --top-p 0", "`--top-p` must lie in (0, 1], got 0.0"),
    ("calibrate", "--temperature 1 --top-p 0 -o new", "`--top-p` must lie in (0, 1], got 0.0"),
    ("eval", "--temperatures 0,inf -o new", "A temperature must be a finite number >= 0, got inf"),
    ("eval", "--temperatures nan -o new", "A temperature must be a finite number >= 0, got nan"),
    ("generate", f"--seed {2**70}", "--seed"),
    ("compare", "--seed -1", "--seed"),
    ("generate", "--max-new-tokens 0", "--max-new-tokens"),
    ("generate", "--num-assistant-tokens 0", "`num_assistant_tokens` must lie in [1, 4]"),
    ("generate", "--assistant-confidence-threshold 2", "`assistant_confidence_threshold` must lie in [0, 1], got 2.0"),
    ("generate", "--num-assistant-tokens-schedule often", "got 'often'"),
    ("profile", "--context-lengths 0 -o new", "must be one or more lengths >= 2, got [0]"),
    ("profile", "--num-requests 3 -o new", "must be a power of two, got 3"),
    ("demo", "--port 0", "--port"),
    ("demo", "--host no.such.host.invalid", "`--host` must be an address of this machine, got 'no.such.host.invalid'"),
    ("doctor", "--set block_size", "A field is stated as NAME=VALUE"),
    ("convert", "--to onnx -o new", "must be one of ('dspark', 'deepspec', 'speculators'), got 'onnx'"),
    ("prepare", "--server nowhere -o new", "`--server` must begin with http:// or https://, got 'nowhere'"),
    ("train", "--output_dir new --learning_rate fast", "invalid float value: 'fast'"),
    ("train", "--output_dir new --speed 9", "`dspark-hf train` has no --speed 9."),
]


@pytest.mark.parametrize(("name", "options", "said"), VALUES, ids=lambda value: value[:40])
def test_values(name, options, said, place, monkeypatch):
    message = refused(place, monkeypatch, f"{COMMANDS[name]} {options}")
    assert said in message
    assert len(message) < 700


FILES = [
    ("compare --prompts gone.txt", "A prompt file must exist, got 'gone.txt'"),
    ("calibrate --check-prompts folder -o new", "must end in .txt, .json or .jsonl, got 'folder'"),
    (
        "prepare --target target --prompts gone.jsonl -o new",
        "`--prompts` must be a file that exists, got 'gone.jsonl'",
    ),
    ("prepare --target target --prompts folder -o new", "`--prompts` must be a file, got the folder 'folder'"),
    ("train --target target --data gone.jsonl --output_dir new", "`--data` must be a file that exists"),
    ("train --target target --data folder --output_dir new", "`--data` must be a file, got the folder 'folder'"),
    ("convert draft --to dspark -o new --round-times gone.json", "`--round-times` must be a file that exists"),
    ("convert draft --to dspark -o new --round-times folder", "`--round-times` must be a file, got the folder"),
    ("eval gone.jsonl -o new", "gone.jsonl"),
]


@pytest.mark.parametrize(("line", "said"), FILES, ids=lambda value: value[:40])
def test_files_that_are_read(line, said, place, monkeypatch):
    assert said in refused(place, monkeypatch, line)


PLACES = [
    ("calibrate", "-o file", "`--output` cannot be written to 'file': 'file' is a file"),
    ("calibrate", "-o file/new", "`--output` cannot be written to 'file/new': 'file' is a file"),
    ("calibrate", "-o new --plot file/x.png", "`--plot` cannot be written to 'file': 'file' is a file"),
    ("profile", "-o folder", "`--output` must be a file, got the folder 'folder'"),
    ("profile", "-o file/new", "`--output` cannot be written to 'file'"),
    ("eval", "-o file", "`--output` cannot be written to 'file'"),
    ("eval", "-o new --tensorboard file", "`--tensorboard` cannot be written to 'file'"),
    ("prepare", "-o folder", "`--output` must be a file, got the folder 'folder'"),
    ("prepare", "-o file/new", "`--output` cannot be written to 'file'"),
    ("train", "--output_dir file", "`--output_dir` cannot be written to 'file'"),
    ("train", "--output_dir new --feature_cache file", "`--feature_cache` cannot be written to 'file'"),
    ("convert", "--to dspark -o full", "must be a new or an empty folder, got full"),
    ("convert", "--to dspark -o file/new", "`output` cannot be written to 'file/new'"),
]


@pytest.mark.parametrize(("name", "options", "said"), PLACES, ids=lambda value: value[:40])
def test_places_that_cannot_be_written_to(name, options, said, place, monkeypatch):
    assert said in refused(place, monkeypatch, f"{COMMANDS[name]} {options}")


CONTRADICTIONS = [
    ("compare w10 --prompts prompts.jsonl", "from the command line or from `--prompts`, got both"),
    (
        "generate w10 --target target --draft draft --plain --num-assistant-tokens 2",
        "`--plain` does without the draft",
    ),
    ("generate w10 --target target", "`--target` needs `--draft`"),
    ("eval --draft draft -o new", "`--draft` needs `--target`"),
    ("doctor target", "name the draft after the target"),
    ("prepare --server http://localhost:1 --prompts prompts.jsonl -o new", "`--server` needs `--target`"),
]


@pytest.mark.parametrize(("line", "said"), CONTRADICTIONS, ids=lambda value: value[:40])
def test_options_that_do_not_go_together(line, said, place, monkeypatch):
    assert said in refused(place, monkeypatch, line)


@pytest.mark.parametrize("name", ["compare", "generate"])
def test_prompts_without_text(name, place, monkeypatch):
    for prompt in ("", "\t"):
        line = f"{name} {prompt} --target target --draft draft"
        assert "A prompt must hold some text" in refused(place, monkeypatch, line)


def test_training_says_what_is_missing_in_a_few_lines(place, monkeypatch):
    message = refused(place, monkeypatch, "train --target target --output_dir new")
    assert "the following arguments are required: --data" in message
    assert len(message) < 400
