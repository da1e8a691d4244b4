# SPDX-License-Identifier: Apache-2.0
"""The command line, `dspark-hf`: argument parsing and printing only."""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch
import transformers
import typer

from .._version import __version__
from .calibrate import calibrate_command
from .compare import compare_command
from .convert import convert_command
from .demo import demo_command
from .doctor import doctor_command
from .evaluate import eval_command
from .generate import generate_command
from .prepare import prepare_command
from .profile import profile_command
from .train import train_command


app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="DSpark speculative decoding for Hugging Face transformers."
)
# Options are spelled with hyphens or, as transformers does, with underscores.
SPELLING = {"token_normalize_func": lambda name: name.replace("_", "-")}
COMMANDS: dict[str, Callable[..., None]] = {
    "compare": compare_command,
    "generate": generate_command,
    "eval": eval_command,
    "prepare": prepare_command,
    "calibrate": calibrate_command,
    "profile": profile_command,
    "doctor": doctor_command,
    "demo": demo_command,
    "convert": convert_command,
}
for name, command in COMMANDS.items():
    app.command(name, context_settings=SPELLING)(command)
app.command(
    "train",
    context_settings={**SPELLING, "allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Further options are those of transformers' TrainingArguments, for example --output_dir, "
    "--num_train_epochs, --per_device_train_batch_size, --bf16.",
)(train_command)


@app.command()
def env() -> None:
    """Versions and devices, to paste into a bug report."""
    typer.echo(f"dspark_hf: {__version__}")
    typer.echo(f"transformers: {transformers.__version__}")
    typer.echo(f"torch: {torch.__version__} ({torch.get_num_threads()} threads, CUDA {torch.version.cuda or 'no'})")
    typer.echo(f"python: {platform.python_version()}, {platform.platform()}")
