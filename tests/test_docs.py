# SPDX-License-Identifier: Apache-2.0
"""The documentation: it builds without a warning, its links lead somewhere, its code runs, its tables are true."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dspark_hf import DSparkDraftModel, load_default_pair


ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES]
# Pages whose Python blocks run, in order, on the default pair; blocks that name a model of the Hub only compile.
RUNNABLE = ("index", "quickstart", "knobs", "statistics", "checkpoints", "troubleshooting")
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


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [page.name for page in PAGES if f": {page.name}\n" not in navigation] == []


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
        module, _, attribute = name.partition(".")
        try:
            thing = importlib.import_module(f"dspark_hf.{module}")
            for part in attribute.split(".") if attribute else ():
                thing = getattr(thing, part)
        except (ImportError, AttributeError):
            missing.append(name)
    assert missing == []
    assert len(named) >= 15


def paper_map_rows():
    """Table rows with code in the second column and tests in the third."""
    return re.findall(r"^\| (?:Eq|Section|Appendix|Algorithm|Footnote|Verification).*\|$", paper_map(), re.MULTILINE)


@pytest.mark.parametrize("equation", range(1, 13))
def test_paper_map_has_every_equation(equation):
    numbers = set()
    for row in paper_map_rows():
        for first, last in re.findall(r"Eq (\d+)(?: to (\d+))?", row.split("|")[1]):
            numbers |= set(range(int(first), int(last or first) + 1))
    assert equation in numbers


# Messages and code


def test_error_messages_are_those_of_the_package():
    # Adjacent string literals are one message: drop what separates them.
    source = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "dspark_hf").rglob("*.py")))
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)` \|", page[page.index("## Error messages") :], re.MULTILINE)
    assert len(messages) > 15
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
