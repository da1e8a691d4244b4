# SPDX-License-Identifier: Apache-2.0
"""`dspark-hf calibrate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..common.decoding_options import sampling_arguments
from ..common.path_checks import check_output_file, check_output_folder
from ..common.plots import check_can_plot
from ..common.prompts import read_prompts
from ..evaluation.calibrate import calibrate, check_can_save, num_calibration_answers, save_calibration
from ..evaluation.reliability_plot import save_reliability_plot
from ..scheduling.calibration import CalibrationReport
from .loading import check_prompting, load_pair, prompting_tokenizer
from .options import (
    Device,
    Draft,
    Dtype,
    Json,
    MaxNewTokens,
    Raw,
    Seed,
    Target,
    Temperature,
    Thinking,
    TopP,
    TrustRemoteCode,
    choose_prompts,
    console,
    errors,
    exit_on_error,
    progress_bar,
)


Prompts = Annotated[
    Path | None,
    typer.Option("--prompts", help="File of prompts, half of them to check on. Default: the built-in ones."),
]
CheckPrompts = Annotated[Path | None, typer.Option("--check-prompts", help="File of other prompts to check on.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Folder for a copy of the draft. Default: its own config.")
]
Plot = Annotated[Path | None, typer.Option("--plot", help="Reliability diagram to write, .png or .svg (extra: eval).")]
NumAnswers = Annotated[int, typer.Option("--num-answers", min=1, help="Answers per prompt, when sampling.")]


def calibrate_command(
    prompts: Prompts = None,
    check_prompts: CheckPrompts = None,
    output: Output = None,
    plot: Plot = None,
    target: Target = None,
    draft: Draft = None,
    dtype: Dtype = "bfloat16",
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    max_new_tokens: MaxNewTokens = 96,
    num_answers: NumAnswers = 1,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    raw: Raw = False,
    enable_thinking: Thinking = None,
    json_output: Json = False,
) -> None:
    """Make a draft's confidences mean what they say, and keep that in its config."""
    with exit_on_error():
        check_prompting(raw, enable_thinking)
        chosen, sampling = choose_prompts(None, prompts), sampling_arguments(temperature, top_p)
        check = read_prompts(check_prompts) if check_prompts is not None else None
        total = num_calibration_answers(chosen, check, num_answers)
        if plot is not None:
            check_can_plot(plot, "reliability diagram")
        check_output_file(plot, "--plot")
        check_output_folder(output, "--output")
        with errors.status("Loading the models..."):
            model, draft_model, tokenizer = load_pair(target, draft, dtype, device, trust_remote_code)
        tokenizer = prompting_tokenizer(tokenizer, draft_model, enable_thinking, raw)
        if saves := output is not None or draft is not None:  # the default draft belongs to the package
            check_can_save(draft_model, output)
        torch.manual_seed(seed)
        with progress_bar() as progress:
            task = progress.add_task("Answers", total=total)
            report = calibrate(
                model,
                draft_model,
                tokenizer,
                chosen,
                check_prompts=check,
                max_new_tokens=max_new_tokens,
                num_answers=num_answers,
                raw=raw,
                generate_arguments=sampling,
                prompts_name=prompts.name if prompts is not None else "built-in",
                on_progress=lambda: progress.advance(task),
            )
        folder = save_calibration(draft_model, output) if saves else None
        if plot is not None:
            save_reliability_plot(report, plot)
    if json_output:
        typer.echo(json.dumps(report.to_dict(), indent=2, allow_nan=False))
    else:
        _print_calibration(report)
    errors.print(
        f"Saved in {folder}." if saves else "Nothing was saved: pass --output for a copy of the draft.", markup=False
    )


def _print_calibration(report: CalibrationReport) -> None:
    table = Table(
        title=f"Prefix survival, fitted to {report.num_rounds} blocks, judged on {report.num_check_rounds} others",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    headings = ("slot", "tempe-\nrature", "ECE\nbefore", "ECE\nafter", "noise\nfloor")
    for heading in (*headings, "AUC\nbefore", "AUC\nafter", "Brier\nbefore", "Brier\nafter"):
        table.add_column(heading, justify="right", no_wrap=True)
    for slot, (before, after) in enumerate(zip(report.before, report.after, strict=True)):
        table.add_row(
            str(slot),
            f"{report.temperatures[slot]:.2f}",
            f"{before.expected_calibration_error:.3f}",
            f"{after.expected_calibration_error:.3f}",
            f"{after.noise_floor:.3f}",
            f"{before.area_under_curve:.3f}",
            f"{after.area_under_curve:.3f}",
            f"{before.brier_score:.3f}",
            f"{after.brier_score:.3f}",
        )
    console.print(table)
    console.print(f"Mean ECE {report.mean_error_before:.3f} before and {report.mean_error_after:.3f} after.")
