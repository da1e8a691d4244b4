# SPDX-License-Identifier: Apache-2.0
"""Decoding options: greedy, or sampling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Decoding:
    """Decoding options of a call."""

    temperature: float  # 0 decodes greedily
    top_p: float = 1.0  # nucleus, when sampling

    @property
    def name(self) -> str:
        """The name in the report."""
        if self.is_greedy:
            return "greedy"
        nucleus = f", top-p {self.top_p:g}" if self.top_p < 1 else ""
        return f"temperature {self.temperature:g}{nucleus}"

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `generate`."""
        return sampling_arguments(self.temperature, self.top_p)


def sampling_arguments(temperature: float, top_p: float = 1.0) -> dict[str, Any]:
    """Arguments of `generate`; temperature 0 is greedy."""
    if not math.isfinite(temperature) or temperature < 0:
        raise ValueError(f"A temperature must be a finite number >= 0, got {temperature}.")
    if not 0 < top_p <= 1:
        raise ValueError(f"`--top-p` must lie in (0, 1], got {top_p}. 1 keeps every token.")
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
