# SPDX-License-Identifier: Apache-2.0
"""DSpark speculative decoding for Hugging Face transformers. Importing it lets `generate` accept DSpark drafts."""

from ._version import __version__
from .batch_rows import RowStreamer
from .batching import generate_many
from .candidate_generator import DraftProposal, DSparkCandidateGenerator
from .configuration_dspark import DSparkConfig
from .default_pair import load_default_pair
from .eagle3 import Eagle3Config, Eagle3DraftModel
from .integration import disable, enable, is_enabled, register_auto_classes
from .metrics import AcceptanceStats, RoundRecord, collect_rounds
from .modeling_dspark import DSparkDraftModel, DSparkPreTrainedModel
from .outputs import DSparkGenerateOutput
from .profiling import RoundTimeProfile, measure_profile
from .scheduling import SPSCurve
from .stopping_criteria import AdaptiveConfidenceCriteria


register_auto_classes()
enable()

__all__ = [
    "AcceptanceStats",
    "AdaptiveConfidenceCriteria",
    "DSparkCandidateGenerator",
    "DSparkConfig",
    "DSparkDraftModel",
    "DSparkGenerateOutput",
    "DSparkPreTrainedModel",
    "DraftProposal",
    "Eagle3Config",
    "Eagle3DraftModel",
    "RoundRecord",
    "RoundTimeProfile",
    "RowStreamer",
    "SPSCurve",
    "__version__",
    "collect_rounds",
    "disable",
    "enable",
    "generate_many",
    "is_enabled",
    "load_default_pair",
    "measure_profile",
]
