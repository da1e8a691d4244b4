# SPDX-License-Identifier: Apache-2.0
"""DSpark speculative decoding for Hugging Face transformers. Importing it lets `generate` accept DSpark drafts."""

from ._version import __version__
from .common.records import AcceptanceStats, RoundRecord, collect_rounds
from .decoding.criterion import AdaptiveConfidenceCriteria
from .decoding.drafter import DraftProposal
from .decoding.dspark_drafter import DSparkCandidateGenerator
from .decoding.generate_many import generate_many
from .decoding.outputs import DSparkGenerateOutput
from .decoding.streaming import RowStreamer
from .default_pair import load_default_pair
from .drafts.configuration_dspark import DSparkConfig
from .drafts.configuration_eagle3 import Eagle3Config
from .drafts.modeling_dspark import DSparkDraftModel, DSparkPreTrainedModel
from .drafts.modeling_eagle3 import Eagle3DraftModel
from .integration import disable, enable, is_enabled, register_auto_classes
from .profiling.profile import RoundTimeProfile, measure_profile
from .scheduling.curve import SPSCurve


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
