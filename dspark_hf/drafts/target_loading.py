# SPDX-License-Identifier: Apache-2.0
"""Loads any supported kind of target: text or image-text, remote code, a PEFT adapter on its base.

The kind is read from its config and from transformers' own mappings, before any weight is read. Code from a repository
runs only if the caller allows it, and a warning names it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME, is_peft_available, logging

from ..common.model_sources import find_file, find_source, read_config_fields
from . import formats
from .formats import eagle3
from .pretrained import readable_errors


logger = logging.get_logger("transformers.dspark_hf.drafts.target_loading")

# In the order in which they are tried: a target is run on text.
_MAPPINGS = {
    "AutoModelForCausalLM": MODEL_FOR_CAUSAL_LM_MAPPING,
    "AutoModelForImageTextToText": MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    "AutoModelForMultimodalLM": MODEL_FOR_MULTIMODAL_LM_MAPPING,
}


@dataclass(frozen=True)
class TargetSource:
    """The location of a target, and what is known of it before it is loaded."""

    name: str  # folder or Hub id, as given
    base: str  # folder or Hub id of the weights: the same, or the base model of an adapter
    fields: dict[str, Any]  # the config.json there
    is_adapter: bool  # whether `name` is a PEFT adapter, to be put on the base
    trust_remote_code: bool  # whether code that comes with it may run


def find_target(name: str | os.PathLike, trust_remote_code: bool = False) -> TargetSource:
    """Find a target, and read what is known without loading it."""
    source = find_source(name)
    adapter_path = find_file(source, ADAPTER_CONFIG_NAME)
    if adapter_path is not None and not is_peft_available():
        raise ImportError(f"{source} has a PEFT adapter, and PEFT is not installed: pip install peft.")
    base, is_adapter = source, False
    if adapter_path is not None and find_file(source, CONFIG_NAME) is None:
        base, is_adapter = _base_of(source, adapter_path), True
    fields = read_config_fields(base)
    if formats.is_dspark(fields) or eagle3.matches(fields):
        made_for = fields.get("target_name_or_path")
        raise ValueError(
            f"{source} is a draft, and a target is needed: the model that the draft was made for"
            f"{f', {made_for}' if made_for else ''}. Give that as the target, and {source} as the draft."
        )
    found = TargetSource(source, base, fields, is_adapter, trust_remote_code)
    code = _remote_code(found)
    if trust_remote_code and code:
        logger.warning(f"Code that comes with the model runs: {_code_in_words(found, code)}.")
    return found


def load_target_config(source: TargetSource) -> PreTrainedConfig:
    """The config of a target, or of an adapter's base."""
    model_type = source.fields.get("model_type")
    if model_type not in CONFIG_MAPPING:
        code = _remote_code(source)
        if code and not source.trust_remote_code:
            raise _needs_its_code(source, code)
        if not code:
            raise ValueError(
                f"The config.json of {source.base} says `model_type` {model_type!r}, which transformers "
                f"{transformers.__version__} does not know. Update transformers, or correct the file."
            )
    config = AutoConfig.from_pretrained(source.base, trust_remote_code=source.trust_remote_code)
    if config.is_encoder_decoder:
        raise NotImplementedError(
            f"DSpark drafts need a decoder-only target, and {source.base} is an encoder-decoder model "
            f"({type(config).__name__}). Use a plain assistant model."
        )
    return config


def load_target_model(
    source: TargetSource, dtype: torch.dtype | str = "auto", merge_adapter: bool = False
) -> PreTrainedModel:
    """Load a target with all its weights, and its adapter where it is one."""
    auto_class = _auto_class(load_target_config(source), source)
    arguments = {"dtype": dtype, "trust_remote_code": source.trust_remote_code, "output_loading_info": True}
    with readable_errors(source.base):
        model, info = auto_class.from_pretrained(source.base, **arguments)
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(
            f"The checkpoint {source.base} lacks weights that {type(model).__name__} needs, which would be random: "
            f"{', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}. Give a model with an LM head, as it was "
            "trained."
        )
    if source.is_adapter:
        model = _with_adapter(model, source, merge_adapter)
    return model.eval()


def empty_target(source: TargetSource) -> PreTrainedModel:
    """A target without weights, to check what fits it."""
    config = load_target_config(source)
    with torch.device("meta"):
        return _auto_class(config, source).from_config(config, trust_remote_code=source.trust_remote_code)


def load_target_tokenizer(source: TargetSource) -> PreTrainedTokenizerBase:
    """The tokenizer of a target; for an adapter, its own if it has one."""
    place = source.name if source.is_adapter and get_tokenizer_config(source.name) else source.base
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=source.trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError, AttributeError) as error:
        code = _auto_map(get_tokenizer_config(place)) if not source.trust_remote_code else []
        if code:
            raise _needs_its_code(source, code) from error
        reason = str(error).strip().split("\n")[0].rstrip(" :.")
        raise ValueError(
            f"The tokenizer of {place} cannot be loaded ({reason}). Save it beside the model with `save_pretrained`, "
            "or install what it needs."
        ) from error
    # Without any file transformers makes up a tokenizer without a vocabulary.
    if not any(find_file(place, name) for name in ("tokenizer_config.json", *tokenizer.vocab_files_names.values())):
        raise ValueError(f"{place} holds no tokenizer. Save the target's beside it with `save_pretrained`.")
    return tokenizer


def _base_of(adapter: str, config_path: str) -> str:
    fields = json.loads(Path(config_path).read_text(encoding="utf-8"))
    base = fields.get("base_model_name_or_path")
    if not base:
        raise ValueError(
            f"{adapter} is a PEFT adapter that does not name its base model. Set `base_model_name_or_path` in its "
            "adapter_config.json."
        )
    try:
        found = find_source(base)
    except (OSError, ValueError) as error:
        raise type(error)(f"{adapter} is a PEFT adapter, and its base model is not there. {error}") from error
    if find_file(found, CONFIG_NAME) is None and find_file(found, ADAPTER_CONFIG_NAME) is not None:
        raise ValueError(
            f"{adapter} is a PEFT adapter on {base}, another adapter. Merge that one into its base first."
        )
    return found


def _with_adapter(model: PreTrainedModel, source: TargetSource, merge: bool) -> PreTrainedModel:
    try:
        if merge:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, source.name).merge_and_unload()
        else:
            model.load_adapter(source.name)
    except (ValueError, RuntimeError, KeyError, TypeError, AttributeError, NotImplementedError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(" :.")
        raise ValueError(
            f"The PEFT adapter {source.name} cannot be put on {source.base} ({reason}). Merge the two into a model of "
            "its own, and give that."
        ) from error
    model.config.name_or_path = source.name  # the target that was used is recorded, not its base
    return model


def _auto_class(config: PreTrainedConfig, source: TargetSource) -> Any:
    """transformers' class that loads a target: its own code if that may run, else the first mapping that has it."""
    code = getattr(config, "auto_map", None) or {}
    if source.trust_remote_code and (own := [name for name in _MAPPINGS if name in code]):
        return getattr(transformers, own[0])
    for name, mapping in _MAPPINGS.items():
        if type(config) in mapping:
            return getattr(transformers, name)
    if any(name in code for name in _MAPPINGS):
        raise _needs_its_code(source, _remote_code(source))
    raise ValueError(
        f"{source.base} cannot be a target: transformers {transformers.__version__} has no class that writes text for "
        f"{type(config).__name__} (architectures {config.architectures or []}). Give a model with an LM head."
    )


def _remote_code(source: TargetSource) -> list[str]:
    """The `auto_map` references of a target and of its tokenizer."""
    references = [*_auto_map(source.fields), *_auto_map(get_tokenizer_config(source.base))]
    if source.is_adapter:
        references += _auto_map(get_tokenizer_config(source.name))
    return list(dict.fromkeys(references))


def _auto_map(fields: dict[str, Any]) -> list[str]:
    """`module.Class` or `owner/name--module.Class`; a tokenizer has a pair of them, or one and `None`."""
    found = fields.get("auto_map") or {}
    values = found.values() if isinstance(found, dict) else [found]
    nested = [value if isinstance(value, (list, tuple)) else [value] for value in values]
    return [value for group in nested for value in group if isinstance(value, str)]


def _code_in_words(source: TargetSource, code: list[str]) -> str:
    """List code files by their repository."""
    files: dict[str, list[str]] = {}
    for reference in code:
        repository, _, path = reference.rpartition("--")
        files.setdefault(repository or source.base, []).append(path.rpartition(".")[0] + ".py")
    return "; ".join(f"{', '.join(dict.fromkeys(names))} of {place}" for place, names in files.items())


def _needs_its_code(source: TargetSource, code: list[str]) -> ValueError:
    return ValueError(
        f"{source.name} can only be loaded with code that comes with it, which has not been allowed to run: "
        f"{_code_in_words(source, code)}. Read it, then pass `trust_remote_code=True` (command line: "
        "`--trust-remote-code`)."
    )
