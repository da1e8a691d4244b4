# SPDX-License-Identifier: Apache-2.0
"""The seam into transformers: `generate(assistant_model=draft)` reaches our loop, everything else stays as it was.

Four methods of `GenerationMixin` are wrapped. Each wrapper looks at the type of the assistant and hands every call
without a DSpark draft to the original, untouched.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMixin, GenerationMode
from transformers.utils import logging

from .decoding.call import generator_for
from .decoding.criterion import resolve_options
from .decoding.eagle3_drafter import resolve_eagle3
from .decoding.loop import decode
from .decoding.stream_end import claim, ended_on_failure
from .drafts.configuration_dspark import DSparkConfig
from .drafts.configuration_eagle3 import Eagle3Config
from .drafts.modeling_dspark import DSparkDraftModel
from .drafts.modeling_eagle3 import Eagle3DraftModel
from .profiling.automatic import profile_for


logger = logging.get_logger("transformers.dspark_hf.integration")

_originals: dict[str, Callable] = {}
_MARK = "_dspark_hf"  # attribute of our wrappers


def enable() -> None:
    """Let `generate` accept DSpark drafts as `assistant_model`. Importing the package does it; twice does no harm."""
    if _originals:
        return
    for name, wrap in _WRAPPERS.items():
        original = getattr(GenerationMixin, name)
        _originals[name] = original
        wrapper = functools.wraps(original)(wrap(original))
        setattr(wrapper, _MARK, True)
        setattr(GenerationMixin, name, wrapper)


def disable() -> None:
    """Give `GenerationMixin` its own methods back. DSpark drafts are then no valid `assistant_model`.

    A method that another package wrapped after us stays wrapped by it; our part in it hands every call on.
    """
    for name, original in _originals.items():
        if getattr(getattr(GenerationMixin, name), _MARK, False):
            setattr(GenerationMixin, name, original)
    _originals.clear()


def is_enabled() -> bool:
    """Whether `generate` accepts DSpark drafts.

    Returns:
        `bool`
    """
    return bool(_originals)


def register_auto_classes() -> None:
    """Let `AutoConfig` and `AutoModel` load drafts saved by this package; does nothing where the type is taken."""
    for config_class, model_class in ((DSparkConfig, DSparkDraftModel), (Eagle3Config, Eagle3DraftModel)):
        model_type, name = config_class.model_type, model_class.__name__
        if model_type in CONFIG_MAPPING and CONFIG_MAPPING[model_type] is not config_class:
            logger.warning_once(
                f"transformers already knows a model type {model_type!r}; the Auto classes keep loading that one. Use "
                f"{name}.from_pretrained for drafts of this package."
            )
            continue
        AutoConfig.register(model_type, config_class, exist_ok=True)
        AutoModel.register(config_class, model_class, exist_ok=True)
        # Where `pipeline(assistant_model="folder")` looks for the class that a config names.
        if not hasattr(transformers, name):
            setattr(transformers, name, model_class)


def check_call(
    target: PreTrainedModel,
    draft: DSparkDraftModel,
    generation_mode: GenerationMode,
    generation_config: GenerationConfig,
    mode_kwargs: dict[str, Any],
) -> None:
    """Refuse what DSpark does not support, before anything is generated."""
    others = {
        "assistant_early_exit": generation_config.assistant_early_exit,
        "use_mtp": getattr(generation_config, "use_mtp", None),
        "speculation_type": getattr(generation_config, "speculation_type", None),
    }
    for name, value in others.items():
        if value:
            raise ValueError(
                f"A DSpark draft and `{name}` are two ways to draft, got both (`{name}`={value!r}). Unset `{name}`, "
                "or omit `assistant_model`."
            )
    if generation_mode != GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            f"A DSpark draft works with greedy decoding and sampling, got generation mode {generation_mode.value!r} "
            f"(`num_beams`={generation_config.num_beams}). Use `num_beams=1`, or omit `assistant_model`."
        )
    if getattr(generation_config, "assistant_ensemble_weight", None) is not None:
        raise ValueError(
            "`assistant_ensemble_weight` changes the text on purpose, and DSpark is lossless, got "
            f"{generation_config.assistant_ensemble_weight}. Unset it."
        )
    if mode_kwargs.get("assistant_tokenizer") is not None:
        raise ValueError("A DSpark draft shares its target's vocabulary. Do not pass `assistant_tokenizer`.")
    if mode_kwargs.get("synced_gpus"):
        raise NotImplementedError(
            "DSpark does not run under ZeRO-3 or FSDP sharded generation (`synced_gpus=True`). Gather the target, or "
            "split it with `device_map`."
        )
    if generation_config.use_cache is False:
        raise ValueError("DSpark needs a cache, got `use_cache=False`. Leave `use_cache` at its default.")
    unloaded = next((name for name, tensor in draft.named_parameters() if tensor.device.type == "meta"), None)
    if unloaded is not None:
        raise ValueError(
            f"The draft has no weights: {unloaded} is on the meta device. Load it with "
            f"{type(draft).__name__}.from_pretrained."
        )
    resolve = resolve_eagle3 if isinstance(draft, Eagle3DraftModel) else resolve_options
    resolve(draft.config, draft.generation_config, generation_config)
    draft.bind_target(target)  # last, since it may probe the target


def _is_ours(assistant: Any) -> bool:
    return isinstance(assistant, (DSparkDraftModel, Eagle3DraftModel)) and is_enabled()


def _wrap_generate(original: Callable) -> Callable:
    names = list(inspect.signature(original).parameters)
    places = {name: names.index(name) - 1 for name in ("assistant_model", "streamer")}  # `self` is not among `args`

    def generate(self, *args, **kwargs):
        def given(name: str) -> Any:
            return kwargs.get(name, args[places[name]] if places[name] < len(args) else None)

        if not _is_ours(given("assistant_model")):
            return original(self, *args, **kwargs)
        # A refusal, or any other error before the loop has the streamer: its consumer must not wait forever.
        with ended_on_failure(given("streamer")):
            return original(self, *args, **kwargs)

    return generate


def _wrap_validation(original: Callable) -> Callable:
    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        draft = generation_mode_kwargs.get("assistant_model")
        if _is_ours(draft):
            check_call(self, draft, generation_mode, generation_config, generation_mode_kwargs)
            # What is left to check does not concern the assistant, whose vocabulary the original would compare.
            rest = {key: value for key, value in generation_mode_kwargs.items() if key != "assistant_model"}
            plain_mode = GenerationMode.SAMPLE if generation_config.do_sample else GenerationMode.GREEDY_SEARCH
            return original(self, plain_mode, generation_config, rest)
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    return _validate_generation_mode


def _wrap_loop(original: Callable) -> Callable:
    # `functools.wraps` keeps the signature that `generate` inspects.
    def _assisted_decoding(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        if not _is_ours(kwargs.get("assistant_model")):
            return original(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)
        claim(kwargs.get("streamer"))  # the loop ends it now
        for name in ("synced_gpus", "inputs_tensor", "assistant_tokenizer", "tokenizer"):
            kwargs.pop(name, None)  # of use to other assistants only
        return decode(
            self,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            round_times=profile_for,
            **kwargs,
        )

    return _assisted_decoding


def _wrap_generator(original: Callable) -> Callable:
    def _get_candidate_generator(self, *args, **kwargs):
        draft = kwargs.get("assistant_model")
        if not _is_ours(draft):
            return original(self, *args, **kwargs)
        return generator_for(self, draft, kwargs["generation_config"], kwargs.get("logits_processor"))

    return _get_candidate_generator


_WRAPPERS = {
    "generate": _wrap_generate,
    "_validate_generation_mode": _wrap_validation,
    "_assisted_decoding": _wrap_loop,
    "_get_candidate_generator": _wrap_generator,
}
