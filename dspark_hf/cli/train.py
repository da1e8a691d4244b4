# SPDX-License-Identifier: Apache-2.0
"""`dspark-hf train`."""

from __future__ import annotations

import transformers
import typer

from ..common.model_sources import find_source
from ..common.path_checks import check_input_file, check_output_folder
from ..common.thinking import check_thinking
from .loading import load_target
from .options import (
    Device,
    Dtype,
    Target,
    TrustRemoteCode,
    console,
    errors,
    exit_on_error,
)


def train_command(
    context: typer.Context,
    target: Target = None,
    dtype: Dtype = "bfloat16",
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Train a draft on answered conversations; run it again to go on after an interruption."""
    # The Trainer takes seconds to import.
    from ..training.arguments import DSparkTrainingArguments
    from ..training.run import DataArguments, DraftArguments, own_process_group, train_draft

    with exit_on_error(), own_process_group():
        parser = transformers.HfArgumentParser(
            (DataArguments, DraftArguments, DSparkTrainingArguments),
            prog="dspark-hf train",
            usage="dspark-hf train --data FILE [FILE ...] --output_dir FOLDER [options]",  # its own has pages
        )
        data_arguments, draft_arguments, arguments, unknown = parser.parse_args_into_dataclasses(
            context.args, return_remaining_strings=True
        )
        if unknown:
            raise ValueError(
                f"`dspark-hf train` has no {' '.join(unknown)}. Its options are those of docs/training.md and of "
                "transformers' TrainingArguments."
            )
        for path in data_arguments.data:
            check_input_file(path, "--data")
        check_output_folder(arguments.output_dir, "--output_dir")
        check_output_folder(data_arguments.feature_cache, "--feature_cache")
        if draft_arguments.init_from is not None:
            draft_arguments.init_from = find_source(draft_arguments.init_from)
        model, tokenizer = load_target(
            target, dtype, str(arguments.device) if device is None else device, trust_remote_code
        )
        check_thinking(tokenizer, data_arguments.enable_thinking)
        _, figures = train_draft(model, tokenizer, data_arguments, draft_arguments, arguments)
    if arguments.process_index == 0:
        errors.print(f"The draft is in {arguments.output_dir}.", markup=False, highlight=False, soft_wrap=True)
        console.print_json(data=figures)
