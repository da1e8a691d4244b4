# SPDX-License-Identifier: Apache-2.0
"""Every way to choose drafts on the same recorded texts, without the noise of a clock.

Records greedy texts of the default pair, and what the draft proposes at every place of them, and replays each text
under each policy against a round-time curve, with the history, correction, copies and gate that a call has.
A timed benchmark of the same policies (`benchmarks/scheduling.py`) needs hours for differences that a replay shows in
seconds.

    python benchmarks/replay.py --prompts gsm8k.jsonl humaneval.jsonl mt-bench.jsonl --save-texts texts.jsonl
    python benchmarks/replay.py --texts texts.jsonl --curve 1:0.064,2:0.069,3:0.074,4:0.076,6:0.079 --draft-s 0.009
    python benchmarks/replay.py --texts texts.jsonl --never-accepted    # a draft that is never right
    python benchmarks/replay.py --texts texts.jsonl --misleading        # texts whose repetitions never go on as before
    python benchmarks/replay.py --texts texts.jsonl --rows 2 8 32 --curve 1:0.055,192:0.103 --draft-s 0.007
    python benchmarks/replay.py --texts texts.jsonl --rows 1 4 16 64 256 --profile round_times.json --plot load.svg

"block only" is the default schedule without copies, "copy only" the same without a draft, "best source" knows what
will be accepted and takes the source and the number of drafts that are fastest: no policy does better round by
round. Recording goes on where it was interrupted.

With `--rows` texts run in batches drawn from all files, each until its last row has ended, or with `--waiting` so many
more texts for each row take the places of those that end. The ratio is then that to the same batches without drafts,
and `--row-s` is what a row costs in every pass, on top of its tokens.

`dspark_hf.scheduling.simulation` says what a replay leaves out.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import transformers
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

import dspark_hf
from dspark_hf import RoundTimeProfile, SPSCurve
from dspark_hf.common.chat_tokens import encode_prompt
from dspark_hf.common.plots import check_can_plot
from dspark_hf.common.prompts import read_prompts
from dspark_hf.decoding.batch import RequestFactory
from dspark_hf.decoding.call import Call, generator_for
from dspark_hf.decoding.drafter import DraftProposal
from dspark_hf.decoding.loop import Loop
from dspark_hf.decoding.single_runner import SingleRunner, model_kwargs_for
from dspark_hf.evaluation.load_plot import save_load_plot
from dspark_hf.profiling import profile_for
from dspark_hf.profiling.measure import batch_points
from dspark_hf.scheduling import CopyOptions, DraftingPolicy, LookaheadScheduler, PrefixScheduler, all_rules
from dspark_hf.scheduling.choice import DraftPlan
from dspark_hf.scheduling.copying import MOST_COPIES, CopySource
from dspark_hf.scheduling.simulation import LoadReport, RecordedBlock, RecordedText, replay


Texts = dict[str, list[RecordedText]]  # of each file


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, default=None, help="replay these, from --save-texts")
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help="prompt files to record")
    parser.add_argument("--limit", type=int, default=16, help="prompts per file")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--save-texts", type=Path, default=Path("texts.jsonl"), help="where to record")
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
    parser.add_argument("--never-accepted", action="store_true", help="reject every block")
    parser.add_argument("--misleading", action="store_true", help="make texts whose repetitions go on otherwise")
    parser.add_argument("--plot", type=Path, default=None, help="picture to write, .png or .svg, with --rows")
    arguments = parser.parse_args()
    if arguments.plot is not None:
        check_can_plot(arguments.plot, "load plot")
    if (arguments.texts is None) == (not arguments.prompts):
        parser.error("Give either `--texts` or `--prompts`.")
    return arguments


class Recorder:
    """Keeps what a drafter proposes, and sends nothing: every round is a plain step."""

    def __init__(self, drafter):
        self._drafter, self.proposals = drafter, []

    def __getattr__(self, name: str):
        return getattr(self._drafter, name)

    def propose(self, requests, others_wait=False):
        self.proposals += self._drafter.propose(requests, others_wait)
        return [DraftProposal(request.input_ids[:, :0], drafted=False) for request in requests]


@torch.inference_mode()
def record_text(target, draft, prompt_ids: torch.Tensor, max_new_tokens: int) -> RecordedText:
    """The greedy answer to a prompt, [1, s], and the draft's block at every place of it."""
    length, num_slots = prompt_ids.shape[1], draft.config.num_draft_slots
    config = GenerationConfig(
        do_sample=False,
        max_length=length + max_new_tokens + num_slots + 1,  # blocks at the end are whole
        num_assistant_tokens=num_slots,
        assistant_confidence_threshold=0.0,
        prompt_lookup_num_tokens=0,
    )
    ends = torch.tensor(target.generation_config.eos_token_id).flatten().tolist()
    criteria = StoppingCriteriaList([MaxLengthCriteria(length + max_new_tokens), EosTokenCriteria(ends)])
    request = RequestFactory(LogitsProcessorList(), criteria, config, length).only(prompt_ids)
    recorder = Recorder(generator_for(target, draft, config))
    recorder.add_requests([request])
    reads = recorder.model_kwargs_overrides
    runner = SingleRunner(target, request, config, model_kwargs_for(target, prompt_ids), reads)
    for _ in Loop(Call((request,), recorder, runner, factory=None)).run():
        pass
    text = request.input_ids[0].tolist()
    blocks = []
    for place, proposal in enumerate(recorder.proposals, start=length + 1):
        drafts = proposal.token_ids[0].tolist()
        blocks.append(RecordedBlock(place, tuple(drafts), proposal.confidence, num_equal(drafts, text[place:])))
    return RecordedText(tuple(text), length + 1, tuple(blocks))


def num_equal(drafts: Sequence[int], text: Sequence[int]) -> int:
    differs = (i for i, (own, right) in enumerate(zip(drafts, text, strict=False)) if own != right)
    return next(differs, min(len(drafts), len(text)))


def record(arguments: argparse.Namespace) -> None:
    """Append the texts that the file lacks; its first line is what a replay must know besides."""
    transformers.logging.disable_progress_bar()
    target, draft, tokenizer = dspark_hf.load_default_pair(dtype=getattr(torch, arguments.dtype))
    path = arguments.save_texts
    if not path.exists():
        profile = profile_for(target, draft, arguments.max_new_tokens)
        curve = dataclasses.asdict(profile.curve(256)) if profile is not None else None
        priors = {name: getattr(draft.config, name) for name in ("acceptance_prior", "copy_prior")}
        path.write_text(json.dumps(priors | {"curve": curve}) + "\n")
    known = {(entry["file"], entry["index"]) for entry in map(json.loads, path.read_text().splitlines()[1:])}
    with path.open("a") as lines:
        for file in arguments.prompts:
            for index, prompt in enumerate(read_prompts(file)[: arguments.limit]):
                if (file.stem, index) in known:
                    continue
                prompt_ids = encode_prompt(tokenizer, prompt.text)["input_ids"]
                text = record_text(target, draft, prompt_ids, arguments.max_new_tokens)
                lines.write(json.dumps({"file": file.stem, "index": index} | dataclasses.asdict(text)) + "\n")
                lines.flush()


def load(path: Path) -> tuple[Texts, dict]:
    setting, *entries = map(json.loads, path.read_text().splitlines())
    texts: Texts = {}
    for entry in entries:
        blocks = [
            RecordedBlock(b["place"], tuple(b["token_ids"]), tuple(b["confidence"]), b["num_accepted"])
            for b in entry["blocks"]
        ]
        if blocks:  # else an answer of one token
            text = RecordedText(tuple(entry["token_ids"]), entry["num_prompt_tokens"], tuple(blocks))
            texts.setdefault(entry["file"], []).append(text)
    return texts, setting


def misleading(text: RecordedText) -> RecordedText:
    """A prompt that holds every ending of the text, of up to eight tokens, followed by another token than the text's.

    Whatever a place of the answer is like, it was followed by something else in the prompt: copies are wrong from
    their first token, but where the answer itself repeats more than eight. Blocks stay as they are.
    """
    answer, wrong = text.token_ids[text.num_prompt_tokens - 1 :], itertools.count(10**6)
    prompt = []
    for place in range(len(answer) - 1, 0, -1):  # the latest of equal places: that of the ending itself
        prompt += [*answer[max(0, place - 8) : place], next(wrong)]
    shift = len(prompt) - (text.num_prompt_tokens - 1)
    blocks = tuple(dataclasses.replace(block, place=block.place + shift) for block in text.blocks)
    return RecordedText((*prompt, *answer), len(prompt) + 1, blocks)


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


def best_source(text: RecordedText, curve: SPSCurve) -> LoadReport:
    """Rounds with the source and the number of drafts that bring the most tokens per second."""
    source, place, end = CopySource(), text.num_prompt_tokens, len(text.token_ids)
    blocks = {block.place: block for block in text.blocks}
    verify_s = curve.verify_table(1, MOST_COPIES + 1)
    num_rounds, num_verified, seconds = 0, 0, 0.0
    source.read(text.token_ids[:place])
    while place < end:
        rest = text.token_ids[place:]
        copied = num_equal(source.tokens(MOST_COPIES).tolist(), rest) if source.match_length else 0
        options = [(n, verify_s[n]) for n in range(copied + 1)]
        options += [(n, curve.draft_s + verify_s[n]) for n in range(1, blocks[place].num_accepted + 1)]
        num_accepted, round_s = max(
            ((min(n, end - place - 1), s) for n, s in options), key=lambda own: (1 + own[0]) / own[1]
        )
        source.read(rest[: num_accepted + 1])
        place += num_accepted + 1
        num_rounds, num_verified, seconds = num_rounds + 1, num_verified + 1 + num_accepted, seconds + round_s
    return LoadReport("best source", 1, num_rounds, end - text.num_prompt_tokens, num_verified, float(seconds))


def print_batches(texts: Texts, setting: dict, curve: SPSCurve, arguments: argparse.Namespace) -> None:
    pool = [text for own in texts.values() for text in own]
    num_slots, pooled = len(pool[0].blocks[0].confidence), []
    print("| policy | " + " | ".join(f"{rows} rows | sent" for rows in arguments.rows) + " |")
    print("|---|" + "---:|" * 2 * len(arguments.rows))
    drawn = {rows: draw_batches(pool, rows, arguments) for rows in arguments.rows}
    limits = (arguments.max_new_tokens, arguments.row_s)
    plain = {rows: [replay(own, curve, None, rows, *limits) for own in drawn[rows]] for rows in arguments.rows}
    for name, make in policies(num_slots, setting, None).items():
        cells = []
        for rows in arguments.rows:
            reports = []
            for own in drawn[rows]:
                policy = make()
                policy.use_curve(known_curve(curve, rows, num_slots, arguments.row_s))
                reports.append(replay(own, curve, policy, rows, *limits, name=name))
            pairs = zip(reports, plain[rows], strict=True)
            ratio = statistics.mean(report.tokens_per_s / other.tokens_per_s for report, other in pairs)
            pooled.append(pool_reports(reports))
            cells.append(f"{ratio:.3f} | {pooled[-1].verify_length:.2f}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    if arguments.plot is not None:
        print(f"Written: {save_load_plot([pool_reports(own) for own in plain.values()] + pooled, arguments.plot)}")


def draw_batches(pool: list, rows: int, arguments: argparse.Namespace) -> list[list[RecordedText]]:
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


class CopyOnly(DraftingPolicy):
    """Never drafts a block."""

    def plan(self, histories, copy_limits, slots, tokens_left=None) -> DraftPlan:
        """The plan without blocks."""
        return super().plan(histories, copy_limits, [0] * len(slots), tokens_left)


def policies(num_slots: int, setting: dict, curve: SPSCurve | None) -> dict[str, Callable[[], DraftingPolicy]]:
    prior, copies = setting["acceptance_prior"], CopyOptions(prior=setting["copy_prior"])

    def make(scheduler: Callable, kind: type = DraftingPolicy, **options) -> Callable[[], DraftingPolicy]:
        return lambda: kind(scheduler(), num_slots, prior, curve, **options)

    return {name: make(rule) for name, rule in all_rules(num_slots).items()} | {
        "block only": make(LookaheadScheduler, may_skip=True),
        "copy only": make(LookaheadScheduler, CopyOnly, copies=copies),
        "confidence": make(PrefixScheduler, copies=copies),
        "hardware, sampling": make(LookaheadScheduler, may_skip=True, learn_times=False, copies=copies),
        "hardware, greedy": make(LookaheadScheduler, may_skip=True, copies=copies),
    }


def figures(texts: Texts, run: Callable[[RecordedText], LoadReport]) -> Iterator[LoadReport]:
    """Of each file, all texts together."""
    for own in texts.values():
        yield pool_reports([run(text) for text in own])


def main() -> None:
    arguments = parse_arguments()
    if arguments.texts is None:
        record(arguments)
    texts, setting = load(arguments.texts or arguments.save_texts)
    curve = choose_curve(arguments, setting)
    if arguments.never_accepted:
        texts = {name: [_rejected(text) for text in own] for name, own in texts.items()}
        setting["acceptance_prior"] = None
    if arguments.misleading:
        texts = {name: [misleading(text) for text in own] for name, own in texts.items()}
    if arguments.rows:
        print_batches(texts, setting, curve, arguments)
        return
    num_slots = len(next(iter(texts.values()))[0].blocks[0].confidence)
    times = ", ".join(f"{b}: {1e3 * s:.1f}" for b, s in zip(curve.batch_tokens, curve.verify_s, strict=True))
    print(f"verification ms by tokens {times}; drafting {1e3 * curve.draft_s:.1f} ms")
    print({name: f"{len(own)} texts" for name, own in texts.items()}, "\n")
    print("| policy | " + " | ".join(texts) + " | mean |\n|---|" + "---:|" * (len(texts) + 1))
    runs = {
        name: lambda text, make=make: replay([text], curve, make())
        for name, make in policies(num_slots, setting, curve).items()
    }
    for name, run in (runs | {"best source": lambda text: best_source(text, curve)}).items():
        reports = list(figures(texts, run))
        ratios = [report.tokens_per_s * curve.plain_s for report in reports]
        cells = [f"{own.accepted_length:.2f}, {ratio:.3f}" for own, ratio in zip(reports, ratios, strict=True)]
        print(f"| {name} | " + " | ".join(cells) + f" | {statistics.mean(ratios):.3f} |", flush=True)


def _rejected(text: RecordedText) -> RecordedText:
    return dataclasses.replace(text, blocks=tuple(dataclasses.replace(b, num_accepted=0) for b in text.blocks))


if __name__ == "__main__":
    main()
