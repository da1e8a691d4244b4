# SPDX-License-Identifier: Apache-2.0
"""`dspark-hf prepare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..common.path_checks import check_input_file, check_output_file
from ..common.thinking import check_thinking
from .loading import load_target
from .options import (
    Device,
    Dtype,
    MaxNewTokens,
    Target,
    TrustRemoteCode,
    console,
    exit_on_error,
    progress_bar,
)


# Without a value, they are those of `SamplingSettings` here, and a server's own there.
Temperature = Annotated[
    float | None, typer.Option("--temperature", min=0.0, help="0 decodes greedily. Default: 0.7; a server's own.")
]
TopK = Annotated[
    int | None, typer.Option("--top-k", min=1, help="Tokens to choose from. Default: 20; a server's own.")
]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", min=0.0, max=1.0, help="Nucleus in the top k. Default: 0.8; a server's own."),
]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", envvar="DSPARK_HF_API_KEY", help="The server's key, if it has one."),
]
AskRefused = Annotated[bool, typer.Option("--ask-refused", help="Ask again what the server refused in earlier runs.")]
EnableThinking = Annotated[
    bool | None, typer.Option("--enable-thinking/--no-thinking", help="The chat template's thinking switch.")
]
MaxPromptTokens = Annotated[int, typer.Option("--max-prompt-tokens", min=1, help="Longer prompts are skipped.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Random seed. Default: 0; a server's own.")]


Output = Annotated[Path, typer.Option("--output", "-o", help="JSON Lines file to write; continued if it exists.")]
Prompts = Annotated[
    list[Path] | None, typer.Option("--prompts", help="JSON Lines files of prompts (`messages` or `prompt`).")
]
Dataset = Annotated[
    str | None, typer.Option("--dataset", help="Or a data set of the Hub with such a column (extra: train).")
]
SelfPrompts = Annotated[int, typer.Option("--self-prompts", min=0, help="Or this many prompts by the target itself.")]
SelfPromptStart = Annotated[
    list[str] | None, typer.Option("--self-prompt-start", help="Words such prompts begin with; repeatable.")
]
Server = Annotated[
    str | None, typer.Option("--server", help="Base URL of an OpenAI-compatible server that runs the target.")
]
Concurrency = Annotated[int, typer.Option("--concurrency", min=1, help="Requests in flight at the server.")]
Rows = Annotated[int, typer.Option("--rows", min=1, help="Answers written at once on this machine.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Most prompts to answer.")]


def prepare_command(
    output: Output,
    prompts: Prompts = None,
    dataset: Dataset = None,
    self_prompts: SelfPrompts = 0,
    self_prompt_start: SelfPromptStart = None,
    target: Target = None,
    dtype: Dtype = "bfloat16",
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    server: Server = None,
    concurrency: Concurrency = 16,
    api_key: ApiKey = None,
    ask_refused: AskRefused = False,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    enable_thinking: EnableThinking = None,
    rows: Rows = 64,
    limit: Limit = None,
    max_prompt_tokens: MaxPromptTokens = 512,
) -> None:
    """Let the target answer prompts: the data to train its draft on."""
    from ..training.prepare import PrepareJob
    from ..training.sampling import SamplingSettings  # the Trainer comes with it, in seconds

    with exit_on_error():
        for path in prompts or ():
            check_input_file(path, "--prompts")
        check_output_file(output, "--output")
        if server is not None and not server.startswith(("http://", "https://")):
            raise ValueError(f"`--server` must begin with http:// or https://, got {server!r}.")
        chosen: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        given = {name: value for name, value in chosen.items() if value is not None or server is not None}
        sampling = SamplingSettings(max_new_tokens, **given)
        with progress_bar(transient=False) as progress:
            job = PrepareJob(
                output=output,
                prompt_files=tuple(prompts or ()),
                dataset=dataset,
                num_self_prompts=self_prompts,
                self_prompt_starts=tuple(self_prompt_start or ("",)),
                sampling=sampling,
                enable_thinking=enable_thinking,
                num_rows=rows,
                limit=limit,
                max_prompt_tokens=max_prompt_tokens,
            )
            if server is not None:
                if target is None:
                    raise ValueError("`--server` needs `--target`: the name of the target at the server.")
                added = job.run_at_server(server, target, concurrency, progress, api_key, ask_refused)
            else:
                model, tokenizer = load_target(target, dtype, device, trust_remote_code)
                check_thinking(tokenizer, enable_thinking)
                added = job.run_here(model, tokenizer, progress)
    console.print(f"{added} rows added to {output}.", markup=False)
