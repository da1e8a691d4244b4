# SPDX-License-Identifier: Apache-2.0
"""Runs a few tokens through a target, once, to check that it is what its config and class say.

Legend: n probed tokens, d hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.utils import logging

from .._compat import CACHE_KEY
from .target_structure import backbone_of


logger = logging.get_logger("transformers.dspark_hf.drafts.target_probe")

NUM_TOKENS = 5
# The attribute in which a target stores probe results. The keys name what they depend on.
_FINDINGS = "_dspark_hf_findings"
_Finding = TypeVar("_Finding")
LogitsOf = Callable[[torch.Tensor, tuple[nn.Module, ...]], torch.Tensor]


@dataclass(frozen=True)
class Closeness:
    """Required closeness of two computations of the same logits, relative to their spread over the vocabulary.

    Half precision and quantised layers round by the shape of a pass, which can also change the experts of a token. For
    these most tokens must agree, otherwise all.
    """

    tolerance: float  # largest relative difference
    quantile: float  # share of the tokens that must stay within it

    def accepts(self, logits: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether logits are the expected ones, both `(n, V)`."""
        logits, expected = logits.double().cpu(), expected.double().cpu()
        is_same = (logits == expected) | (logits.isnan() & expected.isnan())
        # Tokens that a target rules out (-inf), or numbers that are broken, must be the same ones.
        is_finite = logits.isfinite() & expected.isfinite()
        logits, expected = logits.where(is_finite, 0.0), expected.where(is_finite, 0.0)
        spread = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
        relative = (logits - expected).norm(dim=-1) / spread
        relative[is_same.all(dim=-1)] = 0.0  # also where all logits are equal
        relative[(~is_finite & ~is_same).any(dim=-1)] = torch.inf
        return bool(relative.quantile(self.quantile, interpolation="higher") <= self.tolerance)


def closeness_for(target: PreTrainedModel) -> Closeness:
    """The closeness that the precision of a target allows."""
    is_exact = target.dtype in (torch.float32, torch.float64) and getattr(target, "hf_quantizer", None) is None
    return Closeness(tolerance=0.01, quantile=1.0) if is_exact else Closeness(tolerance=0.3, quantile=0.5)


def probe_ids(target: PreTrainedModel) -> torch.Tensor:
    """Ordinary tokens, [1, n]: from the middle of the vocabulary, since special tokens are at its ends."""
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    ids = (vocab_size // 2 + 3 * torch.arange(NUM_TOKENS)) % vocab_size
    # On the meta device are weights that hooks fetch; they move inputs as well.
    return ids[None].to(target.device if target.device.type != "meta" else "cpu")


def position_kwargs(model: nn.Module, length: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Positions of a text without padding, for models that take them.

    Without them, models that place images compute positions, and keep them for the rest of a chat.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return {}
    return {"position_ids": torch.arange(length, device=device)[None]}


def can_run(target: PreTrainedModel) -> bool:
    """Whether a target has weights to run, and always gives the same outputs."""
    is_offloaded = getattr(target, "hf_device_map", None) is not None  # hooks bring weights from the meta device
    return not target.training and (is_offloaded or not any(p.device.type == "meta" for p in target.parameters()))


def findings_of(target: PreTrainedModel) -> dict[Hashable, Any]:
    """The cached findings of a target, stored on the target itself."""
    return target.__dict__.setdefault(_FINDINGS, {})


def random_state_kept(*models: PreTrainedModel) -> contextlib.AbstractContextManager[None]:
    """Restore the random state, which a model may use: dropout in training mode, or its own noise."""
    found = {parameter.device for model in models for parameter in model.parameters()}
    devices = sorted(str(device) for device in found if device.type not in ("cpu", "meta"))
    device_type = torch.device(devices[0]).type if devices else "cuda"
    return torch.random.fork_rng(devices, device_type=device_type)


def once(target: PreTrainedModel, key: Hashable, find: Callable[[], _Finding]) -> _Finding:
    """The result of `find()`, cached on the target."""
    findings = findings_of(target)
    if key not in findings:
        with random_state_kept(target):
            findings[key] = find()
    return findings[key]


@dataclass(frozen=True)
class Head:
    """The computation from the last hidden states of a target to its logits."""

    modules: tuple[nn.Module, ...]  # in order, the LM head last; most targets have nothing before it
    factor: float  # on the outputs of the last module, before the soft cap


def probe_head(
    target: PreTrainedModel,
    outputs_of: LogitsOf,  # from hidden states [..., d] through modules to outputs [..., V]
    softcap: float | None,
    expected: float,
) -> Head:
    """Find out how a target computes its logits."""
    by_config = Head((target.get_output_embeddings(),), expected)
    if not can_run(target):
        return by_config
    parts = (id(target.get_input_embeddings()), id(target.get_output_embeddings()))
    key = ("head", *parts, target.dtype, softcap, expected)
    return once(target, key, lambda: _probe_head(target, outputs_of, softcap, by_config))


@torch.no_grad()
def _probe_head(target: PreTrainedModel, outputs_of: LogitsOf, softcap: float | None, by_config: Head) -> Head:
    ids = probe_ids(target)
    try:
        backbone, (_, length) = backbone_of(target), ids.shape
        positions = position_kwargs(target, length, ids.device)
        outputs = target(input_ids=ids, use_cache=True, return_dict=True, **positions)
        positions = position_kwargs(backbone, length, ids.device)
        hidden = backbone(input_ids=ids, use_cache=False, return_dict=True, **positions).last_hidden_state
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        logger.warning_once(
            f"{type(target).__name__} could not be checked, since it does not run over a few tokens of text: {error}"
        )
        return by_config
    check_filled_cache(target, outputs.get(CACHE_KEY))
    _check_widths(target, ids, hidden, outputs.logits)
    closeness, logits = closeness_for(target), outputs.logits[0].float()
    raw = outputs_of(hidden, by_config.modules)[0].float()
    if closeness.accepts(_capped(raw * by_config.factor, softcap), logits):
        return by_config
    modules = _modules_after_backbone(target, ids)
    raw = outputs_of(hidden, modules)[0].float()
    uncapped = logits if softcap is None else torch.atanh((logits / softcap).clamp(-1 + 1e-6, 1 - 1e-6)) * softcap
    measured = float((uncapped * raw).sum() / (raw * raw).sum())
    for factor in (by_config.factor, measured):
        if closeness.accepts(_capped(raw * factor, softcap), logits):
            return Head(modules, factor)
    raise NotImplementedError(
        f"DSpark computes a target's logits from its last hidden states with its own modules, and for "
        f"{type(target).__name__} finds others than the target does: its forward does something of its own there. Use "
        "plain generation for this target."
    )


def _check_widths(target: PreTrainedModel, ids: torch.Tensor, hidden: torch.Tensor, logits: torch.Tensor) -> None:
    """Reject a target whose tensors differ in width from its config: a draft uses the config's widths."""
    config = target.config.get_text_config(decoder=True)
    found = {
        "embeddings": (target.get_input_embeddings()(ids).shape, config.hidden_size),
        "last hidden states": (hidden.shape, config.hidden_size),
        "logits": (logits.shape, config.vocab_size),
    }
    for name, (shape, width) in found.items():
        if tuple(shape) != (*ids.shape, width):
            raise NotImplementedError(
                f"A DSpark draft reads and writes what a target's config describes: the {name} of "
                f"{type(target).__name__} must have shape {(*ids.shape, width)} for {ids.shape[1]} tokens, got "
                f"{tuple(shape)}. Use plain generation for this target."
            )


def _modules_after_backbone(target: PreTrainedModel, ids: torch.Tensor) -> tuple[nn.Module, ...]:
    """The modules that a target calls after its backbone, in order; the last one is or holds the output embedding."""
    embedding, output = target.get_input_embeddings(), target.get_output_embeddings()
    holders = (module for module in target.modules() if output in module.modules())
    head = next(module for module in holders if embedding not in module.modules())  # the outermost one
    owner = next((module for module in target.modules() if head in module.children()), target)
    called: list[nn.Module] = []
    siblings = [module for module in owner.children() if module is not head]
    hooks = [module.register_forward_hook(lambda module, *_: called.append(module)) for module in siblings]
    try:
        target(input_ids=ids, use_cache=False, return_dict=True, **position_kwargs(target, ids.shape[1], ids.device))
    finally:
        for hook in hooks:
            hook.remove()
    backbones = [i for i, module in enumerate(called) if embedding in module.modules()]
    return (*called[max(backbones, default=-1) + 1 :], head)


def _capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def check_filled_cache(target: PreTrainedModel, cache: Any) -> None:
    """Reject a target whose cache does not store tokens one by one."""
    name = type(target).__name__
    if cache is None:
        raise NotImplementedError(
            f"DSpark continues from a cache, and {name} returned none. Use plain generation for this target."
        )
    if getattr(cache, "is_croppable", False):
        return
    layers = getattr(cache, "layers", ())
    reason = f"{type(cache).__name__} of {name} does not allow"
    if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers):
        reason = f"the recurrent state of {name} does not allow"
    raise NotImplementedError(
        f"DSpark needs to take back rejected tokens, which {reason}. Use plain generation for this target."
    )
