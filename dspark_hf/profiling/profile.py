# SPDX-License-Identifier: Apache-2.0
"""Round-time profiles of a target, a draft and the machine they run on: records and files.

A profile says how long drafting and verification passes of 1, 2, ... tokens take (see `measure`). The schedulers
interpret it, and `automatic` finds the one that fits a call.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from huggingface_hub import constants as hub_constants
from transformers import PreTrainedModel

from ..common.files import write_text
from ..common.versions import library_versions
from ..drafts.modeling_dspark import DSparkDraftModel
from ..scheduling.curve import SPSCurve
from .fingerprint import fingerprint
from .measure import MeasuredCurve, measure_curves


FILE_NAME = "round_times.json"  # beside a draft's weights
FORMAT = 2  # 1 had times of fewer tokens, and no falls


@dataclasses.dataclass(frozen=True)
class RoundTimeProfile:
    """Round times of one target and draft on one machine, at one or more context lengths.

    Args:
        measured (`tuple[MeasuredCurve, ...]`): By ascending context length, all over the same B.
        fingerprint (`dict[str, Any]`): What must be the same for the times to hold; see [`fingerprint`].
        versions (`dict[str, str]`): Of torch, transformers and dspark_hf; to look up only.
        date (`str`): When it was measured, ISO 8601.

    Raises:
        ValueError: If the curves do not go together.
    """

    measured: tuple[MeasuredCurve, ...]
    fingerprint: dict[str, Any]
    versions: dict[str, str]
    date: str

    def __post_init__(self) -> None:
        lengths = [curve.context_length for curve in self.measured]
        if not lengths or lengths != sorted(set(lengths)):
            raise ValueError(f"The context lengths of a profile must be ascending, got {lengths}.")
        points = {measured.curve.batch_tokens for measured in self.measured}
        if len(points) > 1:
            raise ValueError(f"The curves of a profile must have the same `batch_tokens`, got {sorted(points)}.")

    @property
    def curves(self) -> tuple[tuple[int, SPSCurve], ...]:
        """`tuple[tuple[int, SPSCurve], ...]`: Context lengths and their curves."""
        return tuple((measured.context_length, measured.curve) for measured in self.measured)

    def curve(self, context_length: int) -> SPSCurve:
        """Round times at a context length: linear between measured ones, the nearest outside of them.

        Args:
            context_length (`int`): Tokens in the target's cache.

        Returns:
            [`SPSCurve`]
        """
        shorter = [item for item in self.curves if item[0] <= context_length]
        longer = [item for item in self.curves if item[0] > context_length]
        if not shorter or not longer:
            return (shorter[-1] if shorter else longer[0])[1]
        (first, before), (last, after) = shorter[-1], longer[0]
        weight = (context_length - first) / (last - first)

        def between(a: float, b: float) -> float:
            return a + weight * (b - a)

        verify_s = tuple(between(a, b) for a, b in zip(before.verify_s, after.verify_s, strict=True))
        request_s = between(before.draft_request_s, after.draft_request_s)
        return SPSCurve(before.batch_tokens, verify_s, between(before.draft_s, after.draft_s), request_s)

    def mismatch(self, target: PreTrainedModel, draft: DSparkDraftModel, num_requests: int = 1) -> str | None:
        """The reason why the profile does not apply to a pair on this machine in its current set-up.

        Args:
            target (`PreTrainedModel`): The model that generates.
            draft (`DSparkDraftModel`): Its draft.
            num_requests (`int`, *optional*, defaults to 1): Most texts of a batch, see [`profile_for`].

        Returns:
            `str`: the first field that differs, with both values; `None` where all are the same.
        """
        theirs, ours = _flat(self.fingerprint), _flat(fingerprint(target, draft, num_requests))
        for name in [*ours, *(name for name in theirs if name not in ours)]:
            if theirs.get(name) != ours.get(name):
                return f"`{name}` is {theirs.get(name)!r} in the profile and {ours.get(name)!r} here"
        return None

    def to_dict(self) -> dict[str, Any]:
        """The profile as JSON has it; docs/profiling.md names the fields.

        Returns:
            `dict[str, Any]`
        """
        curves = [
            {
                "context_length": measured.context_length,
                "num_repeats": measured.num_repeats,
                "batch_tokens": list(measured.curve.batch_tokens),
                "verify_s": list(measured.curve.verify_s),
                "verify_spread_s": [list(spread) for spread in measured.verify_spread_s],
                "draft_s": measured.curve.draft_s,
                "draft_request_s": measured.curve.draft_request_s,
                "draft_spread_s": list(measured.draft_spread_s),
            }
            for measured in self.measured
        ]
        head = {"format": FORMAT, "date": self.date, "versions": self.versions, "fingerprint": self.fingerprint}
        return head | {"curves": curves}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RoundTimeProfile:
        """The reverse of [`to_dict`].

        Args:
            values (`dict[str, Any]`): The profile as JSON has it.

        Returns:
            [`RoundTimeProfile`]

        Raises:
            ValueError: If it is no profile, or one of another format.
        """
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            found = values.get("format") if isinstance(values, dict) else type(values).__name__
            raise ValueError(f"A profile must have `format` {FORMAT}, got {found!r}. Re-run `dspark-hf profile`.")
        try:
            measured = tuple(
                MeasuredCurve(
                    context_length=int(item["context_length"]),
                    curve=SPSCurve(
                        tuple(int(tokens) for tokens in item["batch_tokens"]),
                        tuple(float(seconds) for seconds in item["verify_s"]),
                        float(item["draft_s"]),
                        float(item.get("draft_request_s", 0.0)),
                    ),
                    verify_spread_s=tuple(_pair(spread) for spread in item["verify_spread_s"]),
                    draft_spread_s=_pair(item["draft_spread_s"]),
                    num_repeats=int(item["num_repeats"]),
                )
                for item in values["curves"]
            )
            return cls(measured, dict(values["fingerprint"]), dict(values["versions"]), str(values["date"]))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(
                f"A profile is damaged ({type(error).__name__}: {error}). Re-run `dspark-hf profile`."
            ) from error

    def save(self, path: str | os.PathLike) -> None:
        """Write the profile as JSON, whole or not at all; missing folders are made.

        Args:
            path (`str` or `os.PathLike`): File.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike) -> RoundTimeProfile:
        """Read a profile.

        Args:
            path (`str` or `os.PathLike`): File.

        Returns:
            [`RoundTimeProfile`]

        Raises:
            OSError: If the file cannot be read.
            ValueError: If it holds no profile.
        """
        text = Path(path).read_bytes()
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"A profile must be JSON, got {error}. Re-run `dspark-hf profile`.") from error
        return cls.from_dict(values)


def measure_profile(
    target: PreTrainedModel,
    draft: DSparkDraftModel,
    context_lengths: Sequence[int] = (256,),
    num_repeats: int = 7,
    budget_s: float | None = None,
    on_progress: Callable[[], None] | None = None,
    num_requests: int = 1,
) -> RoundTimeProfile:
    """Measure the round times of a pair on this machine.

    Args:
        target (`PreTrainedModel`): The model that generates.
        draft (`DSparkDraftModel`): Its draft.
        context_lengths (`Sequence[int]`, *optional*, defaults to `(256,)`):
            Tokens in the cache, one curve for each; cut to what the target's positions allow.
        num_repeats (`int`, *optional*, defaults to 7): Measurements behind each median.
        budget_s (`float`, *optional*): Seconds after which no further repeat is begun, once there are two.
        on_progress (`Callable`, *optional*): Called after each pass over the token counts, the warm-up included.
        num_requests (`int`, *optional*, defaults to 1): Most texts of a batch.

    Returns:
        [`RoundTimeProfile`]

    Raises:
        ValueError: If a length or a number is too small, target and draft do not fit, or the target's cache cannot
            take tokens back.
        NotImplementedError: If the target cannot have a DSpark draft, or cannot run a batch.
        MemoryError: If the batch does not fit into memory.
        RuntimeError: If the warm-up takes far more than the budget.
    """
    measured = measure_curves(target, draft, context_lengths, num_repeats, budget_s, on_progress, num_requests)
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return RoundTimeProfile(measured, fingerprint(target, draft, num_requests), library_versions(), date)


def profile_folder() -> Path:
    """The folder of profiles in the user's cache."""
    return Path(hub_constants.HF_HOME) / "dspark_hf" / "profiles"


def profile_path(target: PreTrainedModel, draft: DSparkDraftModel, num_requests: int = 1) -> Path:
    """The file of a pair in the user's cache folder, one for each fingerprint.

    Args:
        target (`PreTrainedModel`): The model that generates.
        draft (`DSparkDraftModel`): Its draft.
        num_requests (`int`, *optional*, defaults to 1): Most texts of a batch.

    Returns:
        `pathlib.Path`: it need not exist.
    """
    text = json.dumps({"format": FORMAT} | fingerprint(target, draft, num_requests), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return profile_folder() / f"{digest}.json"


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested names joined by dots."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _pair(values: Sequence[float]) -> tuple[float, float]:
    low, high = values
    return float(low), float(high)
