# SPDX-License-Identifier: Apache-2.0
"""What `dspark-hf prepare` does: find prompts, let the target answer them, show progress."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rich.progress import Progress
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .data import read_rows
from .prepare import (
    PrepareSettings,
    PromptRow,
    is_conversation,
    template_hash,
    write_answers,
    write_answers_from_server,
    write_self_prompts,
)
from .row_generation import SamplingSettings


SELF_PROMPT_TOKENS = 128


@dataclass(frozen=True)
class PrepareJob:
    """One run of `dspark-hf prepare`.

    Args:
        output (`Path`): File of answered rows.
        prompt_files (`tuple[Path, ...]`): Files of prompts.
        dataset (`str`, *optional*): Data set of the Hub.
        num_self_prompts (`int`): Prompts that the target writes itself, kept beside `output`.
        self_prompt_starts (`tuple[str, ...]`): Words they begin with.
        sampling (`SamplingSettings`): How answers are sampled.
        enable_thinking (`bool`, *optional*): The chat template's thinking switch.
        num_rows (`int`): Answers written at once on this machine.
        limit (`int`, *optional*): Most prompts to answer.
        max_prompt_tokens (`int`, *optional*, defaults to 512):
            Longer prompts are left out on this machine; a server has limits of its own.
    """

    output: Path
    prompt_files: tuple[Path, ...]
    dataset: str | None
    num_self_prompts: int
    self_prompt_starts: tuple[str, ...]
    sampling: SamplingSettings
    enable_thinking: bool | None
    num_rows: int
    limit: int | None
    max_prompt_tokens: int = 512

    def run_here(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, progress: Progress) -> int:
        """Answer on this machine.

        Args:
            target (`PreTrainedModel`): The target.
            tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
            progress (`Progress`): Where to show progress.

        Returns:
            `int`: Rows added.

        Raises:
            ValueError: If there are no prompts, or a file was made with other settings.
        """
        prompts = list(islice(self._prompts(), self.limit))
        if self.num_self_prompts:
            prompts += self._self_prompts(target, tokenizer, progress)
        prompts = self._limited(prompts)
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
        )

    def run_at_server(self, url: str, model: str, concurrency: int, progress: Progress) -> int:
        """Answer at an OpenAI-compatible server.

        Args:
            url (`str`): Base URL.
            model (`str`): Name of the target there.
            concurrency (`int`): Requests in flight.
            progress (`Progress`): Where to show progress.

        Returns:
            `int`: Rows added.

        Raises:
            RuntimeError: If the server keeps failing.
            ValueError: If there are no prompts, or a file was made with other settings.
        """
        if self.num_self_prompts:
            raise ValueError("A server answers chats only: `--self-prompts` needs the target on this machine.")
        prompts = self._limited(self._prompts())
        task = progress.add_task("Answers", total=len(prompts))
        settings = PrepareSettings(model, self.sampling, self.enable_thinking)
        return write_answers_from_server(
            url,
            model,
            prompts,
            self.output,
            settings,
            concurrency,
            on_row=lambda _: progress.advance(task),
            on_skip=lambda: progress.advance(task),
        )

    def _settings(self, name: str, tokenizer: PreTrainedTokenizerBase) -> PrepareSettings:
        return PrepareSettings(Path(name).name, self.sampling, self.enable_thinking, template_hash(tokenizer))

    def _limited(self, prompts: Iterable[PromptRow]) -> list[PromptRow]:
        chosen = list(islice(prompts, self.limit))
        if not chosen:
            raise ValueError("There are no prompts. Pass `--prompts`, `--dataset` or `--self-prompts`.")
        return chosen

    def _prompts(self) -> Iterator[PromptRow]:
        for place, row in read_rows(self.prompt_files):
            yield _prompt_row(place, row, Path(place.rsplit(":", 1)[0]).stem)
        if self.dataset is not None:
            yield from _dataset_prompts(self.dataset)

    def _self_prompts(
        self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, progress: Progress
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
        return [_prompt_row(place, row, "self") for place, row in read_rows([path])]


def _prompt_row(place: str, row: dict[str, Any], source: str) -> PromptRow:
    messages = row.get("messages")
    if messages is None and isinstance(row.get("prompt"), str):
        messages = [{"role": "user", "content": row["prompt"]}]
    if is_conversation(messages) and messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]  # answers of others are replaced by the target's own
    if not is_conversation(messages) or not messages or messages[-1]["role"] != "user":
        raise ValueError(
            f"{place} has no prompt: it needs `messages` (`role` and `content`) or `prompt`, got the fields "
            f"{sorted(row)}."
        )
    return PromptRow(tuple({"role": m["role"], "content": m["content"]} for m in messages), source)


def _dataset_prompts(name: str) -> Iterator[PromptRow]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError('`--dataset` needs the datasets package: pip install "dspark-hf[train]".') from error
    for number, row in enumerate(load_dataset(name, split="train", streaming=True)):
        yield _prompt_row(f"{name}:{number}", row, name)
