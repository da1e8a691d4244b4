# SPDX-License-Identifier: Apache-2.0
"""Does a draft fit its target, is it accepted, does it pay here: findings in sentences, with remedies."""

from .diagnosis import Diagnosis, diagnose
from .finding import ADVICE, FAULT, Finding
from .probing import Probe
from .speedup import Gain


__all__ = ["ADVICE", "FAULT", "Diagnosis", "Finding", "Gain", "Probe", "diagnose"]
