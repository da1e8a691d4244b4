# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, and what they stand for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..common.prompts import BUILTIN_PROMPTS, Prompt, read_prompts
from ..drafts.modeling_dspark import DSparkDraftModel


console = Console()
errors = Console(stderr=True)

Target = Annotated[
    str | None, typer.Option("--target", help="Target model: Hub id or folder. Default: that of the default pair.")
]
Draft = Annotated[str | None, typer.Option("--draft", help="Its DSpark draft: Hub id or folder.")]
Dtype = Annotated[str, typer.Option("--dtype", help="Weights of both models: bfloat16, float16 or float32.")]
Device = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda, cuda:1, mps, ... Default: cuda if there is one.")
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer, in tokens.")]
NumAssistantTokens = Annotated[
    int | None,
    typer.Option("--num-assistant-tokens", help="Most drafts sent per round. Default: the block."),
]
Threshold = Annotated[
    float | None,
    typer.Option(
        "--assistant-confidence-threshold",
        "--assistant_confidence_threshold",
        help="Cut a block at the first slot whose confidence is lower. Default: adaptive.",
    ),
]
Schedule = Annotated[
    str | None,
    typer.Option(
        "--num-assistant-tokens-schedule",
        "--num_assistant_tokens_schedule",
        help='"hardware" (default), "confidence" or "constant".',
    ),
]
PromptLookup = Annotated[
    int | None,
    typer.Option(
        "--prompt-lookup-num-tokens",
        min=0,
        help="Most tokens copied from the text per round; 0 for none. Default: the schedule decides, up to 16.",
    ),
]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 decodes greedily.")]
TopP = Annotated[float, typer.Option("--top-p", min=0.0, max=1.0, help="Nucleus, when sampling.")]
Seed = Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1, help="Random seed, when sampling.")]
Thinking = Annotated[
    bool | None,
    typer.Option(
        "--enable-thinking/--no-thinking",
        help="The chat template's thinking switch. Default: as the draft was trained.",
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run code that comes with the target, where it needs some."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables or sentences.")]
Raw = Annotated[bool, typer.Option("--raw", help="Continue the text itself, without the chat template.")]


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Known errors end the command with their message and exit status 2, without a traceback."""
    try:
        yield
    except (ValueError, TypeError, OSError, NotImplementedError, RuntimeError, MemoryError, ImportError) as error:
        # As it is: a message may hold brackets, which markup would read.
        errors.print(Text.assemble(("Error:", "bold red"), f" {error}"), soft_wrap=True)
        raise typer.Exit(2) from error


def set_knobs(
    draft: DSparkDraftModel, num_tokens: int | None, threshold: float | None, schedule: str | None, lookup: int | None
) -> None:
    """Options that were given; what was saved with the draft stays otherwise."""
    chosen = {
        "num_assistant_tokens": num_tokens,
        "assistant_confidence_threshold": threshold,
        "num_assistant_tokens_schedule": schedule,
        "prompt_lookup_num_tokens": lookup,
    }
    for name, value in chosen.items():
        if value is not None:
            setattr(draft.generation_config, name, value)


def choose_prompts(text: list[str] | None, path: Path | None) -> list[Prompt]:
    """Prompts of the command line or of a file; the built-in ones where there are neither."""
    if text and path is not None:
        raise ValueError("Prompts come from the command line or from `--prompts`, got both. Remove one of them.")
    if text:
        return [Prompt("yours", check_prompt(prompt)) for prompt in text]
    return read_prompts(path) if path is not None else list(BUILTIN_PROMPTS)


def check_prompt(text: str) -> str:
    """Refuse a prompt without words, as prompt files do."""
    if not text.strip():
        raise ValueError(f"A prompt must hold some text, got {text!r}.")
    return text


def progress_bar(transient: bool = True) -> Progress:
    """A progress bar on standard error; a transient one is gone when the work is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=errors, transient=transient)
