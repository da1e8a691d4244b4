# SPDX-License-Identifier: Apache-2.0
"""What looking up copies and choosing the source of drafts costs in a round: `python benchmarks/copy_overhead.py`.

The texts of recorded answers, one after the other, serve as a long text (`benchmarks/replay.py` records them). Each
round reads three new tokens, looks the ending up, chooses, and takes the tokens of a copy.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from replay import load

from dspark_hf.scheduling import CopyOptions, DraftingPolicy, LookaheadScheduler


NUM_ROUNDS, NEW_TOKENS = 300, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="from `benchmarks/replay.py --save-texts`")
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024, 8192, 32768, 131072])
    arguments = parser.parse_args()
    texts, _ = load(arguments.texts)
    ids = [token for own in texts.values() for text in own for token in text.token_ids]
    print("| context | prompt, ms | median ms | slowest ms |\n|---:|---:|---:|---:|")
    for context in arguments.contexts:
        text = (ids * (1 + (context + NUM_ROUNDS * NEW_TOKENS) // len(ids)))[: context + NUM_ROUNDS * NEW_TOKENS]
        policy = DraftingPolicy(LookaheadScheduler(), 5, may_skip=True, copies=CopyOptions())
        history = policy.new_history()
        start = time.perf_counter()
        history.copies.read(text[:context])
        prompt_s, seconds = time.perf_counter() - start, []
        for place in range(context, len(text), NEW_TOKENS):
            start = time.perf_counter()
            history.copies.read(text[place : place + NEW_TOKENS])
            plan = policy.plan([history], [16], [5], [1000])
            history.copies.tokens(max(plan.copy_lengths[0], 1)).tolist() if history.copies.match_length else []
            seconds.append(time.perf_counter() - start)
        figures = (1e3 * own for own in (prompt_s, statistics.median(seconds), max(seconds)))
        print(f"| {context:,} | " + " | ".join(f"{own:.3f}" for own in figures) + " |", flush=True)


if __name__ == "__main__":
    main()
