# SPDX-License-Identifier: Apache-2.0
"""The documentation: it builds without a warning, its links lead somewhere, its code runs, its tables are true."""

import dataclasses
import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from dspark_hf import DSparkDraftModel, load_default_pair
from dspark_hf.cli import app
from dspark_hf.training import DSparkTrainingArguments
from dspark_hf.training.run import DataArguments, DraftArguments


ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES]
# Pages whose Python blocks run, in order, on the default pair; blocks that name a model of the Hub only compile.
RUNNABLE = ("index", "quickstart", "batches", "own_model", "knobs", "statistics", "checkpoints", "troubleshooting")
HUB_NAMES = ("Qwen/", "deepseek-ai/")


def python_blocks(page):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def without_code(text):
    return re.sub(r"`[^`]*`", "", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


def heading_anchors(text):
    """Anchors as Python-Markdown makes them."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    api = (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")
    assert 'id="dspark_hf.load_default_pair"' in api
    assert "[<code>" not in api  # a reference that was not understood
    assert "Keep a Changelog" in (tmp_path / "site" / "changelog" / "index.html").read_text(encoding="utf-8")


def test_every_page_is_in_the_navigation_once():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^ +- .+: (\S+\.md)$", navigation, re.MULTILINE)) == [page.name for page in PAGES]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        linked = (path.parent / file).resolve() if file else path
        if not linked.exists() or (anchor and anchor not in heading_anchors(linked.read_text(encoding="utf-8"))):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_nothing_points_at_one_machine(path):
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"(?:/work|/root|/home|/tmp|localhost|127\.0\.0\.1)\S*", text) == []


# Figures


def test_figures_are_those_that_the_package_draws():
    specification = importlib.util.spec_from_file_location("figures", DOCS / "figures.py")
    figures = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(figures)
    for name, draw in figures.FIGURES.items():
        assert (DOCS / "assets" / name).read_text(encoding="utf-8") == draw(), f"run python docs/figures.py for {name}"
    # What the page says about them: the rule of the paper stops before the stair, the look-ahead behind it.
    drawn = (DOCS / "assets" / "schedule.svg").read_text(encoding="utf-8")
    assert "Algorithm 1 sends 1<" in drawn
    assert "look-ahead sends 4<" in drawn


def test_every_figure_is_shown():
    shown = "".join(path.read_text(encoding="utf-8") for path in TEXTS)
    assert [path.name for path in sorted((DOCS / "assets").iterdir()) if f"assets/{path.name})" not in shown] == []


# The paper map


def paper_map():
    return (DOCS / "paper_map.md").read_text(encoding="utf-8")


def test_paper_map_names_files_and_tests_that_exist():
    missing = []
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", paper_map())
    for file, test in named:
        if not (ROOT / file).is_file():
            missing.append(file)
        elif test and not re.search(rf"^def {test}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE):
            missing.append(f"{file}::{test}")
    assert missing == []
    assert len(named) >= 10


def test_paper_map_names_code_that_exists():
    missing = []
    named = re.findall(r"`((?:\w+\.)*\w+)`", "\n".join(row.split("|")[2] for row in paper_map_rows()))
    for name in named:
        try:
            pkgutil.resolve_name(f"dspark_hf.{name}")
        except (ImportError, AttributeError):
            missing.append(name)
    assert missing == []
    assert len(named) >= 15


def paper_map_rows():
    """Table rows with code in the second column and tests in the third."""
    return re.findall(
        r"^\| (?:Eq|Section|Appendix|Algorithm|Figure|Footnote|Verification).*\|$", paper_map(), re.MULTILINE
    )


def test_paper_map_leads_from_every_entry_to_code_and_tests():
    entries = [row.split("|")[1:4] for row in paper_map_rows()]
    assert [entry for entry, code, _ in entries if "`" not in code] == []
    assert [entry for entry, _, tests in entries if "`tests/" not in tests] == []


@pytest.mark.parametrize("entry", ["Algorithm 1", "Section 5.2", "Appendix A", "Section 3.2: Sequential Temperature"])
def test_paper_map_has_what_is_no_equation(entry):
    assert sum(row.startswith(f"| {entry}") for row in paper_map_rows()) == 1


@pytest.mark.parametrize("equation", range(1, 13))
def test_paper_map_has_every_equation(equation):
    numbers = set()
    for row in paper_map_rows():
        for first, last in re.findall(r"Eq (\d+)(?: to (\d+))?", row.split("|")[1]):
            numbers |= set(range(int(first), int(last or first) + 1))
    assert equation in numbers


# Names, commands, messages and code


def package_source():
    return "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "dspark_hf").rglob("*.py")))


def test_words_of_the_glossary_are_those_of_the_code():
    source, page = package_source(), (DOCS / "glossary.md").read_text(encoding="utf-8")
    named = [name for row in re.findall(r"^\| .* \|$", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]
    assert len(named) > 40
    assert [name for name in named if not re.search(rf"\b{name}\b", source)] == []


def commands_in_blocks(text):
    """(command, options) of each call of the command line in a code block; `\\` continues a line."""
    for block in re.findall(r"^```(?:bash|sh)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        code = re.sub(r" +# .*$", "", block.replace("\\\n", " "), flags=re.MULTILINE)
        for call in re.split(r"&&|;|\||\n", re.sub(r"\"[^\"]*\"|'[^']*'", "TEXT", code)):
            words = call.split()
            if words and re.search(r"(^|/)dspark-hf$", words[0]):
                yield words[1], [word.split("=")[0] for word in words if word.startswith("--")]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_commands_and_options_exist(path):
    commands = typer.main.get_command(app).commands
    of_train = {
        field.name
        for arguments in (DataArguments, DraftArguments, DSparkTrainingArguments)
        for field in dataclasses.fields(arguments)
    }
    unknown = []
    for name, options in commands_in_blocks(path.read_text(encoding="utf-8")):
        known = {"--help"} | {f"--{field}" for field in of_train if name == "train"}
        for parameter in commands[name].params if name in commands else ():
            known |= {*parameter.opts, *parameter.secondary_opts}
        unknown += [name] * (name not in commands) + [f"{name} {option}" for option in options if option not in known]
    assert unknown == []


def test_commands_are_found_in_blocks():
    text = '```bash\nx && a/dspark-hf compare --target "a; --no" \\\n  --draft=b  # --neither\n```\n`dspark-hf env`'
    assert list(commands_in_blocks(text)) == [("compare", ["--target", "--draft"])]


def test_quick_start_lists_every_command_and_every_example():
    page = (DOCS / "quickstart.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `(\w+\.py)` \|", page, re.MULTILINE)) == sorted(
        path.name for path in (ROOT / "examples").glob("*.py")
    )
    tables = page[page.index("| command | what it does |") :]
    assert sorted(re.findall(r"^\| `(\w+)` \|", tables, re.MULTILINE)) == sorted(typer.main.get_command(app).commands)


def test_error_messages_are_those_of_the_package():
    # Adjacent string literals are one message: drop what separates them.
    source = re.sub(r'"\s*\n\s*f?"', "", package_source())
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)` \|", page[page.index("## Error messages") :], re.MULTILINE)
    assert len(messages) > 50
    assert [message for message in messages if message not in source] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_compile(page):
    for number, block in enumerate(python_blocks(page.stem)):
        compile(block, f"{page.name}, Python block {number}", "exec")


@pytest.fixture(scope="module")
def default_pair():
    return load_default_pair()


@pytest.mark.parametrize("page", RUNNABLE)
def test_python_blocks_run_without_a_hub(page, default_pair, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)  # one of them saves a draft
    target, draft, tokenizer = default_pair
    knobs = draft.generation_config.to_dict()
    messages = [{"role": "user", "content": "What is 7 times 8?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    namespace = {"target": target, "draft": draft, "tokenizer": tokenizer, "messages": messages, "inputs": inputs}
    namespace["DSparkDraftModel"] = DSparkDraftModel
    for number, block in enumerate(python_blocks(page)):
        block = re.sub(r"max_new_tokens=\d+", "max_new_tokens=12", block)
        if not any(name in block for name in HUB_NAMES):
            exec(compile(block, f"{page}.md, Python block {number}", "exec"), namespace)
    draft.generation_config.update(**knobs)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_first_draft_by_the_docs_alone(tmp_path):
    """The commands of the page as they stand, with smaller numbers."""
    page = (DOCS / "training.md").read_text(encoding="utf-8")
    section = page[page.index("## A first draft in minutes") :]
    script = re.search(r"^```bash\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[1]
    for long, short in (("prompts 60", "prompts 12"), ("tokens 64", "tokens 16"), ("steps 60", "steps 3")):
        assert long in script
        script = script.replace(long, short)
    script = script.replace("$(python ", f"$({sys.executable} ")
    script = re.sub(r"^dspark-hf ", f"{sys.executable} -m dspark_hf ", script, flags=re.MULTILINE)
    script = script.rstrip() + ' --max-new-tokens 8 "What is silk?"\n'
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "12 rows added to answers.jsonl." in result.stdout
    assert '"eval_accepted_length"' in result.stdout
    assert DSparkDraftModel.from_pretrained(tmp_path / "tiny-draft").config.block_size == 4
    assert re.search(r"yours \(1\) +\d", result.stdout)
