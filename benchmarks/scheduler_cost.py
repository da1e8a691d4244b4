# SPDX-License-Identifier: Apache-2.0
"""What a decision costs: `python benchmarks/scheduler_cost.py`. One thread, medians; the goal is 2 ms at most.

A scheduler stands between drafting and verification of every round, for all requests of a batch at once. Random
confidences of 4,096 requests with 7 slots each, on three curves: a flat and then linear one, a straight line, and
stairs, on which the look-ahead has most to do. On a busy machine the time on the clock holds that of other programs,
too; the CPU time does not.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time

import numpy as np
import torch

from dspark_hf.scheduling import RoundOutlook, Scheduler, SPSCurve, all_rules, mean_survival


MEAN_ACCEPTANCE = 0.75
NUM_BLOCKS = 8  # different confidences, so that no branch is learned by heart


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4096)
    parser.add_argument("--slots", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=200)
    return parser.parse_args()


def curves(num_requests: int, num_slots: int) -> dict[str, SPSCurve]:
    most = num_requests * (num_slots + 1)
    steps = tuple(range(1, most + 1, max(1, most // 64)))
    return {
        "flat, then linear": SPSCurve((1, 2 * num_requests, most), (0.020, 0.020, 0.080), 0.002),
        "linear": SPSCurve((1, most), (0.020, 0.200), 0.002),
        "stairs": SPSCurve(steps, tuple(0.020 + 0.010 * (8 * b // most) for b in steps), 0.002),
    }


def measure(
    scheduler: Scheduler, blocks: list[torch.Tensor], outlook: RoundOutlook, repeats: int
) -> tuple[list[float], list[float]]:
    """Milliseconds of each call, after some to warm up: on the clock, and of the CPU."""
    wall_ms, cpu_ms = [], []
    for repeat in range(-NUM_BLOCKS, repeats):
        start, cpu_start = time.perf_counter(), time.thread_time()
        scheduler.verify_lengths(blocks[repeat % NUM_BLOCKS], outlook)
        cpu_end, end = time.thread_time(), time.perf_counter()
        if repeat >= 0:
            wall_ms.append(1e3 * (end - start))
            cpu_ms.append(1e3 * (cpu_end - cpu_start))
    return wall_ms, cpu_ms


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    shape = (arguments.requests, arguments.slots)
    blocks = [torch.rand(shape, generator=generator) ** (1 / 3) for _ in range(NUM_BLOCKS)]  # mean 0.75
    print(f"{shape[0]} requests x {shape[1]} slots, {arguments.repeats} calls each, milliseconds, one thread")
    print(f"torch {torch.__version__}, numpy {np.__version__}, {platform.machine()}\n")
    print("| scheduler | curve | median | median of CPU time | 95 % of CPU time |")
    print("|---|---|---|---|---|")
    for name, make in all_rules(arguments.slots).items():
        for curve_name, curve in curves(*shape).items():
            outlook = RoundOutlook(curve, mean_survival([MEAN_ACCEPTANCE] * arguments.slots))
            wall_ms, cpu_ms = measure(make(), blocks, outlook, arguments.repeats)
            late = sorted(cpu_ms)[int(0.95 * len(cpu_ms))]
            figures = f"{statistics.median(wall_ms):.2f} | {statistics.median(cpu_ms):.2f} | {late:.2f}"
            print(f"| {name} | {curve_name} | {figures} |")


if __name__ == "__main__":
    main()
