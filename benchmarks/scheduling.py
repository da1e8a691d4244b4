# SPDX-License-Identifier: Apache-2.0
"""Every way to choose the draft length, on the default pair: `python benchmarks/scheduling.py`.

All policies run on each prompt in turn, in an order that rotates from prompt to prompt, plain generation among them,
so that a machine that slows down favours none. Greedy.

    python benchmarks/scheduling.py --prompts gsm8k.jsonl humaneval.jsonl mt-bench.jsonl --limit 4
    python benchmarks/scheduling.py --dtype float32 --random-draft      # a draft that is never right
    python benchmarks/scheduling.py --max-new-tokens 8                  # answers too short to gain much

A ratio is tokens per second over those of plain generation, pooled over the prompts of a file and all repeats; the
range is that of the repeats. "verified" counts target tokens per generated token.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

import dspark_hf
from dspark_hf.common.chat_tokens import encode_prompt
from dspark_hf.common.prompts import BUILTIN_PROMPTS, Prompt, read_prompts
from dspark_hf.evaluation.timed import TimedAnswer, Totals, timed_generate, totals
from dspark_hf.profiling import profile_for


@dataclass(frozen=True)
class Policy:
    """One way to choose the draft length; without a schedule: plain generation."""

    name: str
    schedule: str | None = None
    num_tokens: int | None = None
    threshold: float | None = None


@dataclass(frozen=True)
class Run:
    """One `generate` call."""

    policy: str
    domain: str
    repeat: int
    answer: TimedAnswer


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help="prompt files; default: built-in prompts")
    parser.add_argument("--limit", type=int, default=4, help="prompts per file")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--policies", nargs="*", default=None, help="names of the table's first column; default: all")
    parser.add_argument("--draft", default=None, help="another draft for the default target")
    parser.add_argument("--random-draft", action="store_true", help="a draft with random weights")
    parser.add_argument("--json", type=Path, default=None, help="also write every run to this file")
    return parser.parse_args()


def policies(num_slots: int, names: list[str] | None) -> list[Policy]:
    fixed = [Policy(f"fixed {n}", "constant", n) for n in range(1, num_slots + 1)]
    learned = [
        Policy("threshold 0.5", "constant", threshold=0.5),
        Policy("Algorithm 1", "confidence"),
        Policy("hardware", "hardware"),
    ]
    known = [*fixed, *learned]
    unknown = sorted(set(names or ()) - {policy.name for policy in known})
    if unknown:
        raise ValueError(f"`--policies` must be among {[policy.name for policy in known]}, got {unknown}.")
    return [Policy("plain"), *(policy for policy in known if names is None or policy.name in names)]


def run(target, draft, inputs, policy: Policy, domain: str, repeat: int, max_new_tokens: int) -> Run:
    draft.generation_config.num_assistant_tokens_schedule = policy.schedule
    draft.generation_config.num_assistant_tokens = policy.num_tokens
    draft.generation_config.assistant_confidence_threshold = policy.threshold
    assistant = {} if policy.schedule is None else {"assistant_model": draft}
    arguments = {**assistant, "do_sample": False, "max_new_tokens": max_new_tokens}
    return Run(policy.name, domain, repeat, timed_generate(target, inputs, arguments))


def pooled(runs: Iterable[Run]) -> Totals:
    return totals(run.answer for run in runs)


def row(name: str, runs: list[Run], domains: list[str]) -> list[str]:
    """Ratio to plain generation per domain and over all, and what was verified."""
    cells = [name]
    for domain in [*domains, None]:
        chosen = [r for r in runs if domain in (None, r.domain)]
        ratios = []
        for repeat in sorted({r.repeat for r in chosen}):
            here = [r for r in chosen if r.repeat == repeat]
            ours, plain = (pooled(r for r in here if r.policy == policy) for policy in (name, "plain"))
            ratios.append(ours.tokens_per_s / plain.tokens_per_s)
        spread = f" ({min(ratios):.2f}-{max(ratios):.2f})" if len(ratios) > 1 else ""
        cells.append(f"{statistics.median(ratios):.2f}{spread}")
    stats = pooled(r for r in runs if r.policy == name).stats
    if name == "plain":
        return [*cells, "1.00", "1.00", "0.00", "-"]
    skipped = f"{stats.num_skipped / stats.num_rounds:.0%}"
    figures = (stats.accepted_length, stats.verified_per_token, stats.mean_verify_length)
    return [*cells, *(f"{figure:.2f}" for figure in figures), skipped]


def print_row(cells: list[str]) -> None:
    print("| " + " | ".join(cells) + " |")


def main() -> None:
    arguments = parse_arguments()
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    target, draft, tokenizer = dspark_hf.load_default_pair(dtype=getattr(torch, arguments.dtype))
    if arguments.draft is not None:
        draft = dspark_hf.DSparkDraftModel.from_pretrained(arguments.draft, dtype=target.dtype).eval()
    if arguments.random_draft:
        torch.manual_seed(0)
        config = dspark_hf.DSparkConfig.from_dict(draft.config.to_dict())
        config.acceptance_prior = config.confidence_temperatures = None  # nothing is known about it
        draft = dspark_hf.DSparkDraftModel(config).to(target.dtype).eval()
    prompts = [Prompt(f.stem, p.text) for f in arguments.prompts for p in read_prompts(f)[: arguments.limit]]
    prompts = prompts or list(BUILTIN_PROMPTS)
    domains = list(dict.fromkeys(prompt.domain for prompt in prompts))
    chosen = policies(draft.config.num_draft_slots, arguments.policies)
    profile = profile_for(target, draft, remaining_tokens=10**6)  # measured now, not inside the first run
    inputs = [encode_prompt(tokenizer, prompt.text) for prompt in prompts]
    for policy in chosen:  # warm-up
        run(target, draft, inputs[0], policy, "", 0, 4)
    runs, turn = [], 0
    for repeat in range(arguments.repeats):
        for prompt, encoded in zip(prompts, inputs, strict=True):
            for policy in chosen[turn % len(chosen) :] + chosen[: turn % len(chosen)]:
                runs.append(run(target, draft, encoded, policy, prompt.domain, repeat, arguments.max_new_tokens))
            turn += 1
        print(f"repeat {repeat + 1} of {arguments.repeats} done", flush=True)

    print(f"\n{arguments.dtype}, {arguments.max_new_tokens} new tokens, {len(prompts)} prompts, greedy")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    if profile is not None:
        curve = profile.curve(256)
        points = ", ".join(f"{b}: {1e3 * s:.0f}" for b, s in zip(curve.batch_tokens, curve.verify_s, strict=True))
        print(f"verification ms by tokens {points}; drafting {1e3 * curve.draft_s:.1f} ms")
    print()
    print_row(["policy", *domains, "all", "accepted length", "verified", "drafts sent", "rounds not drafted"])
    print("|" + "---|" * (len(domains) + 6))
    for policy in chosen:
        print_row(row(policy.name, runs, domains))
    if arguments.json is not None:
        as_dicts = [
            {
                "policy": r.policy,
                "domain": r.domain,
                "repeat": r.repeat,
                "tokens": len(r.answer.token_ids),
                "seconds": r.answer.seconds,
            }
            for r in runs
        ]
        arguments.json.write_text(json.dumps(as_dicts, indent=1))


if __name__ == "__main__":
    main()
