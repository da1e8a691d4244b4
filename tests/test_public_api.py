# SPDX-License-Identifier: Apache-2.0
"""Docstrings of public names say what goes in and what comes out; other code has prose and shape comments."""

import ast
import dataclasses
import importlib
import inspect
import io
import pkgutil
import re
import textwrap
import tokenize
from pathlib import Path

import pytest
from transformers import PreTrainedConfig

import dspark_hf
from dspark_hf.drafts.configuration_draft import DraftConfig


ROOT = Path(__file__).parents[1]
# transformers' own fields, which every config has.
INHERITED_FIELDS = {"bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"}
SECTIONS = ("Args", "Returns", "Raises", "Yields", "Example")


def modules():
    names = [module.name for module in pkgutil.walk_packages(dspark_hf.__path__, "dspark_hf.")]
    return [dspark_hf, *(importlib.import_module(name) for name in names if not name.endswith("__main__"))]


def names_on_the_page():
    """Dotted name -> the members that the API page shows of it, None for all."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8") + "\n"
    shown = {f"dspark_hf.{name}": None for name in dspark_hf.__all__ if name != "__version__"}
    for name, options in re.findall(r"^::: (\S+)\n((?: {4}.*\n)*)", page, re.MULTILINE):
        members = re.search(r"members: \[(.*)\]", options)
        shown[name] = re.findall(r"\w+", members[1]) if members else None
    return shown


def public_things():
    """Name -> thing of all that is public: on the API page, or a member that the page shows."""
    things = {}
    for name, members in names_on_the_page().items():
        path, _, last = name.rpartition(".")
        thing = getattr(importlib.import_module(path), last)
        place = f"{thing.__module__}.{thing.__qualname__}"
        things[place] = thing
        if inspect.isclass(thing):
            things |= {f"{place}.{name}": member for name, member in public_members(thing, members)}
    return things


def public_members(cls, shown):
    for name, member in vars(cls).items():
        member = getattr(member, "__func__", member)  # of a classmethod or staticmethod
        is_documented = inspect.isfunction(member) or isinstance(member, property)
        if is_documented and (name in shown if shown is not None else not name.startswith("_")):
            yield name, member


THINGS = public_things()


def definitions(tree, prefix):
    """(qualified name, node) of every class and function of a module, nested ones too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{prefix}.{node.name}", node
            yield from definitions(node, f"{prefix}.{node.name}")
        else:
            yield from definitions(node, prefix)


def internal_definitions():
    """(qualified name, node, comments of its file by line) of all that is not public."""
    for module in modules():
        with tokenize.open(module.__file__) as file:
            source = file.read()
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
        for name, node in definitions(ast.parse(source), module.__name__):
            if name not in THINGS:
                yield name, node, comments


def is_tensor(annotation):
    return annotation is not None and re.fullmatch(r"torch\.\w*Tensor( \| None)?", ast.unparse(annotation)) is not None


def is_record(node):
    return isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list)


def bare_tensors(node, comments):
    """Tensors without a comment behind them: fields of a record, and parameters beside others that have a shape."""
    if is_record(node):
        tensors = [(n.target.id, n) for n in node.body if isinstance(n, ast.AnnAssign) and is_tensor(n.annotation)]
    elif isinstance(node, ast.ClassDef):
        return []
    else:
        taken = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if not any("[" in comments.get(argument.end_lineno, "") for argument in taken):
            return []
        tensors = [(argument.arg, argument) for argument in taken if is_tensor(argument.annotation)]
    return [name for name, tensor in tensors if tensor.end_lineno not in comments]


def docstring(thing):
    return inspect.cleandoc(thing.__doc__ or "")


def section(text, name):
    """Body of a section, dedented; "" if the docstring has none."""
    match = re.search(rf"^{name}:\n((?:    .*\n?|\n)*)", text + "\n", re.MULTILINE)
    return textwrap.dedent(match[1]).strip("\n") if match else ""


def documented_arguments(text):
    return re.findall(r"^\*{0,2}(\w+) \(", section(text, "Args"), re.MULTILINE)


def refers_to_another(text):
    """Whether the docstring sends the reader to another one for its arguments."""
    return re.search(r"\bSee \[`[\w.]+`\]", text) is not None


def parameters(thing):
    """Names that a caller passes, and whether there may be more of them."""
    found, is_open = [], False
    for name, parameter in inspect.signature(thing).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            is_open = True
        elif name not in ("self", "cls"):
            found.append(name)
    return found, is_open


def constructor_parameters(cls):
    """Likewise of a class, where it has a constructor of its own."""
    if issubclass(cls, DraftConfig):
        inherited = INHERITED_FIELDS | {field.name for field in dataclasses.fields(PreTrainedConfig)}
        return [field.name for field in dataclasses.fields(cls) if field.name not in inherited], True
    if dataclasses.is_dataclass(cls) and "__init__" in vars(cls):
        bases = [base for base in cls.__mro__[1:] if dataclasses.is_dataclass(base)]
        inherited = {field.name for base in bases for field in dataclasses.fields(base)}
        return [f.name for f in dataclasses.fields(cls) if f.init and f.name not in inherited], False
    return parameters(cls.__init__) if "__init__" in vars(cls) else ([], True)


def taken_by(thing):
    return constructor_parameters(thing) if inspect.isclass(thing) else parameters(thing)


def returns_something(function):
    annotation = inspect.signature(function).return_annotation
    return annotation not in (inspect.Signature.empty, None, "None", "Iterator[None]")


def is_entry(line, heading):
    """Whether a line at the margin of a section begins an entry, `name (type):` or `Error:`."""
    return re.match(r"\*{0,2}\w+ \(`" if heading == "Args" else r"\w+: ", line) is not None


# The API page


@pytest.mark.parametrize("name", sorted(dspark_hf.__all__))
def test_public_name_is_on_the_api_page(name):
    assert re.search(rf"\bdspark_hf\.{name}\b", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"))


def test_public_names_exist_and_are_few():
    assert all(hasattr(dspark_hf, name) for name in dspark_hf.__all__)
    assert len(dspark_hf.__all__) == len(set(dspark_hf.__all__)) <= 22


def test_the_page_is_understood():
    places = {place.rpartition(".")[2] for place in THINGS}
    assert {"DSparkDraftModel", "from_pretrained", "accepted_length", "verify_lengths", "diagnose"} <= places
    assert len(THINGS) > 80


# Docstrings of public names


@pytest.mark.parametrize("name", sorted(THINGS))
def test_public_name_says_what_goes_in(name):
    thing, text = THINGS[name], docstring(THINGS[name])
    assert text
    if not isinstance(thing, property) and not refers_to_another(text):
        assert bool(taken_by(thing)[0]) == bool(section(text, "Args"))


def test_public_docstrings_refer_to_public_names_for_their_arguments():
    places = {".".join(place.split(".")[-2:]) for place in THINGS} | {place.split(".")[-1] for place in THINGS}
    referred = {name: re.findall(r"\bSee \[`([\w.]+)`\]", docstring(thing)) for name, thing in THINGS.items()}
    assert {name: others for name, others in referred.items() if not set(others) <= places} == {}


def test_documented_arguments_are_those_of_the_signature():
    wrong = {}
    for name, thing in THINGS.items():
        documented = documented_arguments(docstring(thing))
        if isinstance(thing, property):
            taken, is_open = [], False
        elif refers_to_another(docstring(thing)) and not documented:
            continue
        else:
            taken, is_open = taken_by(thing)
        if inspect.isclass(thing) and issubclass(thing, DraftConfig):  # shared fields come first in the class
            documented, taken = sorted(documented), sorted(taken)
        if documented != taken and not (is_open and documented[: len(taken)] == taken):
            wrong[name] = {"documented": documented, "taken": taken}
    assert wrong == {}


def test_public_name_says_what_comes_out():
    wrong = []
    for name, thing in THINGS.items():
        text = docstring(thing)
        if isinstance(thing, property):
            is_said = text.startswith("`")  # its type
        else:
            is_silent = inspect.isclass(thing) or not returns_something(thing)
            is_said = is_silent or section(text, "Returns") or refers_to_another(text)
        if not is_said:
            wrong.append(name)
    assert wrong == []


def test_entries_go_on_under_themselves():
    # A line at the margin of a section begins an entry; the API page would take the rest of a sentence for one.
    wrong = [
        (name, line)
        for name, thing in THINGS.items()
        for heading in ("Args", "Raises")
        for line in section(docstring(thing), heading).splitlines()
        if line and not line.startswith("    ") and not is_entry(line, heading)
    ]
    assert wrong == []


# All other code


def test_every_docstring_begins_with_a_sentence():
    docstrings = {name: ast.get_docstring(node) for name, node, _ in internal_definitions()}
    docstrings |= {name: docstring(thing) for name, thing in THINGS.items()}
    first_paragraphs = {name: (text or ".").split("\n\n")[0].rstrip() for name, text in docstrings.items()}
    assert [name for name, text in first_paragraphs.items() if not text.endswith((".", ":"))] == []


def test_sections_are_for_public_names():
    headings = re.compile(rf"^({'|'.join(SECTIONS)}):$", re.MULTILINE)
    found = {name: headings.findall(ast.get_docstring(node) or "") for name, node, _ in internal_definitions()}
    assert {name: sections for name, sections in found.items() if sections} == {}


def test_tensors_have_their_shape_behind_them():
    # Private ones may say it in their docstring.
    things = [(name, *rest) for name, *rest in internal_definitions() if "._" not in name.replace(".__", ".")]
    found = {name: bare_tensors(node, comments) for name, node, comments in things}
    assert {name: tensors for name, tensors in found.items() if tensors} == {}


def test_bare_tensors_are_found():
    source = """
@dataclass
class Record:
    ids: torch.Tensor  # [1, k]
    mask: torch.Tensor | None = None


def judge(
    ids: torch.Tensor,  # [1, k]
    probs: torch.Tensor,
): ...


def count(ids: torch.Tensor): ...
"""
    record, judge, count = ast.parse(source).body
    comments = {4: "# [1, k]", 9: "# [1, k]"}
    assert bare_tensors(record, comments) == ["mask"]
    assert bare_tensors(judge, comments) == ["probs"]
    assert bare_tensors(count, comments) == []
