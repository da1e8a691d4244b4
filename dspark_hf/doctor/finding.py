# SPDX-License-Identifier: Apache-2.0
"""The findings of the doctor."""

from __future__ import annotations

from dataclasses import dataclass


FAULT, ADVICE = "fault", "advice"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a pair, or that could be better.

    Args:
        code (`str`): Name of the finding, for programs.
        severity (`str`): `"fault"`: the pair cannot work as it should; `"advice"`: it works, and this may matter.
        sentence (`str`): What was found, with the values.
        remedy (`str`): What to do about it.
    """

    code: str
    severity: str
    sentence: str
    remedy: str
