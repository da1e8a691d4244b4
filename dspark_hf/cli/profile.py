# SPDX-License-Identifier: Apache-2.0
"""`dspark-hf profile`: round times of a pair on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from transformers import PreTrainedModel

from ..common.path_checks import check_output_file
from ..drafts.modeling_dspark import DSparkDraftModel
from ..profiling.profile import RoundTimeProfile, measure_profile, profile_path
from .loading import load_pair
from .options import Device, Draft, Dtype, Target, TrustRemoteCode, console, errors, exit_on_error, progress_bar


def profile_command(
    target: Target = None,
    draft: Draft = None,
    dtype: Dtype = "bfloat16",
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    context_lengths: Annotated[
        str, typer.Option("--context-lengths", help="Tokens of context, with commas: 128,1024.")
    ] = "256",
    num_requests: Annotated[int, typer.Option("--num-requests", min=1, help="Texts of a batch; a power of two.")] = 1,
    repeats: Annotated[int, typer.Option("--repeats", min=2, help="Measurements per figure; medians are kept.")] = 15,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write. Default: where `generate` looks for it.")
    ] = None,
) -> None:
    """Measure how long rounds take on this machine; `generate` weighs drafts against these times."""
    with exit_on_error():
        lengths = _parse_lengths(context_lengths)
        if num_requests & (num_requests - 1):  # `generate` looks for powers of two
            raise ValueError(f"`--num-requests` must be a power of two, got {num_requests}. Take the next larger one.")
        check_output_file(output, "--output")
        with errors.status("Loading the models..."):
            model, draft_model, _ = load_pair(target, draft, dtype, device, trust_remote_code)
        with progress_bar() as progress:
            task = progress.add_task("Timing rounds", total=(repeats + 1) * len(set(lengths)))
            measured = _measure(model, draft_model, lengths, repeats, lambda: progress.advance(task), num_requests)
        _print_profile(measured)  # first: a folder that cannot be written does not cost the figures
        path = output if output is not None else profile_path(model, draft_model, num_requests)
        measured.save(path)
    console.print(f"Written to {path}.", markup=False, highlight=False, soft_wrap=True)


def _measure(
    model: PreTrainedModel,
    draft: DSparkDraftModel,
    lengths: list[int],
    repeats: int,
    on_progress: Callable[[], None],
    num_requests: int,
) -> RoundTimeProfile:
    """The profile; what a target's own code may raise is put into words, too."""
    try:
        return measure_profile(model, draft, lengths, repeats, on_progress=on_progress, num_requests=num_requests)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, StopIteration) as error:
        raise RuntimeError(f"{type(model).__name__} and its draft could not be measured: {error!r}.") from error


def _parse_lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"`--context-lengths` must be numbers with commas between them, got {text!r}.") from error


def _print_profile(profile: RoundTimeProfile) -> None:
    found = profile.fingerprint
    num_requests = found.get("num_requests", 1)
    threads = f", {found['num_threads']} thread(s)" if found["num_threads"] is not None else ""
    console.print(f"{found['device']}{threads}, {found['dtype']}", highlight=False)
    headings = ("tokens\nverified", "verify\nms", "quartiles\nms", "drafting\nms", "round\nms", "plain\nsteps")
    for measured in profile.measured:
        curve = measured.curve
        title = f"Context of {measured.context_length} tokens, {measured.num_repeats} repeats"
        table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        for b, verify_s, (low, high) in zip(curve.batch_tokens, curve.verify_s, measured.verify_spread_s, strict=True):
            # A plain step drafts nothing.
            draft_s = curve.for_requests(num_requests).draft_s if b > num_requests else 0.0
            table.add_row(
                str(b),
                f"{1000 * verify_s:.1f}",
                f"{1000 * low:.1f}..{1000 * high:.1f}",
                f"{1000 * draft_s:.1f}" if draft_s else "-",
                f"{1000 * (draft_s + verify_s):.1f}",
                f"{(draft_s + verify_s) / curve.verify(num_requests):.2f}",
            )
        console.print(table)
        low, high = measured.draft_spread_s
        console.print(f"Drafting: quartiles {1000 * low:.1f}..{1000 * high:.1f} ms.\n", highlight=False)
