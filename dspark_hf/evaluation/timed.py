# SPDX-License-Identifier: Apache-2.0
"""One timed answer: tokens, when they came, and the rounds that they came from; and the sums of many."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..common.records import AcceptanceStats, RoundRecord, collect_rounds


@dataclass(frozen=True)
class TimedAnswer:
    """One timed `generate` call."""

    seconds: float  # the whole call, prefill included
    blocks: tuple[tuple[int, ...], ...]  # token ids as they came, the first block from the pass over the prompt
    times_s: tuple[float, ...]  # when each block came, in seconds from the start of the call
    rounds: tuple[RoundRecord, ...] = ()  # the rounds, one for each block but the first

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The answer."""
        return tuple(token for block in self.blocks for token in block)

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second of the whole call."""
        return len(self.token_ids) / self.seconds

    @property
    def stats(self) -> AcceptanceStats:
        """Figures of the rounds."""
        return AcceptanceStats(list(self.rounds))

    @property
    def first_token_s(self) -> float:
        """Seconds to the first token."""
        return self.times_s[0]

    @property
    def token_latency_s(self) -> float | None:
        """Seconds per token after the first arrival; `None` where nothing came after it."""
        num_later = len(self.token_ids) - len(self.blocks[0])
        return (self.times_s[-1] - self.times_s[0]) / num_later if num_later else None

    def seconds_to(self, num_tokens: int) -> float | None:  # None where the answer is shorter
        """Seconds until the answer had a number of tokens."""
        so_far = 0
        for block, seconds in zip(self.blocks, self.times_s, strict=True):
            so_far += len(block)
            if so_far >= num_tokens:
                return seconds
        return None


@dataclass(frozen=True)
class Totals:
    """Sums over answers; every mean pools over tokens or rounds, never over answers."""

    num_tokens: int
    seconds: float
    stats: AcceptanceStats

    @property
    def tokens_per_s(self) -> float:
        """All tokens over all seconds."""
        return self.num_tokens / self.seconds


def totals(answers: Iterable[TimedAnswer]) -> Totals:
    """Sum up answers."""
    answers = list(answers)
    rounds = [record for answer in answers for record in answer.rounds]
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    return Totals(num_tokens, sum(answer.seconds for answer in answers), AcceptanceStats(rounds))


def tokens_by_source(stats: AcceptanceStats) -> dict[str, tuple[int, float]]:
    """Source of drafts -> its rounds, and the tokens per round, bonus token included."""
    return {source: (own.num_rounds, own.accepted_length) for source, own in sorted(stats.by_source().items())}


def sources_text(by_source: dict[str, tuple[int, float]]) -> str:  # such as `"block 1.9 (20), copy 4.2 (12)"`
    """Tokens per round by source, with the rounds of each, for people."""
    return ", ".join(f"{source} {length:.1f} ({count})" for source, (count, length) in by_source.items())


def timed_generate(target: PreTrainedModel, inputs: dict[str, torch.Tensor], arguments: dict[str, Any]) -> TimedAnswer:
    """Generate and time one answer, by whatever drafter the arguments name."""
    inputs = {name: value.to(target.device) for name, value in inputs.items()}
    is_copied = bool(arguments.get("prompt_lookup_num_tokens")) and arguments.get("assistant_model") is None
    with collect_rounds() as stats, Observer(target, is_copied) as seen:
        target.generate(**inputs, **arguments, streamer=seen)
    return TimedAnswer(seen.seconds, tuple(seen.blocks), tuple(seen.times_s), tuple(stats.rounds or seen.rounds))


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:  # None where the two are equal
    """Index of the first token that differs."""
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


class Observer(BaseStreamer):
    """Watches one `generate` call from outside: what the target is given, which tokens come, and when.

    It works alike for every drafter, those of transformers included. Use it as a context manager around the call, and
    as the call's `streamer`.
    """

    def __init__(self, target: PreTrainedModel, is_copied: bool = False):  # whether drafts are copied from the text
        self._target, self._is_copied = target, is_copied
        self._inputs: list[torch.Tensor] = []
        self._has_prompt = False
        self._start = 0.0
        self.blocks: list[tuple[int, ...]] = []
        self.times_s: list[float] = []
        self.seconds = 0.0

    def __enter__(self) -> Observer:
        self._handle = self._target.register_forward_pre_hook(self._see_input, with_kwargs=True)
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self._start
        self._handle.remove()

    def put(self, value: torch.Tensor) -> None:
        """Take the tokens of a round; the prompt comes first and is none."""
        now = time.perf_counter() - self._start
        if self._has_prompt:
            self.blocks.append(tuple(value.flatten().tolist()))
            self.times_s.append(now)
        self._has_prompt = True

    def end(self) -> None:
        """No-op."""

    @property
    def rounds(self) -> list[RoundRecord]:
        """The rounds, see [`observed_rounds`]."""
        return observed_rounds([ids[0].tolist() for ids in self._inputs], self.blocks, self.times_s, self._is_copied)

    def _see_input(self, _module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inputs.append(kwargs["input_ids"] if "input_ids" in kwargs else args[0])


def observed_rounds(
    inputs: Sequence[Sequence[int]],
    blocks: Sequence[Sequence[int]],
    times_s: Sequence[float],
    is_copied: bool = False,  # whether drafts are copied from the text
) -> list[RoundRecord]:
    """Put rounds together from what the target was given and what came out.

    A pass is given the last token and the drafts. The drafts that were accepted are those that came out: a token that
    is drawn in the place of a rejected draft never equals it. Passes over the prompt are no rounds.
    """
    if len(inputs) < len(blocks):
        raise RuntimeError(
            f"Each block of tokens must come from one pass of the target, got {len(blocks)} blocks from {len(inputs)} "
            "passes. This way of decoding cannot be evaluated."
        )
    records = []
    later = list(inputs)[len(inputs) - len(blocks) + 1 :]
    for number, ((anchor, *drafts), block) in enumerate(zip(later, blocks[1:], strict=True), start=1):
        pairs = zip(drafts, block, strict=False)
        accepted = next((slot for slot, (draft, token) in enumerate(pairs) if draft != token), None)
        accepted = min(len(drafts), len(block)) if accepted is None else accepted
        records.append(
            RoundRecord(
                anchor_id=anchor,
                token_ids=tuple(drafts),
                confidence=(),
                num_accepted=accepted,
                bonus_token=block[accepted] if accepted < len(block) else None,
                num_committed=len(block),
                round_s=times_s[number] - times_s[number - 1],
                drafted=bool(drafts) and not is_copied,
                num_copied=len(drafts) if is_copied else 0,
            )
        )
    return records
