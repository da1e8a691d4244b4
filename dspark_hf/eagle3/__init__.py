# SPDX-License-Identifier: Apache-2.0
"""Eagle3 drafts behind the same seam: one draft layer that is run once per draft token, fed with its own output."""

from .candidate_generator import Eagle3CandidateGenerator
from .configuration import Eagle3Config
from .modeling import Eagle3DraftModel


__all__ = ["Eagle3CandidateGenerator", "Eagle3Config", "Eagle3DraftModel"]
