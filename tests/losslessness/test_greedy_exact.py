# SPDX-License-Identifier: Apache-2.0
"""Greedy decoding with a draft equals plain greedy decoding, to the token, over randomised calls.

A case is a target, a draft, a prompt and a few options, all drawn from its number. What is compared: the text, the
calls that stateful processors and criteria see, what a streamer receives, and every field of the returned object. The
mix itself is checked at the end: rounds with all, some and none of the drafts accepted, ends of text inside accepted
blocks, each option.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

from dspark_hf import AcceptanceStats, collect_rounds
from dspark_hf._compat import CACHE_KEY
from tests.support.closeness import SAFE_LEAD, LeadRecorder, is_close, tolerance_of
from tests.support.models import (
    TARGET_KINDS,
    VOCAB_SIZE,
    character_tokenizer,
    echo_draft,
    oracle_draft,
    random_draft,
    random_prompt,
    spread_confidence,
    tiny_target,
)


GROUPS, CASES_PER_GROUP = 10, 9  # per kind of target: 6 * 10 * 9 = 540 cases
MAX_NEW_TOKENS = 24

# Static caches can take tokens back since transformers 5.24, those of windowed layers never.
STATIC_CACHE_KINDS = ("qwen3", "llama", "llama_tied") if CACHE_KEY == "cache" else ()

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
DFLASH = {"markov_rank": 0, "confidence_head_with_markov": False}
DRAFTS: dict[str, tuple[Callable, dict[str, Any]]] = {
    "vanilla": (oracle_draft, {}),
    "vanilla_block1": (oracle_draft, {"block_size": 1}),
    "vanilla_block2": (oracle_draft, {"block_size": 2, "target_layer_ids": [-1]}),
    "vanilla_block7": (oracle_draft, {"block_size": 7, "noise": 0.01}),
    "gated": (oracle_draft, {"markov_head_type": "gated", "block_size": 3}),
    "rnn": (oracle_draft, {"markov_head_type": "rnn", "block_size": 6, "noise": 0.02}),
    "reduced_vocabulary": (oracle_draft, {"draft_vocab_size": 48, "block_size": 5}),
    "reduced_rnn": (oracle_draft, {"draft_vocab_size": 70, "markov_head_type": "rnn", "noise": 0.02}),
    "slot0_dropped": (oracle_draft, {"sample_from_anchor": False, "block_size": 5}),
    "sliding_causal": (oracle_draft, {**SLIDING, "block_size": 6, "noise": 0.2}),
    "sliding_bidirectional": (oracle_draft, {**SLIDING, "sliding_window_non_causal": True, "noise": 0.2}),
    "taps": (oracle_draft, {"target_layer_ids": [2, -1, 0], "noise": 0.1}),
    "no_confidence": (oracle_draft, {"enable_confidence_head": False}),
    "confidence_without_markov": (oracle_draft, {"confidence_head_with_markov": False}),
    "random": (random_draft, {"block_size": 7}),
    "random_gated_slot0_dropped": (
        random_draft,
        {"markov_head_type": "gated", "sample_from_anchor": False, "block_size": 2},
    ),
    "dflash": (echo_draft, DFLASH),
    "dflash_no_confidence": (echo_draft, {"markov_rank": 0, "enable_confidence_head": False, "block_size": 3}),
    "dflash_slot0_dropped": (random_draft, {**DFLASH, "sample_from_anchor": False}),
}
TOKENIZER = character_tokenizer()


@lru_cache(maxsize=1)
def target_of(kind: str):
    return tiny_target(kind)


@lru_cache(maxsize=len(DRAFTS))
def draft_of(kind: str, name: str):
    build, overrides = DRAFTS[name]
    draft = build(**overrides) if build is random_draft else build(target_of(kind), **overrides)
    return spread_confidence(draft) if build is oracle_draft else draft


class CountedBias(LogitsProcessor):
    """Stateful: what it adds depends on how often it was called. Remembers what it saw."""

    def __init__(self):
        self.calls: list[tuple[int, ...]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls.append(tuple(input_ids[0].tolist()))
        scores = scores.clone()
        scores[:, (7 * len(self.calls)) % VOCAB_SIZE] += 2.5
        return scores


class CountedStop(StoppingCriteria):
    """Stateful: ends the text at its n-th call. Remembers the text and the scores it saw."""

    def __init__(self, num_calls: int):
        self.num_calls = num_calls
        self.calls: list[tuple[tuple[int, ...], int | None, float]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        last = float(scores[-1].max()) if scores else math.nan
        self.calls.append((tuple(input_ids[0].tolist()), None if scores is None else len(scores), last))
        return torch.full((1,), len(self.calls) >= self.num_calls, dtype=torch.bool)


class RecordingStreamer(TextIteratorStreamer):
    """Also remembers the ids."""

    def __init__(self):
        super().__init__(TOKENIZER)
        self.ids: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.ids += value.flatten().tolist()
        super().put(value)


@dataclass
class Case:
    """One call, with and without a draft."""

    kind: str
    number: int
    draft_name: str
    prompt: torch.Tensor
    kwargs: dict[str, Any]
    draft_knobs: dict[str, Any] = field(default_factory=dict)
    features: list[str] = field(default_factory=list)
    bias: bool = False
    stop_after: int | None = None
    streamer: bool = False
    attention: str = "sdpa"

    def __str__(self) -> str:
        return (
            f"{self.kind} #{self.number}: {self.draft_name} {self.draft_knobs}, prompt of {self.prompt.shape[1]}, "
            f"{self.attention}, features {self.features}, arguments {self.kwargs}"
        )


@dataclass
class Run:
    """What one call did."""

    output: Any
    processor_calls: list | None
    criterion_calls: list | None
    streamer: RecordingStreamer | None
    smallest_lead: float  # of a plain text, in units of rounding

    @property
    def sequences(self) -> torch.Tensor:
        return self.output if isinstance(self.output, torch.Tensor) else self.output.sequences


def run(case: Case, with_draft: bool, **overrides: Any) -> Run:
    target, kwargs = target_of(case.kind), dict(case.kwargs) | overrides
    processor, criterion, recorder = CountedBias() if case.bias else None, None, LeadRecorder()
    processors = LogitsProcessorList([processor] if case.bias else [])
    if not with_draft:
        processors.append(recorder)
        for name in ("prompt_lookup_num_tokens", "max_matching_ngram_size"):  # the library's own way to draft
            kwargs.pop(name, None)
    if processors:
        kwargs["logits_processor"] = processors
    if case.stop_after is not None:
        criterion = CountedStop(case.stop_after)
        kwargs["stopping_criteria"] = StoppingCriteriaList([criterion])
    streamer = RecordingStreamer() if case.streamer else None
    if with_draft:
        draft = draft_of(case.kind, case.draft_name)
        knobs = draft.generation_config
        unset = {name: getattr(knobs, name) for name in case.draft_knobs}
        knobs.update(**case.draft_knobs)
        kwargs["assistant_model"] = draft
    target.set_attn_implementation(case.attention)
    try:
        output = target.generate(case.prompt, do_sample=False, streamer=streamer, **kwargs)
    finally:
        if with_draft:
            for name, value in unset.items():
                setattr(knobs, name, value)
    return Run(output, processor and processor.calls, criterion and criterion.calls, streamer, recorder.smallest)


def plain_tokens(case: Case) -> list[int]:
    """The text without any option, to pick tokens from that really occur."""
    output = target_of(case.kind).generate(case.prompt, do_sample=False, max_new_tokens=case.kwargs["max_new_tokens"])
    return output[0, case.prompt.shape[1] :].tolist()


def add_eos(case: Case, rng: random.Random) -> None:
    """An EOS that falls inside an accepted block, where there is one; else any token of the text, else any token."""
    if "eos_token_id" in case.kwargs:
        return
    with collect_rounds() as stats:
        output = run(case, with_draft=True).sequences
    text = output[0, case.prompt.shape[1] :].tolist()
    inside, position = [], 1  # the prefill makes one token without drafts
    for record in stats.rounds:
        inside += [i for i in range(position, position + record.num_accepted) if text[i : i + 1] and i]
        position += record.num_committed
    inside = [i for i in inside if i < len(text) and text.index(text[i]) == i]
    eos = text[rng.choice(inside)] if inside else rng.choice(text)
    case.kwargs["eos_token_id"] = [eos, 2] if rng.random() < 0.3 else eos


def min_new_tokens(case: Case, rng: random.Random) -> None:
    case.kwargs["min_new_tokens"] = rng.randint(1, case.kwargs["max_new_tokens"])
    add_eos(case, rng)


def min_length(case: Case, rng: random.Random) -> None:
    case.kwargs["min_length"] = case.prompt.shape[1] + rng.randint(1, case.kwargs["max_new_tokens"])
    add_eos(case, rng)


def repetition_penalty(case: Case, rng: random.Random) -> None:
    case.kwargs["repetition_penalty"] = rng.choice([0.7, 1.2, 1.8])


def encoder_repetition_penalty(case: Case, rng: random.Random) -> None:
    case.kwargs["encoder_repetition_penalty"] = rng.choice([0.8, 1.5])


def no_repeat_ngram_size(case: Case, rng: random.Random) -> None:
    case.kwargs["no_repeat_ngram_size"] = rng.choice([1, 2, 3])


def bad_words_ids(case: Case, rng: random.Random) -> None:
    text = plain_tokens(case)
    start = rng.randrange(len(text))
    case.kwargs["bad_words_ids"] = [text[start : start + 2], [rng.choice(text)]]


def suppress_tokens(case: Case, rng: random.Random) -> None:
    case.kwargs["suppress_tokens"] = rng.sample(plain_tokens(case), 1)


def begin_suppress_tokens(case: Case, rng: random.Random) -> None:
    case.kwargs["begin_suppress_tokens"] = plain_tokens(case)[:1]


def sequence_bias(case: Case, rng: random.Random) -> None:
    text = plain_tokens(case)
    start = rng.randrange(len(text))
    case.kwargs["sequence_bias"] = {(rng.randrange(3, VOCAB_SIZE),): 4.0, tuple(text[start : start + 2]): -6.0}


def forced_eos_token_id(case: Case, rng: random.Random) -> None:
    case.kwargs["forced_eos_token_id"] = rng.randrange(3, VOCAB_SIZE)


def exponential_decay(case: Case, rng: random.Random) -> None:
    add_eos(case, rng)
    case.kwargs["exponential_decay_length_penalty"] = (rng.randint(1, 8), rng.choice([1.05, 1.4]))


def guidance_scale(case: Case, rng: random.Random) -> None:
    case.kwargs["guidance_scale"] = rng.choice([1.3, 2.0])
    if rng.random() < 0.5:
        case.kwargs["negative_prompt_ids"] = random_prompt(rng.randint(1, 6), seed=case.number)


def prefix_allowed_tokens_fn(case: Case, rng: random.Random) -> None:
    offset = rng.randrange(5)

    def allowed(batch_id: int, input_ids: torch.Tensor) -> list[int]:
        first = (int(input_ids[-1]) + input_ids.shape[0] + offset) % 3
        return list(range(3 + first, VOCAB_SIZE, 3))

    case.kwargs["prefix_allowed_tokens_fn"] = allowed


def stop_strings(case: Case, rng: random.Random) -> None:
    text = TOKENIZER.decode(plain_tokens(case))
    start = rng.randrange(len(text))
    case.kwargs |= {"stop_strings": [text[start : start + rng.randint(1, 4)]], "tokenizer": TOKENIZER}


def stopping_criteria(case: Case, rng: random.Random) -> None:
    case.stop_after = rng.randint(1, case.kwargs["max_new_tokens"])


def logits_processor(case: Case, rng: random.Random) -> None:
    case.bias = True


def renormalize_logits(case: Case, rng: random.Random) -> None:
    case.kwargs |= {"renormalize_logits": True, "remove_invalid_values": True}


def threshold(case: Case, rng: random.Random) -> None:
    value = rng.choice([0.0, 0.3, 0.9])
    if draft_of(case.kind, case.draft_name).confidence_head is None:
        value = 0.0
    where = rng.choice([case.kwargs, case.draft_knobs])
    where["assistant_confidence_threshold"] = value


def schedule(case: Case, rng: random.Random) -> None:
    case.draft_knobs["num_assistant_tokens_schedule"] = rng.choice(["constant", "confidence"])


def num_assistant_tokens(case: Case, rng: random.Random) -> None:
    most = draft_of(case.kind, case.draft_name).config.num_draft_slots
    rng.choice([case.kwargs, case.draft_knobs])["num_assistant_tokens"] = rng.randint(1, most)


def prompt_lookup(case: Case, rng: random.Random) -> None:
    where = rng.choice([case.kwargs, case.draft_knobs])
    where["prompt_lookup_num_tokens"] = rng.choice([0, 1, 3, 10, 10, 40])
    if rng.random() < 0.5:
        where["max_matching_ngram_size"] = rng.choice([1, 2, 5])


def repetitive_prompt(case: Case, rng: random.Random) -> None:
    """A prompt that says things twice, the plain answer among them: there is a lot to copy, some of it wrong."""
    answer = torch.tensor([plain_tokens(case)[: rng.randint(1, 12)]])
    case.prompt = torch.cat([case.prompt, answer, case.prompt, answer, case.prompt[:, : rng.randint(1, 3)]], dim=1)


def static_cache(case: Case, rng: random.Random) -> None:
    if case.kind in STATIC_CACHE_KINDS:
        case.kwargs["cache_implementation"] = "static"
    else:
        case.features.remove("static_cache")


def left_padding(case: Case, rng: random.Random) -> None:
    num_pads = rng.randint(1, 5)
    case.kwargs["attention_mask"] = torch.tensor([[0] * num_pads + [1] * case.prompt.shape[1]])
    case.prompt = torch.cat([case.prompt.new_zeros(1, num_pads), case.prompt], dim=1)


def streamer(case: Case, rng: random.Random) -> None:
    case.streamer = True


def returned_scores(case: Case, rng: random.Random) -> None:
    case.kwargs |= {"return_dict_in_generate": True, "output_scores": True}


def returned_everything(case: Case, rng: random.Random) -> None:
    fields = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
    case.kwargs |= {"return_dict_in_generate": True} | dict.fromkeys(fields, True)
    case.attention = "eager"


# In the order in which they are applied: the ones that pick tokens from the text come last.
FEATURES = (
    repetitive_prompt,
    left_padding,
    threshold,
    schedule,
    num_assistant_tokens,
    prompt_lookup,
    static_cache,
    streamer,
    returned_scores,
    returned_everything,
    renormalize_logits,
    repetition_penalty,
    encoder_repetition_penalty,
    no_repeat_ngram_size,
    prefix_allowed_tokens_fn,
    forced_eos_token_id,
    guidance_scale,
    logits_processor,
    bad_words_ids,
    suppress_tokens,
    begin_suppress_tokens,
    sequence_bias,
    stop_strings,
    stopping_criteria,
    exponential_decay,
    min_new_tokens,
    min_length,
    add_eos,
)
WEIGHTS = {
    repetitive_prompt: 4,
    threshold: 3,
    schedule: 3,
    num_assistant_tokens: 2,
    prompt_lookup: 3,
    add_eos: 5,
    returned_scores: 3,
    returned_everything: 3,
}


def build_case(kind: str, number: int) -> Case:
    rng = random.Random(f"{kind}-{number}")
    prompt = random_prompt(rng.randint(1, 40), seed=rng.randrange(10**6))
    length = rng.choice([1, 2, 3, rng.randint(4, MAX_NEW_TOKENS), MAX_NEW_TOKENS, MAX_NEW_TOKENS])
    case = Case(kind, number, rng.choice(list(DRAFTS)), prompt, {"max_new_tokens": length})
    case.attention = rng.choice(["sdpa", "eager"])
    pool = [feature for feature in FEATURES for _ in range(WEIGHTS.get(feature, 1))]
    chosen = {rng.choice(pool) for _ in range(rng.randint(0, 5))}
    for feature in FEATURES:
        if feature in chosen:
            case.features.append(feature.__name__)
            feature(case, rng)
    return case


def differences(case: Case, plain: Run, drafted: Run) -> list[str]:
    """What the call with a draft did otherwise than the plain one; empty if nothing."""
    found = []
    if not torch.equal(plain.sequences, drafted.sequences):
        found.append(f"text {drafted.sequences.tolist()} instead of {plain.sequences.tolist()}")
        return found
    if plain.processor_calls != drafted.processor_calls:
        found.append(f"{len(drafted.processor_calls)} processor calls instead of {len(plain.processor_calls)}")
    if plain.streamer is not None:
        if plain.streamer.ids != drafted.streamer.ids:
            found.append("streamed ids")
        if "".join(plain.streamer) != "".join(drafted.streamer):
            found.append("streamed text")
    if plain.criterion_calls is not None:
        if [call[:2] for call in plain.criterion_calls] != [call[:2] for call in drafted.criterion_calls]:
            found.append(f"criterion called with {drafted.criterion_calls} instead of {plain.criterion_calls}")
        pairs = zip(plain.criterion_calls, drafted.criterion_calls, strict=False)
        if not all(math.isnan(a[2]) or is_close(b[2], a[2]) for a, b in pairs):
            found.append("scores seen by the criterion")
    if not isinstance(plain.output, torch.Tensor):
        found += output_differences(plain.output, drafted.output)
    return found


def output_differences(plain: Any, drafted: Any) -> list[str]:
    found = []
    for name in ("scores", "logits", "hidden_states", "attentions"):
        want, got = flatten(getattr(plain, name)), flatten(getattr(drafted, name))
        if [tensor.shape for tensor in want] != [tensor.shape for tensor in got]:
            found.append(f"shapes in {name}: {[t.shape for t in got]} instead of {[t.shape for t in want]}")
        elif not is_close(got, want):
            found.append(f"values in {name}")
        if (getattr(plain, name) is None) != (getattr(drafted, name) is None):
            found.append(f"presence of {name}")
    want, got = plain[CACHE_KEY], drafted[CACHE_KEY]
    if int(want.get_seq_length()) != int(got.get_seq_length()):
        found.append(f"cache length {int(got.get_seq_length())} instead of {int(want.get_seq_length())}")
    for index, (a, b) in enumerate(zip(want.layers, got.layers, strict=True)):
        if type(a) is not type(b) or a.keys.shape != b.keys.shape:
            found.append(f"cache layer {index} is {type(b)} {b.keys.shape} instead of {type(a)} {a.keys.shape}")
        elif hasattr(a, "max_cache_len"):  # a static one keeps what it overwrites later
            continue
        elif not is_close((b.keys, b.values), (a.keys, a.values)):
            found.append(f"contents of cache layer {index}")
    return found


def flatten(entries: Any) -> list[torch.Tensor]:
    if entries is None:
        return []
    return [entries] if isinstance(entries, torch.Tensor) else [t for entry in entries for t in flatten(entry)]


@dataclass
class GroupResult:
    """What a group of cases found, and what it was made of."""

    failures: list[str] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    eos_drafts: int = 0  # texts that end with an accepted draft
    dropped: int = 0  # texts that end inside a round, before its last token
    short: int = 0  # texts that end before max_new_tokens
    near_ties: int = 0  # texts that rounding may decide: equality would be luck
    smallest_lead: float = math.inf  # of the other texts
    largest_error: float = 0.0  # of logits, in units of rounding as well


@cache
def run_group(kind: str, group: int) -> GroupResult:
    result = GroupResult()
    for number in range(group * CASES_PER_GROUP, (group + 1) * CASES_PER_GROUP):
        case = build_case(kind, number)
        result.cases.append(case)
        plain = run(case, with_draft=False)
        if plain.smallest_lead < SAFE_LEAD:
            result.near_ties += 1
            continue
        result.smallest_lead = min(result.smallest_lead, plain.smallest_lead)
        with collect_rounds() as stats:
            drafted = run(case, with_draft=True)
        result.failures += [f"{case}: {difference}" for difference in differences(case, plain, drafted)]
        result.stats.rounds += stats.rounds
        num_new = plain.sequences.shape[1] - case.prompt.shape[1]
        result.short += num_new < case.kwargs["max_new_tokens"]
        if stats.rounds:
            last = stats.rounds[-1]
            result.eos_drafts += last.num_committed <= last.num_accepted and "eos_token_id" in case.kwargs
            result.dropped += last.truncated
        if getattr(plain.output, "logits", None) is not None and not result.failures:
            pairs = zip(plain.output.logits, drafted.output.logits, strict=True)
            errors = [float((a - b).abs().max()) / tolerance_of(a, factor=1.0) for a, b in pairs]
            result.largest_error = max(result.largest_error, *errors)
    return result


@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("kind", TARGET_KINDS)
def test_drafts_change_nothing(kind, group):
    failures = run_group(kind, group).failures
    assert not failures, "\n".join(failures)


def all_groups() -> list[GroupResult]:
    return [run_group(kind, group) for kind in TARGET_KINDS for group in range(GROUPS)]


def test_the_mix_covers_every_kind_of_round():
    groups = all_groups()
    records = [record for group in groups for record in group.stats.rounds]
    assert sum(len(group.cases) for group in groups) >= 500
    counts = Counter(
        "none sent"
        if record.verify_length == 0
        else "all"
        if record.num_accepted == record.verify_length
        else "some"
        if record.num_accepted
        else "none"
        for record in records
    )
    assert min(counts[key] for key in ("none sent", "all", "some", "none")) >= 250, counts
    assert {record.num_accepted for record in records} >= set(range(8))
    sources = Counter(record.source for record in records)
    assert sources["both"] >= 1, sources  # how many there are of each depends on the times of this machine
    assert sources["copy"] >= 150, sources
    copied = [record for record in records if record.num_copied]
    outcomes = Counter(
        (record.num_accepted > record.num_drawn, record.num_accepted < record.verify_length) for record in copied
    )
    assert min(outcomes[right, wrong] for right, wrong in ((True, False), (True, True), (False, True))) >= 20, outcomes
    assert sum(record.truncated for record in copied) >= 1  # texts that end inside a copy
    cut = sum(len(record.confidence) > record.verify_length > 0 for record in records)
    assert cut >= 100, "too few blocks are cut before verification"
    assert sum(group.eos_drafts for group in groups) >= 40
    assert sum(group.dropped for group in groups) >= 60
    assert sum(group.short for group in groups) >= 100


def test_the_mix_covers_every_option_and_draft():
    cases = [case for group in all_groups() for case in group.cases]
    features = Counter(name for case in cases for name in case.features)
    assert set(features) >= {feature.__name__ for feature in FEATURES} - {"static_cache"}
    assert min(features.values()) >= 10, features
    drafts = Counter(case.draft_name for case in cases)
    assert min(drafts[name] for name in DRAFTS) >= 15, drafts
    assert {case.kwargs["max_new_tokens"] for case in cases} == set(range(1, MAX_NEW_TOKENS + 1))
    assert {case.attention for case in cases} == {"sdpa", "eager"}
    assert min(case.prompt.shape[1] for case in cases) == 1
    assert max(case.prompt.shape[1] for case in cases) >= 40


def test_no_token_was_decided_by_rounding(record_property):
    """Every text compared leads by more than two logits that a wider forward pass moves, and few are left out."""
    groups = all_groups()
    lead, error = min(group.smallest_lead for group in groups), max(group.largest_error for group in groups)
    record_property("smallest_lead", lead)
    record_property("largest_error", error)
    assert error > 0, "the wider pass was never compared"
    assert lead >= SAFE_LEAD > 2 * error
    assert sum(group.near_ties for group in groups) <= 0.02 * sum(len(group.cases) for group in groups)
