# SPDX-License-Identifier: Apache-2.0
"""Batches of the default pair: plain generation, fixed numbers of drafts and the scheduler, at 1 to 32 texts.

    python benchmarks/batching.py --prompts gsm8k.jsonl humaneval.jsonl mt-bench.jsonl --plot batching.svg

Every policy answers the same prompts, in turn, the whole repeated; medians are reported. `--lengths long` lets every
text run to the last token, `mixed` lets texts end where they end. Throughput is tokens of all texts over the time of
the call. Memory is what the process grew by at most during a call, sampled every 10 ms.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

import psutil
import torch
import transformers

import dspark_hf
from dspark_hf import collect_rounds
from dspark_hf.common.chat_tokens import encode_prompt
from dspark_hf.common.prompts import BUILTIN_PROMPTS, read_prompts


PLAIN, SCHEDULED = "plain", "scheduled"
HEADINGS = ("rows", "policy", "tokens/s (range)", "against plain", "accepted length", "drafts sent", "memory MB")


@dataclass(frozen=True)
class Run:
    """One call: what it made and what it took."""

    num_rows: int
    policy: str
    num_tokens: int
    seconds: float
    accepted_length: float
    verify_length: float
    memory_mb: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help="files, taken in turn; default: built-in")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--fixed", type=int, nargs="*", default=[1, 2, 3, 5], help="fixed numbers of drafts")
    parser.add_argument("--lengths", choices=("long", "mixed"), default="mixed")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--json", type=Path, default=None, help="also write every run to this file")
    parser.add_argument("--plot", type=Path, default=None, help="picture to draw, .svg or .png")
    return parser.parse_args()


def load_prompts(files: list[Path], count: int) -> list[str]:
    """Prompts of all files in turn, from the beginning again where there are too few."""
    pools = [[prompt.text for prompt in read_prompts(file)] for file in files] or [[p.text for p in BUILTIN_PROMPTS]]
    texts = [text for text in chain(*zip_longest(*pools)) if text is not None]
    return [texts[i % len(texts)] for i in range(count)]


def as_batch(tokenizer, texts: list[str]) -> dict[str, torch.Tensor]:
    rows = [encode_prompt(tokenizer, text)["input_ids"][0].tolist() for text in texts]
    tokenizer.padding_side = "left"
    return dict(tokenizer.pad({"input_ids": rows}, return_tensors="pt"))


@contextlib.contextmanager
def watched_memory() -> Iterator[list[float]]:
    """Yields a list whose last entry is the most MB that the process grew by."""
    process, found, stop = psutil.Process(), [0.0], threading.Event()
    before = process.memory_info().rss

    def watch() -> None:
        while not stop.wait(0.01):
            found[0] = max(found[0], (process.memory_info().rss - before) / 2**20)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


def run(target, draft, batch: dict[str, torch.Tensor], policy: str, arguments: argparse.Namespace) -> Run:
    options = {"do_sample": False, "max_new_tokens": arguments.max_new_tokens}
    if policy != PLAIN:
        fixed = None if policy == SCHEDULED else int(policy.split()[-1])
        draft.generation_config.num_assistant_tokens = fixed
        draft.generation_config.num_assistant_tokens_schedule = "constant" if fixed else "hardware"
        options["assistant_model"] = draft
    with watched_memory() as memory, collect_rounds() as stats:
        start = time.perf_counter()
        output = target.generate(**batch, **options)
        seconds = time.perf_counter() - start
    new = output[:, batch["input_ids"].shape[1] :]
    ends = torch.tensor(target.generation_config.eos_token_id or [-1]).reshape(-1)
    before_end = ~torch.isin(new, ends).cumsum(dim=1).bool()
    num_tokens = int((before_end.sum(dim=1) + 1).clamp(max=new.shape[1]).sum())
    return Run(len(output), policy, num_tokens, seconds, stats.accepted_length, stats.mean_verify_length, memory[0])


def cells(runs: list[Run], plain: list[Run]) -> tuple[str, ...]:
    speeds = [r.tokens_per_s for r in runs]
    ratios = [r.tokens_per_s / p.tokens_per_s for r, p in zip(runs, plain, strict=True)]
    is_plain = runs[0].policy == PLAIN
    return (
        str(runs[0].num_rows),
        runs[0].policy,
        f"{statistics.median(speeds):.0f} ({min(speeds):.0f}-{max(speeds):.0f})",
        f"{statistics.median(ratios):.2f}",
        "" if is_plain else f"{statistics.median(r.accepted_length for r in runs):.2f}",
        "" if is_plain else f"{statistics.median(r.verify_length for r in runs):.2f}",
        f"{statistics.median(r.memory_mb for r in runs):.0f}",
    )


def draw(table: dict[tuple[int, str], list[Run]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    speed, length = figure.subplots(1, 2)
    counts = sorted({rows for rows, _ in table})
    for policy in dict.fromkeys(policy for _, policy in table):
        chosen = [table[rows, policy] for rows in counts]
        style = {"marker": "o", "markersize": 4, "linewidth": 2 if policy in (PLAIN, SCHEDULED) else 1}
        speed.plot(counts, [statistics.median(r.tokens_per_s for r in runs) for runs in chosen], label=policy, **style)
        if policy == SCHEDULED:
            sent = [statistics.median(r.verify_length for r in runs) for runs in chosen]
            length.plot(counts, sent, color="black", **style)
    speed.set(xlabel="texts", ylabel="tokens per second of all")
    length.set(xlabel="texts", ylabel="drafts sent per text and round, scheduled", ylim=(0, None))
    for axes in (speed, length):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.grid(alpha=0.3)
    speed.legend(fontsize=8)
    figure.savefig(path)


def main() -> None:
    arguments = parse_arguments()
    transformers.logging.disable_progress_bar()
    target, draft, tokenizer = dspark_hf.load_default_pair(dtype=getattr(torch, arguments.dtype))
    if arguments.lengths == "long":
        target.generation_config.pad_token_id = tokenizer.eos_token_id
        target.generation_config.eos_token_id = None
    texts = load_prompts(arguments.prompts, max(arguments.rows))
    policies = [PLAIN, *(f"fixed {n}" for n in arguments.fixed), SCHEDULED]
    table: dict[tuple[int, str], list[Run]] = {}
    for num_rows in arguments.rows:
        batch = as_batch(tokenizer, texts[:num_rows])
        run(target, draft, batch, SCHEDULED, arguments)  # warm, and the round times measured
        for _ in range(arguments.repeats):
            for policy in policies:
                table.setdefault((num_rows, policy), []).append(run(target, draft, batch, policy, arguments))
        print(f"{num_rows} rows done", flush=True)
    print(f"\n{arguments.dtype}, {arguments.lengths} texts of {arguments.max_new_tokens} tokens, greedy")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, transformers {transformers.__version__}\n")
    print("| " + " | ".join(HEADINGS) + " |\n|" + "---|" * len(HEADINGS))
    for (num_rows, _), runs in table.items():
        print("| " + " | ".join(cells(runs, table[num_rows, PLAIN])) + " |")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([vars(r) for runs in table.values() for r in runs], indent=1))
    if arguments.plot is not None:
        draw(table, arguments.plot)


if __name__ == "__main__":
    main()
