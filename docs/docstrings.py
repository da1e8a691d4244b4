# SPDX-License-Identifier: Apache-2.0
"""Lets the API page read docstrings in transformers' style: its argument types, its examples and its references."""

import re

import griffe


_ARGUMENT = re.compile(r"^( +[\w*]+ )\((`.*?)\):", re.MULTILINE)  # name (`int`, *optional*, defaults to 3):
_RETURNED = re.compile(r"(Returns:\n +)(`[^:\n]*):")  # `torch.Tensor` of shape `(b, d)`: description
_REFERENCE = re.compile(r"\[`([\w.]+)`\](?!\[)")  # [`DSparkConfig`]


class TransformersDocstrings(griffe.Extension):
    """Rewrites every docstring of the package before it is parsed."""

    def on_package(self, *, pkg: griffe.Module, **_) -> None:
        """Walk the package once it is loaded."""
        self._public = {str(name) for name in pkg.exports or ()}
        self._visit(pkg)

    def _visit(self, thing: griffe.Object) -> None:
        if thing.docstring is not None:
            thing.docstring.value = self._rewritten(thing.docstring.value)
        for member in thing.members.values():
            if not member.is_alias:
                self._visit(member)

    def _rewritten(self, text: str) -> str:
        text = _ARGUMENT.sub(lambda m: f"{m[1]}({m[2].replace('`', '').replace('*', '')}):", text)
        text = _RETURNED.sub(lambda m: f"{m[1]}{m[2].replace('`', '')}:", text)
        text = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
        text = re.sub(r" +# doctest: \+SKIP$", "", text, flags=re.MULTILINE)
        return _REFERENCE.sub(self._link, text)

    def _link(self, match: re.Match) -> str:
        code = f"`{match[1]}`"
        return f"[{code}][dspark_hf.{match[1]}]" if match[1].split(".")[0] in self._public else code
