# SPDX-License-Identifier: Apache-2.0
"""Acceptance of the draft as configured, and under alternative readings of its config."""

from __future__ import annotations

import contextlib
import copy
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..common.prompts import Prompt
from ..common.records import AcceptanceStats, RoundRecord
from ..common.thinking import has_thinking_switch, with_thinking
from ..drafts.modeling_dspark import DSparkDraftModel
from ..evaluation.calibrate import collect_full_blocks
from .config_checks import expected_config
from .finding import ADVICE, FAULT, Finding
from .pair import Pair


# Tokens per round below which the pair gains nothing, and below which alternatives are tried unasked.
NEAR_ONE, LOW = 1.15, 1.5
# An alternative explains a low accepted length if it is better by this many tokens per round and standard errors.
MARGIN, MARGIN_ERRORS = 0.2, 2.5
# Prompted otherwise, the target writes another text, which may simply be easier.
TEXT_MARGIN = 0.75
# A slot is dead if it was reached so often, is accepted so rarely, and the slot before it is not dead at all.
DEAD_ROUNDS, DEAD_RATE, LIVE_RATE = 20, 0.05, 0.3
MAX_MASKS = 4


@dataclass(frozen=True)
class Probe:
    """The outcome of full blocks."""

    accepted_length: float  # tokens per round, bonus token included
    standard_error: float  # of `accepted_length`, over the rounds
    num_rounds: int
    reached: tuple[int, ...] = ()  # per slot, rounds in which all slots before it were accepted
    accepted: tuple[int, ...] = ()  # per slot, rounds in which it was accepted as well

    @classmethod
    def from_rounds(cls, rounds: Sequence[RoundRecord]) -> Probe:
        """Count."""
        committed = [record.num_committed for record in rounds]
        error = statistics.stdev(committed) / len(committed) ** 0.5 if len(committed) > 1 else float("inf")
        stats = AcceptanceStats(list(rounds))
        reached, accepted = zip(*stats.slot_counts, strict=True) if stats.num_drafted else ((), ())
        return cls(stats.accepted_length, error, len(rounds), reached, accepted)


@dataclass(frozen=True)
class Alternative:
    """One thing that may be wrong, and how to find out."""

    code: str  # code of the finding, if this is it
    meaning: str  # what is wrong then; the beginning of a sentence
    remedy: str  # what to do then
    fields: Mapping[str, Any] = field(default_factory=dict)  # fields of the draft's config to change
    raw: bool | None = None  # whether to prompt without the chat template; None: as before
    enable_thinking: bool | None = None  # the thinking switch; None: as before

    @property
    def margin(self) -> float:
        """Tokens per round by which it must be better to count."""
        return MARGIN if self.raw is None and self.enable_thinking is None else TEXT_MARGIN


def collect(
    pair: Pair, prompts: Sequence[Prompt], max_new_tokens: int, alternative: Alternative | None = None
) -> list[RoundRecord]:
    """Answer prompts greedily with full blocks; the draft is as before afterwards."""
    change = alternative if alternative is not None else Alternative("", "", "")
    tokenizer = pair.prompting_tokenizer
    if change.enable_thinking is not None:
        tokenizer = with_thinking(pair.tokenizer, change.enable_thinking)
    raw = pair.raw if change.raw is None else change.raw
    with changed(pair.draft, change.fields):
        length = max(max_new_tokens, pair.config.num_draft_slots + 2)
        return list(collect_full_blocks(pair.target, pair.draft, tokenizer, prompts, length, raw=raw).rounds)


@contextlib.contextmanager
def changed(draft: DSparkDraftModel, fields: Mapping[str, Any]) -> Iterator[None]:
    """Other values in a draft's config inside the `with` block; everything is put back afterwards."""
    before = {name: getattr(draft.config, name) for name in fields}
    rotary = draft.rotary_emb
    try:
        for name, value in fields.items():
            setattr(draft.config, name, value)
        if "rope_parameters" in fields:
            draft.rotary_emb = type(rotary)(copy.deepcopy(draft.config)).to(draft.device)
        yield
    finally:
        draft.rotary_emb = rotary
        for name, value in before.items():
            setattr(draft.config, name, value)


def alternatives(pair: Pair, other_prompting: bool = True) -> list[Alternative]:
    """Alternative readings that could explain why drafts are not accepted."""
    prompting = _other_prompting(pair) if other_prompting else ()
    return [*_other_taps(pair), *_other_slots(pair), *prompting, *_other_rope(pair), *_other_masks(pair)]


def explanation(found: Probe, tried: Sequence[tuple[Alternative, Probe]]) -> tuple[Alternative, Probe] | None:
    """The best of the alternatives that do clearly better."""
    clear = []
    for alternative, probe in tried:
        gain = probe.accepted_length - found.accepted_length
        error = (probe.standard_error**2 + found.standard_error**2) ** 0.5
        if gain >= max(alternative.margin, MARGIN_ERRORS * error):
            clear.append((alternative, probe))
    return max(clear, key=lambda item: item[1].accepted_length, default=None)


def judge_probe(found: Probe, best: tuple[Alternative, Probe] | None) -> list[Finding]:
    """Findings of the probing."""
    if best is not None:
        alternative, probe = best
        return [
            Finding(
                alternative.code,
                FAULT,
                f"{alternative.meaning}: then a round yields {probe.accepted_length:.2f} tokens, and now "
                f"{found.accepted_length:.2f}.",
                alternative.remedy,
            )
        ]
    if found.accepted_length < NEAR_ONE:
        return [
            Finding(
                "acceptance_near_one",
                FAULT,
                f"The target accepts almost no draft: {found.accepted_length:.2f} tokens per round, of which one is "
                "the target's own.",
                "No other reading of the checkpoint that was tried explains it. Then it is another target (a base "
                "model, a fine-tune, another revision), texts unlike the training data, or a draft that was hardly "
                "trained.",
            )
        ]
    return _dead_slots(found)


def _dead_slots(found: Probe) -> list[Finding]:
    rates = [a / r if r else 0.0 for a, r in zip(found.accepted, found.reached, strict=True)]
    for slot in range(1, len(rates)):
        if found.reached[slot] >= DEAD_ROUNDS and rates[slot] < DEAD_RATE and rates[slot - 1] >= LIVE_RATE:
            return [
                Finding(
                    "block_tail",
                    ADVICE,
                    f"Slot {slot} of a block is accepted in {rates[slot]:.0%} of the rounds that reach it, the slot "
                    f"before it in {rates[slot - 1]:.0%}.",
                    f"Either the draft was trained with blocks of {slot}, or its sequential head does not work. Send "
                    f"no more: `draft.generation_config.num_assistant_tokens = {slot}`.",
                )
            ]
    return []


def _other_taps(pair: Pair) -> Iterator[Alternative]:
    ids, last = list(pair.config.target_layer_ids), pair.text_config.num_hidden_layers - 1
    for step in (1, -1):
        shifted = [i + step for i in ids]
        if min(shifted) >= -1 and max(shifted) < last:
            yield Alternative(
                "layer_ids_shifted",
                f"The draft was trained on the target layers {shifted}, not {ids}",
                _set_field("target_layer_ids", shifted),
                {"target_layer_ids": shifted},
            )


def _other_slots(pair: Pair) -> Iterator[Alternative]:
    config = pair.config
    if config.block_size >= 2:
        flipped = not config.sample_from_anchor
        first = "the token after the anchor" if flipped else "the anchor itself"
        yield Alternative(
            "slots_shifted",
            f"The first slot of a block stands for {first}",
            _set_field("sample_from_anchor", flipped),
            {"sample_from_anchor": flipped},
        )
    if "sliding_attention" in config.layer_types:
        flipped = not config.sliding_window_non_causal
        seen = "in both directions" if flipped else "only backwards"
        yield Alternative(
            "window_direction",
            f"In sliding layers the slots of a block see each other {seen}",
            _set_field("sliding_window_non_causal", flipped),
            {"sliding_window_non_causal": flipped},
        )


def _other_prompting(pair: Pair) -> Iterator[Alternative]:
    if not pair.tokenizer.chat_template:
        return
    yield Alternative(
        "template_missing" if pair.raw else "template_not_wanted",
        f"The draft was trained {'with' if pair.raw else 'without'} the chat template",
        "Build prompts with `tokenizer.apply_chat_template(..., add_generation_prompt=True)`."
        if pair.raw
        else "Pass the text itself to the tokenizer, without the chat template (here: `--raw`).",
        raw=not pair.raw,
    )
    if has_thinking_switch(pair.tokenizer) and not pair.raw:
        for value in (False, True):
            if value != pair.enable_thinking:
                yield Alternative(
                    "thinking_switch",
                    f"The draft was trained with `enable_thinking={value}`",
                    f"Pass `enable_thinking={value}` to `apply_chat_template` (here: "
                    f"`--{'enable' if value else 'no'}-thinking`).",
                    enable_thinking=value,
                )


def _other_rope(pair: Pair) -> Iterator[Alternative]:
    reference = expected_config(pair)
    ours = pair.config.rope_parameters or {}
    theirs = (reference.rope_parameters or {}) if reference is not None else {}
    names = ("rope_theta", "rope_type")
    if theirs and any(ours.get(name) != theirs.get(name) for name in names):
        yield Alternative(
            "rope",
            "The draft was trained with the target's RoPE, and its config has another",
            _set_field("rope_parameters", dict(theirs)) + " Then save the draft and load it again.",
            {"rope_parameters": dict(theirs)},
        )


def _other_masks(pair: Pair) -> Iterator[Alternative]:
    tokenizer, num_rows = pair.tokenizer, pair.text_config.vocab_size
    reserved = sorted(set(tokenizer.added_tokens_decoder) - set(tokenizer.all_special_ids))
    named = [i for i in reserved if "mask" in tokenizer.added_tokens_decoder[i].content.lower()]
    padding = [len(tokenizer), num_rows - 1] if len(tokenizer) < num_rows else []
    special = [tokenizer.mask_token_id, tokenizer.pad_token_id]
    candidates = dict.fromkeys(i for i in (*special[:1], *named, *padding, *special[1:], *reserved) if i is not None)
    others = [i for i in candidates if i != pair.config.mask_token_id and i < num_rows]
    for token_id in others[:MAX_MASKS]:
        yield Alternative(
            "mask_token",
            f"The draft was trained with the mask token {token_id}, not {pair.config.mask_token_id}",
            _set_field("mask_token_id", token_id),
            {"mask_token_id": token_id},
        )


def _set_field(name: str, value: Any) -> str:
    return (
        f"Set `draft.config.{name} = {value!r}` and keep it with `draft.save_pretrained(...)`, or correct the field "
        "in the draft's config.json."
    )
