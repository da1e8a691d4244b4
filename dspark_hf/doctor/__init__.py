# SPDX-License-Identifier: Apache-2.0
"""Checks whether a draft fits its target, is accepted and speeds it up: findings in sentences, with remedies."""

from .diagnosis import Diagnosis, diagnose
from .finding import ADVICE, FAULT, Finding
from .probing import Probe
from .speedup import Gain


__all__ = ["ADVICE", "FAULT", "Diagnosis", "Finding", "Gain", "Probe", "diagnose"]
