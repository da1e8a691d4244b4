# SPDX-License-Identifier: Apache-2.0
"""What the doctor says, and the pair that it looks at."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..configuration_dspark import DSparkConfig
from ..modeling_dspark import DSparkDraftModel
from ..thinking import with_thinking


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


@dataclass(frozen=True)
class Pair:
    """A target, its draft, and how the target is prompted.

    Args:
        target (`PreTrainedModel`): The model that generates.
        draft (`DSparkDraftModel`): Its draft.
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        enable_thinking (`bool`, *optional*): The chat template's thinking switch; `None` leaves it to the template.
        raw (`bool`, *optional*, defaults to `False`): Prompt without the chat template.
    """

    target: PreTrainedModel
    draft: DSparkDraftModel
    tokenizer: PreTrainedTokenizerBase
    enable_thinking: bool | None = None
    raw: bool = False

    @property
    def config(self) -> DSparkConfig:
        """`DSparkConfig`: The draft's."""
        return self.draft.config

    @property
    def text_config(self) -> PreTrainedConfig:
        """`PreTrainedConfig`: The target's, of its language part."""
        return self.target.config.get_text_config(decoder=True)

    @property
    def training_info(self) -> dict:
        """`dict`: What the draft's config says about its training; empty where it says nothing."""
        return self.config.training_info or {}

    @property
    def prompting_tokenizer(self) -> PreTrainedTokenizerBase:
        """`PreTrainedTokenizerBase`: The target's, with the thinking switch set as the pair is prompted."""
        return with_thinking(self.tokenizer, self.enable_thinking)
