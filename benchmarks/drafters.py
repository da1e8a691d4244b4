# SPDX-License-Identifier: Apache-2.0
"""Trains one draft per configuration on the same data, and measures what the target accepts of each.

    python benchmarks/drafters.py --data answers.jsonl --output drafters --num-prompts 20 --steps 2000 \\
        --prompts math=gsm8k.jsonl code=humaneval.jsonl chat=mt-bench.jsonl

A configuration is a sequential head and a number of draft layers: `markov-2`, `gated-2`, `rnn-2` and `dflash-2`, the
last with neither a sequential nor a confidence head. All have the same seed, steps, sequences and blocks, and share
one cache of the target's features. Every block is sent whole. Further options are those of `dspark-hf train`, for all
configurations (`--bf16`, `--num_anchors 64`, `--target_layer_start true`, ...).

The same command goes on after an interruption: drafts that are trained and prompts that are measured are not done
again. The output folder gets a folder per draft, `results.json`, `results.md` and `suffix_decay.svg`.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import hashlib
import json
import math
import os
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import dspark_hf
from dspark_hf import DSparkDraftModel, collect_rounds
from dspark_hf.common.chat_tokens import encode_prompt
from dspark_hf.common.prompts import Prompt, read_prompts
from dspark_hf.common.records import AcceptanceStats, RoundRecord
from dspark_hf.default_pair import ensure_default_target
from dspark_hf.training import DSparkTrainingArguments
from dspark_hf.training.run import DataArguments, DraftArguments, train_draft


CONFIGURATIONS = ("dflash-2", "markov-2", "gated-2", "rnn-2", "markov-1", "markov-4")
HEADS = {
    "dflash": {"markov_rank": 0, "confidence_head": False},
    "markov": {"markov_head_type": "vanilla"},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
}
TEMPERATURES = (0, 1)
PLOTTED = ("dflash-2", "markov-2")
SEED = 0  # of sampled answers


@dataclass(frozen=True)
class Measurement:
    """What became of the rounds of some prompts.

    Args:
        prompts (`tuple[tuple[tuple[int, int, int], ...], ...]`):
            Per prompt, per round: drafts sent, drafts accepted, tokens committed.
    """

    prompts: tuple[tuple[tuple[int, int, int], ...], ...]

    @property
    def stats(self) -> AcceptanceStats:
        """`AcceptanceStats`: The figures, pooled over rounds; which tokens they were is not kept."""
        return AcceptanceStats(
            [RoundRecord(0, (0,) * sent, (), accepted, None, committed) for sent, accepted, committed in self._rounds]
        )

    @property
    def num_reached(self) -> list[int]:
        """`list[int]`: Per slot, rounds that sent it and accepted all before it."""
        return [reached for reached, _ in self.stats.slot_counts]

    @property
    def standard_error(self) -> float:
        """`float`: Of the accepted length, a ratio of sums over prompts drawn at random; NaN for one prompt."""
        num_rounds = [len(rounds) for rounds in self.prompts]
        committed = [sum(tokens for _, _, tokens in rounds) for rounds in self.prompts]
        count = len(self.prompts)
        if count < 2 or not sum(num_rounds):
            return math.nan
        ratio = sum(committed) / sum(num_rounds)
        squares = sum((c - ratio * n) ** 2 for c, n in zip(committed, num_rounds, strict=True))
        return math.sqrt(squares * count / (count - 1)) / sum(num_rounds)

    @property
    def _rounds(self) -> list[tuple[int, int, int]]:
        return [record for rounds in self.prompts for record in rounds]


def pooled(parts: Sequence[Measurement]) -> Measurement:
    """Several domains as one."""
    return Measurement(tuple(prompt for part in parts for prompt in part.prompts))


def main(arguments: Sequence[str] | None = None) -> None:
    options, training_options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    transformers.logging.disable_progress_bar()
    options.output.mkdir(parents=True, exist_ok=True)
    check_settings(options, training_options)
    name = options.target if options.target is not None else ensure_default_target()
    tokenizer = AutoTokenizer.from_pretrained(name)
    target = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, options.dtype))
    target = target.to(options.device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
    measured = {}
    for configuration in options.configs:
        train(configuration, target, tokenizer, options, training_options)
        measured[configuration] = measure(configuration, target, tokenizer, options)
    results = as_json(options, training_options, measured)
    write(options.output / "results.json", json.dumps(results, indent=1))
    write(options.output / "results.md", as_markdown(results))
    plot_suffix_decay(results, options.plot, options.output / "suffix_decay.svg")
    print((options.output / "results.md").read_text(encoding="utf-8"))


def parse_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and those for training."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="answers, from `dspark-hf prepare`")
    parser.add_argument("--prompts", nargs="+", required=True, metavar="DOMAIN=FILE", help="prompts to measure on")
    parser.add_argument("--num-prompts", type=int, default=20, help="the first so many of each file")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--configs", nargs="+", default=list(CONFIGURATIONS), metavar="HEAD-LAYERS")
    parser.add_argument("--plot", nargs="+", default=list(PLOTTED), help="configurations to plot, where measured")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--target", default=None, help="Hub id or folder; default: the default target")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default=None, help="to measure on; default: cuda if there is one")
    options, training_options = parser.parse_known_args(arguments)
    for configuration in options.configs:
        if not re.fullmatch(f"({'|'.join(HEADS)})-[1-9][0-9]*", configuration):
            parser.error(
                f"a configuration is {', '.join(HEADS)}, a dash and a number of layers, got {configuration!r}"
            )
    if any("=" not in entry for entry in options.prompts):
        parser.error(f"`--prompts` must be DOMAIN=FILE, got {options.prompts}")
    options.prompts = {domain: Path(file) for domain, file in (entry.split("=", 1) for entry in options.prompts)}
    for number in ("num_prompts", "max_new_tokens", "steps"):
        if getattr(options, number) < 1:
            parser.error(f"`--{number.replace('_', '-')}` must be >= 1, got {getattr(options, number)}")
    return options, training_options


def check_settings(options: argparse.Namespace, training_options: list[str]) -> None:
    """Drafts trained with different settings must not stand in one table."""
    path = options.output / "settings.json"
    settings = {
        "data": [hashlib.sha256(file.read_bytes()).hexdigest() for file in options.data],
        "target": Path(options.target or "").name,
        "dtype": options.dtype,
        "steps": options.steps,
        "training_options": training_options,
    }
    if not path.exists():
        write(path, json.dumps(settings, indent=1))
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    different = sorted(name for name in settings if found.get(name) != settings[name])
    if different:
        sys.exit(
            f"{options.output} holds drafts trained with other settings ({', '.join(different)}). Choose another "
            "`--output`, or repeat those settings to go on."
        )


def draft_arguments_of(configuration: str, base: DraftArguments) -> DraftArguments:
    """What `markov-2` and the like stand for."""
    head, layers = configuration.split("-")
    return dataclasses.replace(base, draft_num_layers=int(layers), **HEADS[head])


def train(
    configuration: str,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    options: argparse.Namespace,
    training_options: list[str],
) -> None:
    """Train one draft, unless that was done; what is left is the folder."""
    folder = options.output / configuration
    if (folder / "held_out.json").exists():  # written last
        print(f"{configuration}: trained before", flush=True)
        return
    print(f"{configuration}: training", flush=True)
    parser = HfArgumentParser((DataArguments, DraftArguments, DSparkTrainingArguments))
    ours = ["--data", *map(str, options.data), "--output_dir", str(folder), "--max_steps", str(options.steps)]
    defaults = ["--feature_cache", str(options.output / "features"), "--report_to", "none", "--save_total_limit", "1"]
    data_arguments, base, arguments = parser.parse_args_into_dataclasses([*defaults, *training_options, *ours])
    train_draft(target, tokenizer, data_arguments, draft_arguments_of(configuration, base), arguments)
    gc.collect()


def measure(
    configuration: str, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace
) -> dict[str, dict[int, Measurement]]:
    """Per domain and temperature, what the target accepts; cells that were measured are read from the folder."""
    path = options.output / configuration / "measured.json"
    cells = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    draft, found = None, {}
    for domain, file in options.prompts.items():
        prompts = read_prompts(file)[: options.num_prompts]
        for temperature in TEMPERATURES:
            identity = f"{[prompt.text for prompt in prompts]} {options.max_new_tokens} {temperature}"
            key = hashlib.sha256(identity.encode()).hexdigest()
            if key not in cells:
                if draft is None:
                    draft = load_draft(options.output / configuration, target)
                print(f"{configuration}: {len(prompts)} prompts of {domain}, temperature {temperature}", flush=True)
                cells[key] = rounds_of(prompts, target, draft, tokenizer, options.max_new_tokens, temperature)
                write(path, json.dumps(cells))
            rounds = tuple(tuple(tuple(record) for record in prompt) for prompt in cells[key])
            found.setdefault(domain, {})[temperature] = Measurement(rounds)
    return found


def load_draft(folder: Path, target: PreTrainedModel) -> DSparkDraftModel:
    """A trained draft that sends every slot."""
    draft = DSparkDraftModel.from_pretrained(folder, dtype=target.dtype).to(target.device).eval()
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    return draft


def rounds_of(
    prompts: Sequence[Prompt],
    target: PreTrainedModel,
    draft: DSparkDraftModel,
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
    temperature: float,
) -> list[list[tuple[int, int, int]]]:
    """Answer prompts; see [`Measurement`]."""
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": float(temperature), "top_k": 0, "top_p": 1.0}
    found = []
    for index, prompt in enumerate(prompts):
        torch.manual_seed(SEED + index)
        inputs = {name: value.to(target.device) for name, value in encode_prompt(tokenizer, prompt.text).items()}
        with collect_rounds() as stats:
            target.generate(**inputs, assistant_model=draft, max_new_tokens=max_new_tokens, **sampling)
        found.append([(r.verify_length, r.num_accepted, r.num_committed) for r in stats.rounds])
    return found


def as_json(
    options: argparse.Namespace, training_options: list[str], measured: dict[str, dict[str, dict[int, Measurement]]]
) -> dict[str, Any]:
    """Everything that the table and the plot show."""
    return {
        "versions": {
            "dspark_hf": dspark_hf.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
        "machine": {"processor": platform.machine(), "num_threads": torch.get_num_threads()},
        "settings": {
            "data": [file.name for file in options.data],
            "prompts": {domain: file.name for domain, file in options.prompts.items()},
            "num_prompts": options.num_prompts,
            "max_new_tokens": options.max_new_tokens,
            "steps": options.steps,
            "dtype": options.dtype,
            "training_options": training_options,
        },
        "drafts": {name: draft_figures(options.output / name, cells) for name, cells in measured.items()},
    }


def draft_figures(folder: Path, cells: dict[str, dict[int, Measurement]]) -> dict[str, Any]:
    acceptance = {}
    for temperature in TEMPERATURES:
        by_domain = {domain: found[temperature] for domain, found in cells.items()}
        if len(by_domain) > 1:
            by_domain["all"] = pooled(list(by_domain.values()))
        acceptance[str(temperature)] = {domain: figures(part) for domain, part in by_domain.items()}
    return {
        "num_parameters": DSparkDraftModel.from_pretrained(folder).num_parameters(),
        "held_out": json.loads((folder / "held_out.json").read_text(encoding="utf-8")),
        "acceptance": acceptance,
    }


def figures(part: Measurement) -> dict[str, Any]:
    stats = part.stats
    return {
        "num_prompts": len(part.prompts),
        "num_rounds": stats.num_rounds,
        "accepted_length": _or_none(stats.accepted_length),
        "standard_error": _or_none(part.standard_error),
        "conditional_acceptance": [_or_none(rate) for rate in stats.conditional_acceptance],
        "num_reached": part.num_reached,
    }


def as_markdown(results: dict[str, Any]) -> str:
    """Two tables: accepted lengths, and acceptance slot by slot."""
    drafts = results["drafts"]
    domains = list(next(iter(drafts.values()))["acceptance"]["0"])
    columns = [(temperature, domain) for temperature in ("0", "1") for domain in domains]
    titles = [f"{_decoding(temperature)}: {domain}" for temperature, domain in columns]
    lengths, slots = [], []
    for name, draft in drafts.items():
        cells = [draft["acceptance"][temperature][domain] for temperature, domain in columns]
        lengths.append(
            [name, f"{draft['num_parameters'] / 1e6:.1f}", f"{draft['held_out']['eval_accepted_length']:.2f}"]
            + [f"{_number(cell['accepted_length'])} ± {_number(cell['standard_error'])}" for cell in cells]
        )
        for temperature in ("0", "1"):
            rates = draft["acceptance"][temperature][domains[-1]]["conditional_acceptance"]
            slots.append([name, _decoding(temperature), *map(_number, rates)])
    num_slots = max(len(row) for row in slots) - 2
    slots = [row + ["-"] * (num_slots + 2 - len(row)) for row in slots]
    settings = results["settings"]
    return "\n".join(
        [
            f"{settings['steps']} steps each on {', '.join(settings['data'])}; at most {settings['num_prompts']} "
            f"prompts of a domain, {settings['max_new_tokens']} new tokens, {settings['dtype']}, whole blocks.",
            "",
            "Accepted length, bonus token included, ± its standard error over prompts:",
            "",
            *_table(["draft", "million parameters", "held out", *titles], lengths),
            "",
            f"Acceptance of a slot once all before it were accepted, prompts: {domains[-1]}:",
            "",
            *_table(["draft", "decoding", *(f"slot {slot}" for slot in range(num_slots))], slots),
            "",
        ]
    )


def plot_suffix_decay(results: dict[str, Any], names: Sequence[str], path: Path) -> None:
    """Conditional acceptance by slot with its standard error, a panel per temperature."""
    from matplotlib.figure import Figure  # no window and no global state
    from matplotlib.ticker import MaxNLocator

    shown = [name for name in names if name in results["drafts"]] or list(results["drafts"])
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    panels = figure.subplots(1, len(TEMPERATURES), sharex=True, sharey=True)
    for axes, temperature in zip(panels, map(str, TEMPERATURES), strict=True):
        for name, marker in zip(shown, "osD^v<>P" * len(shown), strict=False):
            domain, cell = list(results["drafts"][name]["acceptance"][temperature].items())[-1]
            rates = [math.nan if rate is None else rate for rate in cell["conditional_acceptance"]]
            counts = [max(1, count) for count in cell["num_reached"]]
            errors = [math.sqrt(rate * (1 - rate) / count) for rate, count in zip(rates, counts, strict=True)]
            axes.errorbar(range(len(rates)), rates, errors, marker=marker, markersize=4, capsize=2, label=name)
        axes.set_title(f"{_decoding(temperature)}, prompts: {domain}", fontsize=10)
        axes.set(xlabel="slot", ylim=(0, 1))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("acceptance, all before accepted")
    panels[0].legend(fontsize=9)
    temporary = path.with_suffix(".tmp")
    figure.savefig(temporary, format="svg")
    os.replace(temporary, path)


def write(path: Path, text: str) -> None:
    """All of a file or nothing."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _decoding(temperature: str) -> str:
    return "greedy" if temperature == "0" else f"T = {temperature}"


def _or_none(value: float) -> float | None:
    """JSON knows no NaN."""
    return None if math.isnan(value) else value


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(headings)} |",
        "|---|" + "---:|" * (len(headings) - 1),
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


if __name__ == "__main__":
    main()
