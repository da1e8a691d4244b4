# SPDX-License-Identifier: Apache-2.0
"""The pair that the doctor looks at."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..common.thinking import with_thinking
from ..drafts.configuration_dspark import DSparkConfig
from ..drafts.modeling_dspark import DSparkDraftModel


@dataclass(frozen=True)
class Pair:
    """A target, its draft, and how the target is prompted."""

    target: PreTrainedModel
    draft: DSparkDraftModel
    tokenizer: PreTrainedTokenizerBase
    enable_thinking: bool | None = None  # the chat template's thinking switch; None leaves it to the template
    raw: bool = False  # prompt without the chat template

    @property
    def config(self) -> DSparkConfig:
        """The draft's."""
        return self.draft.config

    @property
    def text_config(self) -> PreTrainedConfig:
        """The target's, of its language part."""
        return self.target.config.get_text_config(decoder=True)

    @property
    def training_info(self) -> dict:
        """The training record in the draft's config; empty if there is none."""
        return self.config.training_info or {}

    @property
    def prompting_tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's, with the thinking switch set as the pair is prompted."""
        return with_thinking(self.tokenizer, self.enable_thinking)
