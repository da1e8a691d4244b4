# SPDX-License-Identifier: Apache-2.0
"""The README: its two set-up commands, its code, and its command line are what the package has."""

import re
from pathlib import Path

from typer.testing import CliRunner

from dspark_hf.cli import app
from dspark_hf.decoding.criterion import SCHEDULES


ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
INSTALL = "python3 -m venv .venv && .venv/bin/python -m pip install -c constraints.txt"
# The one block that needs a model hub.
HUB_MODEL = "Qwen/Qwen3-4B"


def fenced_blocks(text, language):
    """Bodies of the code blocks in a language, in order."""
    return [body.rstrip("\n") for body in re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]


def test_exactly_two_set_up_commands():
    assert fenced_blocks(README, "bash") == [
        f"{INSTALL} . && .venv/bin/dspark-hf compare",
        f'{INSTALL} ".[dev]" && .venv/bin/python -m pytest',
    ]
    assert README.count("pip install") == 2


def test_commands_name_what_the_project_has():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for line in (r'dspark-hf = "dspark_hf\.cli:app"', r"dev = \[", r"quantization = \["):
        assert re.search(f"^{line}", project, re.MULTILINE), line
    assert (ROOT / "constraints.txt").is_file()


def test_command_line_table_lists_every_command():
    listed = re.findall(r"^\| `dspark-hf (\w+)", README, re.MULTILINE)
    assert sorted(listed) == sorted(command.name or command.callback.__name__ for command in app.registered_commands)
    text = CliRunner().invoke(app, ["compare", "--help"], env={"COLUMNS": "200"}).output
    for option in re.findall(r"`(--[\w-]+)", README):
        assert option in text or option == "--help", option


def test_knobs_are_named_as_the_package_reads_them():
    for schedule in SCHEDULES:
        assert f'`"{schedule}"`' in README
    for knob in ("num_assistant_tokens", "assistant_confidence_threshold", "num_assistant_tokens_schedule"):
        assert re.search(rf"^\| `{knob}` \|", README, re.MULTILINE)


def test_python_blocks_compile_and_all_but_one_run_without_a_hub():
    blocks = fenced_blocks(README, "python")
    for number, block in enumerate(blocks):
        compile(block, f"README.md, Python block {number}", "exec")
    assert [HUB_MODEL in block for block in blocks] == [True] + [False] * (len(blocks) - 1)


def test_python_blocks_run_one_after_the_other(capfd):
    namespace = {}
    for number, block in enumerate(fenced_blocks(README, "python")[1:], start=1):
        assert "load_default_pair" in block or "max_new_tokens=48" in block
        short = block.replace("max_new_tokens=48", "max_new_tokens=16")
        exec(compile(short, f"README.md, Python block {number}", "exec"), namespace)
    output = capfd.readouterr().out
    # The first block prints the answer, the statistics block the accepted length, above 1 on such a prompt.
    assert output.splitlines()[0].startswith("A box holds 12 eggs.")
    assert namespace["stats"].accepted_length > 1
    assert namespace["output"].shape[1] - namespace["inputs"]["input_ids"].shape[1] <= 16


def test_parts_come_in_the_order_of_a_readers_questions():
    parts = (
        "assistant_model=draft",
        "(docs/assets/demo.png)",
        "## Why",
        "## Install",
        "## Use",
        "## Command line",
        "## Measured",
        "## When not to use it",
        "## Supported",
        "## Losslessness",
        "## Documentation",
        "## Licence and citation",
        "eprint        = {2607.05147}",
    )
    places = [README.index(part) for part in parts]
    assert places == sorted(places)


def test_first_use_is_short():
    (first, *_) = fenced_blocks(README, "python")
    assert len([line for line in first.splitlines() if line]) <= 12


def test_extras_are_those_of_the_project():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = project[project.index("[project.optional-dependencies]") : project.index("[project.scripts]")]
    extras = dict(re.findall(r"^(\w+) = (\[[^\]]*\])$", project, re.MULTILINE))
    section = README[README.index("Extras go in brackets") : README.index("## Use")]
    listed = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section, re.MULTILINE))
    assert listed.keys() == extras.keys() - {"dev"}
    for name, packages in listed.items():
        assert packages.split(", ") == re.findall(r'"([\w-]+)', extras[name])


def test_figures_stand_beside_their_command():
    measured = README[README.index("## Measured") : README.index("## When not to use it")]
    assert measured.index("dspark-hf eval gsm8k.jsonl") < measured.index("| prompts |")
    assert "<!--" not in README
