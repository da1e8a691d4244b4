# SPDX-License-Identifier: Apache-2.0
"""How well the default draft's confidences are calibrated, before and after: `python benchmarks/calibration.py`.

Temperatures are fitted on some prompts and judged on others. Each check file is judged by itself and all together.
`noise floor` is the ECE that so many rounds show on average where every prediction is exactly right.

    python benchmarks/calibration.py --fit train.jsonl --check gsm8k.jsonl humaneval.jsonl mt-bench.jsonl --limit 20
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import dspark_hf
from dspark_hf.common.prompts import read_prompts
from dspark_hf.common.records import RoundRecord
from dspark_hf.evaluation.calibrate import collect_full_blocks
from dspark_hf.scheduling.calibration import CalibrationReport, acceptance_prior, calibration_report
from dspark_hf.scheduling.observations import ConfidenceObservations


HEADINGS = (
    "check (full blocks)",
    "slot",
    "ECE before",
    "ECE after",
    "noise floor",
    "AUC before",
    "AUC after",
    "Brier before",
    "Brier after",
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", type=Path, nargs="+", required=True, help="prompt files to fit to")
    parser.add_argument("--check", type=Path, nargs="+", required=True, help="prompt files to judge on")
    parser.add_argument("--limit", type=int, default=20, help="prompts per file")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 decodes greedily")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--draft", default=None, help="another draft for the default target")
    parser.add_argument("--plot", type=Path, default=None, help="reliability diagram to write, .png or .svg")
    parser.add_argument("--json", type=Path, default=None, help="also write figures and rounds to this file")
    return parser.parse_args()


def collect(pair: tuple, files: list[Path], arguments: argparse.Namespace) -> dict[str, list[RoundRecord]]:
    """Rounds of each prompt file."""
    target, draft, tokenizer = pair
    sampling = {"do_sample": True, "temperature": arguments.temperature, "top_k": 0, "top_p": 1.0}
    collected = {}
    for file in files:
        start, prompts = time.perf_counter(), read_prompts(file)[: arguments.limit]
        collected[file.stem] = collect_full_blocks(
            target,
            draft,
            tokenizer,
            prompts,
            max_new_tokens=arguments.max_new_tokens,
            generate_arguments=sampling if arguments.temperature else None,
        ).rounds
        seconds = time.perf_counter() - start
        print(f"{file.stem}: {len(prompts)} prompts, {len(collected[file.stem])} rounds, {seconds:.0f} s", flush=True)
    return collected


def print_table(reports: dict[str, CalibrationReport]) -> None:
    print("\n| " + " | ".join(HEADINGS) + " |")
    print("|" + "---|" * len(HEADINGS))
    for name, report in reports.items():
        for slot, (before, after) in enumerate(zip(report.before, report.after, strict=True)):
            print(
                f"| {name} ({report.num_check_rounds}) | {slot} "
                f"| {before.expected_calibration_error:.3f} | {after.expected_calibration_error:.3f} "
                f"| {after.noise_floor:.3f} | {before.area_under_curve:.3f} | {after.area_under_curve:.3f} "
                f"| {before.brier_score:.3f} | {after.brier_score:.3f} |"
            )
        floor = sum(figures.noise_floor for figures in report.after) / len(report.after)
        print(
            f"| {name} | mean | {report.mean_error_before:.3f} | {report.mean_error_after:.3f} | {floor:.3f} | | | | |"
        )


def observations_as_json(observations: ConfidenceObservations) -> dict[str, Any]:
    logits = [[round(logit, 4) for logit in row] for row in observations.confidence_logits.tolist()]
    return {"confidence_logits": logits, "num_accepted": observations.num_accepted.tolist()}


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    target, draft, tokenizer = dspark_hf.load_default_pair(dtype=getattr(torch, arguments.dtype))
    if arguments.draft is not None:
        draft = dspark_hf.DSparkDraftModel.from_pretrained(arguments.draft, dtype=target.dtype)
    collected = {
        part: collect((target, draft, tokenizer), files, arguments)
        for part, files in (("fit", arguments.fit), ("check", arguments.check))
    }
    slots = draft.config.num_draft_slots
    fit_rounds, check_rounds = ([r for rounds in part.values() for r in rounds] for part in collected.values())
    fitted = ConfidenceObservations.from_rounds(fit_rounds, slots)
    checks = {
        name: ConfidenceObservations.from_rounds(rounds, slots)
        for name, rounds in {**collected["check"], "all": check_rounds}.items()
    }
    reports = {name: calibration_report(fitted, check) for name, check in checks.items()}
    prior = acceptance_prior(ConfidenceObservations.from_rounds([*fit_rounds, *check_rounds], slots))

    decoding = f"sampled at temperature {arguments.temperature:g}" if arguments.temperature else "greedy"
    print(f"\n{arguments.dtype}, {decoding}, {arguments.max_new_tokens} tokens, {arguments.limit} prompts per file")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}")
    print("temperatures:", ", ".join(f"{temperature:.2f}" for temperature in reports["all"].temperatures))
    print("acceptance of each slot given those before:", ", ".join(f"{rate:.2f}" for rate in prior))
    print_table(reports)
    if arguments.json is not None:
        figures = {
            "arguments": {name: str(value) for name, value in vars(arguments).items()},
            "versions": {"dspark_hf": dspark_hf.__version__, "torch": torch.__version__},
            "reports": {name: report.to_dict() for name, report in reports.items()},
            "fitted": observations_as_json(fitted),
            "checks": {name: observations_as_json(checks[name]) for name in collected["check"]},
        }
        arguments.json.write_text(json.dumps(figures))
    if arguments.plot is not None:
        from dspark_hf.evaluation.reliability_plot import save_reliability_plot

        save_reliability_plot(reports["all"], arguments.plot)


if __name__ == "__main__":
    main()
