# SPDX-License-Identifier: Apache-2.0
"""Runs `dspark-hf prepare`: find prompts, have the target answer them, show progress."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rich.progress import Progress
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.chat import template_hash
from ..common.conversations import check_prompt, is_answer, read_messages, read_tools
from .answers import PrepareSettings, PromptRow, write_answers, write_answers_from_server, write_self_prompts
from .dataset import read_rows
from .left_out import LeftOut
from .sampling import SamplingSettings


SELF_PROMPT_TOKENS = 128


@dataclass(frozen=True)
class PrepareJob:
    """One run of `dspark-hf prepare`."""

    output: Path  # file of answered rows
    prompt_files: tuple[Path, ...]
    dataset: str | None  # data set of the Hub
    num_self_prompts: int  # prompts that the target writes itself, kept beside `output`
    self_prompt_starts: tuple[str, ...]  # words they begin with
    sampling: SamplingSettings  # how answers are sampled
    enable_thinking: bool | None  # the chat template's thinking switch
    num_rows: int  # answers written at once on this machine
    limit: int | None  # most prompts to answer
    max_prompt_tokens: int = 512  # longer prompts are left out on this machine; a server has limits of its own

    def run_here(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, progress: Progress) -> int:
        """Answer on this machine."""
        left_out = LeftOut()
        prompts = list(islice(self._prompts(left_out), self.limit))
        if self.num_self_prompts:
            prompts += self._self_prompts(target, tokenizer, progress, left_out)
        prompts = self._limited(prompts, left_out)
        task = progress.add_task("Answers", total=len(prompts))
        return write_answers(
            target,
            tokenizer,
            prompts,
            self.output,
            self._settings(target.config.name_or_path, tokenizer),
            self.num_rows,
            self.max_prompt_tokens,
            on_row=lambda _: progress.advance(task),
            on_skip=lambda: progress.advance(task),
            left_out=left_out,
        )

    def run_at_server(
        self,
        url: str,
        model: str,
        concurrency: int,
        progress: Progress,
        api_key: str | None = None,
        ask_refused: bool = False,
    ) -> int:
        """Answer at an OpenAI-compatible server."""
        if self.num_self_prompts:
            raise ValueError("A server answers chats only: `--self-prompts` needs the target on this machine.")
        left_out = LeftOut()
        prompts = self._limited(self._prompts(left_out), left_out)
        task = progress.add_task("Answers", total=len(prompts))
        settings = PrepareSettings(model, self.sampling, self.enable_thinking)
        return write_answers_from_server(
            url,
            model,
            prompts,
            self.output,
            settings,
            concurrency,
            api_key=api_key,
            on_row=lambda _: progress.advance(task),
            on_skip=lambda: progress.advance(task),
            left_out=left_out,
            ask_refused=ask_refused,
        )

    def _settings(self, name: str, tokenizer: PreTrainedTokenizerBase) -> PrepareSettings:
        return PrepareSettings(Path(name).name, self.sampling, self.enable_thinking, template_hash(tokenizer))

    def _limited(self, prompts: Iterable[PromptRow], left_out: LeftOut) -> list[PromptRow]:
        chosen = list(islice(prompts, self.limit))
        if not chosen:
            left_out.finish(0)
            raise ValueError("There are no prompts. Pass `--prompts`, `--dataset` or `--self-prompts`.")
        return chosen

    def _prompts(self, left_out: LeftOut) -> Iterator[PromptRow]:
        for path in self.prompt_files:
            yield from _usable(read_rows([path], left_out), path.stem, left_out)
        if self.dataset is not None:
            yield from _usable(_dataset_rows(self.dataset), self.dataset, left_out)

    def _self_prompts(
        self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, progress: Progress, left_out: LeftOut
    ) -> list[PromptRow]:
        path = self.output.with_suffix(".prompts.jsonl")
        task = progress.add_task("Prompts", total=self.num_self_prompts)
        sampling = SamplingSettings(SELF_PROMPT_TOKENS, 1.0, 50, 0.95, self.sampling.seed)
        write_self_prompts(
            target,
            tokenizer,
            self.num_self_prompts,
            path,
            PrepareSettings(Path(target.config.name_or_path).name, sampling, None, template_hash(tokenizer)),
            self.self_prompt_starts,
            self.num_rows,
            on_row=lambda _: progress.advance(task),
            on_skip=lambda: progress.advance(task),
        )
        return list(_usable(read_rows([path], left_out), "self", left_out))


def _usable(rows: Iterable[tuple[str, dict[str, Any]]], source: str, left_out: LeftOut) -> Iterator[PromptRow]:
    """Rows as prompts; those that hold none are left out."""
    for place, row in rows:
        try:
            yield _prompt_row(place, row, source)
        except ValueError as error:
            left_out.add(place, str(error))


def _prompt_row(place: str, row: dict[str, Any], source: str) -> PromptRow:
    messages = row.get("messages")
    if messages is None and row.get("prompt") is not None:
        messages = [{"role": "user", "content": row["prompt"]}]
    if messages is None:
        raise ValueError(f"The row has no prompt: it needs `messages` or `prompt`, got the fields {sorted(row)}.")
    if isinstance(messages, list) and messages and is_answer(messages[-1]):
        messages = messages[:-1]  # answers of others are replaced by the target's own
    turns = read_messages(messages)
    check_prompt(turns)
    return PromptRow(tuple(turns), source, read_tools(row.get("tools")), place)


def _dataset_rows(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError('`--dataset` needs the datasets package: pip install "dspark-hf[train]".') from error
    for number, row in enumerate(load_dataset(name, split="train", streaming=True)):
        yield f"{name}:{number}", row
