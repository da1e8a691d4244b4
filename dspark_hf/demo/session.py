# SPDX-License-Identifier: Apache-2.0
"""Runs comparisons: plain generation first, then DSpark, never two at a time, watched while they run."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from ..common.chat_tokens import encode_prompt
from ..common.records import AcceptanceStats, RoundRecord, collect_rounds
from ..common.thinking import has_thinking_switch, thinks_by_default, with_thinking
from ..drafts.modeling_dspark import DSparkDraftModel
from .records import Progress, Side, Token, tokens_of_round
from .settings import Limits, RunSettings


# Seconds between two snapshots: often enough to look alive, seldom enough to leave the processor to the models.
UPDATE_S = 0.15
# A round-time profile is made for texts of this length or longer, and should be made before the first visitor comes.
WARM_UP_LENGTH, WARM_UP_TOKENS = 48, 8
WARM_UP_PROMPT = "Count from one to ten."


@dataclass(frozen=True)
class Pair:
    """A target, its draft and their tokenizer.

    `enable_thinking`: the chat template's thinking switch where a visitor does not set it; None leaves it to the
    template.
    """

    target: PreTrainedModel
    draft: DSparkDraftModel
    tokenizer: PreTrainedTokenizerBase
    enable_thinking: bool | None = None

    @property
    def num_slots(self) -> int:
        """Drafts in a block."""
        return self.draft.config.num_draft_slots

    @property
    def dtype_name(self) -> str:
        """`"bfloat16"` and the like."""
        return str(self.target.dtype).removeprefix("torch.")

    @property
    def thinks(self) -> bool | None:
        """Whether visitors who set nothing get thinking; `None` without a switch in the template."""
        if not has_thinking_switch(self.tokenizer):
            return None
        return thinks_by_default(self.tokenizer) if self.enable_thinking is None else self.enable_thinking


class Session:
    """All comparisons of one pair. Every visitor shares it; one `generate` call runs at a time."""

    def __init__(self, pair: Pair, limits: Limits | None = None, update_s: float = UPDATE_S):
        self.pair = pair
        self.limits = limits if limits is not None else Limits()
        self.update_s = update_s
        self._lock = threading.Lock()

    def check(self, settings: RunSettings) -> dict[str, torch.Tensor]:
        """Refuse what is out of bounds."""
        settings.check(self.limits, self.pair.num_slots)
        inputs = encode_prompt(self._tokenizer(settings), settings.prompt, settings.raw)
        positions = getattr(self.pair.target.config.get_text_config(), "max_position_embeddings", None)
        most = self.limits.max_prompt_tokens
        if positions is not None:
            most = min(most, positions - settings.max_new_tokens)
        length = inputs["input_ids"].shape[1]
        if length > most:
            raise ValueError(
                f"This prompt is too long for the demo: {length:,} tokens, and at most {most:,} are taken. Please "
                "shorten it."
            )
        return {name: value.to(self.pair.target.device) for name, value in inputs.items()}

    def _tokenizer(self, settings: RunSettings) -> PreTrainedTokenizerBase:
        """With the thinking switch as the visitor sets it, else as the demo was started."""
        asked = settings.enable_thinking
        if asked is None:
            return with_thinking(self.pair.tokenizer, self.pair.enable_thinking)
        if settings.raw:
            raise ValueError("Raw text goes without the chat template, so thinking cannot be switched. Do not set it.")
        if self.pair.thinks is None:
            raise ValueError("The chat template of this target has no thinking switch. Do not set it.")
        return with_thinking(self.pair.tokenizer, asked)

    def compare(self, settings: RunSettings, stop: threading.Event | None = None) -> Generator[Progress, None, None]:
        """Generate without and then with the draft."""
        inputs = self.check(settings)
        stop = stop if stop is not None else threading.Event()
        progress = Progress(settings)
        for name in ("plain", "dspark"):
            if stop.is_set():
                break
            with contextlib.closing(self._side(inputs, settings, name == "dspark", stop)) as snapshots:
                for side in snapshots:
                    progress = replace(progress, plain=side) if name == "plain" else replace(progress, dspark=side)
                    if not side.finished:
                        yield progress
        yield replace(progress, stopped=stop.is_set())

    def warm_up(self) -> None:
        """Run both ways for a few tokens, so that the first visitor's figures are like everybody's."""
        settings = RunSettings(WARM_UP_PROMPT, max_new_tokens=min(WARM_UP_LENGTH, self.limits.max_new_tokens))
        inputs = self.check(settings)
        for with_draft in (False, True):
            with contextlib.closing(self._side(inputs, settings, with_draft, threading.Event())) as snapshots:
                for side in snapshots:
                    if len(side.tokens) >= WARM_UP_TOKENS:
                        break

    def _side(
        self, inputs: dict[str, torch.Tensor], settings: RunSettings, with_draft: bool, stop: threading.Event
    ) -> Generator[Side, None, None]:
        """Snapshots of one `generate` call in a thread; the last one is finished."""
        steps: queue.SimpleQueue[_Step | BaseException] = queue.SimpleQueue()
        arguments = (inputs, settings, with_draft, stop, steps)
        threading.Thread(target=self._generate, args=arguments, daemon=True, name="dspark-demo").start()
        decoder = _PieceDecoder(self.pair.tokenizer)
        side = Side()
        try:
            yield side
            while not side.finished:
                side = _after(side, _gather(steps, self.update_s), decoder)
                yield side
        finally:
            if not side.finished:  # the consumer has gone
                stop.set()

    def _generate(self, inputs, settings, with_draft, stop, steps) -> None:
        """The thread: one call, alone with the models."""
        try:
            with self._lock, _knobs(self.pair.draft, settings), collect_rounds() as stats:
                torch.manual_seed(settings.seed)
                streamer = _StepStreamer(stats, steps)
                self.pair.target.generate(
                    **inputs,
                    **settings.generate_arguments,
                    **({"assistant_model": self.pair.draft} if with_draft else {}),
                    stopping_criteria=[_StopRequested(stop)],
                    streamer=streamer,
                )
            steps.put(_Step(time.perf_counter() - streamer.start, finished=True))
        except BaseException as error:  # handed to whoever listens
            steps.put(error)


@dataclass(frozen=True)
class _Step:
    """The tokens that one pass of the target committed; `seconds` since the call began."""

    seconds: float
    token_ids: tuple[int, ...] = ()
    record: RoundRecord | None = None
    finished: bool = False


class _StepStreamer(BaseStreamer):
    """Puts each block of tokens together with the round that it came from."""

    def __init__(self, stats: AcceptanceStats, steps: queue.SimpleQueue):
        self.start = time.perf_counter()
        self._stats = stats
        self._steps = steps
        self._num_rounds = 0
        self._is_prompt = True  # `generate` hands the prompt over first

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        is_round = self._stats.num_rounds > self._num_rounds
        self._num_rounds = self._stats.num_rounds
        record = self._stats.rounds[-1] if is_round else None
        token_ids = tuple(value.flatten().tolist())
        self._steps.put(_Step(time.perf_counter() - self.start, token_ids, record))

    def end(self) -> None:
        """The thread itself tells the end, after the models are free again."""


class _StopRequested(StoppingCriteria):
    """Ends a call at the next token."""

    def __init__(self, stop: threading.Event):
        self._stop = stop

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ARG002
        return torch.full((input_ids.shape[0],), self._stop.is_set(), dtype=torch.bool, device=input_ids.device)


class _PieceDecoder:
    """Decodes the text that each token adds; a character that spans tokens comes with the last of them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._pending: list[int] = []
        self._shown = ""

    def add(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._tokenizer.decode(self._pending, clean_up_tokenization_spaces=False)
        if text.endswith("\ufffd") and len(self._pending) < 8:
            return ""
        piece = text[len(self._shown) :]
        # One token stays as context: some tokenizers drop the space before the first token of a text.
        self._pending = [token_id]
        self._shown = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        return piece


def _after(side: Side, steps: list[_Step], decoder: _PieceDecoder) -> Side:
    """The side with more steps added."""
    tokens: list[Token] = list(side.tokens)
    rounds = list(side.rounds)
    for step in steps:
        texts = tuple(decoder.add(token_id) for token_id in step.token_ids)
        tokens += tokens_of_round(step.token_ids, texts, step.record, len(rounds) if step.record else None)
        if step.record is not None:
            rounds.append(step.record)
    return Side(tuple(tokens), steps[-1].seconds, tuple(rounds), steps[-1].finished)


def _gather(steps: queue.SimpleQueue, seconds: float) -> list[_Step]:
    """At least one step, and those of the next `seconds`; an error of the thread is raised here."""
    gathered: list[_Step] = []
    deadline = time.monotonic() + seconds
    while True:
        try:
            step = steps.get(timeout=max(0.0, deadline - time.monotonic()) if gathered else None)
        except queue.Empty:
            return gathered
        if isinstance(step, BaseException):
            raise step
        gathered.append(step)
        if step.finished:
            return gathered


@contextlib.contextmanager
def _knobs(draft: DSparkDraftModel, settings: RunSettings) -> Iterator[None]:
    """The draft with the visitor's knobs for one call: some values count only there, not in the call."""
    config = draft.generation_config
    chosen: dict[str, Any] = {}
    if settings.num_assistant_tokens is not None:
        chosen["num_assistant_tokens"] = settings.num_assistant_tokens
    if settings.schedule is not None:  # a threshold would go before it
        chosen |= {"num_assistant_tokens_schedule": settings.schedule, "assistant_confidence_threshold": None}
    before = {name: getattr(config, name, None) for name in chosen}
    for name, value in chosen.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
