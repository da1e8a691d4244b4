# SPDX-License-Identifier: Apache-2.0
"""Training data: prompts from a file, a data set or the target itself, and answers that the target writes.

A draft has to predict its target, so the answers are the target's own, with its own chat template. Rows are appended
to a JSON Lines file as they finish; a killed run loses the answers in flight, and the same command continues it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..common.chat import template_hash
from ..common.chat_tokens import encode_messages, end_token_ids, user_turn
from ..common.data_file import DataFile, RefusedFile
from ..common.jsonl import shortened
from .answer_server import AnswerServer, Refusal, ServerAnswer
from .left_out import LeftOut
from .sampling import SamplingSettings, sample_answers


__all__ = [
    "DataFile",
    "PrepareSettings",
    "PromptRow",
    "encode_messages",
    "template_hash",
    "write_answers",
    "write_answers_from_server",
    "write_self_prompts",
]

logger = logging.get_logger("transformers.dspark_hf.training.answers")

MIN_SELF_PROMPT_WORDS = 3
_Encoded = tuple[Any, tuple[int, ...]]  # what comes back with an answer, and the tokens of its prompt
PROBE = ({"role": "user", "content": "Hello"},)


@dataclass(frozen=True)
class PromptRow:
    """A conversation to be answered.

    Args:
        messages (`tuple[dict[str, Any], ...]`): `role` and `content`, and what else chat templates read; the last one
            is the user's or the result of a tool.
        source (`str`, *optional*, defaults to `""`): Where it came from, for statistics.
        tools (`tuple[dict[str, Any], ...]`, *optional*, defaults to `()`): Tools offered to the target.
        place (`str`, *optional*, defaults to `""`): File and line, for messages.
    """

    messages: tuple[dict[str, Any], ...]
    source: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    place: str = ""

    @property
    def key(self) -> str:
        """`str`: Identifies the conversation, so that a resumed run answers nothing twice."""
        asked = [self.messages, self.tools] if self.tools else self.messages
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def where(self) -> str:
        """`str`: Its place, or how its last turn begins."""
        return self.place or f"The prompt {shortened(self.messages[-1].get('content'), 40)}"

    def row(self, answer: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """A row of a file about this prompt.

        Args:
            answer (`Sequence[dict[str, Any]]`, *optional*, defaults to `()`): The turn that answers it, if any.

        Returns:
            `dict[str, Any]`: `key`, `messages`, `tools` where there are any, and `source`.
        """
        tools = {"tools": list(self.tools)} if self.tools else {}
        return {"key": self.key, "messages": [*self.messages, *answer], **tools, "source": self.source}


@dataclass(frozen=True)
class PrepareSettings:
    """The settings of a data file; written beside it, and compared when a run is resumed.

    Args:
        target (`str`): Name or path of the target.
        sampling (`SamplingSettings`): How answers are sampled.
        enable_thinking (`bool`, *optional*):
            Value of the chat template's thinking switch; `None` leaves it to the template.
        template_sha256 (`str`, *optional*, defaults to `""`): Hash of the chat template.
    """

    target: str
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    enable_thinking: bool | None = None
    template_sha256: str = ""


def _do_nothing(*_: Any) -> None:
    pass


def write_answers(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[PromptRow],
    output: Path,
    settings: PrepareSettings,
    num_rows: int = 64,
    max_prompt_tokens: int = 512,
    on_row: Callable[[dict[str, Any]], None] | None = None,
    on_skip: Callable[[], None] | None = None,
    left_out: LeftOut | None = None,
) -> int:
    """Let the target answer prompts, many at once on this machine.

    A prompt that the chat template refuses, or that is too long, is left out and named in the log.

    Args:
        target (`PreTrainedModel`): The model to train a draft for.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        prompts (`Iterable[PromptRow]`): Prompts; those already answered in `output` are skipped.
        output (`Path`): JSON Lines file; rows hold `messages`, `prompt_ids`, `answer_ids`, `finish_reason`, `source`,
            and `tools` where there are any.
        settings (`PrepareSettings`): Recorded beside it.
        num_rows (`int`, *optional*, defaults to 64): Answers written at once.
        max_prompt_tokens (`int`, *optional*, defaults to 512): Longer prompts are left out.
        on_row (`Callable`, *optional*): Called with each finished row.
        on_skip (`Callable`, *optional*): Called for each prompt that gets no row: answered, repeated or left out.
        left_out (`LeftOut`, *optional*): Rows that were left out before.

    Returns:
        `int`: Rows added.

    Raises:
        ValueError: If `output` was made with other settings, `max_prompt_tokens` is below 1, or no prompt can be
            answered.
    """
    if max_prompt_tokens < 1:
        raise ValueError(f"`max_prompt_tokens` must be >= 1, got {max_prompt_tokens}.")
    left_out, on_row, on_skip = left_out or LeftOut(), on_row or _do_nothing, on_skip or _do_nothing
    file = DataFile(output, settings)
    waiting = _new_prompts(prompts, file.keys, on_skip)
    encoded = _encoded(tokenizer, waiting, settings.enable_thinking, max_prompt_tokens, left_out, on_skip)
    added = 0
    alike = _by_length(encoded, 8 * num_rows)
    for answer in sample_answers(target, alike, settings.sampling, end_token_ids(target, tokenizer), num_rows):
        prompt, prompt_ids = answer.key
        text = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        row = prompt.row([{"role": "assistant", "content": text}]) | {"finish_reason": answer.finish_reason}
        row |= {"prompt_ids": list(prompt_ids), "answer_ids": list(answer.token_ids)}
        file.append(row)
        added += 1
        on_row(row)
    left_out.finish(len(file.keys))
    return added


def write_self_prompts(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    num_prompts: int,  # rows wanted in `output`, the ones it has included
    output: Path,
    settings: PrepareSettings,  # recorded beside it; a temperature of 1 gives variety
    starts: Sequence[str] = ("",),
    num_rows: int = 64,
    on_row: Callable[[dict[str, Any]], None] | None = None,  # called with each finished row
    on_skip: Callable[[], None] | None = None,  # called for each of the rows wanted that `output` has
) -> int:
    """Let an instruct target write prompts: it continues the header of a user's turn, to the end of that turn."""
    on_row, on_skip = on_row or _do_nothing, on_skip or _do_nothing
    header, end_tokens = user_turn(target, tokenizer)
    file = DataFile(output, settings)
    # Another stream than the first run's, or a resumed run would write the same prompts again.
    sampling = replace(settings.sampling, seed=(settings.sampling.seed or 0) + len(file.keys))
    encoded = {start: tuple(tokenizer(header + start, add_special_tokens=False)["input_ids"]) for start in starts}
    wanted, added = num_prompts - len(file.keys), 0
    for _ in range(min(num_prompts, len(file.keys))):
        on_skip()

    def openings() -> Iterator[tuple[str, tuple[int, ...]]]:
        attempts = 0
        while added < wanted and attempts < 4 * wanted + num_rows:
            start = starts[attempts % len(starts)]
            attempts += 1
            yield start, encoded[start]

    for answer in sample_answers(target, openings(), sampling, end_tokens, num_rows):
        if added >= wanted:
            break  # without waiting for the rows in flight
        text = (answer.key + tokenizer.decode(answer.token_ids, skip_special_tokens=True)).strip()
        if answer.finish_reason != "stop" or len(text.split()) < MIN_SELF_PROMPT_WORDS:
            continue
        prompt = PromptRow(({"role": "user", "content": text},), "self")
        if prompt.key in file.keys:
            continue
        file.append(row := prompt.row())
        added += 1
        on_row(row)
    return added


def write_answers_from_server(
    url: str,
    model: str,
    prompts: Iterable[PromptRow],
    output: Path,
    settings: PrepareSettings,  # recorded beside it; sampling arguments that are None are not sent
    concurrency: int = 16,
    retries: int = 5,
    api_key: str | None = None,
    on_row: Callable[[dict[str, Any]], None] | None = None,  # called with each finished row
    on_skip: Callable[[], None] | None = None,
    left_out: LeftOut | None = None,
    ask_refused: bool = False,
) -> int:
    """Let a served target answer prompts, through any OpenAI-compatible server (vLLM, SGLang, ...).

    Rows have no token ids; training encodes them with the target's template. A prompt that the server refuses (4xx)
    is recorded in `NAME.refused.jsonl` beside `output`, and not asked again by a later run.
    """
    server = AnswerServer(url, model, settings.sampling, settings.enable_thinking, retries, api_key)
    file = DataFile(output, settings)
    refused = RefusedFile(file, ask_refused)
    left_out, on_row, on_skip = left_out or LeftOut(), on_row or _do_nothing, on_skip or _do_nothing
    if refused.keys:
        logger.warning(f"{refused.path} has {len(refused.keys)} refused prompts: `--ask-refused` asks them again.")
    waiting = list(_new_prompts(prompts, file.keys | refused.keys, on_skip))
    added, is_checked = 0, False
    for prompt, answer in _asked(server, waiting, concurrency):
        if isinstance(answer, Refusal):
            if not (added or is_checked):
                _check_arguments(server)
                is_checked = True
            refused.append(prompt.row() | {"status": answer.status, "reason": answer.reason})
            left_out.add(prompt.where, f"The server said {answer.status} ({answer.reason}).")
            on_skip()
            continue
        file.append(row := prompt.row([answer.message]) | {"finish_reason": answer.finish_reason})
        added += 1
        on_row(row)
    left_out.finish(len(file.keys))
    return added


def _new_prompts(prompts: Iterable[PromptRow], known: set[str], on_skip: Callable[[], None]) -> Iterator[PromptRow]:
    """Prompts that are not known, each once."""
    seen = set(known)
    for prompt in prompts:
        if prompt.key not in seen:
            seen.add(prompt.key)
            yield prompt
        else:
            on_skip()


def _encoded(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[PromptRow],
    enable_thinking: bool | None,
    max_prompt_tokens: int,
    left_out: LeftOut,
    on_skip: Callable[[], None],
) -> Iterator[_Encoded]:
    """Prompts in tokens; those that the template refuses and those that are too long are left out."""
    for prompt in prompts:
        try:
            ids = encode_messages(tokenizer, prompt.messages, enable_thinking, prompt.tools)
        except ValueError as error:
            left_out.add(prompt.where, str(error))
            on_skip()
            continue
        if len(ids) <= max_prompt_tokens:
            yield (prompt, ids), ids
            continue
        reason = f"A prompt must have at most {max_prompt_tokens} tokens, got {len(ids)}. Raise `max_prompt_tokens`."
        left_out.add(prompt.where, reason)
        on_skip()


def _by_length(prompts: Iterator[_Encoded], count: int) -> Iterator[_Encoded]:
    """Sort a chunk of prompts at a time, the longest first: prompts of like length fill a batch without padding."""
    while chunk := list(islice(prompts, count)):
        yield from sorted(chunk, key=lambda prompt: -len(prompt[1]))


def _asked(
    server: AnswerServer, prompts: Sequence[PromptRow], concurrency: int
) -> Iterator[tuple[PromptRow, ServerAnswer | Refusal]]:
    """The replies of a server to prompts, in their order."""
    pool = ThreadPoolExecutor(concurrency)
    try:
        # A chunk at a time, so that a server that is down ends the run instead of failing for every prompt.
        for begin in range(0, len(prompts), 4 * concurrency):
            chunk = prompts[begin : begin + 4 * concurrency]
            answers = pool.map(lambda prompt: server.ask(prompt.messages, prompt.tools), chunk)
            yield from zip(chunk, answers, strict=True)
    finally:
        pool.shutdown(cancel_futures=True)


def _check_arguments(server: AnswerServer) -> None:
    """After a first refusal: a server that refuses a short prompt too refuses the arguments that come with it."""
    answer = server.ask(PROBE)
    if isinstance(answer, Refusal):
        sent = ", ".join(f"`{name}`" for name in server.arguments)
        raise RuntimeError(
            f"The server at {server.url} said {answer.status} ({answer.reason}) even to a short prompt. Requests hold "
            f"{sent}. Leave out the option that it names (`--temperature`, `--top-k`, `--top-p`, `--seed`, "
            "`--enable-thinking`), since what is not given is not sent, or lower `--max-new-tokens`."
        )
