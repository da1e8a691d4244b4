# SPDX-License-Identifier: Apache-2.0
"""Layers: a module imports only from its own layer or from lower ones; small modules, small functions, no debris."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dspark_hf


PACKAGE = Path(dspark_hf.__file__).parent
NAME = dspark_hf.__name__

# Modules that are not listed are applications, which may import everything and which nothing below may import.
LAYERS = {
    0: {
        "_version",
        "attention",
        "text_files",
        "path_checks",
        "json_values",
        "json_lines",
        "conversations",
        "sampling",
        "metrics",
        "draft_cache",
        "blocks",
        "losses",
        "scheduling",
        "calibration",
        "drafting_history",
        "simulation",
    },
    1: {
        "position_limits",
        "target_probe",
        "_compat",
        "versions",
        "target_structure",
        "model_sources",
        "configuration_dspark",
        "heads",
        "pairing",
        "modeling_dspark",
        "checkpoints",
        "target_loading",
    },
    2: {
        "drafter",
        "round_check",
        "thinking",
        "drafting_steps",
        "drawing",
        "stream_end",
        "processors",
        "stopping_criteria",
        "candidate_generator",
        "eagle3",
        "outputs",
        "decoding_rows",
        "batch_rows",
        "single_target",
        "packed_attention",
        "row_rules",
        "packed_target",
        "waiting_requests",
        "decoding",
        "batching",
        "integration",
        "fingerprint",
        "measured_rounds",
        "measuring",
        "profiling",
        "row_cache",
        "row_generation",
        "chat",
        "chat_tokens",
        "data_file",
        "answer_server",
        "left_out",
        "prepare",
        "data",
        "feature_cache",
        "objective",
    },
}
APPLICATIONS = 3
# Other packages that a layer may use, the standard library aside.
LIBRARIES = {
    0: {"torch", "numpy"},
    1: {"torch", "transformers", "safetensors", "peft"},
    2: {"torch", "transformers", "safetensors", "huggingface_hub"},
}
STANDARD_LIBRARY_ONLY = {
    "metrics",
    "_version",
    "text_files",
    "path_checks",
    "json_values",
    "json_lines",
    "conversations",
}
MAY_PRINT = {"cli", "__main__"}
MAX_FUNCTION_LINES, MAX_FILE_LINES = 80, 500


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
    return next((layer for layer, names in LAYERS.items() if top in names), APPLICATIONS)


def layer_violations(name: str, tree: ast.AST) -> list[str]:
    layer = layer_of(name)
    own, other = split_imports(name, tree)
    above = [target for target in own - {"__init__"} if layer_of(target) > layer]
    found = [f"{name} (layer {layer}) imports {target} (layer {layer_of(target)})" for target in above]
    if layer < APPLICATIONS and "__init__" in own:  # it imports them all
        found.append(f"{name} imports from the package itself")
    allowed = set(sys.stdlib_module_names) | (set() if name in STANDARD_LIBRARY_ONLY else LIBRARIES.get(layer, other))
    return found + [f"{name} (layer {layer}) imports {library}" for library in other - allowed]


def test_layers_name_modules_that_can_exist():
    for name in ("sampling", "metrics", "draft_cache", "heads", "modeling_dspark", "decoding", "checkpoints"):
        assert name in MODULES, f"{name} is gone: bring LAYERS up to date"
    assert layer_of("checkpoints.deepspec") == 1


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
        ("sampling", "import transformers", ["sampling (layer 0) imports transformers"]),
        ("metrics", "import torch", ["metrics (layer 0) imports torch"]),
        ("sampling", "from .heads import MarkovHead", ["sampling (layer 0) imports heads (layer 1)"]),
        ("heads", "from . import decoding", ["heads (layer 1) imports decoding (layer 2)"]),
        ("heads", "from dspark_hf.decoding import decode", ["heads (layer 1) imports decoding (layer 2)"]),
        ("heads", "def f():\n    import dspark_hf.decoding", ["heads (layer 1) imports decoding (layer 2)"]),
        (
            "checkpoints.deepspec",
            "from ..processors import mirrored",
            ["checkpoints.deepspec (layer 1) imports processors (layer 2)"],
        ),
        ("decoding", "from .cli import app", ["decoding (layer 2) imports cli (layer 3)"]),
        ("decoding", "import datasets", ["decoding (layer 2) imports datasets"]),
        ("cli", "import typer\nfrom .decoding import decode", []),
        ("checkpoints.deepspec", "from ..configuration_dspark import DSparkConfig\nfrom .fields import require", []),
        ("sampling", "from __future__ import annotations\nimport math\nimport torch", []),
    ],
)
def test_walker(name, source, expected):
    assert layer_violations(name, ast.parse(source)) == expected


def test_walker_notices_imports_from_the_package_itself():
    tree = ast.parse("from dspark_hf import DSparkConfig")
    assert layer_violations("decoding", tree) == ["decoding imports from the package itself"]
    assert layer_violations("cli", tree) == []  # public names
