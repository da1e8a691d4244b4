# SPDX-License-Identifier: Apache-2.0
"""The drafters that an evaluation compares, and what each passes to `generate`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModel, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..common.model_sources import find_source, read_config_fields
from ..decoding.criterion import resolve_options
from ..default_pair import default_draft_path
from ..drafts.modeling_dspark import DSparkDraftModel
from ..drafts.modeling_eagle3 import Eagle3DraftModel
from ..drafts.target_loading import find_target, load_target_model, load_target_tokenizer


PLAIN, PROMPT_LOOKUP, ASSISTANT, MTP, DFLASH, DRAFT = "plain", "prompt-lookup", "assistant", "mtp", "dflash", "draft"
# Kind -> whether it needs a folder or Hub id; "draft" means the package's own where none is given.
KINDS = {PLAIN: False, PROMPT_LOOKUP: False, ASSISTANT: True, MTP: False, DFLASH: True, DRAFT: False}
TAKES_PATH = (ASSISTANT, DFLASH, DRAFT)
LOOKUP_TOKENS = 10
# Knobs saved with the draft are unset, because they would cut the block.
ALL_SLOTS = (
    ("num_assistant_tokens_schedule", "constant"),
    ("num_assistant_tokens", None),
    ("assistant_confidence_threshold", None),
    ("prompt_lookup_num_tokens", 0),
)
WITHOUT_COPIES = (("prompt_lookup_num_tokens", 0),)
_DRAFTING = (DRAFT, ASSISTANT, DFLASH)
# Knob -> what it takes, and the kinds that have it.
KNOBS: dict[str, tuple[Callable[[str], Any], tuple[str, ...]]] = {
    "num_assistant_tokens": (int, _DRAFTING),
    "assistant_confidence_threshold": (float, _DRAFTING),
    "num_assistant_tokens_schedule": (str, _DRAFTING),
    "prompt_lookup_num_tokens": (int, (PROMPT_LOOKUP, DRAFT)),
    "max_matching_ngram_size": (int, (PROMPT_LOOKUP, DRAFT)),
}
# What transformers raises for a pair that does not fit is not of one type.
UNFIT = (ValueError, NotImplementedError, RuntimeError, TypeError, AttributeError, KeyError, IndexError)


@dataclass(frozen=True)
class Drafter:
    """A row of the evaluation: a way to draft, before anything is loaded."""

    name: str  # its name in the report
    kind: str
    path: str | None = None  # folder or Hub id of the model that drafts
    knobs: tuple[tuple[str, Any], ...] = ()  # knobs that differ from its own; None unsets one


@dataclass(frozen=True, eq=False)
class LoadedDrafter:
    """A drafter that is ready, or the reason why it is not."""

    drafter: Drafter  # what was asked for
    arguments: dict[str, Any] = field(default_factory=dict)  # further arguments of `generate`
    assistant: PreTrainedModel | None = None  # the model that drafts
    knobs: GenerationConfig | None = None  # the assistant's own, set before each call
    num_slots: int | None = None  # slots of a block, of a draft that has blocks
    sends_every_slot: bool = False  # whether no block is cut by schedule or threshold
    note: str = ""  # a limit that the report states
    refusal: str | None = None  # why it does not apply to the target

    @property
    def name(self) -> str:
        """The name in the report."""
        return self.drafter.name


def parse_drafter(text: str) -> Drafter:
    """Read a drafter from the command line: `[NAME=]KIND[:PATH][,KNOB=VALUE...]`."""
    head, *knobs = text.split(",")
    kind, _, path = head.partition(":")
    name, named, kind = kind.rpartition("=")
    kind, path = kind.strip(), path.strip()
    if kind not in KINDS:
        raise ValueError(
            f"A drafter is `[NAME=]KIND[:PATH][,KNOB=VALUE...]` with a KIND of {', '.join(KINDS)}, got {text!r}."
        )
    if KINDS[kind] and not path:
        raise ValueError(f"The drafter {text!r} names no model. Write `{kind}:FOLDER` or `{kind}:HUB_ID`.")
    if path and kind not in TAKES_PATH:
        raise ValueError(f"A drafter of the kind {kind} loads no model, got {path!r}. Remove the path.")
    if named and not name.strip():
        raise ValueError(f"A drafter's name must not be empty, got {text!r}.")
    default_name = f"{kind} {Path(path).name}" if path else kind
    return Drafter(name.strip() or default_name, kind, path or None, tuple(_parse_knob(kind, knob) for knob in knobs))


def _parse_knob(kind: str, text: str) -> tuple[str, Any]:
    name, _, value = (part.strip() for part in text.partition("="))
    own = [knob for knob, (_, kinds) in KNOBS.items() if kind in kinds]
    if name not in own:
        raise ValueError(f"The knobs of a drafter of the kind {kind} are {', '.join(own) or 'none'}, got {text!r}.")
    convert = KNOBS[name][0]
    try:
        return name, convert(value)
    except ValueError as error:
        raise ValueError(f"The knob `{name}` takes {convert.__name__}, got {value!r}.") from error


def default_drafters(drafts: Sequence[str | None]) -> list[Drafter]:
    """The drafters compared by default: prompt lookup, and each draft with its own schedule, the same without copies
    from the text, and with every slot sent (which the figures of its confidences need).
    """
    found = [Drafter(PROMPT_LOOKUP, PROMPT_LOOKUP)]
    for path in drafts or [None]:
        name = Path(path).name if path is not None else "dspark"
        found.append(Drafter(name, DRAFT, path))
        found.append(Drafter(f"{name} without copies", DRAFT, path, WITHOUT_COPIES))
        found.append(Drafter(f"{name} all slots", DRAFT, path, ALL_SLOTS))
    return found


def check_names(drafters: Sequence[Drafter]) -> list[Drafter]:
    """Put plain generation first, which everything is compared with, and refuse two drafters of one name."""
    ordered = [Drafter(PLAIN, PLAIN), *(drafter for drafter in drafters if drafter.kind != PLAIN)]
    names = [drafter.name for drafter in ordered]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"Drafters must have different names, got {twice} more than once. Write `NAME=KIND...`.")
    if len(ordered) == 1:
        raise ValueError("An evaluation compares plain generation with at least one drafter, got none. Name one.")
    return ordered


def load_drafters(
    drafters: Sequence[Drafter],
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    trust_remote_code: bool = False,
) -> list[LoadedDrafter]:  # in the same order
    """Load what drafts. One that does not apply to the target is kept, with the reason."""
    loading = _Loading(target, tokenizer, trust_remote_code)
    loaded = []
    for drafter in drafters:
        try:
            loaded.append(_LOADERS[drafter.kind](drafter, loading))
        except OSError:  # a wrong path is no property of the pair
            raise
        except UNFIT as error:
            loaded.append(LoadedDrafter(drafter, refusal=str(error)))
    return loaded


def load_own_draft(path: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load a draft of any kind that this package decodes with, as its config says."""
    source = find_source(path)
    config = read_config_fields(source)
    words = [config.get("model_type"), config.get("speculators_model_type"), *(config.get("architectures") or ())]
    is_eagle3 = any("eagle3" in str(word).lower() for word in words)
    draft_class = Eagle3DraftModel if is_eagle3 else DSparkDraftModel
    return draft_class.from_pretrained(source, dtype=dtype).eval()


@dataclass(frozen=True)
class _Loading:
    """The shared state of one evaluation's loaders: target, and models already loaded, by kind and path."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    trust_remote_code: bool
    models: dict[tuple[str, str | None], PreTrainedModel] = field(default_factory=dict)


def _load_plain(drafter: Drafter, _loading: _Loading) -> LoadedDrafter:
    return LoadedDrafter(drafter)


def _load_draft(drafter: Drafter, loading: _Loading) -> LoadedDrafter:
    target, key = loading.target, (DRAFT, drafter.path)
    if key not in loading.models:
        path = drafter.path if drafter.path is not None else default_draft_path()
        loading.models[key] = load_own_draft(path, target.dtype).to(target.device)
    draft = loading.models[key]
    draft.bind_target(target)  # raises where the two do not fit
    knobs, num_slots, sends_every_slot = _knobs(draft, drafter), None, False
    if isinstance(draft, DSparkDraftModel):
        options, num_slots = resolve_options(draft.config, knobs), draft.config.num_draft_slots
        is_cut = options.confidence_threshold or options.num_assistant_tokens < num_slots
        sends_every_slot = options.schedule == "constant" and not is_cut
    return LoadedDrafter(
        drafter, {"assistant_model": draft}, draft, knobs, num_slots=num_slots, sends_every_slot=sends_every_slot
    )


def _load_lookup(drafter: Drafter, _loading: _Loading) -> LoadedDrafter:
    return LoadedDrafter(drafter, {"prompt_lookup_num_tokens": LOOKUP_TOKENS} | dict(drafter.knobs))


def _load_assistant(drafter: Drafter, loading: _Loading) -> LoadedDrafter:
    target, key = loading.target, (ASSISTANT, drafter.path)
    source = find_target(_path_of(drafter), loading.trust_remote_code)
    if key not in loading.models:
        loading.models[key] = load_target_model(source, target.dtype).to(target.device)
    assistant = loading.models[key]
    arguments: dict[str, Any] = {"assistant_model": assistant}
    sizes = [model.config.get_text_config().vocab_size for model in (target, assistant)]
    if sizes[0] != sizes[1]:
        arguments |= {"tokenizer": loading.tokenizer, "assistant_tokenizer": load_target_tokenizer(source)}
    return LoadedDrafter(drafter, arguments, assistant, _knobs(assistant, drafter))


def _path_of(drafter: Drafter) -> str:
    if drafter.path is None:
        raise ValueError(f"A drafter of the kind {drafter.kind} names a model. Write `{drafter.kind}:FOLDER`.")
    return drafter.path


def _load_mtp(drafter: Drafter, loading: _Loading) -> LoadedDrafter:
    target = loading.target
    _require_generation_option("use_mtp")
    if not getattr(target.config.get_text_config(), "num_mtp_layers", None):
        raise ValueError(
            f"{type(target).__name__} has no layers for multi-token prediction (`num_mtp_layers` in its config)."
        )
    note = "transformers loads the layers again in every call, and the times include that."
    return LoadedDrafter(drafter, {"use_mtp": True}, note=note)


def _load_dflash(drafter: Drafter, loading: _Loading) -> LoadedDrafter:
    _require_generation_option("speculation_type")
    target, key = loading.target, (DFLASH, drafter.path)
    if key not in loading.models:
        source = find_source(_path_of(drafter))
        loading.models[key] = AutoModel.from_pretrained(source, dtype=target.dtype).to(target.device).eval()
    assistant = loading.models[key]
    needed = ("target_layer_ids", "block_size", "mask_token_id")
    if isinstance(assistant, DSparkDraftModel) or not all(hasattr(assistant.config, name) for name in needed):
        raise ValueError(
            f"transformers' own DFlash needs a DFlash model of transformers' own, got {type(assistant).__name__}. "
            f"For a draft that this package reads write `draft:{drafter.path}`."
        )
    arguments = {"assistant_model": assistant, "speculation_type": "dflash"}
    return LoadedDrafter(drafter, arguments, assistant, _knobs(assistant, drafter))


_LOADERS = {
    PLAIN: _load_plain,
    PROMPT_LOOKUP: _load_lookup,
    ASSISTANT: _load_assistant,
    MTP: _load_mtp,
    DFLASH: _load_dflash,
    DRAFT: _load_draft,
}


def _require_generation_option(name: str) -> None:
    if not hasattr(GenerationConfig(), name):
        raise NotImplementedError(
            f"transformers {transformers.__version__} has no `{name}`; a later one is needed for this drafter."
        )


def _knobs(assistant: PreTrainedModel, drafter: Drafter) -> GenerationConfig:
    """A copy of the assistant's own knobs, with those that were given."""
    knobs = copy.deepcopy(getattr(assistant, "generation_config", None)) or GenerationConfig()
    for name, value in drafter.knobs:
        setattr(knobs, name, value)
    return knobs
