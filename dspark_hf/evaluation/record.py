# SPDX-License-Identifier: Apache-2.0
"""One answer of one drafter, as it is recorded."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from ..common.records import RoundRecord
from .timed import TimedAnswer


@dataclass(frozen=True, kw_only=True)
class Run(TimedAnswer):
    """A timed answer of one drafter to one turn of a question."""

    task: str  # task of the question
    index: int  # its row in the task
    turn: int  # turn of the conversation, from 0
    decoding: str  # name of the `Decoding`
    drafter: str  # name of the drafter
    num_prompt_tokens: int  # tokens of the conversation before the answer

    @classmethod
    def of(
        cls, answer: TimedAnswer, task: str, index: int, turn: int, decoding: str, drafter: str, num_prompt_tokens: int
    ) -> Run:
        """The run that an answer belongs to."""
        return cls(
            **{field.name: getattr(answer, field.name) for field in fields(answer)},
            task=task,
            index=index,
            turn=turn,
            decoding=decoding,
            drafter=drafter,
            num_prompt_tokens=num_prompt_tokens,
        )

    @property
    def question(self) -> str:
        """Key of the question, the unit that is resampled."""
        return f"{self.task}/{self.index}"

    @property
    def key(self) -> str:
        """Names the run within an evaluation."""
        return run_key(self.task, self.index, self.turn, self.decoding, self.drafter)

    def to_row(self) -> dict[str, Any]:
        """A line of the file."""
        return {"key": self.key} | asdict(self)

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Run:
        """Read a line of the file."""
        try:
            values = {entry.name: row[entry.name] for entry in fields(cls)}
            rounds = tuple(_round_of(record) for record in values["rounds"])
            blocks = tuple(tuple(block) for block in values["blocks"])
            return cls(**(values | {"blocks": blocks, "times_s": tuple(values["times_s"]), "rounds": rounds}))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"A recorded run lacks a field, or has one of another kind ({error!r}), got the fields {sorted(row)}. "
                "The file was changed, or written by another version: choose another output."
            ) from error


def run_key(task: str, index: int, turn: int, decoding: str, drafter: str) -> str:
    """The key of a run within an evaluation."""
    return f"{task}/{index}/{turn}/{decoding}/{drafter}"


def _round_of(record: dict[str, Any]) -> RoundRecord:
    """A round from JSON's types."""
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in record.items()}
    return RoundRecord(**values)
