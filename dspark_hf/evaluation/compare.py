# SPDX-License-Identifier: Apache-2.0
"""Plain generation against DSpark on the same prompts: speed, accepted length, and whether the texts are the same."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.chat_tokens import encode_prompt
from ..common.prompts import Prompt
from ..drafts.modeling_dspark import DSparkDraftModel
from ..profiling.automatic import QUICK_MIN_TOKENS
from .timed import TimedAnswer, first_difference, timed_generate, tokens_by_source, totals


WARM_UP_TOKENS = QUICK_MIN_TOKENS
PLAIN, DSPARK, WITHOUT_COPIES = "plain", "dspark", "without copies"


@dataclass(frozen=True)
class PromptComparison:
    """Plain and DSpark generation for one prompt.

    Args:
        prompt (`Prompt`): The prompt.
        plain (`TimedAnswer`): Without the draft.
        dspark (`TimedAnswer`): With it.
        top2_gap (`float`, *optional*):
            Where two greedy texts differ, the target's logit gap between its two best tokens at the first difference.
        without_copies (`TimedAnswer`, *optional*): With the draft, and nothing copied from the text.
    """

    prompt: Prompt
    plain: TimedAnswer
    dspark: TimedAnswer
    top2_gap: float | None = None
    without_copies: TimedAnswer | None = None

    @property
    def identical(self) -> bool:
        """`bool`: Whether the two texts are the same, token by token."""
        return self.plain.token_ids == self.dspark.token_ids

    @property
    def first_difference(self) -> int | None:
        """`int` or `None`: Index of the first new token that differs."""
        return first_difference(self.plain.token_ids, self.dspark.token_ids)


@dataclass(frozen=True)
class ComparisonSummary:
    """Pooled figures of several prompts.

    Args:
        name (`str`): What was pooled, a domain for example.
        num_prompts (`int`): Prompts.
        num_identical (`int`): Prompts whose two texts are the same.
        plain_tokens_per_s (`float`): All new tokens over all seconds, without the draft.
        dspark_tokens_per_s (`float`): Likewise, with it.
        accepted_length (`float`): tau, tokens per round, bonus token included.
        verify_length (`float`): Drafts sent to verification per round.
        verified_per_token (`float`): Tokens the target's verification passes carried, per token committed.
        acceptance_rate (`float`): Accepted drafts over drafts sent, in [0, 1].
        by_source (`dict[str, tuple[int, float]]`): Source of drafts -> its rounds, and tokens per round.
    """

    name: str
    num_prompts: int
    num_identical: int
    plain_tokens_per_s: float
    dspark_tokens_per_s: float
    accepted_length: float
    verify_length: float
    verified_per_token: float
    acceptance_rate: float
    by_source: dict[str, tuple[int, float]]

    @property
    def speedup(self) -> float:
        """`float`: DSpark's tokens per second over plain generation's."""
        return self.dspark_tokens_per_s / self.plain_tokens_per_s


def compare(
    target: PreTrainedModel,
    draft: DSparkDraftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    max_new_tokens: int = 96,
    repeats: int = 1,
    raw: bool = False,
    generate_arguments: dict[str, Any] | None = None,
    on_progress: Callable[[], None] | None = None,
    without_copies: bool = False,
) -> list[PromptComparison]:
    """Run every prompt with and without the draft.

    The ways alternate, and the one that goes first changes from prompt to prompt, so that a machine that slows down
    does not favour any. A few tokens are generated beforehand to warm them up.

    Args:
        target (`PreTrainedModel`): The model that generates.
        draft (`DSparkDraftModel`): Its draft.
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        prompts (`Sequence[Prompt]`): What to generate from.
        max_new_tokens (`int`, *optional*, defaults to 96): Longest answer, in tokens.
        repeats (`int`, *optional*, defaults to 1): Times each call is made; medians of the seconds are kept.
        raw (`bool`, *optional*, defaults to `False`): Omit the chat template.
        generate_arguments (`dict[str, Any]`, *optional*): Further arguments of `generate`; greedy without any.
        on_progress (`Callable`, *optional*): Called after each `generate` call that counts.
        without_copies (`bool`, *optional*, defaults to `False`): Whether to run the draft without copies as well.

    Returns:
        `list[PromptComparison]`, in the order of `prompts`.

    Raises:
        ValueError: If there are no prompts, or a number is below 1.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("repeats", repeats), ("len(prompts)", len(prompts))):
        if value < 1:
            raise ValueError(f"`{name}` must be >= 1, got {value}.")
    arguments = {"do_sample": False, **(generate_arguments or {}), "max_new_tokens": max_new_tokens}
    inputs = [encode_prompt(tokenizer, prompt.text, raw) for prompt in prompts]
    ways = [PLAIN, DSPARK, *([WITHOUT_COPIES] if without_copies else [])]
    for way in ways:
        # Long enough for round times to be measured now, on the first use, and not in a call that is timed.
        _generate(target, draft, way, inputs[0], {**arguments, "max_new_tokens": min(WARM_UP_TOKENS, max_new_tokens)})
    results = []
    for index, (prompt, prompt_inputs) in enumerate(zip(prompts, inputs, strict=True)):
        runs: dict[str, list[TimedAnswer]] = {way: [] for way in ways}
        for repeat in range(repeats):
            first = (index + repeat) % len(ways)
            for way in ways[first:] + ways[:first]:
                runs[way].append(_generate(target, draft, way, prompt_inputs, arguments))
                if on_progress is not None:
                    on_progress()
        results.append(
            _judge(target, prompt, prompt_inputs, {way: _median(own) for way, own in runs.items()}, arguments)
        )
    return results


def summarize(results: Sequence[PromptComparison], name: str = "all") -> ComparisonSummary:
    """Pool results over prompts.

    Args:
        results (`Sequence[PromptComparison]`): From [`compare`].
        name (`str`, *optional*, defaults to `"all"`): Name of the pool.

    Returns:
        [`ComparisonSummary`]
    """
    plain, dspark = totals(result.plain for result in results), totals(result.dspark for result in results)
    return ComparisonSummary(
        name=name,
        num_prompts=len(results),
        num_identical=sum(result.identical for result in results),
        plain_tokens_per_s=plain.tokens_per_s,
        dspark_tokens_per_s=dspark.tokens_per_s,
        accepted_length=dspark.stats.accepted_length,
        verify_length=dspark.stats.mean_verify_length,
        verified_per_token=dspark.stats.verified_per_token,
        acceptance_rate=dspark.stats.acceptance_rate,
        by_source=tokens_by_source(dspark.stats),
    )


def without_copies_summary(results: Sequence[PromptComparison]) -> ComparisonSummary | None:
    """Pool the runs without copies; `None` if there were none."""
    replaced = [replace(own, dspark=own.without_copies) for own in results if own.without_copies is not None]
    return summarize(replaced, "no copies") if replaced else None


def _generate(
    target: PreTrainedModel,
    draft: DSparkDraftModel,
    way: str,
    inputs: dict[str, torch.Tensor],
    arguments: dict[str, Any],
) -> TimedAnswer:
    how: dict[str, Any] = {"assistant_model": draft} if way != PLAIN else {}
    if way == WITHOUT_COPIES:
        how["prompt_lookup_num_tokens"] = 0
    return timed_generate(target, inputs, how | arguments)


def _median(runs: list[TimedAnswer]) -> TimedAnswer:
    return replace(runs[0], seconds=statistics.median(run.seconds for run in runs))


def _judge(
    target: PreTrainedModel,
    prompt: Prompt,
    inputs: dict[str, torch.Tensor],
    answers: dict[str, TimedAnswer],
    arguments: dict[str, Any],
) -> PromptComparison:
    plain, dspark = answers[PLAIN], answers[DSPARK]
    index = first_difference(plain.token_ids, dspark.token_ids)
    gap = None
    if index is not None and not arguments["do_sample"]:
        shared = torch.cat([inputs["input_ids"], torch.tensor([plain.token_ids[:index]], dtype=torch.long)], dim=1)
        with torch.no_grad():
            best = target(shared.to(target.device)).logits[0, -1].float().topk(2).values
        gap = float(best[0] - best[1])
    return PromptComparison(prompt, plain, dspark, gap, answers.get(WITHOUT_COPIES))
