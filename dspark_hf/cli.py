# SPDX-License-Identifier: Apache-2.0
"""The command line, `dspark-hf`: argument parsing and printing only."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from . import __version__
from .comparison import ComparisonSummary, PromptComparison, compare, encode_prompt, summarize
from .default_pair import ensure_default_target, load_default_pair
from .metrics import collect_rounds
from .modeling_dspark import DSparkDraftModel
from .prepare_job import PrepareJob
from .profiling import RoundTimeProfile, measure_profile, profile_path
from .prompts import BUILTIN_PROMPTS, Prompt, read_prompts
from .row_generation import SamplingSettings


app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="DSpark speculative decoding for Hugging Face transformers."
)
console = Console()
errors = Console(stderr=True)

Target = Annotated[
    str | None, typer.Option("--target", help="Target model: Hub id or folder. Default: the default pair.")
]
Draft = Annotated[str | None, typer.Option("--draft", help="Its DSpark draft: Hub id or folder.")]
Dtype = Annotated[str, typer.Option("--dtype", help="Weights of both models: bfloat16, float16 or float32.")]
Device = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda, cuda:1, mps, ... Default: cuda if there is one.")
]
MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", "--max_new_tokens", min=1, help="Longest answer, in tokens.")
]
NumAssistantTokens = Annotated[
    int | None,
    typer.Option(
        "--num-assistant-tokens", "--num_assistant_tokens", help="Most drafts sent per round. Default: the block."
    ),
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
        help='"hardware" (default), "confidence", "lookahead", "capacity" or "constant".',
    ),
]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 decodes greedily.")]
TopP = Annotated[float, typer.Option("--top-p", "--top_p", min=0.0, max=1.0, help="Nucleus, when sampling.")]
Seed = Annotated[int, typer.Option("--seed", help="Random seed, when sampling.")]
Raw = Annotated[bool, typer.Option("--raw", help="Continue the text itself, without the chat template.")]


@contextlib.contextmanager
def _errors_in_words() -> Iterator[None]:
    """Known errors end the command with their message and exit status 2, without a traceback."""
    try:
        yield
    except (ValueError, TypeError, OSError, NotImplementedError, RuntimeError) as error:
        errors.print(f"[bold red]Error:[/] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error


def _load_target(target: str | None, dtype: str, device: str | None) -> tuple:
    transformers.logging.disable_progress_bar()
    name = target if target is not None else ensure_default_target()
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=_dtype(dtype))
    return model.to(_device(device)).eval(), tokenizer


def _dtype(name: str) -> torch.dtype:
    if name not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"`--dtype` must be bfloat16, float16 or float32, got {name!r}.")
    return getattr(torch, name)


def _device(name: str | None) -> str:
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


def _load(target: str | None, draft: str | None, dtype: str, device: str | None) -> tuple:
    transformers.logging.disable_progress_bar()
    if (target is None) != (draft is None):
        given, missing = ("--target", "--draft") if draft is None else ("--draft", "--target")
        raise ValueError(f"A draft fits one target only: `{given}` needs `{missing}` as well.")
    if target is None:
        return load_default_pair(dtype=_dtype(dtype), device=_device(device))
    model, tokenizer = _load_target(target, dtype, device)
    draft_model = DSparkDraftModel.from_pretrained(draft, dtype=_dtype(dtype))
    return model, draft_model.to(_device(device)).eval(), tokenizer


def _set_knobs(draft: DSparkDraftModel, num_tokens: int | None, threshold: float | None, schedule: str | None) -> None:
    """Options that were given; what was saved with the draft stays otherwise."""
    chosen = {
        "num_assistant_tokens": num_tokens,
        "assistant_confidence_threshold": threshold,
        "num_assistant_tokens_schedule": schedule,
    }
    for name, value in chosen.items():
        if value is not None:
            setattr(draft.generation_config, name, value)


def _sampling_arguments(temperature: float, top_p: float) -> dict[str, Any]:
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}


@app.command("compare")
def compare_command(
    text: Annotated[
        list[str] | None, typer.Argument(help="Prompts. Default: 12 built-in ones (math, code, chat).")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="File of prompts: .txt, .json or .jsonl (prompt, messages or turns)."),
    ] = None,
    target: Target = None,
    draft: Draft = None,
    dtype: Dtype = "bfloat16",
    device: Device = None,
    max_new_tokens: MaxNewTokens = 96,
    num_assistant_tokens: NumAssistantTokens = None,
    assistant_confidence_threshold: Threshold = None,
    num_assistant_tokens_schedule: Schedule = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    raw: Raw = False,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Runs per prompt; medians are reported.")] = 1,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Plain generation against DSpark: speed, accepted length, and whether the texts are the same."""
    with _errors_in_words():
        chosen = _choose_prompts(text, prompts)
        status = errors if json_output else console
        with status.status("Loading the models (the default target is fetched and converted once)..."):
            model, draft_model, tokenizer = _load(target, draft, dtype, device)
        _set_knobs(draft_model, num_assistant_tokens, assistant_confidence_threshold, num_assistant_tokens_schedule)
        torch.manual_seed(seed)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=errors, transient=True) as progress:
            task = progress.add_task("Generating with and without DSpark", total=2 * repeats * len(chosen))
            results = compare(
                model,
                draft_model,
                tokenizer,
                chosen,
                max_new_tokens=max_new_tokens,
                repeats=repeats,
                raw=raw,
                generate_arguments=_sampling_arguments(temperature, top_p),
                on_progress=lambda: progress.advance(task),
            )
    if json_output:
        typer.echo(json.dumps(_as_json(results, dtype, str(model.device), temperature), indent=2))
    else:
        _print_comparison(results, dtype, temperature)


@app.command()
def generate(
    text: Annotated[str, typer.Argument(help="The user's turn, or the text to continue with --raw.")],
    target: Target = None,
    draft: Draft = None,
    dtype: Dtype = "bfloat16",
    device: Device = None,
    max_new_tokens: MaxNewTokens = 256,
    num_assistant_tokens: NumAssistantTokens = None,
    assistant_confidence_threshold: Threshold = None,
    num_assistant_tokens_schedule: Schedule = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    raw: Raw = False,
    plain: Annotated[bool, typer.Option("--plain", help="Do not use the draft.")] = False,
) -> None:
    """Stream one answer to the terminal; the figures go to standard error."""
    with _errors_in_words():
        with errors.status("Loading the models..."):
            model, draft_model, tokenizer = _load(target, draft, dtype, device)
        _set_knobs(draft_model, num_assistant_tokens, assistant_confidence_threshold, num_assistant_tokens_schedule)
        torch.manual_seed(seed)
        inputs = {name: value.to(model.device) for name, value in encode_prompt(tokenizer, text, raw).items()}
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        assistant = {} if plain else {"assistant_model": draft_model}
        with collect_rounds() as stats:
            model.generate(
                **inputs,
                **assistant,
                **_sampling_arguments(temperature, top_p),
                max_new_tokens=max_new_tokens,
                streamer=streamer,
            )
    if stats.num_rounds:
        rate, verified = stats.num_committed / stats.round_s, stats.num_verified / stats.num_committed
        errors.print(
            f"[dim]{rate:.1f} tokens/s after the prefill, accepted length {stats.accepted_length:.2f}, {verified:.2f} "
            "tokens verified per token[/]",
            highlight=False,
        )


@app.command()
def prepare(
    output: Annotated[Path, typer.Option("--output", "-o", help="JSON Lines file to write; continued if it exists.")],
    prompts: Annotated[
        list[Path] | None, typer.Option("--prompts", help="JSON Lines files of prompts (`messages` or `prompt`).")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option("--dataset", help="Or a data set of the Hub with such a column (extra: train).")
    ] = None,
    self_prompts: Annotated[
        int, typer.Option("--self-prompts", "--self_prompts", min=0, help="Or so many prompts by the target itself.")
    ] = 0,
    self_prompt_start: Annotated[
        list[str] | None,
        typer.Option("--self-prompt-start", "--self_prompt_start", help="Words such prompts begin with; repeatable."),
    ] = None,
    target: Target = None,
    dtype: Dtype = "bfloat16",
    device: Device = None,
    server: Annotated[
        str | None, typer.Option("--server", help="Base URL of an OpenAI-compatible server that runs the target.")
    ] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Requests in flight at the server.")] = 16,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.7,
    top_k: Annotated[int, typer.Option("--top-k", "--top_k", min=1, help="Tokens to choose from.")] = 20,
    top_p: TopP = 0.8,
    seed: Seed = 0,
    enable_thinking: Annotated[
        bool | None, typer.Option("--enable-thinking/--no-thinking", help="The chat template's thinking switch.")
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Answers written at once on this machine.")] = 64,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Answer so many prompts at most.")] = None,
    max_prompt_tokens: Annotated[
        int,
        typer.Option("--max-prompt-tokens", "--max_prompt_tokens", min=1, help="Longer prompts are left out."),
    ] = 512,
) -> None:
    """Let the target answer prompts: the data to train its draft on."""
    with _errors_in_words():
        sampling = SamplingSettings(max_new_tokens, temperature, top_k, top_p, seed)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=errors) as progress:
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
                added = job.run_at_server(server, target, concurrency, progress)
            else:
                added = job.run_here(*_load_target(target, dtype, device), progress)
    console.print(f"{added} rows added to {output}.")


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Further options are those of transformers' TrainingArguments, for example --output_dir, "
    "--num_train_epochs, --per_device_train_batch_size, --bf16.",
)
def train(
    context: typer.Context,
    target: Target = None,
    dtype: Dtype = "bfloat16",
    device: Device = None,
) -> None:
    """Train a draft on answered conversations; run it again to go on after an interruption."""
    # The Trainer takes seconds to import.
    from .train_draft import DataArguments, DraftArguments, own_process_group, train_draft
    from .training import DSparkTrainingArguments

    with _errors_in_words(), own_process_group():
        parser = transformers.HfArgumentParser((DataArguments, DraftArguments, DSparkTrainingArguments))
        data_arguments, draft_arguments, arguments = parser.parse_args_into_dataclasses(context.args)
        model, tokenizer = _load_target(target, dtype, device or str(arguments.device))
        _, figures = train_draft(model, tokenizer, data_arguments, draft_arguments, arguments)
    if arguments.process_index == 0:
        console.print_json(data=figures)


@app.command()
def profile(
    target: Target = None,
    draft: Draft = None,
    dtype: Dtype = "bfloat16",
    device: Device = None,
    context_lengths: Annotated[
        str, typer.Option("--context-lengths", "--context_lengths", help="Tokens of context, with commas: 128,1024.")
    ] = "256",
    repeats: Annotated[int, typer.Option("--repeats", min=2, help="Measurements per figure; medians are kept.")] = 15,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write. Default: where `generate` looks for it.")
    ] = None,
) -> None:
    """Measure how long rounds take on this machine; `generate` weighs drafts against these times."""
    with _errors_in_words():
        lengths = _parse_lengths(context_lengths)
        with errors.status("Loading the models..."):
            model, draft_model, _ = _load(target, draft, dtype, device)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=errors, transient=True) as progress:
            task = progress.add_task("Timing rounds", total=(repeats + 1) * len(set(lengths)))
            measured = measure_profile(
                model, draft_model, lengths, repeats, on_progress=lambda: progress.advance(task)
            )
        _print_profile(measured)  # first: a folder that cannot be written does not cost the figures
        path = output if output is not None else profile_path(model, draft_model)
        measured.save(path)
    console.print(f"Written to {path}.", highlight=False, soft_wrap=True)


@app.command()
def env() -> None:
    """Versions and devices, to paste into a bug report."""
    typer.echo(f"dspark_hf: {__version__}")
    typer.echo(f"transformers: {transformers.__version__}")
    typer.echo(f"torch: {torch.__version__} ({torch.get_num_threads()} threads, CUDA {torch.version.cuda or 'no'})")
    typer.echo(f"python: {platform.python_version()}, {platform.platform()}")


def _parse_lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"`--context-lengths` must be numbers with commas between them, got {text!r}.") from error


def _print_profile(profile: RoundTimeProfile) -> None:
    found = profile.fingerprint
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
            draft_s = curve.draft_s if b > 1 else 0.0  # a plain step drafts nothing
            table.add_row(
                str(b),
                f"{1000 * verify_s:.1f}",
                f"{1000 * low:.1f}..{1000 * high:.1f}",
                f"{1000 * draft_s:.1f}" if draft_s else "-",
                f"{1000 * (draft_s + verify_s):.1f}",
                f"{(draft_s + verify_s) / curve.plain_s:.2f}",
            )
        console.print(table)
        low, high = measured.draft_spread_s
        console.print(f"Drafting: quartiles {1000 * low:.1f}..{1000 * high:.1f} ms.\n", highlight=False)


def _choose_prompts(text: list[str] | None, path: Path | None) -> list[Prompt]:
    if text and path is not None:
        raise ValueError("Prompts come from the command line or from `--prompts`, got both. Leave one away.")
    if text:
        return [Prompt("yours", prompt) for prompt in text]
    return read_prompts(path) if path is not None else list(BUILTIN_PROMPTS)


def _summaries(results: list[PromptComparison]) -> list[ComparisonSummary]:
    domains = list(dict.fromkeys(result.prompt.domain for result in results))
    pools = [summarize([r for r in results if r.prompt.domain == domain], domain) for domain in domains]
    return pools if len(pools) == 1 else [*pools, summarize(results)]


def _print_comparison(results: list[PromptComparison], dtype: str, temperature: float) -> None:
    decoding = "greedy" if temperature == 0 else f"sampled at temperature {temperature:g}"
    table = Table(title=f"Plain generation and DSpark, {dtype}, {decoding}", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("prompts", no_wrap=True)
    headings = (
        "plain\ntok/s",
        "DSpark\ntok/s",
        "speed-\nup",
        "accepted\nlength",
        "drafts\nsent",
        "verified\n/token",
    )
    for heading in (*headings, "same\ntext"):
        table.add_column(heading, justify="right", no_wrap=True)
    for pool in _summaries(results):
        table.add_row(
            f"{pool.name} ({pool.num_prompts})",
            f"{pool.plain_tokens_per_s:.1f}",
            f"{pool.dspark_tokens_per_s:.1f}",
            f"{pool.speedup:.2f}x",
            f"{pool.accepted_length:.2f}",
            f"{pool.verify_length:.2f}",
            f"{pool.verified_per_token:.2f}",
            f"{pool.num_identical}/{pool.num_prompts}" if temperature == 0 else "-",
        )
    console.print(table)
    if temperature == 0:
        _print_differences(results, dtype)


def _print_differences(results: list[PromptComparison], dtype: str) -> None:
    different = [result for result in results if not result.identical]
    if not different:
        console.print("All texts are the same, token by token.")
        return
    table = Table(title="Where the greedy texts part", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("prompt", no_wrap=True)
    for heading in ("token", "gap of the two\nbest logits"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in different:
        gap = f"{result.top2_gap:.4f}" if result.top2_gap is not None else "-"
        table.add_row(" ".join(result.prompt.text.split())[:48], str(result.first_difference), gap)
    console.print(table)
    if dtype == "float32":
        console.print("[bold red]In float32 the texts should be the same. Please report this with `dspark-hf env`.[/]")
    else:
        console.print(
            f"In {dtype} a kernel rounds differently for one token and for several, so greedy texts may part where "
            "two tokens tie; both are the target's own. With --dtype float32 they are the same."
        )


def _as_json(results: list[PromptComparison], dtype: str, device: str, temperature: float) -> dict[str, Any]:
    return {
        "versions": {"dspark_hf": __version__, "transformers": transformers.__version__, "torch": torch.__version__},
        "dtype": dtype,
        "device": device,
        "temperature": temperature,
        "summary": [dataclasses.asdict(pool) | {"speedup": pool.speedup} for pool in _summaries(results)],
        "prompts": [
            {
                "domain": result.prompt.domain,
                "prompt": result.prompt.text,
                "plain": {"num_tokens": len(result.plain.token_ids), "seconds": result.plain.seconds},
                "dspark": {"num_tokens": len(result.dspark.token_ids), "seconds": result.dspark.seconds},
                "accepted_length": result.dspark.stats.accepted_length,
                "identical": result.identical,
                "first_difference": result.first_difference,
                "top2_gap": result.top2_gap,
            }
            for result in results
        ],
    }
