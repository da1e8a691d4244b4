# SPDX-License-Identifier: Apache-2.0
"""Several ways to draft, side by side: plain generation, prompt lookup, the draft as it is, and with every slot sent.

What `dspark-hf eval` does, in Python, on a few built-in prompts. For figures to rely on, take dozens of your own
prompts; see docs/evaluation.md. `--output` writes a report, and needs the `eval` extra.

Run it with
    python examples/evaluate.py --tasks my_prompts.jsonl --num-questions 40 --max-new-tokens 128 --output my-evaluation
"""

import argparse
import tempfile
from pathlib import Path

from dspark_hf import load_default_pair
from dspark_hf.evaluation.drafters import check_names, default_drafters, load_drafters, parse_drafter
from dspark_hf.evaluation.evaluate import evaluate, settings_for, warm_up
from dspark_hf.evaluation.report import check_can_report, write_report
from dspark_hf.evaluation.summary import interval_text, summarize_runs
from dspark_hf.evaluation.tasks import load_tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["builtin"], help="names of tasks, or files of prompts")
    parser.add_argument("--num-questions", type=int, default=6, help="questions of each task")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--output", type=Path, help="folder that keeps the answers, to go on with; default: none")
    args = parser.parse_args()
    if args.output:
        check_can_report()  # fail before the work, not after it

    target, _, tokenizer = load_default_pair()
    tasks = load_tasks(args.tasks, args.num_questions)
    # The default rows, and one more: at most two drafts in a round.
    rows = [*default_drafters([]), parse_drafter("two slots=draft,num_assistant_tokens=2")]
    drafters = load_drafters(check_names(rows), target, tokenizer)
    settings = settings_for(target, tokenizer, tasks, drafters, temperatures=[0.0], max_new_tokens=args.max_new_tokens)
    drafters = warm_up(target, tokenizer, tasks, drafters, settings)

    with tempfile.TemporaryDirectory() as scratch:
        folder = args.output or Path(scratch)
        runs = evaluate(target, tokenizer, tasks, drafters, settings, folder)
        evaluation = summarize_runs(runs, settings, tasks, drafters)
        for entry in evaluation.figures:
            print(
                f"{entry.task}, {entry.drafter}: accepted length {entry.accepted_length.value:.2f}, "
                f"verified per token {entry.verified_per_token.value:.2f}, speed-up {interval_text(entry.speedup)}"
            )
        for sentence in evaluation.sentences():
            print(sentence)
        if args.output:
            print(f"Report: {write_report(evaluation, folder)[-1]}")


if __name__ == "__main__":
    main()
