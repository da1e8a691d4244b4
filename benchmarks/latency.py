# SPDX-License-Identifier: Apache-2.0
"""Speed of the default pair with and without the draft: `python benchmarks/latency.py`.

Plain generation and DSpark alternate prompt by prompt; the whole set is repeated, and medians over the repeats are
reported with their range. Prompt files (`.txt`, `.json`, `.jsonl`) can be given; each is a row of the table.

    python benchmarks/latency.py --prompts gsm8k.jsonl humaneval.jsonl mt-bench.jsonl --limit 8
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from itertools import groupby
from pathlib import Path

import torch
import transformers

import dspark_hf
from dspark_hf.common.prompts import BUILTIN_PROMPTS, Prompt, read_prompts
from dspark_hf.decoding.criterion import SCHEDULES
from dspark_hf.evaluation.compare import PromptComparison, compare, summarize
from dspark_hf.evaluation.timed import totals


HEADINGS = (
    "prompts",
    "plain tokens/s",
    "DSpark tokens/s",
    "speed-up (range)",
    "accepted length",
    "drafts sent",
    "draft ms",
    "verify ms",
    "plain step ms",
    "loop efficiency",
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--prompts", type=Path, nargs="*", default=[], help="prompt files; default: the built-in prompts"
    )
    parser.add_argument("--limit", type=int, default=4, help="prompts per file")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--schedule", choices=SCHEDULES, default=None)
    parser.add_argument("--num-assistant-tokens", type=int, default=None)
    parser.add_argument("--draft", default=None, help="another draft for the default target")
    parser.add_argument("--json", type=Path, default=None, help="also write every run to this file")
    return parser.parse_args()


def load_prompts(arguments: argparse.Namespace) -> list[Prompt]:
    if not arguments.prompts:
        return list(BUILTIN_PROMPTS)
    return [
        Prompt(file.stem, prompt.text)
        for file in arguments.prompts
        for prompt in read_prompts(file)[: arguments.limit]
    ]


def row(name: str, repeats: list[list[PromptComparison]]) -> tuple[str, ...]:
    """One table row from the same prompts in every repeat."""
    pools = [summarize(results, name) for results in repeats]
    results = [result for repeat in repeats for result in repeat]
    stats = totals(result.dspark for result in results).stats
    speedups = [pool.speedup for pool in pools]
    plain_step_ms = 1e3 / statistics.median(pool.plain_tokens_per_s for pool in pools)
    return (
        f"{name} ({pools[0].num_prompts})",
        f"{statistics.median(pool.plain_tokens_per_s for pool in pools):.1f}",
        f"{statistics.median(pool.dspark_tokens_per_s for pool in pools):.1f}",
        f"{statistics.median(speedups):.2f} ({min(speedups):.2f}-{max(speedups):.2f})",
        f"{stats.accepted_length:.2f}",
        f"{stats.mean_verify_length:.2f}",
        f"{1e3 * statistics.median(record.draft_s for record in stats.rounds):.1f}",
        f"{1e3 * statistics.median(record.verify_s for record in stats.rounds):.1f}",
        f"{plain_step_ms:.1f}",
        f"{stats.loop_efficiency:.3f}",
    )


def as_json(result: PromptComparison) -> dict:
    sides = {"plain": result.plain, "dspark": result.dspark}
    figures = {name: {"num_tokens": len(run.token_ids), "seconds": run.seconds} for name, run in sides.items()}
    return {"domain": result.prompt.domain, "accepted_length": result.dspark.stats.accepted_length, **figures}


def print_row(cells: tuple[str, ...]) -> None:
    print("| " + " | ".join(cells) + " |")


def main() -> None:
    arguments = parse_arguments()
    transformers.logging.disable_progress_bar()
    target, draft, tokenizer = dspark_hf.load_default_pair(dtype=getattr(torch, arguments.dtype))
    if arguments.draft is not None:
        draft = dspark_hf.DSparkDraftModel.from_pretrained(arguments.draft, dtype=target.dtype).eval()
    draft.generation_config.num_assistant_tokens_schedule = arguments.schedule
    draft.generation_config.num_assistant_tokens = arguments.num_assistant_tokens
    prompts = load_prompts(arguments)
    repeats = []
    for repeat in range(arguments.repeats):
        repeats.append(compare(target, draft, tokenizer, prompts, max_new_tokens=arguments.max_new_tokens))
        print(f"repeat {repeat + 1} of {arguments.repeats}: {summarize(repeats[-1]).speedup:.2f}x", flush=True)

    print(f"\n{arguments.dtype}, {arguments.max_new_tokens} new tokens, {arguments.repeats} repeats, greedy")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    print(f"transformers {transformers.__version__}\n")
    print_row(HEADINGS)
    print("|" + "---|" * len(HEADINGS))
    for name, _ in groupby(prompts, key=lambda prompt: prompt.domain):
        print_row(row(name, [[r for r in results if r.prompt.domain == name] for results in repeats]))
    print_row(row("all", repeats))
    identical = sum(result.identical for result in repeats[0])
    print(f"\nIdentical greedy texts: {identical} of {len(prompts)}")
    if arguments.json is not None:
        runs = [[as_json(result) for result in results] for results in repeats]
        arguments.json.write_text(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
