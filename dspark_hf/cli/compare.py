# SPDX-License-Identifier: Apache-2.0
"""`dspark-hf compare`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from ..common.decoding_options import sampling_arguments
from ..common.files import json_values
from ..common.versions import library_versions
from ..decoding.criterion import resolve_options
from ..evaluation.compare import ComparisonSummary, PromptComparison, compare, summarize, without_copies_summary
from ..evaluation.timed import sources_text
from .loading import check_prompting, load_pair, prompting_tokenizer
from .options import (
    Device,
    Draft,
    Dtype,
    Json,
    MaxNewTokens,
    NumAssistantTokens,
    PromptLookup,
    Raw,
    Schedule,
    Seed,
    Target,
    Temperature,
    Thinking,
    Threshold,
    TopP,
    TrustRemoteCode,
    choose_prompts,
    console,
    errors,
    exit_on_error,
    progress_bar,
    set_knobs,
)


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
    trust_remote_code: TrustRemoteCode = False,
    max_new_tokens: MaxNewTokens = 96,
    num_assistant_tokens: NumAssistantTokens = None,
    assistant_confidence_threshold: Threshold = None,
    num_assistant_tokens_schedule: Schedule = None,
    prompt_lookup_num_tokens: PromptLookup = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    raw: Raw = False,
    enable_thinking: Thinking = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Runs per prompt; medians are reported.")] = 1,
    json_output: Json = False,
) -> None:
    """Plain generation against DSpark: speed, accepted length, and whether the texts are the same."""
    with exit_on_error():
        check_prompting(raw, enable_thinking)
        cut = (assistant_confidence_threshold, num_assistant_tokens_schedule)
        knobs = (num_assistant_tokens, *cut, prompt_lookup_num_tokens)
        chosen, sampling = choose_prompts(text, prompts), sampling_arguments(temperature, top_p)
        status = errors if json_output else console
        with status.status("Loading the models (the default target is fetched and converted once)..."):
            model, draft_model, tokenizer = load_pair(target, draft, dtype, device, trust_remote_code)
        tokenizer = prompting_tokenizer(tokenizer, draft_model, enable_thinking, raw)
        set_knobs(draft_model, *knobs)
        copies = resolve_options(draft_model.config, draft_model.generation_config).copies is not None
        torch.manual_seed(seed)
        with progress_bar() as progress:
            total = (2 + copies) * repeats * len(chosen)
            task = progress.add_task("Generating with and without DSpark", total=total)
            results = compare(
                model,
                draft_model,
                tokenizer,
                chosen,
                max_new_tokens=max_new_tokens,
                repeats=repeats,
                raw=raw,
                generate_arguments=sampling,
                on_progress=lambda: progress.advance(task),
                without_copies=copies,
            )
    if json_output:
        found = _as_json(results, dtype, str(model.device), temperature)
        typer.echo(json.dumps(json_values(found), indent=2, allow_nan=False))
    else:
        _print_comparison(results, dtype, temperature)


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
    without = without_copies_summary(results)
    for pool in [*_summaries(results), *([without] if without is not None else [])]:
        table.add_row(
            escape(f"{pool.name} ({pool.num_prompts})"),
            f"{pool.plain_tokens_per_s:.1f}",
            f"{pool.dspark_tokens_per_s:.1f}",
            f"{pool.speedup:.2f}x",
            f"{pool.accepted_length:.2f}",
            f"{pool.verify_length:.2f}",
            f"{pool.verified_per_token:.2f}",
            f"{pool.num_identical}/{pool.num_prompts}" if temperature == 0 else "-",
        )
    console.print(table)
    sources = sources_text(summarize(results).by_source)
    console.print(f"Tokens per round by the source of its drafts (rounds): {sources}.", highlight=False)
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
        table.add_row(escape(" ".join(result.prompt.text.split())[:48]), str(result.first_difference), gap)
    console.print(table)
    if dtype == "float32":
        console.print("[bold red]In float32 the texts should be the same. Please report this with `dspark-hf env`.[/]")
    else:
        console.print(
            f"In {dtype} a kernel rounds differently for one token and for several, so greedy texts may part where "
            "two tokens tie; both are the target's own. With --dtype float32 they are the same."
        )


def _as_json(results: list[PromptComparison], dtype: str, device: str, temperature: float) -> dict[str, Any]:
    without = without_copies_summary(results)
    pools = [*_summaries(results), *([without] if without is not None else [])]
    return {
        "versions": library_versions(),
        "dtype": dtype,
        "device": device,
        "temperature": temperature,
        "summary": [dataclasses.asdict(pool) | {"speedup": pool.speedup} for pool in pools],
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
