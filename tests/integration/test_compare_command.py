# SPDX-License-Identifier: Apache-2.0
"""`dspark-hf compare` and what it shares with other commands: whose texts are printed as they are, and JSON."""

import json

import pytest
import typer
from typer.testing import CliRunner

from dspark_hf.cli import app
from dspark_hf.cli.compare import _print_comparison
from dspark_hf.cli.options import exit_on_error
from dspark_hf.common.prompts import Prompt
from dspark_hf.evaluation.compare import PromptComparison
from dspark_hf.evaluation.timed import TimedAnswer
from tests.support.models import oracle_draft, tiny_target
from tests.support.scripted import letter_tokenizer


def refuse_constants(name):
    raise ValueError(f"{name} is no JSON")


@pytest.mark.parametrize("message", ['pip install "dspark-hf[eval]"', "no [/INST] here", "[bold]x[/]", "a\\"])
def test_an_error_is_told_as_it_is(message, capsys):
    with pytest.raises(typer.Exit) as ended, exit_on_error():
        raise ValueError(message)
    assert ended.value.exit_code == 2
    assert capsys.readouterr().err == f"Error: {message}\n"


def test_prompts_and_domains_are_printed_as_they_are(capsys):
    prompt = Prompt("my[/b]domain", "[INST] What? [/INST]")
    result = PromptComparison(
        prompt, TimedAnswer(0.5, ((1, 2),), (0.5,)), TimedAnswer(0.5, ((1, 3),), (0.5,)), top2_gap=0.25
    )
    _print_comparison([result], "bfloat16", temperature=0.0)
    printed = capsys.readouterr().out
    assert "my[/b]domain (1)" in printed
    assert "[INST] What? [/INST]" in printed


def test_figures_that_are_none_are_null_in_json(tmp_path):
    target = tiny_target()
    target.save_pretrained(tmp_path / "target")
    letter_tokenizer().save_pretrained(tmp_path / "target")
    oracle_draft(target).save_pretrained(tmp_path / "draft")
    pair = ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"), "--dtype", "float32"]
    # The first token comes without drafts, so that there is no round.
    result = CliRunner().invoke(app, ["compare", "Hello", *pair, "--raw", "--max-new-tokens", "1", "--json"])
    assert result.exit_code == 0, result.output + repr(result.exception)
    found = json.loads(result.stdout, parse_constant=refuse_constants)
    assert found["prompts"][0]["accepted_length"] is None
    assert found["summary"][0]["accepted_length"] is None
    assert found["prompts"][0]["dspark"]["num_tokens"] == 1
