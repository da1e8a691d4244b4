# SPDX-License-Identifier: Apache-2.0
"""Checks that the fields a caller passes and a draft's config.json are readable and do not contradict each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig


def given(stated: dict[str, Any] | None) -> dict[str, Any]:
    """The fields that a caller passes."""
    return {name: value for name, value in (stated or {}).items() if value is not None}


@contextlib.contextmanager
def readable_type_errors(source: str) -> Iterator[None]:
    """Turn errors of fields of a wrong type in a config.json into readable ones."""
    try:
        yield
    except (TypeError, AttributeError, KeyError, IndexError) as error:  # fields of transformers' own
        raise ValueError(
            f"The draft config of {source} has a field of a wrong type ({type(error).__name__}: {error}). Compare it "
            "with the config.json that its trainer wrote."
        ) from error


def check_agrees(config: PreTrainedConfig, stated: dict[str, Any], source: str) -> None:
    """Reject a contradiction."""
    for name, value in stated.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"`{name}={value!r}` contradicts the draft config of {source}, which says {getattr(config, name)!r}. "
                "Leave the argument out, or correct config.json."
            )
