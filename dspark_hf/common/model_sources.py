# SPDX-License-Identifier: Apache-2.0
"""Resolves the name of a model: an existing folder, or a Hub id. An error names the alternative."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME, cached_file
from transformers.utils.hub import is_offline_mode


GGUF_SUFFIX = ".gguf"
_GGUF_REMEDY = (
    "Read it once with `from_pretrained(FOLDER, gguf_file=NAME)` of AutoModelForCausalLM and of AutoTokenizer, save "
    "both with `save_pretrained`, and give that folder."
)


def find_source(name: str | os.PathLike, subfolder: str = "") -> str:
    """The folder or Hub id that a name stands for."""
    text = os.fspath(os.path.expanduser(name))
    if not text.strip():
        raise ValueError("A model is named by its folder or its Hub id, got an empty name.")
    path = Path(text, subfolder)
    if path.is_dir():
        _check_folder(path)
    elif path.exists():
        raise NotADirectoryError(_file_in_words(path))
    elif looks_like_path(text):
        shown = os.path.join(text, subfolder) if subfolder else text
        raise FileNotFoundError(f"There is no folder {shown!r}. Check the path, or give a Hub id (`owner/name`).")
    return text


def looks_like_path(name: str) -> bool:
    """Whether a name that is no existing folder can only be a path."""
    parts = name.replace(os.sep, "/").split("/")
    return (
        name.startswith((".", "~"))
        or os.path.isabs(name)
        or len(parts) > 2
        or not all(parts)
        or (len(parts) == 2 and Path(parts[0]).is_dir())
    )


def read_config_fields(source: str, hub_arguments: dict[str, Any] | None = None) -> dict[str, Any]:
    """The config.json of a model."""
    try:
        fields = PreTrainedConfig.get_config_dict(source, **(hub_arguments or {}))[0]
    except OSError as error:
        if os.path.isdir(source):
            raise OSError(f"The {CONFIG_NAME} of {source} cannot be read ({error}). Copy it again.") from error
        raise OSError(_not_on_the_hub(source, error)) from error
    except (AttributeError, TypeError):
        fields = None
    if not isinstance(fields, dict):
        raise ValueError(f"The {CONFIG_NAME} of {source} must hold a JSON object, with the fields of a model.")
    return fields


def find_file(source: str, name: str) -> str | None:  # path on this machine, or None where the model has no such file
    """A file of a model, fetched where it is on the Hub."""
    quietly = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    try:
        return cached_file(source, name, **quietly)
    except OSError as error:
        raise OSError(_not_on_the_hub(source, error)) from error


def _check_folder(path: Path) -> None:
    if (path / CONFIG_NAME).is_file() or (path / ADAPTER_CONFIG_NAME).is_file():
        return
    files = sorted(path.iterdir())
    if not files:
        raise FileNotFoundError(f"The folder {str(path)!r} is empty, without a {CONFIG_NAME}. Give one with a model.")
    for file in files:
        if file.suffix == GGUF_SUFFIX:
            raise FileNotFoundError(f"The folder {str(path)!r} holds a GGUF file and no {CONFIG_NAME}. {_GGUF_REMEDY}")
    # What a Trainer leaves when it is interrupted, and the layout of the Hub's cache.
    inner = sorted({*path.glob(f"*/{CONFIG_NAME}"), *path.glob(f"snapshots/*/{CONFIG_NAME}")})
    remedy = f"Did you mean {str(inner[-1].parent)!r}?" if inner else "Give the folder that `save_pretrained` wrote."
    raise FileNotFoundError(f"The folder {str(path)!r} has no {CONFIG_NAME}, so it holds no model. {remedy}")


def _file_in_words(path: Path) -> str:
    if path.suffix == GGUF_SUFFIX:
        return (
            f"{str(path)!r} is a GGUF file, and a model is given as a folder in transformers' format. {_GGUF_REMEDY}"
        )
    is_part = (path.parent / CONFIG_NAME).is_file()
    remedy = f"Give the folder that holds it, {str(path.parent)!r}." if is_part else f"Give one with a {CONFIG_NAME}."
    return f"A model is given as a folder, and {str(path)!r} is a file. {remedy}"


def _not_on_the_hub(name: str, error: OSError) -> str:
    if is_offline_mode():
        return (
            f"There is no folder {name!r} here, and the Hub's model of that name is not in the cache. Nothing is "
            "fetched, since the offline mode is on (HF_HUB_OFFLINE): check the name, or unset the variable."
        )
    reason = str(error).strip().split("\n")[0].rstrip(".")
    return f"There is no folder {name!r} here, and the Hub gave no model of that name ({reason}). Check the name."
