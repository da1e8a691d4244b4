# SPDX-License-Identifier: Apache-2.0
"""Public names are on the API page, and every docstring says what goes in and what comes out."""

import dataclasses
import importlib
import inspect
import pkgutil
import re
import textwrap
from pathlib import Path

import pytest

import dspark_hf


ROOT = Path(__file__).parents[1]
# transformers' own fields, which every config has.
INHERITED_FIELDS = {"bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"}
# Its docstrings are the help texts of the command line.
COMMAND_LINE = "dspark_hf.cli"


def modules():
    names = [module.name for module in pkgutil.walk_packages(dspark_hf.__path__, "dspark_hf.")]
    return [dspark_hf, *(importlib.import_module(name) for name in names if not name.endswith("__main__"))]


def public_things():
    """(qualified name, thing) of every public function, class, method and property defined in the package."""
    things = {}
    for module in modules():
        for name, thing in vars(module).items():
            is_defined_here = getattr(thing, "__module__", None) == module.__name__
            if name.startswith("_") or not is_defined_here:
                continue
            if inspect.isfunction(thing):
                things[f"{module.__name__}.{name}"] = thing
            elif inspect.isclass(thing):
                things[f"{module.__name__}.{name}"] = thing
                things |= dict(public_members(f"{module.__name__}.{name}", thing))
    return things


def public_members(prefix, cls):
    for name, member in vars(cls).items():
        member = getattr(member, "__func__", member)  # of a classmethod or staticmethod
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
            yield f"{prefix}.{name}", member


THINGS = public_things()


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
    if cls is dspark_hf.DSparkConfig:
        return [name for name in vars(cls)["__annotations__"] if name not in INHERITED_FIELDS], True
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


@pytest.mark.parametrize("name", sorted(set(dspark_hf.__all__) - {"__version__"}))
def test_public_name_says_what_goes_in_and_what_comes_out(name):
    thing = getattr(dspark_hf, name)
    text = docstring(thing)
    assert text
    assert bool(taken_by(thing)[0]) == bool(section(text, "Args"))
    if not inspect.isclass(thing) and returns_something(thing):
        assert section(text, "Returns")


# Every docstring of the package


def test_the_walk_finds_the_package():
    assert len(THINGS) > 80
    for name in (
        "decoding.verification.verify_block",
        "drafts.heads.RNNHead.features",
        "common.records.AcceptanceStats.accepted_length",
    ):
        assert f"dspark_hf.{name}" in THINGS


def test_every_docstring_begins_with_a_sentence():
    first_paragraphs = {name: docstring(thing).split("\n\n")[0].rstrip() for name, thing in THINGS.items()}
    assert [name for name, text in first_paragraphs.items() if not text.endswith((".", ":"))] == []


def test_documented_arguments_are_those_of_the_signature():
    wrong = {}
    for name, thing in THINGS.items():
        documented = documented_arguments(docstring(thing))
        if isinstance(thing, property):
            taken, is_open = [], False
        elif name.startswith(COMMAND_LINE) or (refers_to_another(docstring(thing)) and not documented):
            continue
        else:
            taken, is_open = taken_by(thing)
        if documented != taken and not (is_open and documented[: len(taken)] == taken):
            wrong[name] = {"documented": documented, "taken": taken}
    assert wrong == {}


def test_every_docstring_says_what_is_returned():
    wrong = []
    for name, thing in THINGS.items():
        text = docstring(thing)
        if name.startswith(COMMAND_LINE):
            continue
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
