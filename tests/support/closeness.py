# SPDX-License-Identifier: Apache-2.0
"""What it means in the tests that two computations give the same numbers, and that a greedy choice is no coin toss.

Another CPU, another number of threads or another shape adds up the same terms in another order. That moves a result by
some units of `eps * scale`: the precision of its dtype times the largest absolute value of the tensor. A small entry
is moved as far as a large one, for it was computed from terms as large. So the tolerance of a tensor is
`factor * eps * scale`. Exact equality is for copies, for one computation done twice, and for greedy tokens that lead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import LogitsProcessor


# Seen between instruction sets: 49 units. Allowed: 3e-5 of the scale in fp32. A random change of 1e-3 in any one
# tensor of a golden draft moves the result by more.
ROUNDING = 256.0
# For gradients, where terms of either sign nearly cancel, and for weights after a few steps of an optimizer that
# divides by the size of the gradients.
TRAINED = 1024.0
# Two logits that both move by 49 units change places only if one leads by less than 98.
SAFE_LEAD = 200.0


def assert_close(actual: Any, expected: Any, factor: float = ROUNDING, scale: float | None = None) -> None:
    """Equal up to rounding: tensors, numbers read from fp32 tensors, or containers of either.

    A list of numbers is one tensor. Other containers are compared entry by entry, each with its own scale.
    """
    for path, ours, theirs in _pairs(actual, expected, ""):
        problem = _difference(ours, theirs, factor, scale)
        assert problem is None, f"{path} {problem}".strip()


def is_close(actual: Any, expected: Any, factor: float = ROUNDING, scale: float | None = None) -> bool:
    """`assert_close` as a question."""
    return all(_difference(ours, theirs, factor, scale) is None for _, ours, theirs in _pairs(actual, expected, ""))


def assert_differs(actual: Any, expected: Any, factor: float = 16 * ROUNDING) -> None:
    """So different that rounding is no explanation."""
    for path, ours, theirs in _pairs(actual, expected, ""):
        assert ours.shape == theirs.shape, f"{path} has the shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}"
        assert not is_close(ours, theirs, factor), f"{path} differs by less than {tolerance_of(theirs, factor):.2e}"


def tolerance_of(expected: torch.Tensor, factor: float = ROUNDING, scale: float | None = None) -> float:
    """The largest difference that rounding explains; `scale` replaces the largest absolute value of `expected`."""
    return factor * eps_of(expected) * (scale_of(expected) if scale is None else scale)


def eps_of(tensor: torch.Tensor) -> float:
    """Precision of what the tensor was computed from: models run in fp32 at best."""
    eps = torch.finfo(torch.float32).eps
    return max(eps, torch.finfo(tensor.dtype).eps) if tensor.dtype.is_floating_point else eps


def scale_of(tensor: torch.Tensor) -> float:
    """The largest absolute value that is a value."""
    values = tensor[~_masked(tensor)]
    return float(values.abs().max()) if values.numel() else 0.0


def smallest_lead(scores: torch.Tensor) -> float:
    """By how much the first choice leads the second, in units of `eps * scale`: the smallest of all rows."""
    best = scores.topk(2, dim=-1).values.double()
    largest = torch.where(_masked(scores), 0, scores).abs().amax(dim=-1).double()
    leads = (best[..., 0] - best[..., 1]) / (largest * eps_of(scores))
    return float(leads.masked_fill(_masked(best).any(dim=-1) | (largest == 0), math.inf).min())


class LeadRecorder(LogitsProcessor):
    """Changes nothing; remembers the smallest lead of a greedy text."""

    def __init__(self):
        self.smallest = math.inf

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.smallest = min(self.smallest, smallest_lead(scores))
        return scores


def _pairs(actual: Any, expected: Any, path: str) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """The tensors of two containers side by side, and where they are."""
    if isinstance(expected, Mapping):
        assert set(actual) == set(expected), f"{path} has the keys {sorted(actual)} instead of {sorted(expected)}"
        entries = [(f"{path}[{key!r}]", actual[key], expected[key]) for key in expected]
    elif isinstance(expected, (list, tuple)) and any(isinstance(entry, (torch.Tensor, tuple)) for entry in expected):
        assert len(actual) == len(expected), f"{path} has {len(actual)} entries instead of {len(expected)}"
        entries = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(actual, expected, strict=True))]
    else:
        yield path, *_tensors(actual, expected)
        return
    for place, ours, theirs in entries:
        yield from _pairs(ours, theirs, place)


def _tensors(actual: Any, expected: Any) -> list[torch.Tensor]:
    """Numbers take the dtype of the tensor that they are compared with."""
    dtype = next((value.dtype for value in (actual, expected) if isinstance(value, torch.Tensor)), torch.float32)
    return [
        value.detach().cpu() if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=dtype)
        for value in (actual, expected)
    ]


def _masked(tensor: torch.Tensor) -> torch.Tensor:
    """Infinite, or what processors put in its place."""
    limit = torch.finfo(tensor.dtype).max / 2 if tensor.dtype.is_floating_point else math.inf
    return tensor.abs() >= min(limit, torch.finfo(torch.float32).max / 2)


def _difference(actual: torch.Tensor, expected: torch.Tensor, factor: float, scale: float | None) -> str | None:
    """What is wrong with `actual`; `None` if nothing."""
    if actual.shape != expected.shape:
        return f"has the shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    if actual.dtype != expected.dtype:
        return f"is {actual.dtype} instead of {expected.dtype}"
    if actual.isnan().any() or expected.isnan().any():
        return "holds NaN"
    masked = _masked(expected)
    if not torch.equal(_masked(actual), masked) or not torch.equal(actual[masked].sign(), expected[masked].sign()):
        return "is infinite elsewhere"
    difference = (actual[~masked].double() - expected[~masked].double()).abs()
    largest, allowed = float(difference.max()) if difference.numel() else 0.0, tolerance_of(expected, factor, scale)
    if largest <= allowed:
        return None
    unit = tolerance_of(expected, 1.0, scale)
    return (
        f"differs by {largest:.2e}: {largest / unit if unit else math.inf:.0f} units, of which {factor:g} are allowed"
    )
