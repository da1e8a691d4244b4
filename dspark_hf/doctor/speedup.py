# SPDX-License-Identifier: Apache-2.0
"""The speed-up of a pair on this machine: measured, and derived for short answers and for many requests.

The second half computes on numbers only, without a model.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..common.prompts import Prompt
from ..common.records import RoundRecord
from ..decoding.criterion import resolve_options
from ..evaluation.compare import PromptComparison, compare, summarize, without_copies_summary
from ..profiling.automatic import profile_for
from ..profiling.profile import RoundTimeProfile, measure_profile
from ..scheduling.curve import SPSCurve
from ..scheduling.policy import DraftingPolicy
from ..scheduling.rules import LookaheadScheduler
from ..scheduling.simulation import RecordedText, full_blocks, replay
from .finding import ADVICE, Finding
from .pair import Pair


CONTEXT, BUDGET_S = 128, 6.0  # of a measurement of round times, if there is no profile
REQUEST_COUNTS = (1, 2, 4, 8, 16, 32, 64)  # those within the measured round times are tried
SHORTEST = 3  # tokens that any answer has


@dataclass(frozen=True)
class Gain:
    """Speed with the draft against plain generation, for one request unless it says otherwise.

    `break_even_tokens`: tokens of an answer after which the draft's reading of the prompt is amortised; None where
    it never is. `load_limit`: most requests at a time up to which drafting pays by the measured round times, 0 for
    none; None where it is not known.
    """

    speedup: float  # all tokens over all seconds, against plain generation; prefill included
    lowest: float  # the speed-up of the prompt that gains least
    highest: float  # of the one that gains most
    num_prompts: int
    num_tokens: int  # tokens generated with the draft
    accepted_length: float  # tokens per round, with as many drafts as the schedule sends
    num_identical: int  # prompts whose two greedy texts are the same
    plain_token_s: float  # seconds per token of plain generation, after the prefill
    dspark_token_s: float  # seconds per token with the draft, after the prefill
    break_even_tokens: float | None = None
    load_limit: int | None = None
    load_tried: int | None = None  # most requests that were looked at
    by_source: dict[str, tuple[int, float]] | None = None  # source of drafts -> its rounds, and tokens per round
    speedup_without_copies: float | None = None  # None where nothing is copied anyway


def measure_gain(
    pair: Pair,
    prompts: Sequence[Prompt],  # at least one
    max_new_tokens: int,  # longest answer, in tokens
    rounds: Sequence[RoundRecord],
    on_progress: Callable[[str], None],  # called with what begins
) -> Gain:
    """Run prompts with and without the draft, in turns, and time rounds."""
    on_progress("Generating with and without the draft")
    results = compare(
        pair.target,
        pair.draft,
        pair.prompting_tokenizer,
        prompts,
        max_new_tokens=max_new_tokens,
        raw=pair.raw,
        without_copies=resolve_options(pair.config, pair.draft.generation_config).copies is not None,
    )
    on_progress("Timing rounds")
    profile = _profile(pair)
    curve = profile.curve(CONTEXT) if profile is not None else None
    return gain_from(results, load_limit(rounds, curve, pair.config.num_draft_slots) if curve is not None else None)


def _profile(pair: Pair) -> RoundTimeProfile | None:
    found = profile_for(pair.target, pair.draft, 0)
    if found is not None:
        return found
    try:
        return measure_profile(pair.target, pair.draft, (CONTEXT,), budget_s=BUDGET_S)
    except (ValueError, RuntimeError, NotImplementedError):  # it is only for the load
        return None


def gain_from(results: Sequence[PromptComparison], load: tuple[int, int] | None = None) -> Gain:
    """Sum up a comparison."""
    pooled = summarize(results)
    speedups = [result.dspark.tokens_per_s / result.plain.tokens_per_s for result in results]
    plain_s, dspark_s = token_seconds(results)
    without = without_copies_summary(results)
    return Gain(
        speedup=pooled.speedup,
        lowest=min(speedups),
        highest=max(speedups),
        num_prompts=pooled.num_prompts,
        num_tokens=sum(len(result.dspark.token_ids) for result in results),
        accepted_length=pooled.accepted_length,
        num_identical=pooled.num_identical,
        plain_token_s=plain_s,
        dspark_token_s=dspark_s,
        break_even_tokens=break_even_tokens(first_draft_s(results), plain_s, dspark_s),
        load_limit=load[0] if load is not None else None,
        load_tried=load[1] if load is not None else None,
        by_source=pooled.by_source,
        speedup_without_copies=without.speedup if without is not None else None,
    )


def token_seconds(results: Sequence[PromptComparison]) -> tuple[float, float]:  # NaN where no prompt got two tokens
    """Seconds per token after the prefill, without and with the draft.

    The prefill is what a call with the draft takes besides its rounds, and plain generation takes as long for it.
    """
    plain_s = dspark_s = 0.0
    plain_tokens = dspark_tokens = 0
    for result in results:
        prefill_s = max(0.0, result.dspark.seconds - result.dspark.stats.round_s)
        plain_s += max(0.0, result.plain.seconds - prefill_s)
        plain_tokens += len(result.plain.token_ids) - 1
        dspark_s += result.dspark.stats.round_s
        dspark_tokens += result.dspark.stats.num_committed
    nan = float("nan")
    return (plain_s / plain_tokens if plain_tokens else nan, dspark_s / dspark_tokens if dspark_tokens else nan)


def first_draft_s(results: Sequence[PromptComparison]) -> float:  # the median over the prompts, at least 0
    """Seconds that the first drafting of a text takes longer than the later ones: it reads the prompt."""
    extra = []
    for result in results:
        seconds = [record.draft_s for record in result.dspark.stats.rounds if record.drafted]
        if len(seconds) > 1:
            extra.append(seconds[0] - statistics.median(seconds[1:]))
    return max(0.0, statistics.median(extra)) if extra else 0.0


def break_even_tokens(
    first_s: float, plain_token_s: float, dspark_token_s: float
) -> float | None:  # None where a token does not take less time with the draft
    """Tokens after which a cost paid once is earned back."""
    return first_s / (plain_token_s - dspark_token_s) if dspark_token_s < plain_token_s else None


def load_limit(
    rounds: Sequence[RoundRecord], curve: SPSCurve, num_slots: int
) -> tuple[int, int] | None:  # None without rounds that can be replayed
    """Most requests at a time up to which drafting gives more tokens per second than plain generation.

    Recorded rounds are replayed with the default schedule, for no more requests than the curve has tokens: beyond
    what was measured, plain generation would be guesswork too. The times are those of one request, so the result is
    rough.
    """
    usable = full_blocks(rounds, num_slots)
    if not usable:
        return None
    counts, limit = [count for count in REQUEST_COUNTS if count <= curve.batch_tokens[-1]], 0
    for count in counts:
        starts = [i * len(usable) // count for i in range(count)]
        texts = [RecordedText.from_rounds(usable[start:] + usable[:start]) for start in starts]
        policy = DraftingPolicy(LookaheadScheduler(), num_slots, curve=curve, learn_times=False, may_skip=True)
        if replay(texts, curve, policy, count).tokens_per_s <= replay(texts, curve, None, count).tokens_per_s:
            break
        limit = count
    return limit, counts[-1]


def judge_gain(gain: Gain, dtype: str, device_type: str) -> list[Finding]:
    """Findings of the measurement."""
    if gain.speedup >= 1:
        return []
    if dtype == "float32" and device_type == "cpu":
        remedy = "On a CPU, verifying several tokens is expensive in float32: try bfloat16."
    elif gain.accepted_length < 2:
        remedy = "Too few drafts are accepted for what a round costs. Train a better draft, or generate without it."
    else:
        remedy = (
            "A round costs too much for what it yields. Look where the time goes with `dspark-hf profile`: send fewer "
            "drafts, train a smaller draft, or give the machine to this process alone."
        )
    return [
        Finding(
            "slower_than_plain",
            ADVICE,
            f"With the draft generation runs at {gain.speedup:.2f} times the speed of plain generation.",
            remedy,
        )
    ]


def gain_sentences(gain: Gain) -> list[str]:
    """The measurements as sentences."""
    spread = f" ({gain.lowest:.2f} to {gain.highest:.2f} from prompt to prompt)" if gain.num_prompts > 1 else ""
    sentences = [
        f"Expect {gain.speedup:.2f} times the speed of plain generation for one request on this machine{spread}; "
        f"measured on {gain.num_tokens} tokens."
    ]
    sentences += _source_sentences(gain)
    if gain.break_even_tokens is None:
        sentences.append("It does not pay for answers of any length.")
    else:
        tokens = math.ceil(gain.break_even_tokens) + 1  # the first token comes without drafts
        lengths = "any length" if tokens <= SHORTEST else f"{tokens} tokens or more"
        sentences.append(f"It pays for answers of {lengths}.")
    if gain.load_limit == 0:
        sentences.append("By the measured round times, drafting does not pay for one request at a time, nor for more.")
    elif gain.load_limit is not None:
        all_tried = gain.load_limit == gain.load_tried
        sentences.append(
            f"It pays up to {'at least ' if all_tried else ''}{gain.load_limit} request(s) at a time, in an engine "
            "that batches them. That is a rough figure: round times were measured with one request"
            + (", and say nothing about more." if all_tried else ".")
        )
    return sentences


def _source_sentences(gain: Gain) -> list[str]:
    """What blocks and copies bring."""
    sources = gain.by_source or {}
    names = {"block": "a block of the draft", "copy": "a copy from the text", "both": "a block that a copy continues"}
    parts = [
        f"{name} {sources[key][1]:.2f} ({sources[key][0]} rounds)" for key, name in names.items() if key in sources
    ]
    sentences = [f"Tokens of a round by the source of its drafts: {', '.join(parts)}."] if parts else []
    if gain.speedup_without_copies is not None:
        sentences.append(f"Without copies it would be {gain.speedup_without_copies:.2f} times.")
    return sentences
