# SPDX-License-Identifier: Apache-2.0
"""Checks the tensors of a draft: never trained, half loaded, broken, or made for another embedding."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch

from .finding import ADVICE, FAULT, Finding
from .pair import Pair


# Distance of two embedding rows over the length of one: rounding, a fine-tuned target, another one.
SAME_ROWS, RELATED_ROWS = 0.03, 0.5
# Share of the fresh standard deviation within which a head counts as never trained.
FRESH_TOLERANCE = 0.01
MAX_VALUES = 2**20  # a sample tells as much as the whole of a large matrix


def check_weights(pair: Pair) -> list[Finding]:
    """Run every check that reads weights."""
    with torch.no_grad():
        return [finding for check in _CHECKS for finding in check(pair)]


def _finite(pair: Pair) -> Iterator[Finding]:
    broken = [name for name, tensor in _tensors(pair) if not torch.isfinite(tensor).all()]
    if broken:
        yield Finding(
            "weights_not_finite",
            FAULT,
            f"The draft holds NaN or infinity in {_shown(broken)}.",
            "The file is damaged, or training broke down. Copy it again, or train again with a lower learning rate.",
        )


def _constant(pair: Pair) -> Iterator[Finding]:
    constant = [
        name
        for name, tensor in _tensors(pair)
        if tensor.ndim == 2 and min(tensor.shape) > 1 and "_head." not in name and tensor.min() == tensor.max()
    ]
    if constant:
        yield Finding(
            "weights_constant",
            FAULT,
            f"All entries are equal in {_shown(constant)}: these tensors were never filled.",
            "Config and weights do not belong together, or the file was written half. Copy the draft again.",
        )


def _norms(pair: Pair) -> Iterator[Finding]:
    fresh: dict[str, bool] = {}
    for name, tensor in _tensors(pair):
        if "norm" in name and tensor.ndim == 1:
            part = _part(name)
            fresh[part] = fresh.get(part, True) and bool((tensor == 1).all())
    untouched = sorted(part for part, is_fresh in fresh.items() if is_fresh)
    if len(untouched) == len(fresh):
        yield Finding(
            "draft_untrained",
            FAULT,
            "Every norm weight of the draft is exactly 1, as in a draft that was never trained.",
            "Load the folder in which training ended, not one made at its start.",
        )
    layers = [part for part in untouched if part.startswith("layers.")]
    if layers and any(part.startswith("layers.") and not is_fresh for part, is_fresh in fresh.items()):
        yield Finding(
            "half_loaded",
            FAULT,
            f"The norm weights of {_shown(layers)} are exactly 1 and those of other layers are not: these layers "
            "were never loaded.",
            "Compare the names of the tensors in the file with those that the config asks for, and load the draft "
            "with DSparkDraftModel.from_pretrained, which refuses missing ones.",
        )


def _sequential_head(pair: Pair) -> Iterator[Finding]:
    head = pair.draft.markov_head
    if head is None:
        return
    first, second = head.markov_w1.weight, head.markov_w2.weight
    if first.device.type == "meta":
        return
    scale = pair.config.initializer_range
    if not first.any() or not second.any():
        state = "all zeros, so it adds nothing to the logits"
    elif looks_fresh(first, scale) and looks_fresh(second, scale):
        state = f"random numbers of standard deviation {scale:g}, as before any training"
    else:
        return
    yield Finding(
        "head_untrained",
        FAULT,
        f"The sequential head of the draft is {state}.",
        "The head is missing from the training or from the file. Train it, or set `markov_rank` to 0 if the draft has "
        "none.",
    )


def _confidence_head(pair: Pair) -> Iterator[Finding]:
    head = pair.draft.confidence_head
    if head is not None and head.proj.weight.device.type != "meta" and not head.proj.weight.any():
        yield Finding(
            "confidence_untrained",
            ADVICE,
            "The confidence head says the same of every slot: its weights are all zeros.",
            "Train it, or set `enable_confidence_head` to false, so that schedules go by acceptance alone.",
        )


def _embedding(pair: Pair) -> Iterator[Finding]:
    weight = getattr(pair.target.get_input_embeddings(), "weight", None)
    sample = pair.draft.embedding_sample
    if weight is None or weight.device.type == "meta" or not weight.is_floating_point():
        return
    ids = [i for i, row in sample.items() if i < weight.shape[0] and row.shape[-1] == weight.shape[-1]]
    if not ids:
        return
    distance = rows_distance(weight[ids], torch.stack([sample[i] for i in ids]))
    if distance > SAME_ROWS:
        is_related = distance < RELATED_ROWS
        yield Finding(
            "embedding_differs",
            ADVICE if is_related else FAULT,
            f"The draft carries a copy of its target's embedding, and rows of it are {distance:.0%} of their length "
            f"away from this target's: {'this one was trained further' if is_related else 'it is another model'}.",
            "Use the target that the draft was made for"
            + (f", {pair.config.target_name_or_path}." if pair.config.target_name_or_path else "."),
        )


def looks_fresh(weight: torch.Tensor, scale: float) -> bool:
    """Whether a matrix still has the distribution it was initialised with: normal, of mean 0."""
    values = weight.flatten()[:: max(1, weight.numel() // MAX_VALUES)].float()
    noise = 1 / (2 * values.numel()) ** 0.5  # relative standard error of a normal sample's deviation
    deviation = values.std().item()
    if scale <= 0 or deviation == 0 or abs(deviation / scale - 1) > max(FRESH_TOLERANCE, 4 * noise):
        return False
    kurtosis = ((values - values.mean()) / deviation).pow(4).mean().item()
    return abs(kurtosis - 3) < max(0.05, 4 * (24 / values.numel()) ** 0.5)


def rows_distance(
    ours: torch.Tensor,  # [n, d]
    theirs: torch.Tensor,  # [n, d]
) -> float:
    """Distance of rows from the expected ones."""
    ours, theirs = ours.float().cpu(), theirs.float().cpu()
    return ((ours - theirs).norm() / theirs.norm().clamp(min=1e-12)).item()


def _tensors(pair: Pair) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in pair.draft.named_parameters():
        if tensor.device.type != "meta" and tensor.is_floating_point():
            yield name, tensor


def _part(name: str) -> str:
    found = re.match(r"layers\.\d+", name)
    return found[0] if found else name


def _shown(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f", ... ({len(names)} in all)" if len(names) > 4 else "")


_CHECKS: tuple[Callable[[Pair], Iterator[Finding]], ...] = (
    _finite,
    _constant,
    _norms,
    _sequential_head,
    _confidence_head,
    _embedding,
)
