# SPDX-License-Identifier: Apache-2.0
"""`dspark-hf eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from filelock import FileLock, Timeout
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.decoding_options import sampling_arguments
from ..common.model_sources import find_source
from ..common.path_checks import check_output_folder
from ..common.thinking import check_thinking
from ..evaluation.drafters import (
    DRAFT,
    PLAIN,
    Drafter,
    LoadedDrafter,
    check_names,
    default_drafters,
    load_drafters,
    parse_drafter,
)
from ..evaluation.evaluate import Settings, evaluate, num_answers, settings_for, warm_up
from ..evaluation.report import check_can_report, write_report, write_tensorboard
from ..evaluation.summary import Evaluation, interval_text, summarize_runs
from ..evaluation.tasks import BUILTIN, TaskData, load_tasks
from .loading import check_prompting, load_target
from .options import (
    Device,
    Dtype,
    Json,
    MaxNewTokens,
    Raw,
    Seed,
    Target,
    TopP,
    TrustRemoteCode,
    console,
    errors,
    exit_on_error,
    progress_bar,
)


INTERRUPTED = 130  # as a shell reports it
LOCK_FILE = ".eval.lock"


Tasks = Annotated[
    list[str] | None,
    typer.Argument(
        help="gsm8k, math500, aime25, mbpp, humaneval, livecodebench, mt-bench, alpaca, arena-hard-v2 "
        "(extra: eval), builtin (default), or files of turns, messages or prompts."
    ),
]
Output = Annotated[Path, typer.Option("--output", "-o", help="Folder for runs and report; continued if it has runs.")]
Drafts = Annotated[
    list[str] | None,
    typer.Option(
        "--draft", help="A draft of the target, repeatable: with its own schedule, and with every slot sent."
    ),
]
Drafters = Annotated[
    list[str] | None,
    typer.Option(
        "--drafter",
        help="Another row, repeatable: [NAME=]KIND[:PATH][,KNOB=VALUE...]. KIND: draft, prompt-lookup, assistant, "
        "mtp or dflash (transformers' own).",
    ),
]
Limit = Annotated[int, typer.Option("--limit", min=0, help="Questions of each task, spread over it; 0 for all.")]
Temperatures = Annotated[
    str, typer.Option("--temperatures", help="One for each decoding, with commas; 0 decodes greedily.")
]
EnableThinking = Annotated[
    bool | None, typer.Option("--enable-thinking/--no-thinking", help="The chat template's thinking switch.")
]
Tensorboard = Annotated[
    Path | None, typer.Option("--tensorboard", help="Folder for TensorBoard logs as well (extra: train).")
]


def eval_command(
    tasks: Tasks = None,
    output: Output = Path("evaluation"),
    target: Target = None,
    draft: Drafts = None,
    drafter: Drafters = None,
    dtype: Dtype = "bfloat16",
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    limit: Limit = 20,
    max_new_tokens: MaxNewTokens = 256,
    temperatures: Temperatures = "0,1",
    top_p: TopP = 1.0,
    seed: Seed = 0,
    raw: Raw = False,
    enable_thinking: EnableThinking = None,
    tensorboard: Tensorboard = None,
    json_output: Json = False,
) -> None:
    """Drafters side by side on tasks: accepted length, speed-up, latency, confidence; JSON, CSV and an HTML report."""
    try:
        with exit_on_error():
            check_can_report(tensorboard)
            check_prompting(raw, enable_thinking)
            for path, option in ((output, "--output"), (tensorboard, "--tensorboard")):
                check_output_folder(path, option)
            chosen = _parse_temperatures(temperatures)
            wanted = _drafters(target, draft or [], drafter or [])
            data = load_tasks(tasks or [BUILTIN], limit or None)
            with errors.status("Loading the models..."):
                model, tokenizer = load_target(target, dtype, device, trust_remote_code)
                loaded = load_drafters(wanted, model, tokenizer, trust_remote_code)
            check_thinking(tokenizer, enable_thinking)
            settings = settings_for(
                model, tokenizer, data, loaded, chosen, top_p, max_new_tokens, seed, raw, enable_thinking
            )
            evaluation = _run(model, tokenizer, data, loaded, settings, output)
            files = write_report(evaluation, output)
            if tensorboard is not None:
                write_tensorboard(evaluation, tensorboard)
    except KeyboardInterrupt as error:
        errors.print(f"Interrupted. The answers so far are in {output}: the same command goes on.", markup=False)
        raise typer.Exit(INTERRUPTED) from error
    if json_output:
        typer.echo(json.dumps(evaluation.to_dict(), indent=2, allow_nan=False))
    else:
        _print_evaluation(evaluation)
    errors.print(f"Report: {files[-1]}", highlight=False, markup=False, soft_wrap=True)


def _drafters(target: str | None, drafts: list[str], drafters: list[str]) -> list[Drafter]:
    if target is not None and not drafts and not drafters:
        raise ValueError("A draft fits one target only: name `--draft`, or other drafters with `--drafter`.")
    if target is None and drafts:
        raise ValueError("A draft fits one target only: `--draft` needs `--target` as well.")
    rows = default_drafters(drafts) if drafts or not drafters else []
    found = check_names([*rows, *(parse_drafter(text) for text in drafters)])
    if target is not None and any(row.kind == DRAFT and row.path is None for row in found):
        raise ValueError(
            "The package's own draft fits the default target only. Write `draft:FOLDER` or `draft:HUB_ID`."
        )
    for row in found:
        if row.path is not None:
            find_source(row.path)  # a wrong path is noticed before the target is loaded
    return found


def _parse_temperatures(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"`--temperatures` must be numbers with commas between them, got {text!r}.") from error
    for temperature in found:
        sampling_arguments(temperature)
    return found


def _run(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: list[TaskData],
    loaded: list[LoadedDrafter],
    settings: Settings,
    output: Path,
) -> Evaluation:
    """Record what is missing, with progress, and sum up."""
    output.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(output / LOCK_FILE, timeout=0), progress_bar() as progress:
            ready = warm_up(target, tokenizer, data, loaded, settings)
            for entry in ready:
                if entry.refusal is not None:
                    errors.print(f"{entry.name} does not apply: {entry.refusal}", markup=False, soft_wrap=True)
            num_active = sum(entry.refusal is None for entry in ready)
            task = progress.add_task("Answers", total=num_active * num_answers(data, settings))
            runs = evaluate(
                target, tokenizer, data, ready, settings, output, on_progress=lambda: progress.advance(task)
            )
    except Timeout as error:
        raise RuntimeError(
            f"One evaluation at a time can write to a folder, and another is writing to {str(output)!r}. Wait for it, "
            "or choose another output."
        ) from error
    return summarize_runs(runs, settings, data, ready)


def _print_evaluation(evaluation: Evaluation) -> None:
    for decoding in dict.fromkeys(entry.decoding for entry in evaluation.figures):
        table = Table(title=f"{evaluation.settings.dtype}, {decoding}", box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("task", no_wrap=True)
        table.add_column("drafter", no_wrap=True)
        for heading in ("accepted\nlength", "verified\n/token", "speed-up\n[95 %]"):
            table.add_column(heading, justify="right", no_wrap=True)
        for entry in evaluation.figures:
            if entry.decoding == decoding:
                table.add_row(
                    escape(f"{entry.task} ({entry.num_questions})"),
                    escape(entry.drafter),
                    f"{entry.accepted_length.value:.2f}",
                    f"{entry.verified_per_token.value:.2f}",
                    escape(interval_text(entry.speedup)) if entry.drafter != PLAIN else "1",
                )
        console.print(table)
    for sentence in evaluation.sentences():
        console.print(sentence, highlight=False, markup=False)
    if evaluation.different:
        console.print(
            f"Greedy texts that differ from plain generation's: {len(evaluation.different)}, see the report.",
            highlight=False,
        )
