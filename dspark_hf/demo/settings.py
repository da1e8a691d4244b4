# SPDX-License-Identifier: Apache-2.0
"""Settings of a visitor and their bounds. Every refusal is a sentence for the page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..common.decoding_options import sampling_arguments
from ..decoding.criterion import SCHEDULES


@dataclass(frozen=True)
class Limits:
    """Bounds of the demo."""

    max_prompt_chars: int = 4000  # longest prompt, in characters
    max_prompt_tokens: int = 1024  # longest prompt, in tokens, chat template included
    max_new_tokens: int = 256  # longest answer, in tokens
    max_queue: int = 64  # requests that may wait for their turn

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"`{name}` must be >= 1, got {value}.")


@dataclass(frozen=True)
class RunSettings:
    """One comparison, as asked for."""

    prompt: str  # the user's turn, or the text to continue
    raw: bool = False  # continue the text itself, without the chat template
    temperature: float = 0.0  # 0 decodes greedily
    top_p: float = 1.0  # nucleus, when sampling
    max_new_tokens: int = 96  # longest answer, in tokens
    num_assistant_tokens: int | None = None  # most drafts per round; the whole block where not given
    schedule: str | None = None  # which of them are sent; the draft's own setting where not given
    seed: int = 0  # random seed of both sides
    enable_thinking: bool | None = None  # the chat template's thinking switch; the demo's own setting without it

    @property
    def is_greedy(self) -> bool:
        """Whether the two texts should be the same."""
        return self.temperature == 0

    @property
    def generate_arguments(self) -> dict[str, Any]:
        """The arguments of both `generate` calls, apart from the prompt."""
        return {**sampling_arguments(self.temperature, self.top_p), "max_new_tokens": self.max_new_tokens}

    def check(self, limits: Limits, num_slots: int) -> None:
        """Refuse what is out of bounds; the length in tokens is checked where the prompt is tokenised."""
        self._check_prompt(limits)
        _check_number("Temperature", self.temperature, 0, 2)
        _check_number("Top-p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise ValueError("Top-p must be above 0: with 0 there is no token left to draw.")
        _check_whole("The longest answer", self.max_new_tokens, 1, limits.max_new_tokens, " tokens")
        if self.num_assistant_tokens is not None:
            _check_whole("Drafts per round", self.num_assistant_tokens, 1, num_slots)
        if self.schedule is not None and self.schedule not in SCHEDULES:
            raise ValueError(f"The schedule must be one of {', '.join(SCHEDULES)}, got {self.schedule!r}.")
        _check_whole("The seed", self.seed, 0, 2**31 - 1)
        if self.enable_thinking not in (None, True, False):
            raise ValueError(f"Thinking must be true or false, got {self.enable_thinking!r}.")

    def _check_prompt(self, limits: Limits) -> None:
        if not isinstance(self.prompt, str) or not self.prompt.strip():
            raise ValueError("Write a prompt first, or choose one of the examples.")
        if len(self.prompt) > limits.max_prompt_chars:
            raise ValueError(
                f"This prompt is too long for the demo: {len(self.prompt):,} characters, and at most "
                f"{limits.max_prompt_chars:,} are taken. Please shorten it."
            )


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not low <= value <= high:
        raise ValueError(f"{name} must be a number from {low} to {high}, got {value!r}.")


def _check_whole(name: str, value: Any, low: int, high: int, unit: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} must be a whole number from {low} to {high}{unit}, got {value!r}.")
