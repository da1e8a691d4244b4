# SPDX-License-Identifier: Apache-2.0
"""From prompts to a trained draft: answers, features, objective, trainer."""

from .arguments import DSparkTrainingArguments
from .trainer import DSparkTrainer


__all__ = [
    "DSparkTrainer",
    "DSparkTrainingArguments",
]
