# SPDX-License-Identifier: Apache-2.0
"""All checks of a pair in order, cheapest first, and the report."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.files import json_values
from ..common.prompts import BUILTIN_PROMPTS, Prompt
from ..common.records import RoundRecord
from ..drafts.modeling_dspark import DSparkDraftModel
from .config_checks import check_config
from .finding import FAULT, Finding
from .pair import Pair
from .probing import LOW, Probe, alternatives, collect, explanation, judge_probe
from .speedup import Gain, gain_sentences, judge_gain, measure_gain
from .weight_checks import check_weights


NUM_PROBE_PROMPTS, NUM_PROBE_TOKENS = 3, 64
# Two of each domain, which stand four by four; the first three are of three domains.
DEFAULT_PROMPTS = (*BUILTIN_PROMPTS[::4], *BUILTIN_PROMPTS[1::4])
# With these there is nothing to run.
HOPELESS = {
    "hidden_size",
    "vocabulary_padded",
    "vocabulary_size",
    "target_depth",
    "layer_ids",
    "mask_token_missing",
    "weights_not_finite",
    "does_not_fit",
}


@dataclass(frozen=True)
class Diagnosis:
    """The result of [`diagnose`].

    Args:
        target (`str`): Name of the target.
        draft (`str`): Name of the draft.
        findings (`tuple[Finding, ...]`): Faults first.
        probe (`Probe`, *optional*): Acceptance of full blocks; `None` where the pair could not be run.
        gain (`Gain`, *optional*): Speed; `None` where it was not measured.
    """

    target: str
    draft: str
    findings: tuple[Finding, ...]
    probe: Probe | None = None
    gain: Gain | None = None

    @property
    def faults(self) -> tuple[Finding, ...]:
        """`tuple[Finding, ...]`: The findings that are faults."""
        return tuple(finding for finding in self.findings if finding.severity == FAULT)

    @property
    def exit_status(self) -> int:
        """`int`: For scripts: 0 without faults, else 1."""
        return 1 if self.faults else 0

    @property
    def training_commands(self) -> tuple[str, str]:
        """`tuple[str, str]`: What makes a better draft: answers of the target, then the training."""
        target = shlex.quote(self.target)
        return (
            f"dspark-hf prepare --target {target} --prompts my-prompts.jsonl --output answers.jsonl",
            f"dspark-hf train --target {target} --data answers.jsonl --output_dir my-draft",
        )

    def sentences(self) -> list[str]:
        """The measurements as sentences; findings have their own sentences.

        Returns:
            `list[str]`
        """
        if self.probe is None:
            return ["The pair was not run: fix the faults below first."]
        lines = [
            f"With every slot of a block sent, a round yields {self.probe.accepted_length:.2f} tokens (give or take "
            f"{2 * self.probe.standard_error:.2f}), of which one is the target's own; {self.probe.num_rounds} rounds."
        ]
        return lines + (gain_sentences(self.gain) if self.gain is not None else [])

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as JSON has it.

        Returns:
            `dict[str, Any]`
        """
        return {
            "exit_status": self.exit_status,
            "sentences": self.sentences(),
            "training_commands": list(self.training_commands),
            **json_values(dataclasses.asdict(self)),
        }


def diagnose(
    target: PreTrainedModel,
    draft: DSparkDraftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt] | None = None,
    max_new_tokens: int = 48,
    enable_thinking: bool | None = None,
    raw: bool = False,
    thorough: bool = False,
    with_speed: bool = True,
    on_progress: Callable[[str], None] | None = None,
) -> Diagnosis:
    """Check a pair: configs and weights, then acceptance, then speed.

    The draft is the same afterwards, but no other thread may use it meanwhile.

    Args:
        target (`PreTrainedModel`): The model that generates.
        draft (`DSparkDraftModel`): Its draft.
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        prompts (`Sequence[Prompt]`, *optional*): What to generate from; six built-in ones without it.
        max_new_tokens (`int`, *optional*, defaults to 48): Longest answer, in tokens.
        enable_thinking (`bool`, *optional*): The chat template's thinking switch, as it will be used.
        raw (`bool`, *optional*, defaults to `False`): Prompt without the chat template, as it will be done.
        thorough (`bool`, *optional*, defaults to `False`):
            Try other readings of the checkpoint even where drafts are accepted, on all prompts instead of the first
            three: layer ids that are off by one may cost a part of the acceptance only.
        with_speed (`bool`, *optional*, defaults to `True`): Whether to measure the speed.
        on_progress (`Callable`, *optional*): Called with what begins.

    Returns:
        [`Diagnosis`]

    Raises:
        ValueError: If there are no prompts, `max_new_tokens` is below 2, or the target gives no answer to judge.

    Example:
        >>> diagnosis = diagnose(target, draft, tokenizer)  # doctest: +SKIP
        >>> [finding.code for finding in diagnosis.faults]  # doctest: +SKIP
        ['layer_ids_shifted']
    """
    prompts = list(DEFAULT_PROMPTS if prompts is None else prompts)
    _check_extent(prompts, max_new_tokens)
    say = on_progress if on_progress is not None else lambda _: None
    pair = Pair(target, draft, tokenizer, enable_thinking, raw)
    say("Reading configs and weights")
    findings = [*check_config(pair), *check_weights(pair)]
    findings += _cannot_run(pair, findings)
    probe = gain = None
    if _may_run(findings):
        rounds, judged = _probe(pair, prompts if thorough else prompts[:NUM_PROBE_PROMPTS], thorough, say)
        probe = Probe.from_rounds(rounds)
        findings = [*judged, *(finding for finding in findings if finding.code not in {f.code for f in judged})]
        if with_speed and not any(finding.code == "knobs" for finding in findings):
            gain = measure_gain(pair, prompts, max_new_tokens, rounds, say)
            findings += judge_gain(gain, str(target.dtype).removeprefix("torch."), target.device.type)
    findings.sort(key=lambda finding: finding.severity != FAULT)
    return Diagnosis(_name_of(target), _name_of(draft), tuple(findings), probe, gain)


def _name_of(model: PreTrainedModel) -> str:
    return model.config.name_or_path or type(model).__name__


def _check_extent(prompts: Sequence[Prompt], max_new_tokens: int) -> None:
    if not prompts:
        raise ValueError("`prompts` must hold at least one prompt, got none.")
    if max_new_tokens < 2:
        raise ValueError(f"`max_new_tokens` must be >= 2, got {max_new_tokens}: the first token comes without drafts.")


def _cannot_run(pair: Pair, findings: list[Finding]) -> list[Finding]:
    """Further reasons why target and draft cannot run together."""
    if not _may_run(findings):
        return []
    try:
        pair.draft.bind_target(pair.target)
    except (ValueError, NotImplementedError) as error:
        return [Finding("does_not_fit", FAULT, str(error), "Choose a target and a draft that were made together.")]
    return []


def _may_run(findings: list[Finding]) -> bool:
    return not any(finding.code in HOPELESS for finding in findings)


def _probe(
    pair: Pair, prompts: Sequence[Prompt], thorough: bool, on_progress: Callable[[str], None]
) -> tuple[list[RoundRecord], list[Finding]]:
    on_progress("Generating with full blocks")
    rounds = collect(pair, prompts, NUM_PROBE_TOKENS)
    if not rounds:
        raise ValueError(
            "Answers must have two tokens or more to be judged, and the target ended all of them at once. Pass other "
            "prompts, or check the chat template."
        )
    found = Probe.from_rounds(rounds)
    tried = []
    if thorough or found.accepted_length < LOW:
        for alternative in alternatives(pair, other_prompting=found.accepted_length < LOW):
            on_progress(f"Trying: {alternative.code}")
            others = collect(pair, prompts, NUM_PROBE_TOKENS, alternative)
            if others:  # prompted otherwise, the target may end at once
                tried.append((alternative, Probe.from_rounds(others)))
    return rounds, judge_probe(found, explanation(found, tried))
