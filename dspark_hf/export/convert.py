# SPDX-License-Identifier: Apache-2.0
"""Converts a draft from any readable format to one of three. Tensors are copied bit for bit, never recomputed."""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from ..common.path_checks import check_output_folder
from ..drafts.configuration_dspark import DSparkConfig
from ..drafts.formats import deepspec, deepspec_gemma4, speculators
from ..drafts.formats.fields import OPEN_FIELDS
from ..drafts.formats.files import TensorFiles
from ..drafts.modeling_dspark import DSparkDraftModel
from ..drafts.target_loading import TargetSource, empty_target, find_target, load_target_config, load_target_model
from ..scheduling.curve import SPSCurve
from .engine_files import write_engine_files


FORMATS = ("dspark", "deepspec", "speculators")


@dataclass(frozen=True)
class Conversion:
    """The result of [`convert_draft`].

    Args:
        folder (`Path`): The new draft.
        config (`DSparkConfig`): Its configuration, as read back.
        lost (`tuple[str, ...]`): What the source had and the new format has no place for.
        engine_files (`tuple[Path, ...]`): Calibration and round times for other engines.
    """

    folder: Path
    config: DSparkConfig
    lost: tuple[str, ...]
    engine_files: tuple[Path, ...]


def convert_draft(
    draft: str | os.PathLike,
    to: str,
    output: str | os.PathLike,
    target: str | os.PathLike | None = None,
    stated: dict[str, Any] | None = None,
    curve: SPSCurve | None = None,
    trust_remote_code: bool = False,
) -> Conversion:
    """Write a draft in another format. The folder appears complete, after it was read back and compared.

    Args:
        draft (`str` or `os.PathLike`): Hub id or folder of the draft, in any format that is read.
        to (`str`): `"dspark"` (ours), `"deepspec"` or `"speculators"`.
        output (`str` or `os.PathLike`): Folder to write; it must not exist, or be empty.
        target (`str` or `os.PathLike`, *optional*):
            Hub id or folder of the target. DeepSpec's layout holds its embedding and LM head, speculators' names it.
            A PEFT adapter is merged into its base where weights are written.
        stated (`dict[str, Any]`, *optional*): Fields that the source leaves open, as in `from_pretrained`.
        curve (`SPSCurve`, *optional*): Measured round times, written for other engines.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Whether code that comes with the target may run.

    Returns:
        [`Conversion`]

    Raises:
        ValueError: If the draft is broken or ambiguous, the format cannot represent it, the target is missing or does
            not fit, or `output` is not empty.
        NotImplementedError: If the draft's format is known but not supported.
        OSError: If there is no such draft or target.

    Example:
        >>> convert_draft("my-draft", "deepspec", "my-draft-vllm", target="Qwen/Qwen3-4B").folder  # doctest: +SKIP
        PosixPath('my-draft-vllm')
    """
    draft, output = os.path.expanduser(draft), Path(output).expanduser()
    _check_request(to, output)
    source = None if target is None else find_target(target, trust_remote_code)
    model = DSparkDraftModel.from_pretrained(draft, dtype="auto", **(stated or {}))
    files = TensorFiles.find(draft, {})
    tensors = {name: files.read(name) for name in model.state_dict()}
    config = _with_target(model.config, source)
    fields, extra = _WRITERS[to](_Source(config, model, files, source))
    output.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
        save_file(tensors | extra, folder / "model.safetensors", metadata={"format": "pt"})
        if to == "dspark":
            model.generation_config.save_pretrained(folder)
        written = _read_back(folder, config, tensors)
        engine_files = write_engine_files(folder, config, curve)
        os.chmod(folder, 0o755)  # temporary folders are private
        os.replace(folder, output)  # an empty folder may be replaced
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    lost = () if to == "dspark" or not _knobs(model) else ("generation_config.json",)
    return Conversion(output, written, lost, tuple(output / path.name for path in engine_files))


def parse_stated(assignments: Sequence[str]) -> dict[str, Any]:
    """Fields given as text, for command lines."""
    stated = {}
    for assignment in assignments:
        name, sign, text = assignment.partition("=")
        if not sign or name not in OPEN_FIELDS:
            raise ValueError(
                f"A field is stated as NAME=VALUE, NAME one of {', '.join(OPEN_FIELDS)}; got {assignment!r}."
            )
        try:
            stated[name] = json.loads(text)
        except json.JSONDecodeError:
            stated[name] = text
    return stated


def _check_request(to: str, output: Path) -> None:
    if to not in FORMATS:
        raise ValueError(f"`to` must be one of {FORMATS}, got {to!r}.")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"`output` must be a new or an empty folder, got {output}. Choose another, or empty it.")
    check_output_folder(output, "output")


def _with_target(config: DSparkConfig, target: TargetSource | None) -> DSparkConfig:
    """The configuration with the target's name and depth, where the caller names it."""
    config = copy.deepcopy(config)
    if target is not None:
        config.target_name_or_path = target.name
        config.num_target_layers = load_target_config(target).get_text_config(decoder=True).num_hidden_layers
    return config


@dataclass(frozen=True)
class _Source:
    """A draft to write, and what is known of its target."""

    config: DSparkConfig
    model: DSparkDraftModel
    files: TensorFiles
    target: TargetSource | None


def _write_own(source: _Source) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    if source.target is not None:
        _bind_empty(source, source.target)
    source.config.architectures = [type(source.model).__name__]
    return json.loads(source.config.to_json_string()), {}


def _write_deepspec(source: _Source) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    names, is_gemma = ("embed_tokens.weight", "lm_head.weight"), source.config.layer_kind == "gemma4"
    fields = {} if is_gemma else deepspec.from_config(source.config)
    if source.target is None:
        if is_gemma or any(name not in source.files.paths for name in names):
            raise ValueError(
                "DeepSpec's layout holds the target's embedding and LM head, which this draft does not have. Give the "
                "target (`--target`)."
            )
        return fields, {name: source.files.read(name) for name in names}
    if is_gemma:
        text_config = load_target_config(source.target).get_text_config(decoder=True)
        fields = deepspec_gemma4.from_config(source.config, text_config)
    loaded = load_target_model(source.target, merge_adapter=True)
    binding = source.model.bind_target(loaded)
    weights = [_plain_weight(module, source.target.name) for module in (binding.embed_tokens, binding.lm_head)]
    return fields, dict(zip(names, weights, strict=True))


def _write_speculators(source: _Source) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config, ids = source.config, source.model.draft_token_ids()
    if config.target_name_or_path is None:
        raise ValueError("The speculators layout names its target, which this draft does not. Give it (`--target`).")
    if source.target is not None and source.target.is_adapter:
        raise ValueError(
            f"The speculators layout names a target that engines load, and {source.target.name} is a PEFT adapter. "
            "Merge it into its base (`merge_and_unload` and `save_pretrained`), and give the merged model."
        )
    architectures = (
        [] if source.target is None else list(_bind_empty(source, source.target).config.architectures or [])
    )
    fields = speculators.from_config(config, architectures)
    return fields, {} if ids is None else {"t2d": speculators.membership_mask(ids, config.vocab_size)}


# Each returns config.json, and the tensors that are not the draft's own.
_WRITERS = {"dspark": _write_own, "deepspec": _write_deepspec, "speculators": _write_speculators}


def _bind_empty(source: _Source, target: TargetSource) -> PreTrainedModel:
    """Check that the target fits, from its config alone."""
    empty = empty_target(target)
    source.model.bind_target(empty)
    return empty


def _plain_weight(module: torch.nn.Module, target: str) -> torch.Tensor:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
        raise ValueError(
            f"DeepSpec's layout holds the target's embedding and LM head in full precision, but those of {target} are "
            "quantised. Give the target that it was quantised from."
        )
    return weight.detach().clone().contiguous()


def _read_back(folder: Path, config: DSparkConfig, tensors: dict[str, torch.Tensor]) -> DSparkConfig:
    """Load the written draft and compare it with its source."""
    model = DSparkDraftModel.from_pretrained(folder, dtype="auto")
    files = TensorFiles.find(folder, {})
    ours, theirs = ({k: v for k, v in c.to_dict().items() if k not in _NOT_COMPARED} for c in (config, model.config))
    if ours != theirs:
        names = sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name))
        raise RuntimeError(f"The format changed {names} of the draft. Nothing was written; please report this.")
    if any(not torch.equal(files.read(name), tensor) for name, tensor in tensors.items()):
        raise RuntimeError("The format changed a tensor of the draft. Nothing was written; please report this.")
    return model.config


_NOT_COMPARED = ("_name_or_path", "transformers_version", "architectures")


def _knobs(model: DSparkDraftModel) -> dict[str, Any]:
    return {k: v for k, v in model.generation_config.to_diff_dict().items() if k != "transformers_version"}
