# SPDX-License-Identifier: Apache-2.0
"""Milliseconds of a round outside the forward passes of target and draft: `python benchmarks/overhead.py`.

A tiny random pair on the CPU, so that the loop itself is most of a round: 1, 8 and 32 requests, greedy and sampling.
With another checkout the two run in turn, each in processes of its own, and the ratio of their medians is printed:

    python benchmarks/overhead.py
    python benchmarks/overhead.py --against ../before --repeats 5
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from dspark_hf import DSparkConfig, DSparkDraftModel, collect_rounds


VOCAB_SIZE, HIDDEN_SIZE, NUM_PROMPT_TOKENS = 512, 64, 16
MODES = {"greedy": {"do_sample": False}, "sampling": {"do_sample": True, "temperature": 1.0, "top_k": 0}}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--calls", type=int, default=12, help="calls of each kind, after two that do not count")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--against", type=Path, default=None, help="another checkout, to run in turn with this one")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each checkout, with --against")
    parser.add_argument("--json", action="store_true", help="print milliseconds as JSON")
    return parser.parse_args()


def tiny_pair() -> tuple[PreTrainedModel, DSparkDraftModel]:
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 2 * HIDDEN_SIZE,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    target = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, eos_token_id=None, pad_token_id=0, **shape)).eval()
    config = DSparkConfig(
        num_hidden_layers=1,
        num_target_layers=4,
        target_layer_ids=[0, 2],
        block_size=5,
        mask_token_id=VOCAB_SIZE - 1,
        markov_rank=16,
        **shape,
    )
    draft = DSparkDraftModel(config).eval()
    draft.generation_config.num_assistant_tokens_schedule = "confidence"  # every round drafts
    return target, draft


@contextlib.contextmanager
def timed_forward(model: torch.nn.Module) -> Iterator[list[float]]:
    """Seconds of every forward pass of a model."""
    seconds, forward = [], model.forward

    def timed(*arguments, **named):
        start = time.perf_counter()
        outputs = forward(*arguments, **named)
        seconds.append(time.perf_counter() - start)
        return outputs

    model.forward = timed
    try:
        yield seconds
    finally:
        del model.forward


def overhead_ms(
    target: PreTrainedModel, draft: DSparkDraftModel, num_requests: int, mode: dict, arguments: argparse.Namespace
) -> float:
    """Median over calls of the milliseconds of a round that are not in a forward pass."""
    ids = torch.randint(0, VOCAB_SIZE - 1, (num_requests, NUM_PROMPT_TOKENS))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    call = {"max_new_tokens": arguments.max_new_tokens, "assistant_model": draft, **mode}
    figures = []
    for _ in range(arguments.calls + 2):
        with timed_forward(target) as verified, timed_forward(draft) as drafted, collect_rounds() as stats:
            target.generate(**inputs, **call)
        num_rounds = max(Counter(record.request for record in stats.rounds).values())
        inside_s = sum(verified[-num_rounds:]) + sum(drafted)
        figures.append(1e3 * (stats.round_s - inside_s) / num_rounds)
    return statistics.median(figures[2:])


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # the pair is so small that a second one only adds noise
    target, draft = tiny_pair()
    return {
        f"{mode}, R = {count}": overhead_ms(target, draft, count, options, arguments)
        for mode, options in MODES.items()
        for count in arguments.requests
    }


def measure_elsewhere(checkout: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """This script on the package of a checkout, in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--json", "--calls", str(arguments.calls)]
    command += ["--max-new-tokens", str(arguments.max_new_tokens), "--requests", *map(str, arguments.requests)]
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


def compare(arguments: argparse.Namespace) -> None:
    here, there = Path(__file__).resolve().parents[1], arguments.against
    pairs = []
    for number in range(arguments.repeats):
        order = (here, there) if number % 2 == 0 else (there, here)
        found = {checkout: measure_elsewhere(checkout, arguments) for checkout in order}
        pairs.append((found[here], found[there]))
    print("| round | this checkout, ms | the other, ms | ratio (range) |\n|---|---:|---:|---:|")
    for name in pairs[0][0]:
        ours, theirs = ([run[side][name] for run in pairs] for side in (0, 1))
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        print(f"| {name} | {statistics.median(ours):.2f} | {statistics.median(theirs):.2f} | {spread} |")


def main() -> None:
    arguments = parse_arguments()
    os.environ.setdefault("DSPARK_HF_AUTO_PROFILE", "0")
    if arguments.against is not None:
        return compare(arguments)
    found = measure(arguments)
    if arguments.json:
        return print(json.dumps(found))
    print("| round | ms outside the forward passes |\n|---|---:|")
    for name, milliseconds in found.items():
        print(f"| {name} | {milliseconds:.2f} |")
    return None


if __name__ == "__main__":
    main()
