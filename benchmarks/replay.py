# SPDX-License-Identifier: Apache-2.0
"""Every way to choose the draft length on the same recorded rounds, without the noise of a clock.

Records rounds of the default pair in which every slot is verified, and replays each text under each policy against a
round-time curve, with the history, the correction and the gate that a call has. A timed benchmark of the same policies
(`benchmarks/scheduling.py`) needs hours for differences that a replay shows in seconds.

    python benchmarks/replay.py --prompts gsm8k.jsonl humaneval.jsonl mt-bench.jsonl --save-rounds rounds.json
    python benchmarks/replay.py --rounds rounds.json --curve 1:0.064,2:0.069,3:0.074,4:0.076,6:0.079 --draft-s 0.009
    python benchmarks/replay.py --rounds rounds.json --never-accepted    # a draft that is never right
    python benchmarks/replay.py --rounds rounds.json --rows 2 8 32 --curve 1:0.055,192:0.103 --draft-s 0.007
    python benchmarks/replay.py --rounds rounds.json --rows 1 4 16 64 256 --profile round_times.json --plot load.svg

With `--rows` texts run in batches drawn from all files, each until its last row has ended, or with `--waiting` so many
more texts for each row take the places of those that end. The ratio is then that to the same batches without drafts,
and `--row-s` is what a row costs in every pass, on top of its tokens.

`dspark_hf.scheduling.simulation` says what a replay leaves out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers

import dspark_hf
from dspark_hf import RoundRecord, RoundTimeProfile, SPSCurve, collect_rounds
from dspark_hf.common.chat_tokens import encode_prompt
from dspark_hf.common.plots import check_can_plot
from dspark_hf.common.prompts import read_prompts
from dspark_hf.evaluation.load_plot import save_load_plot
from dspark_hf.profiling import profile_for
from dspark_hf.profiling.measure import batch_points
from dspark_hf.scheduling import DraftingPolicy, LookaheadScheduler, Scheduler, all_rules
from dspark_hf.scheduling.simulation import LoadReport, full_blocks, replay


Texts = dict[str, list[list[RoundRecord]]]  # of each file


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=Path, default=None, help="replay these, from --save-rounds")
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help="prompt files to record")
    parser.add_argument("--limit", type=int, default=16, help="prompts per file")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--save-rounds", type=Path, default=None)
    parser.add_argument("--profile", type=Path, default=None, help="round times, from `dspark-hf profile`")
    parser.add_argument("--curve", default=None, help="round times as tokens:seconds,...; default: this machine's")
    parser.add_argument("--draft-s", type=float, default=0.0, help="seconds of drafting, with --curve")
    parser.add_argument("--rows", type=int, nargs="*", default=[], help="texts of a batch, one table for all")
    parser.add_argument("--waiting", type=int, default=0, help="texts that wait for each row, with --rows")
    parser.add_argument("--batches", type=int, default=24, help="batches of each size, with --rows")
    parser.add_argument("--row-s", type=float, default=0.0, help="seconds of a pass for each row, with --rows")
    parser.add_argument(
        "--draft-row-s", type=float, default=0.0, help="seconds of drafting for each row but the first"
    )
    parser.add_argument("--never-accepted", action="store_true", help="reject every draft, and learn from nothing")
    parser.add_argument("--plot", type=Path, default=None, help="picture to write, .png or .svg, with --rows")
    arguments = parser.parse_args()
    if arguments.plot is not None:
        check_can_plot(arguments.plot, "load plot")
    if (arguments.rounds is None) == (not arguments.prompts):
        parser.error("Give either `--rounds` or `--prompts`.")
    return arguments


def record(arguments: argparse.Namespace) -> tuple[Texts, dict]:
    """Rounds of whole blocks, and what a replay must know besides: prior and round times of this machine."""
    transformers.logging.disable_progress_bar()
    target, draft, tokenizer = dspark_hf.load_default_pair(dtype=getattr(torch, arguments.dtype))
    profile = profile_for(target, draft, arguments.max_new_tokens)
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    texts: Texts = {}
    for file in arguments.prompts:
        for prompt in read_prompts(file)[: arguments.limit]:
            inputs = encode_prompt(tokenizer, prompt.text)
            with collect_rounds() as stats:
                target.generate(
                    **inputs, assistant_model=draft, do_sample=False, max_new_tokens=arguments.max_new_tokens
                )
            blocks = full_blocks(stats.rounds, draft.config.num_draft_slots)
            texts.setdefault(file.stem, []).append(blocks)
    curve = profile.curve(256) if profile is not None else None
    return texts, {
        "acceptance_prior": draft.config.acceptance_prior,
        "curve": dataclasses.asdict(curve) if curve is not None else None,
    }


def save(texts: Texts, setting: dict, path: Path) -> None:
    rounds = {name: [[dataclasses.asdict(r) for r in text] for text in own] for name, own in texts.items()}
    path.write_text(json.dumps({"rounds": rounds, "setting": setting}))


def load(path: Path) -> tuple[Texts, dict]:
    values = json.loads(path.read_text())
    texts = {
        name: [
            [
                RoundRecord(**(r | {"token_ids": tuple(r["token_ids"]), "confidence": tuple(r["confidence"])}))
                for r in text
            ]
            for text in own
        ]
        for name, own in values["rounds"].items()
    }
    return texts, values["setting"]


def choose_curve(arguments: argparse.Namespace, setting: dict) -> SPSCurve:
    if arguments.curve is not None:
        points = [point.split(":") for point in arguments.curve.split(",")]
        tokens, seconds = tuple(int(b) for b, _ in points), tuple(float(s) for _, s in points)
        return SPSCurve(tokens, seconds, arguments.draft_s, arguments.draft_row_s)
    if arguments.profile is not None:
        return RoundTimeProfile.load(arguments.profile).curve(256)
    if setting["curve"] is None:
        raise SystemExit("No round times were measured. Give `--curve` or `--profile`.")
    return SPSCurve(**{name: tuple(v) if isinstance(v, list) else v for name, v in setting["curve"].items()})


def print_batches(texts: Texts, prior: list[float] | None, curve: SPSCurve, arguments: argparse.Namespace) -> None:
    pool = [text for own in texts.values() for text in own]
    num_slots, pooled = len(pool[0][0].confidence), []
    print("| policy | " + " | ".join(f"{rows} rows | sent" for rows in arguments.rows) + " |")
    print("|---|" + "---:|" * 2 * len(arguments.rows))
    drawn = {rows: draw_batches(pool, rows, arguments) for rows in arguments.rows}
    setting = (arguments.max_new_tokens, arguments.row_s)
    plain = {rows: [replay(own, curve, None, rows, *setting) for own in drawn[rows]] for rows in arguments.rows}
    for name, make in policies(num_slots, prior, None).items():
        cells = []
        for rows in arguments.rows:
            reports = []
            for own in drawn[rows]:
                policy = make()
                policy.use_curve(known_curve(curve, rows, num_slots, arguments.row_s))
                reports.append(replay(own, curve, policy, rows, *setting, name=name))
            pairs = zip(reports, plain[rows], strict=True)
            ratio = statistics.mean(report.tokens_per_s / other.tokens_per_s for report, other in pairs)
            pooled.append(pool_reports(reports))
            cells.append(f"{ratio:.3f} | {pooled[-1].verify_length:.2f}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    if arguments.plot is not None:
        print(f"Written: {save_load_plot([pool_reports(own) for own in plain.values()] + pooled, arguments.plot)}")


def draw_batches(pool: list, rows: int, arguments: argparse.Namespace) -> list[list[Sequence[RoundRecord]]]:
    """Batches of texts, those that wait included; a text comes twice only where there are too few."""
    count = rows * (1 + arguments.waiting)
    copies = pool * max(1 + arguments.waiting, -(-count // len(pool)))
    return [random.Random(seed).sample(copies, count) for seed in range(arguments.batches)]


def pool_reports(reports: Sequence[LoadReport]) -> LoadReport:
    names = ("num_rounds", "num_tokens", "num_verified", "seconds")
    sums = {name: sum(getattr(report, name) for report in reports) for name in names}
    return dataclasses.replace(reports[0], **sums)


def known_curve(curve: SPSCurve, num_rows: int, num_slots: int, row_s: float) -> SPSCurve:
    """What a profile of so many rows would say: passes of fewer tokens than rows are those of fewer rows."""
    points = batch_points(num_slots, num_rows)
    seconds = tuple(curve.verify(b) + row_s * min(b, num_rows) for b in points)
    return SPSCurve(points, seconds, curve.draft_s, curve.draft_request_s)


def policies(num_slots: int, prior: list[float] | None, curve: SPSCurve | None) -> dict[str, Callable]:
    def make(scheduler: Callable[[], Scheduler], **options: bool) -> Callable[[], DraftingPolicy]:
        return lambda: DraftingPolicy(scheduler(), num_slots, prior, curve, **options)

    return {name: make(rule) for name, rule in all_rules(num_slots).items()} | {
        "hardware, sampling": make(LookaheadScheduler, may_skip=True, learn_times=False),
        "hardware, greedy": make(LookaheadScheduler, may_skip=True),
    }


def _rejected(record: RoundRecord) -> RoundRecord:
    return dataclasses.replace(record, num_accepted=0, num_committed=1)


def main() -> None:
    arguments = parse_arguments()
    texts, setting = record(arguments) if arguments.rounds is None else load(arguments.rounds)
    if arguments.save_rounds is not None:
        save(texts, setting, arguments.save_rounds)
    curve, prior = choose_curve(arguments, setting), setting["acceptance_prior"]
    if arguments.never_accepted:
        texts = {
            n: [[_rejected(r) for r in t for _ in range(1 + r.num_accepted)] for t in own] for n, own in texts.items()
        }
        prior = None
    if arguments.rows:
        print_batches(texts, prior, curve, arguments)
        return
    num_slots = next(len(r.confidence) for own in texts.values() for text in own for r in text)
    times = ", ".join(f"{b}: {1e3 * s:.1f}" for b, s in zip(curve.batch_tokens, curve.verify_s, strict=True))
    print(f"verification ms by tokens {times}; drafting {1e3 * curve.draft_s:.1f} ms")
    print({name: f"{len(own)} texts, {sum(map(len, own))} rounds" for name, own in texts.items()}, "\n")
    print("| policy | " + " | ".join(texts) + " | all |\n|---|" + "---:|" * (len(texts) + 1))
    for name, make in policies(num_slots, prior, curve).items():
        reports = {domain: [replay([text], curve, make()) for text in own] for domain, own in texts.items()}
        reports["all"] = [report for own in reports.values() for report in own]
        ratios = [pool_reports(own).tokens_per_s * curve.plain_s for own in reports.values()]
        print(f"| {name} | " + " | ".join(f"{ratio:.3f}" for ratio in ratios) + " |")


if __name__ == "__main__":
    main()
