# SPDX-License-Identifier: Apache-2.0
"""`dspark-hf doctor`: what is wrong with a pair, and what it gains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..common.model_sources import find_source
from ..common.prompts import read_prompts
from ..common.thinking import check_thinking
from ..default_pair import default_draft_path
from ..doctor import FAULT, Diagnosis, Finding, diagnose
from ..drafts.modeling_dspark import DSparkDraftModel
from ..export.convert import parse_stated
from .loading import check_prompting, load_draft, load_target
from .options import Device, Dtype, Json, MaxNewTokens, Raw, TrustRemoteCode, console, errors, exit_on_error


TargetName = Annotated[str | None, typer.Argument(help="Target model: Hub id or folder. Default: the default pair.")]
DraftName = Annotated[str | None, typer.Argument(help="Its DSpark draft: Hub id or folder.")]
Prompts = Annotated[
    Path | None, typer.Option("--prompts", help="File of prompts: .txt, .json or .jsonl. Default: built-in ones.")
]
EnableThinking = Annotated[
    bool | None,
    typer.Option("--enable-thinking/--no-thinking", help="The chat template's thinking switch, as you will use it."),
]
Stated = Annotated[
    list[str] | None,
    typer.Option("--set", help="What the draft's config leaves open: NAME=VALUE, such as sample_from_anchor=true."),
]
Thorough = Annotated[
    bool, typer.Option("--thorough", help="Try other readings of the checkpoint even where drafts are accepted.")
]
Speed = Annotated[bool, typer.Option("--speed/--no-speed", help="Whether to measure the speed.")]


def doctor_command(
    target: TargetName = None,
    draft: DraftName = None,
    prompts: Prompts = None,
    dtype: Dtype = "bfloat16",
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    max_new_tokens: MaxNewTokens = 48,
    enable_thinking: EnableThinking = None,
    raw: Raw = False,
    stated: Stated = None,
    thorough: Thorough = False,
    speed: Speed = True,
    json_output: Json = False,
) -> None:
    """Check a pair: what is wrong, what it gains here. Exit status 0: no fault, 1: faults, 2: could not run."""
    status = errors if json_output else console
    with exit_on_error(), status.status("Loading the models...") as spinner:
        if target is not None and draft is None:
            raise ValueError("A draft fits one target only: name the draft after the target.")
        check_prompting(raw, enable_thinking)
        chosen = read_prompts(prompts) if prompts is not None else None
        draft_name = find_source(draft) if draft is not None else str(default_draft_path())
        model, tokenizer = load_target(target, dtype, device, trust_remote_code)
        check_thinking(tokenizer, enable_thinking)
        loaded = _load_draft(draft_name, stated or [], dtype, device)
        if isinstance(loaded, Finding):
            diagnosis = Diagnosis(model.config.name_or_path, draft_name, (loaded,))
        else:
            diagnosis = diagnose(
                model,
                loaded,
                tokenizer,
                chosen,
                max_new_tokens,
                enable_thinking,
                raw,
                thorough,
                speed,
                on_progress=lambda step: spinner.update(f"{step}..."),
            )
    if json_output:
        typer.echo(json.dumps(diagnosis.to_dict(), indent=2, allow_nan=False))
    else:
        print_diagnosis(diagnosis, console)
    raise typer.Exit(diagnosis.exit_status)


def print_diagnosis(diagnosis: Diagnosis, output: Console) -> None:
    """The report for people."""

    def say(text: str, style: str | None = None) -> None:
        output.print(text, style=style, highlight=False, markup=False)

    say(f"Target: {diagnosis.target}")
    say(f"Draft:  {diagnosis.draft}\n")
    for sentence in diagnosis.sentences():
        say(sentence)
    for finding in diagnosis.findings:
        is_fault = finding.severity == FAULT
        say(f"\n{'Fault' if is_fault else 'Advice'} ({finding.code})", "bold red" if is_fault else "bold yellow")
        say(finding.sentence)
        say(finding.remedy)
    if not diagnosis.faults:
        say("\nNo fault was found.", "bold green")
    say("\nA draft for your texts is trained with:")
    for command in diagnosis.training_commands:
        output.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)


def _load_draft(name: str, stated: list[str], dtype: str, device: str | None) -> DSparkDraftModel | Finding:
    """The draft; or what is wrong with a checkpoint that is there and cannot be loaded."""
    fields = parse_stated(stated)
    try:
        return load_draft(name, dtype, device, **fields)
    except (ValueError, NotImplementedError) as error:
        return Finding(
            "draft_not_loadable",
            FAULT,
            str(error),
            "Repair the checkpoint as the message says. Set what its config leaves open with `--set NAME=VALUE`.",
        )
