# SPDX-License-Identifier: Apache-2.0
"""Rows that a command skips: logged and counted, with an error if no row remains."""

from __future__ import annotations

from transformers.utils import logging


logger = logging.get_logger("transformers.dspark_hf.training.left_out")

NUM_NAMED = 20  # a file with one fault in every row must not flood the log
NUM_IN_ERROR = 3


class LeftOut:
    """The rows that were left out so far."""

    def __init__(self) -> None:
        self.count = 0
        self.reasons: dict[str, str] = {}  # reason -> the first place that has it

    def add(self, place: str, reason: str) -> None:
        """Leave a row out, and name it in the log."""
        self.count += 1
        self.reasons.setdefault(reason, place)
        if self.count <= NUM_NAMED:
            logger.warning(f"{place}: {reason} The row is left out.")

    def finish(self, num_good: int) -> None:
        """Log how many rows were left out."""
        if not self.count:
            return
        if not num_good:
            first = list(self.reasons.items())[:NUM_IN_ERROR]
            told = "\n".join(f"{place}: {reason}" for reason, place in first)
            raise ValueError(f"None of {self.count} rows can be used. {told}")
        named = f", the first {NUM_NAMED} of which are named above" if self.count > NUM_NAMED else ""
        logger.warning(f"{self.count} of {self.count + num_good} rows were left out{named}.")
