# SPDX-License-Identifier: Apache-2.0
"""What each scheduler would do for many requests at a time: `python benchmarks/simulate_load.py`.

Records rounds of the default pair in which every slot is verified, one text after the other, and replays them as 1 to
256 concurrent requests against a round-time curve. See `dspark_hf.scheduling.simulation` for what a replay leaves out.

    python benchmarks/simulate_load.py --prompts gsm8k.jsonl mt-bench.jsonl --save-rounds rounds.json --plot load.svg
    python benchmarks/simulate_load.py --rounds rounds.json --curve 1:0.020,8:0.021,16:0.035,64:0.120 --draft-s 0.002
    python benchmarks/simulate_load.py --rounds rounds.json --profile round_times.json

Without a curve the built-in EXAMPLE is used: an imagined accelerator, not a measurement of any.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

import dspark_hf
from dspark_hf.common.chat_tokens import encode_prompt
from dspark_hf.common.plots import check_can_plot
from dspark_hf.common.prompts import BUILTIN_PROMPTS, Prompt, read_prompts
from dspark_hf.common.records import AcceptanceStats, RoundRecord, collect_rounds
from dspark_hf.evaluation.load_plot import save_load_plot
from dspark_hf.profiling import RoundTimeProfile
from dspark_hf.scheduling import (
    CapacityScheduler,
    FixedScheduler,
    LookaheadScheduler,
    PrefixScheduler,
    Scheduler,
    SearchScheduler,
    SPSCurve,
    ThresholdScheduler,
)
from dspark_hf.scheduling.simulation import PLAIN, LoadReport, full_blocks, sweep


# Up to 128 tokens a pass takes as long as reading the weights does, 5 ms; from there on the arithmetic counts.
EXAMPLE = SPSCurve((1, 128, 256), (0.005, 0.005, 0.010), draft_s=0.0005)

Texts = list[list[RoundRecord]]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record = parser.add_argument_group("rounds")
    record.add_argument("--rounds", type=Path, default=None, help="replay these, from --save-rounds; records nothing")
    record.add_argument("--prompts", type=Path, nargs="*", default=[], help="prompt files; default: built-in prompts")
    record.add_argument("--limit", type=int, default=4, help="prompts per file")
    record.add_argument("--max-new-tokens", type=int, default=96)
    record.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    record.add_argument("--draft", default=None, help="another draft for the default target")
    record.add_argument("--save-rounds", type=Path, default=None, help="keep the recorded rounds in this JSON file")
    times = parser.add_argument_group("round times").add_mutually_exclusive_group()
    times.add_argument("--profile", type=Path, default=None, help="JSON file of `dspark-hf profile`")
    times.add_argument("--curve", type=parse_curve, default=None, help="B:seconds,B:seconds,... of verification")
    parser.add_argument("--context-length", type=int, default=256, help="tokens in the cache, for --profile")
    parser.add_argument("--draft-s", type=float, default=None, help="seconds of drafting, in place of the curve's own")
    parser.add_argument("--requests", type=int, nargs="+", default=[2**n for n in range(9)])
    parser.add_argument("--num-rounds", type=int, default=None, help="rounds to replay; default: as many as recorded")
    parser.add_argument("--plot", type=Path, default=None, help="picture to write, .png or .svg")
    parser.add_argument("--json", type=Path, default=None, help="also write every report to this file")
    return parser.parse_args()


def parse_curve(text: str) -> SPSCurve:
    """`1:0.02,8:0.025` -> a curve without drafting time."""
    try:
        points = [point.split(":") for point in text.split(",")]
        return SPSCurve(tuple(int(tokens) for tokens, _ in points), tuple(float(seconds) for _, seconds in points))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"a curve must be like 1:0.02,8:0.025 (tokens:seconds, ascending), got {text!r}: {error}"
        ) from error


def chosen_curve(arguments: argparse.Namespace) -> tuple[str, SPSCurve]:
    """Where the curve is from, and the curve."""
    if arguments.profile is not None:
        source, curve = (
            str(arguments.profile),
            RoundTimeProfile.load(arguments.profile).curve(arguments.context_length),
        )
    elif arguments.curve is not None:
        source, curve = "as given", arguments.curve
    else:
        source, curve = "EXAMPLE, an imagined accelerator that nobody measured", EXAMPLE
    if arguments.draft_s is not None:
        curve = dataclasses.replace(curve, draft_s=arguments.draft_s)
    return source, curve


def record_rounds(arguments: argparse.Namespace) -> Texts:
    """The full blocks of each text, every slot sent."""
    transformers.logging.disable_progress_bar()
    target, draft, tokenizer = dspark_hf.load_default_pair(dtype=getattr(torch, arguments.dtype))
    if arguments.draft is not None:
        draft = dspark_hf.DSparkDraftModel.from_pretrained(arguments.draft, dtype=target.dtype).eval()
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.num_assistant_tokens = draft.config.num_draft_slots
    draft.generation_config.assistant_confidence_threshold = None
    prompts = [Prompt(f.stem, p.text) for f in arguments.prompts for p in read_prompts(f)[: arguments.limit]]
    texts = []
    for number, prompt in enumerate(prompts or BUILTIN_PROMPTS, start=1):
        inputs = encode_prompt(tokenizer, prompt.text)
        with collect_rounds() as stats:
            target.generate(**inputs, assistant_model=draft, do_sample=False, max_new_tokens=arguments.max_new_tokens)
        texts.append(full_blocks(stats.rounds, draft.config.num_draft_slots))
        print(f"{number} of {len(prompts or BUILTIN_PROMPTS)}: {len(texts[-1])} full blocks", flush=True)
    return texts


def save_rounds(texts: Texts, path: Path) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps([[dataclasses.asdict(record) for record in text] for text in texts]))
    os.replace(temporary, path)


def load_rounds(path: Path) -> Texts:
    texts = json.loads(path.read_text())
    return [
        [
            RoundRecord(**(fields | {name: tuple(fields[name]) for name in ("token_ids", "confidence")}))
            for fields in text
        ]
        for text in texts
    ]


def policies(num_slots: int) -> dict[str, Callable[[], Scheduler | None]]:
    return {
        PLAIN: lambda: None,
        f"fixed {num_slots}": lambda: FixedScheduler(num_slots),
        "fixed 3": lambda: FixedScheduler(3),
        "threshold 0.5": lambda: ThresholdScheduler(0.5),
        "Algorithm 1": PrefixScheduler,
        "capacity": CapacityScheduler,
        "look-ahead": LookaheadScheduler,
        "search (greedy only)": SearchScheduler,
    }


def print_table(title: str, reports: list[LoadReport], figure: Callable[[LoadReport], str]) -> None:
    counts = list(dict.fromkeys(report.num_requests for report in reports))
    cells = {(report.policy, report.num_requests): figure(report) for report in reports}
    print(f"\n{title}\n")
    print("| policy | " + " | ".join(f"R = {count}" for count in counts) + " |")
    print("|" + "---|" * (len(counts) + 1))
    for policy in dict.fromkeys(report.policy for report in reports):
        print(f"| {policy} | " + " | ".join(cells[policy, count] for count in counts) + " |")


def main() -> None:
    arguments = parse_arguments()
    if arguments.plot is not None:
        check_can_plot(arguments.plot, "load plot")
    source, curve = chosen_curve(arguments)
    texts = load_rounds(arguments.rounds) if arguments.rounds is not None else record_rounds(arguments)
    if arguments.save_rounds is not None:
        save_rounds(texts, arguments.save_rounds)
    records = [record for text in texts for record in text]
    if not records:
        raise SystemExit("No full blocks were recorded. Generate longer texts: --max-new-tokens 96.")
    num_slots = records[0].verify_length
    reports = sweep(texts, curve, policies(num_slots), arguments.requests, arguments.num_rounds)

    stats = AcceptanceStats(records)
    rates = ", ".join(f"{rate:.2f}" for rate in stats.conditional_acceptance)
    print(f"\n{stats.num_rounds} full blocks of {num_slots} drafts, accepted slot by slot: {rates}")
    points = ", ".join(f"{b}: {1e3 * s:.2f}" for b, s in zip(curve.batch_tokens, curve.verify_s, strict=True))
    print(f"Round times: {source}. Verification ms by tokens {points}; drafting {1e3 * curve.draft_s:.2f} ms")
    most = max(arguments.requests) * (num_slots + 1)
    if most > curve.batch_tokens[-1]:
        print(f"Beyond {curve.batch_tokens[-1]} tokens the times go on in a straight line (up to {most} are needed).")
    print_table("Tokens per second of all requests", reports, lambda r: f"{r.tokens_per_s:.0f}")
    print_table("Tokens per second of one request", reports, lambda r: f"{r.user_tokens_per_s:.1f}")
    print_table("Drafts sent per request and round", reports, lambda r: f"{r.verify_length:.2f}")
    print_table("Tokens verified per round", reports, lambda r: f"{r.verified_per_round:.0f}")
    print_table("Tokens verified per token generated", reports, lambda r: f"{r.verified_per_token:.2f}")
    if arguments.plot is not None:
        print(f"\n{save_load_plot(reports, arguments.plot)}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([dataclasses.asdict(report) for report in reports], indent=1))


if __name__ == "__main__":
    main()
