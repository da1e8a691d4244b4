# SPDX-License-Identifier: Apache-2.0
"""What training costs: tokens per second and peak memory against the vocabulary, and the disk of the feature cache.

    python benchmarks/training.py --vocab-sizes 16384 49152 151936 --chunk-sizes 128 1000000

The target is synthetic and narrow, so that the logits are what costs. Each case runs in a process of its own, for the
peak memory that the system reports is that of a whole process; glibc is told to give freed blocks back, or the peak
would be that of a fragmented heap. A chunk size beyond the slots of a step is no chunking.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback

import dspark_hf
from dspark_hf import DSparkConfig, DSparkDraftModel
from dspark_hf.training import DSparkTrainer, DSparkTrainingArguments
from dspark_hf.training.dataset import SequenceDataset, TrainingSequence
from dspark_hf.training.feature_cache import FeatureCache


HEADINGS = ("vocabulary", "slots at once", "tokens/s", "s per step", "peak MB", "MB above the models")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=[16384, 49152, 151936])
    parser.add_argument("--chunk-sizes", type=int, nargs="+", default=[128, 1_000_000], help="--head_chunk_size")
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--num-anchors", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="measured steps, after one to warm up")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures to this file")
    parser.add_argument("--case", nargs=2, type=int, metavar=("VOCAB", "CHUNK"), help=argparse.SUPPRESS)
    return parser.parse_args()


def synthetic_target(vocab_size: int, hidden_size: int) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


class StepTimes(TrainerCallback):
    def __init__(self):
        self.ends: list[float] = []

    def on_train_begin(self, *_, **__) -> None:
        self.ends.append(time.perf_counter())

    def on_step_end(self, *_, **__) -> None:
        self.ends.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Of every step but the first."""
        return [end - begin for begin, end in zip(self.ends[1:], self.ends[2:], strict=False)]


def peak_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024**2 if sys.platform == "darwin" else 1024)  # bytes there, kB elsewhere


def run_case(arguments: argparse.Namespace, vocab_size: int, chunk_size: int) -> dict[str, float]:
    """One vocabulary and chunk size, in this process."""
    torch.manual_seed(0)
    target = synthetic_target(vocab_size, arguments.hidden_size)
    config = DSparkConfig.from_target(
        target.config,
        mask_token_id=vocab_size - 1,
        num_hidden_layers=1,
        block_size=arguments.block_size,
        markov_rank=16,
    )
    ids = torch.randint(vocab_size - 1, (arguments.batch_size, arguments.length)).tolist()
    data = SequenceDataset([TrainingSequence(tuple(row), 8) for row in ids], arguments.length)
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        trainer = DSparkTrainer(
            DSparkDraftModel(config),
            target,
            DSparkTrainingArguments(
                output_dir=folder,
                max_steps=arguments.steps + 1,
                per_device_train_batch_size=arguments.batch_size,
                num_anchors=arguments.num_anchors,
                head_chunk_size=chunk_size,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
            ),
            train_dataset=data,
            callbacks=[times],
        )
        before = peak_mb()
        trainer.train()
        cache = FeatureCache(Path(folder) / "features", data, target, config.target_layer_ids)
        disk = sum(path.stat().st_size for path in cache.folder.iterdir())
    step_s = statistics.median(times.seconds())
    num_tokens = arguments.batch_size * arguments.length
    return {
        "vocab_size": vocab_size,
        "chunk_size": chunk_size,
        "tokens_per_s": num_tokens / step_s,
        "step_s": step_s,
        "peak_mb": peak_mb(),
        "above_models_mb": peak_mb() - before,
        "disk_bytes_per_token": disk / num_tokens,
        "num_states": len(config.target_layer_ids) + 1,
    }


def in_a_process(vocab_size: int, chunk_size: int) -> dict[str, float]:
    case = ["--case", str(vocab_size), str(chunk_size)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    command = [sys.executable, *sys.argv, *case]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if result.returncode != 0:
        sys.exit(f"{' '.join(case)} failed:\n{result.stderr[-2000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    arguments = parse_arguments()
    if arguments.case is not None:
        print(json.dumps(run_case(arguments, *arguments.case)))
        return
    num_slots = arguments.batch_size * arguments.num_anchors * arguments.block_size
    print(
        f"dspark_hf {dspark_hf.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{platform.machine()}, {torch.get_num_threads()} threads, float32; {arguments.batch_size} sequences of "
        f"{arguments.length} tokens, at most {num_slots} slots a step, hidden size {arguments.hidden_size}\n"
    )
    print("| " + " | ".join(HEADINGS) + " |")
    print("|" + "---:|" * len(HEADINGS), flush=True)
    results = []
    for vocab_size in arguments.vocab_sizes:
        for chunk_size in arguments.chunk_sizes:
            case = in_a_process(vocab_size, chunk_size)
            results.append(case)
            at_once = chunk_size if chunk_size < num_slots else f"all ({num_slots})"
            print(
                f"| {vocab_size} | {at_once} | {case['tokens_per_s']:.0f} | {case['step_s']:.2f} | "
                f"{case['peak_mb']:.0f} | {case['above_models_mb']:.0f} |",
                flush=True,
            )
    disk, num_states = results[0]["disk_bytes_per_token"], int(results[0]["num_states"])
    print(
        f"\nFeature cache: {disk:.0f} bytes per token on disk for {num_states} states of {arguments.hidden_size} "
        f"float32 values ({4 * num_states * arguments.hidden_size} bytes of values), whatever the vocabulary."
    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
