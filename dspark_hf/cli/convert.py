# SPDX-License-Identifier: Apache-2.0
"""`dspark-hf convert`: a draft in the layout of another engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import transformers
import typer

from ..common.path_checks import check_input_file
from ..export.convert import convert_draft, parse_stated
from ..profiling.profile import RoundTimeProfile
from .options import TrustRemoteCode, console, exit_on_error


def convert_command(
    draft: Annotated[str, typer.Argument(help="Draft to convert: Hub id or folder, in any format that is read.")],
    to: Annotated[str, typer.Option("--to", help="Format to write: dspark (ours), deepspec or speculators.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write: new, or empty.")],
    target: Annotated[
        str | None, typer.Option("--target", help="The draft's target: Hub id or folder. Needed by other engines.")
    ] = None,
    stated: Annotated[
        list[str] | None,
        typer.Option("--set", help="What the config leaves open: NAME=VALUE, such as sample_from_anchor=true."),
    ] = None,
    round_times: Annotated[
        Path | None,
        typer.Option("--round-times", help="File of `dspark-hf profile`, for engines that schedule by it."),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write a draft in the layout that another engine reads."""
    transformers.logging.disable_progress_bar()
    with exit_on_error():
        check_input_file(round_times, "--round-times")
        curve = RoundTimeProfile.load(round_times).curves[0][1] if round_times is not None else None
        written = convert_draft(draft, to, output, target, parse_stated(stated or []), curve, trust_remote_code)
    console.print(f"{written.folder}: {to}, every tensor as it was.", markup=False, highlight=False)
    for name in written.lost:
        console.print(f"Not kept by this format: {name}", highlight=False)
    for path in written.engine_files:
        console.print(f"For other engines: {path}", markup=False, highlight=False)
