# SPDX-License-Identifier: Apache-2.0
"""Folders: a module imports only from its own folder or from lower ones; small modules and functions, no debris."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dspark_hf


PACKAGE = Path(dspark_hf.__file__).parent
NAME = dspark_hf.__name__

# Folders and modules, lowest first: each imports only from those before it, and from its own. Two in one line do not
# import each other.
ORDER = (
    {"_version", "_compat"},
    {"common"},
    {"scheduling"},
    {"drafts"},
    {"decoding"},
    {"profiling"},
    {"integration", "default_pair"},
    {"training"},
    {"evaluation"},
    {"doctor", "export"},
    {"demo"},
    {"cli"},
    {"__main__"},
)
# Other packages that a folder may use, the standard library aside; one that is not listed may use all.
LIBRARIES = {
    "_version": set(),
    "_compat": {"torch", "transformers"},
    "common": {"torch", "transformers", "jinja2", "matplotlib"},
    "scheduling": {"torch", "numpy"},
    "drafts": {"torch", "transformers", "safetensors", "huggingface_hub", "peft"},
    "decoding": {"torch", "transformers"},
    "profiling": {"torch", "numpy", "transformers", "huggingface_hub", "filelock", "scipy"},
    "integration": {"torch", "transformers"},
}
# Modules that need less than their folder.
OWN_LIBRARIES: dict[str, set[str]] = {
    **dict.fromkeys(("common.records", "common.files", "common.jsonl", "common.conversations"), set()),
    **dict.fromkeys(("drafts.attention", "drafts.draft_cache", "decoding.verification"), {"torch"}),
    **dict.fromkeys(("training.blocks", "training.losses"), {"torch"}),
}
MAY_PRINT = {"cli", "__main__"}
MAX_FUNCTION_LINES, MAX_FILE_LINES = 60, 400


def sources() -> dict[str, str]:
    """Dotted name below the package -> its text; `__init__` for the package itself."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        found[name] = path.read_text(encoding="utf-8")
    return found


SOURCES = sources()
MODULES = {name: ast.parse(source, filename=name) for name, source in SOURCES.items()}


def is_package(name: str) -> bool:
    return name == "__init__" or any(other.startswith(name + ".") for other in MODULES)


def imported_names(name: str, tree: ast.AST) -> Iterator[tuple[str, ...]]:
    """Absolute dotted paths of everything that a module imports, wherever the statement stands."""
    here = () if name == "__init__" else tuple(name.split("."))
    package = here if is_package(name) else here[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield tuple(alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                base = (NAME, *package[: len(package) - node.level + 1], *base)
            for alias in node.names:
                yield (*base, alias.name)


def split_imports(name: str, tree: ast.AST) -> tuple[set[str], set[str]]:
    """Modules of the package, and other packages, that a module imports."""
    own, other = set(), set()
    for path in imported_names(name, tree):
        if path[0] != NAME:
            other.add(path[0])
            continue
        rest = path[1:]
        candidates = (".".join(rest[:n]) for n in range(len(rest), 0, -1))
        own.add(next((candidate for candidate in candidates if candidate in MODULES), "__init__"))
    return own - {name}, other


def layer_of(name: str) -> int:
    top = name.split(".")[0]
    return next(layer for layer, names in enumerate(ORDER) if top in names)


def layer_violations(name: str, tree: ast.AST) -> list[str]:
    top, layer = name.split(".")[0], layer_of(name)
    own, other = split_imports(name, tree)
    above = [target for target in own - {"__init__"} if layer_of(target) >= layer and target.split(".")[0] != top]
    found = [f"{name} imports {target}, which does not lie below it" for target in above]
    if layer < layer_of("demo") and "__init__" in own:  # it imports them all
        found.append(f"{name} imports from the package itself")
    allowed = OWN_LIBRARIES.get(name, LIBRARIES.get(top, other)) | set(sys.stdlib_module_names)
    return found + [f"{name} imports {library}" for library in sorted(other - allowed)]


def module_state(tree: ast.Module) -> list[str]:
    """Names at module level that are bound to something made to change: an empty container, a lock, a weak table."""
    found = []
    for node in tree.body:
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        is_empty = (isinstance(value, ast.Dict) and not value.keys) or (isinstance(value, ast.List) and not value.elts)
        called = ast.unparse(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""
        if is_empty or re.match(r"(dict|list|set|defaultdict|deque|R?Lock|Weak\w+)$", called):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            found.append(ast.unparse(target))
    return found


@pytest.mark.parametrize("name", MODULES)
def test_modules_have_no_state(name):
    """Only what `disable` needs to give transformers its own methods back; context variables are per call."""
    allowed = ["_originals"] if name == "integration" else []
    assert module_state(MODULES[name]) == allowed


def test_module_state_is_found():
    source = "a = {}\nb: list[int] = []\nc = threading.Lock()\nd = weakref.WeakKeyDictionary()\ne = {1: 2}\nf = dict()"
    assert module_state(ast.parse(source)) == ["a", "b", "c", "d", "f"]


def test_order_names_what_is_there():
    tops = {name.split(".")[0] for name in MODULES if name != "__init__"}
    assert sorted(tops) == sorted(name for names in ORDER for name in names)
    assert set(LIBRARIES) <= tops
    assert set(OWN_LIBRARIES) <= set(MODULES)


@pytest.mark.parametrize("name", [name for name in MODULES if name != "__init__"])
def test_imports_go_down(name):
    assert not layer_violations(name, MODULES[name])


def test_imports_have_no_cycles():
    graph = {name: split_imports(name, tree)[0] for name, tree in MODULES.items() if name != "__init__"}
    for name in graph:  # a package's own files may look into the package for one another
        parent = name.rpartition(".")[0]
        graph[name].discard(parent)
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for target in graph.get(name, ()):
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("name", MODULES)
def test_no_assert_and_no_print(name):
    nodes = list(ast.walk(MODULES[name]))
    asserts = [node.lineno for node in nodes if isinstance(node, ast.Assert)]
    prints = [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not asserts, f"`assert` vanishes under -O, raise an error: lines {asserts}"
    assert name in MAY_PRINT or not prints, f"use the logger: lines {prints}"


@pytest.mark.parametrize("name", MODULES)
def test_functions_and_files_are_small(name):
    long = [
        f"{node.name} has {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(MODULES[name])
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert not long
    num_lines = len(SOURCES[name].splitlines())
    assert num_lines <= MAX_FILE_LINES, f"{num_lines} lines"


@pytest.mark.parametrize("name", SOURCES)
def test_every_file_names_its_licence(name):
    assert SOURCES[name].startswith("# SPDX-License-Identifier: Apache-2.0\n")


# That the walker sees what it should.


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("scheduling.rules", "import transformers", ["scheduling.rules imports transformers"]),
        ("common.records", "import torch", ["common.records imports torch"]),
        (
            "scheduling.rules",
            "from ..drafts.heads import MarkovHead",
            ["scheduling.rules imports drafts.heads, which does not lie below it"],
        ),
        (
            "drafts.heads",
            "from ..decoding import loop",
            ["drafts.heads imports decoding.loop, which does not lie below it"],
        ),
        (
            "drafts.heads",
            "from dspark_hf.decoding.loop import decode",
            ["drafts.heads imports decoding.loop, which does not lie below it"],
        ),
        (
            "drafts.heads",
            "def f():\n    import dspark_hf.decoding.loop",
            ["drafts.heads imports decoding.loop, which does not lie below it"],
        ),
        (
            "drafts.formats.deepspec",
            "from ...decoding.processors import mirrored",
            ["drafts.formats.deepspec imports decoding.processors, which does not lie below it"],
        ),
        ("decoding.loop", "from ..cli import app", ["decoding.loop imports cli, which does not lie below it"]),
        (
            "decoding.loop",
            "from ..profiling import profile_for",
            ["decoding.loop imports profiling, which does not lie below it"],
        ),
        (
            "doctor.speedup",
            "from ..export.convert import convert_draft",
            ["doctor.speedup imports export.convert, which does not lie below it"],
        ),
        ("decoding.loop", "import datasets", ["decoding.loop imports datasets"]),
        ("cli", "import typer\nfrom ..decoding.loop import decode", []),
        (
            "drafts.formats.deepspec",
            "from ..configuration_dspark import DSparkConfig\nfrom .fields import require",
            [],
        ),
        ("decoding.verification", "from __future__ import annotations\nimport math\nimport torch", []),
    ],
)
def test_walker(name, source, expected):
    assert layer_violations(name, ast.parse(source)) == expected


def test_walker_notices_imports_from_the_package_itself():
    tree = ast.parse("from dspark_hf import DSparkConfig")
    assert layer_violations("decoding.loop", tree) == ["decoding.loop imports from the package itself"]
    assert layer_violations("cli", tree) == []  # public names
