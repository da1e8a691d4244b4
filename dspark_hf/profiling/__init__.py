# SPDX-License-Identifier: Apache-2.0
"""Measures how long rounds take on this machine."""

from .automatic import profile_for
from .profile import RoundTimeProfile, measure_profile, profile_path


__all__ = [
    "RoundTimeProfile",
    "measure_profile",
    "profile_for",
    "profile_path",
]
