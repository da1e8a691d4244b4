# SPDX-License-Identifier: Apache-2.0
"""Training data: prompts from a file, a data set or the target itself, and answers that the target writes.

A draft has to predict its target, so the answers are the target's own, with its own chat template. Rows are appended
to a JSON Lines file as they finish; a killed run loses the answers in flight, and the same command continues it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ._version import __version__
from .row_generation import RowGenerator, RowRequest, SamplingSettings
from .text_files import write_text


logger = logging.get_logger("transformers.dspark_hf.prepare")

MIN_SELF_PROMPT_WORDS = 3
_MARK = "\u241f"  # a character no chat template contains


@dataclass(frozen=True)
class PromptRow:
    """A conversation to be answered.

    Args:
        messages (`tuple[dict[str, str], ...]`): `role` and `content`; the last one is the user's.
        source (`str`, *optional*, defaults to `""`): Where it came from, for statistics.
    """

    messages: tuple[dict[str, str], ...]
    source: str = ""

    @property
    def key(self) -> str:
        """`str`: Identifies the conversation, so that a resumed run answers nothing twice."""
        return hashlib.sha256(json.dumps(self.messages, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class PrepareSettings:
    """What a data file was made with; written beside it, and compared when a run is resumed.

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


def is_conversation(messages: Any) -> bool:
    """Whether something read from a file is a list of turns, each with the texts `role` and `content`.

    Args:
        messages (`Any`): What stood in the file.

    Returns:
        `bool`
    """
    return isinstance(messages, list) and all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
        for turn in messages
    )


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of a chat template: a draft is right for the template it was trained with only.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's.

    Returns:
        `str`: SHA-256 in hex; of the empty text where there is no template.
    """
    return hashlib.sha256((tokenizer.chat_template or "").encode()).hexdigest()


def encode_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], enable_thinking: bool | None = None
) -> tuple[int, ...]:
    """Tokens of a conversation up to where the answer begins.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        messages (`Sequence[dict[str, str]]`): The conversation, the user's turn last.
        enable_thinking (`bool`, *optional*): The template's thinking switch.

    Returns:
        `tuple[int, ...]`

    Raises:
        ValueError: If the tokenizer has no chat template, or the template adds nothing where the answer should begin.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "The target's tokenizer has no chat template, so nothing says where an answer begins. Set "
            "`tokenizer.chat_template`, or save one with the target."
        )
    switch = {} if enable_thinking is None else {"enable_thinking": enable_thinking}

    def render(add_generation_prompt: bool) -> list[int]:
        return tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=add_generation_prompt, return_dict=True, **switch
        )["input_ids"]

    ids = render(True)
    if len(ids) <= len(render(False)):
        raise ValueError(
            "The chat template ignores `add_generation_prompt`: it adds nothing where the answer should begin. Use a "
            "template with a generation prompt."
        )
    return tuple(ids)


def self_prompt_header(tokenizer: PreTrainedTokenizerBase) -> str:
    """The text before a user's turn in the chat template: an instruct target goes on with a turn of its own making.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's.

    Returns:
        `str`

    Raises:
        ValueError: If there is no chat template.
    """
    if not tokenizer.chat_template:
        raise ValueError("Without a chat template the target cannot write prompts. Pass prompts in a file.")
    text = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
    return text[: text.index(_MARK)]


class DataFile:
    """A JSON Lines file that grows row by row, with the settings it was made with beside it.

    Args:
        path (`Path`): The file.
        settings (`PrepareSettings`): What the rows are made with.

    Raises:
        ValueError: If the file exists and was made with other settings, or is no such file.
    """

    def __init__(self, path: Path, settings: PrepareSettings):
        self.path = Path(path)
        self.settings_path = self.path.with_suffix(".settings.json")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._check_settings(settings)
        self.keys = {row["key"] for row in self._repaired_rows()}

    def _check_settings(self, settings: PrepareSettings) -> None:
        wanted = asdict(settings)
        if self.path.exists():
            if not self.settings_path.exists():
                raise ValueError(
                    f"{self.path} exists, but {self.settings_path.name} beside it does not: it is not a file that can "
                    "be continued. Choose another output."
                )
            found = json.loads(self.settings_path.read_text())["settings"]
            if found != wanted:
                different = sorted(name for name in wanted if found.get(name) != wanted[name])
                raise ValueError(
                    f"{self.path} was made with other settings ({', '.join(different)}): "
                    f"{ {name: found.get(name) for name in different} }, got "
                    f"{ {name: wanted[name] for name in different} }. Rows of two kinds must not mix; choose another "
                    "output."
                )
            return
        versions = {"dspark_hf": __version__, "transformers": transformers.__version__}
        write_text(self.settings_path, json.dumps({"settings": wanted, "versions": versions}, indent=2))

    def _repaired_rows(self) -> Iterator[dict[str, Any]]:
        """Rows so far; a last line that a kill cut in half is removed from the file."""
        if not self.path.exists():
            return
        complete = 0
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                yield json.loads(line)
                complete += len(line)
        os.truncate(self.path, complete)

    def append(self, row: dict[str, Any]) -> None:
        """Add a row and flush it.

        Args:
            row (`dict[str, Any]`): With a `key`.
        """
        with self.path.open("ab") as file:
            file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
        self.keys.add(row["key"])


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
) -> int:
    """Let the target answer prompts, many at once on this machine.

    Args:
        target (`PreTrainedModel`): The model to train a draft for.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        prompts (`Iterable[PromptRow]`): Prompts; those already answered in `output` are skipped.
        output (`Path`): JSON Lines file; rows hold `messages`, `prompt_ids`, `answer_ids`, `finish_reason`, `source`.
        settings (`PrepareSettings`): Recorded beside it.
        num_rows (`int`, *optional*, defaults to 64): Answers written at once.
        max_prompt_tokens (`int`, *optional*, defaults to 512): Longer prompts are left out, with a warning.
        on_row (`Callable`, *optional*): Called with each finished row.
        on_skip (`Callable`, *optional*): Called for each prompt that gets no row: answered, repeated or too long.

    Returns:
        `int`: Rows added.

    Raises:
        ValueError: If `output` was made with other settings, or `max_prompt_tokens` is below 1.
    """
    if max_prompt_tokens < 1:
        raise ValueError(f"`max_prompt_tokens` must be >= 1, got {max_prompt_tokens}.")
    file = DataFile(output, settings)
    engine = RowGenerator(target, settings.sampling, _end_tokens(target, tokenizer), num_rows)
    seen, num_too_long = set(file.keys), 0

    def requests() -> Iterator[RowRequest]:
        nonlocal num_too_long
        for prompt in prompts:
            if prompt.key not in seen:
                seen.add(prompt.key)
                ids = encode_messages(tokenizer, prompt.messages, settings.enable_thinking)
                if len(ids) <= max_prompt_tokens:
                    yield RowRequest((prompt, ids), ids)
                    continue
                num_too_long += 1
            if on_skip is not None:
                on_skip()

    added = 0
    for answer in engine.run(requests()):
        prompt, prompt_ids = answer.key
        text = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        row = _row(prompt, text, answer.finish_reason)
        row |= {"prompt_ids": list(prompt_ids), "answer_ids": list(answer.token_ids)}
        file.append(row)
        added += 1
        if on_row is not None:
            on_row(row)
    if num_too_long:
        logger.warning(f"{num_too_long} prompts of more than {max_prompt_tokens} tokens were left out.")
    return added


def write_self_prompts(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    num_prompts: int,
    output: Path,
    settings: PrepareSettings,
    starts: Sequence[str] = ("",),
    num_rows: int = 64,
    on_row: Callable[[dict[str, Any]], None] | None = None,
    on_skip: Callable[[], None] | None = None,
) -> int:
    """Let an instruct target write prompts: it continues the header of a user's turn, to the end of that turn.

    Args:
        target (`PreTrainedModel`): The model to train a draft for.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        num_prompts (`int`): Rows wanted in `output`, the ones it has included.
        output (`Path`): JSON Lines file of `messages`.
        settings (`PrepareSettings`): Recorded beside it; a temperature of 1 gives variety.
        starts (`Sequence[str]`, *optional*): Words that turns begin with, in turn, to steer their kind.
        num_rows (`int`, *optional*, defaults to 64): Prompts written at once.
        on_row (`Callable`, *optional*): Called with each finished row.
        on_skip (`Callable`, *optional*): Called for each of the rows wanted that `output` has.

    Returns:
        `int`: Rows added; fewer than wanted where the target keeps repeating itself.
    """
    file = DataFile(output, settings)
    header = self_prompt_header(tokenizer)
    end_tokens = _end_tokens(target, tokenizer)
    # Another stream than the first run's, or a resumed run would write the same prompts again.
    sampling = SamplingSettings(**(asdict(settings.sampling) | {"seed": settings.sampling.seed + len(file.keys)}))
    engine = RowGenerator(target, sampling, end_tokens, num_rows)
    encoded = {start: tuple(tokenizer(header + start, add_special_tokens=False)["input_ids"]) for start in starts}
    wanted, added = num_prompts - len(file.keys), 0
    if on_skip is not None:
        for _ in range(min(num_prompts, len(file.keys))):
            on_skip()

    def requests() -> Iterator[RowRequest]:
        attempts = 0
        while added < wanted and attempts < 4 * wanted + num_rows:
            start = starts[attempts % len(starts)]
            attempts += 1
            yield RowRequest(start, encoded[start])

    for answer in engine.run(requests()):
        if added >= wanted:
            break  # without waiting for the rows in flight
        text = (answer.key + tokenizer.decode(answer.token_ids, skip_special_tokens=True)).strip()
        if answer.finish_reason != "stop" or len(text.split()) < MIN_SELF_PROMPT_WORDS:
            continue
        prompt = PromptRow(({"role": "user", "content": text},), "self")
        if prompt.key in file.keys:
            continue
        row = {"key": prompt.key, "messages": list(prompt.messages), "source": "self"}
        file.append(row)
        added += 1
        if on_row is not None:
            on_row(row)
    return added


def write_answers_from_server(
    url: str,
    model: str,
    prompts: Iterable[PromptRow],
    output: Path,
    settings: PrepareSettings,
    concurrency: int = 16,
    retries: int = 5,
    api_key: str | None = None,
    on_row: Callable[[dict[str, Any]], None] | None = None,
    on_skip: Callable[[], None] | None = None,
) -> int:
    """Let a served target answer prompts, through any OpenAI-compatible server (vLLM, SGLang, ...).

    The server returns text, so the rows have no token ids; training encodes them with the target's template.

    Args:
        url (`str`): Base URL, `http://localhost:8000/v1` for example.
        model (`str`): Name of the target at the server.
        prompts (`Iterable[PromptRow]`): Prompts; those already answered in `output` are skipped.
        output (`Path`): JSON Lines file of `messages`, `finish_reason`, `source`.
        settings (`PrepareSettings`): Recorded beside it.
        concurrency (`int`, *optional*, defaults to 16): Requests in flight.
        retries (`int`, *optional*, defaults to 5): Further tries after a failure, with growing pauses.
        api_key (`str`, *optional*): Sent as a bearer token.
        on_row (`Callable`, *optional*): Called with each finished row.
        on_skip (`Callable`, *optional*): Called for each prompt that gets no row: answered or repeated.

    Returns:
        `int`: Rows added.

    Raises:
        RuntimeError: If a request keeps failing; rows so far are kept.
        ValueError: If `output` was made with other settings.
    """
    file = DataFile(output, settings)
    seen, waiting, added = set(file.keys), [], 0
    for prompt in prompts:
        if prompt.key not in seen:
            seen.add(prompt.key)
            waiting.append(prompt)
        elif on_skip is not None:
            on_skip()

    def ask(prompt: PromptRow) -> dict[str, Any]:
        choice = _post(f"{url.rstrip('/')}/chat/completions", _body(model, prompt, settings), api_key, retries)
        return _row(prompt, choice["message"]["content"] or "", choice.get("finish_reason") or "stop")

    with ThreadPoolExecutor(concurrency) as pool:
        # A chunk at a time, so that a server that is down ends the run instead of failing for every prompt.
        for begin in range(0, len(waiting), 4 * concurrency):
            for row in pool.map(ask, waiting[begin : begin + 4 * concurrency]):
                file.append(row)
                added += 1
                if on_row is not None:
                    on_row(row)
    return added


def _body(model: str, prompt: PromptRow, settings: PrepareSettings) -> dict[str, Any]:
    sampling = settings.sampling
    body = {
        "model": model,
        "messages": list(prompt.messages),
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
    }
    if settings.enable_thinking is not None:
        body["chat_template_kwargs"] = {"enable_thinking": settings.enable_thinking}
    return body


def _post(url: str, body: dict[str, Any], api_key: str | None, retries: int) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    for attempt in range(retries + 1):
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                return json.load(response)["choices"][0]
        except (urllib.error.URLError, OSError, KeyError, IndexError, json.JSONDecodeError) as error:
            final = isinstance(error, urllib.error.HTTPError) and error.code in (400, 401, 403, 404, 422)
            if final or attempt == retries:
                raise RuntimeError(
                    f"The server at {url} did not answer after {attempt + 1} tries ({error}). Rows so far are kept; "
                    "run the same command again once it is up."
                ) from error
            time.sleep(min(2**attempt, 30))
    raise ValueError(f"`retries` must be >= 0, got {retries}.")


def _row(prompt: PromptRow, text: str, finish_reason: str) -> dict[str, Any]:
    messages = [*prompt.messages, {"role": "assistant", "content": text}]
    return {"key": prompt.key, "messages": messages, "finish_reason": finish_reason, "source": prompt.source}


def _end_tokens(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    ids = target.generation_config.eos_token_id
    ids = ids if isinstance(ids, (list, tuple)) else [ids]
    return frozenset(i for i in (*ids, tokenizer.eos_token_id) if i is not None)
