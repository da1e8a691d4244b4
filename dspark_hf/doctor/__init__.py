# SPDX-License-Identifier: Apache-2.0
"""Does a draft fit its target, is it accepted, does it pay here: findings in sentences, with remedies."""

from .diagnosis import Diagnosis, diagnose
from .findings import ADVICE, FAULT, Finding
from .gain import Gain
from .probing import Probe


__all__ = ["ADVICE", "FAULT", "Diagnosis", "Finding", "Gain", "Probe", "diagnose"]
