# SPDX-License-Identifier: Apache-2.0
"""The page on training: its tables name options that exist, with their defaults."""

import dataclasses
import re
from pathlib import Path

import pytest
import typer

from dspark_hf import DSparkConfig, DSparkDraftModel
from dspark_hf.cli import app
from dspark_hf.training import DSparkTrainingArguments
from dspark_hf.training.answers import write_answers, write_answers_from_server
from dspark_hf.training.run import DataArguments, DraftArguments
from dspark_hf.training.sampling import SamplingSettings
from tests.integration.test_training_resume import target_without_mask
from tests.support.training import greedy_sequences, trainer_for


PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
PREPARE, TRAIN = PAGE.split("## 2. Train")
SOURCES = ("prompts", "dataset", "self_prompts")
UNSET = {"": (None, dataclasses.MISSING), "none": (None, "none"), "the template's": (None,), "found": (None,)}


def rows(text):
    """(options, default) of each table row that begins with options."""
    for options, default in re.findall(r"^\| (`--[^|]+) \| ([^|]*?) ?\|", text, re.MULTILINE):
        yield re.findall(r"--([\w-]+)", options), default.strip()


def train_fields():
    fields = {}
    for arguments in (DataArguments, DraftArguments, DSparkTrainingArguments):
        fields |= {field.name: field for field in dataclasses.fields(arguments)}
    return fields


def prepare_options():
    command = typer.main.get_command(app).commands["prepare"]
    return {name: option for option in command.params for name in (*option.opts, *option.secondary_opts)}


def is_default(documented, value):
    value = getattr(value, "value", value)  # of an enum
    if documented in UNSET:
        return value in UNSET[documented]
    return documented == (str(value).lower() if isinstance(value, bool) else str(value))


def test_options_of_train():
    fields, named = train_fields(), set()
    for (option, *others), default in rows(TRAIN):
        assert not others
        assert option in fields, option
        assert is_default(default, fields[option].default), (option, fields[option].default)
        named.add(option)
    own = {field.name for arguments in (DataArguments, DraftArguments) for field in dataclasses.fields(arguments)}
    inherited = {field.name for field in dataclasses.fields(DSparkTrainingArguments.__mro__[1])}
    own |= {field.name for field in dataclasses.fields(DSparkTrainingArguments)} - inherited
    assert own <= named, own - named


def test_options_of_prepare():
    options, named = prepare_options(), set()
    for names, default in rows(PREPARE):
        for name in names:
            assert f"--{name}" in options, name
            named.add(options[f"--{name}"].name)
        option = options[f"--{names[0]}"]
        if default.endswith(" *"):  # of answers written here; a server has its own
            assert option.default is None
            assert default == f"{getattr(SamplingSettings(), option.name)} *", names
        elif option.name not in SOURCES:  # their table says what they hold
            assert is_default(default, option.default), (names, option.default)
    shown = {name for name in {option.name for option in options.values()} if f"--{name.replace('_', '-')}" in PAGE}
    assert {option.name for option in options.values()} - {"help", "device"} <= named | shown


@pytest.mark.parametrize("text", [PREPARE, TRAIN], ids=["prepare", "train"])
def test_every_option_that_is_named_exists(text):
    known = {name.strip("-").replace("-", "_") for name in prepare_options()} | set(train_fields())
    known |= {
        "nproc_per_node",
        "num_processes",
        "multi_gpu",
        "draft",
        "output",
        "steps",
    }  # torchrun, accelerate, compare
    named = {name.replace("-", "_") for name in re.findall(r"--([a-z][\w-]+)", text)}
    assert named <= known, named - known


def test_facts_in_the_text():
    assert write_answers.__defaults__[1] == prepare_options()["--max-prompt-tokens"].default  # longest prompt
    assert "after six tries" in PREPARE
    assert write_answers_from_server.__defaults__[1] == 5  # further tries
    assert "30 kB a token" in " ".join(PAGE.split())
    assert (5 + 1) * 2560 * 2 // 1024 == 30


def test_sliding_layers_in_python(tmp_path):
    """The Python block, on a tiny target."""
    target = target_without_mask()
    config = DSparkConfig.from_target(
        target.config,
        mask_token_id=96,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=512,
    )
    trainer = trainer_for(tmp_path, target, greedy_sequences(target, 2), DSparkDraftModel(config), max_steps=1)
    trainer.train()
    trainer.save_model()
    assert DSparkDraftModel.from_pretrained(tmp_path).config.layer_types == ["sliding_attention", "full_attention"]
