# SPDX-License-Identifier: Apache-2.0
"""The user's drafting knobs, and the criterion they select."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria

from ..drafts.configuration_dspark import DSparkConfig
from ..scheduling.copying import MOST_COPIES
from ..scheduling.policy import CopyOptions, DraftingPolicy
from ..scheduling.rules import FixedScheduler, LookaheadScheduler, PrefixScheduler, Scheduler, ThresholdScheduler
from ..scheduling.text_index import LONGEST_MATCH
from .drafter_inputs import chosen_knob


# Every draft; Algorithm 1; look-ahead and gate.
SCHEDULES = ("constant", "confidence", "hardware")
REPLACED_BY_HARDWARE = ("lookahead", "capacity")  # saved with older drafts
# Without a schedule, an ending that occurred before with at least this many tokens is copied.
SHORTEST_UNSCHEDULED_MATCH = 2


@dataclass(frozen=True)
class DraftingOptions:
    """The user's drafting options, resolved from the generation configs."""

    num_assistant_tokens: int  # most drafts sent per round
    confidence_threshold: float | None  # cut at the first slot whose own confidence is below it
    schedule: str  # one of `SCHEDULES`; a threshold takes precedence over it
    copies: CopyOptions | None  # None where nothing is copied


def resolve_options(
    config: DSparkConfig, draft_generation_config: GenerationConfig, call_config: GenerationConfig | None = None
) -> DraftingOptions:
    """Read the knobs: the call's own values first, then the draft's `generation_config`, then the defaults.

    See [`chosen_knob`] for what counts as a choice.
    """

    def chosen(name: str) -> Any:
        return chosen_knob(name, draft_generation_config, call_config)

    num_tokens = chosen("num_assistant_tokens")
    threshold = chosen("assistant_confidence_threshold")
    schedule = chosen("num_assistant_tokens_schedule") or "hardware"
    if num_tokens is None:
        num_tokens = config.num_draft_slots
    if (
        isinstance(num_tokens, bool)
        or not isinstance(num_tokens, int)
        or not 1 <= num_tokens <= config.num_draft_slots
    ):
        raise ValueError(
            f"`num_assistant_tokens` must lie in [1, {config.num_draft_slots}] (the drafts of a block of "
            f"{config.block_size}), got {num_tokens!r}. Slots beyond the trained block are never accepted."
        )
    if schedule not in SCHEDULES:
        replaced = ' It was replaced by "hardware".' if schedule in REPLACED_BY_HARDWARE else ""
        raise ValueError(
            f"`num_assistant_tokens_schedule` must be one of {SCHEDULES} with a DSpark draft, got {schedule!r}."
            + replaced
        )
    if threshold is not None:
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1:
            raise ValueError(f"`assistant_confidence_threshold` must lie in [0, 1], got {threshold!r}.")
        if threshold > 0 and not config.enable_confidence_head:
            raise ValueError(
                "`assistant_confidence_threshold` needs a confidence head, which this draft does not have; got "
                f"{threshold}. Unset it, or limit the drafts with `num_assistant_tokens`."
            )
    is_scheduled = threshold is None and schedule != "constant"
    copies = resolve_copies(is_scheduled, config.copy_prior, draft_generation_config, call_config)
    return DraftingOptions(num_tokens, threshold, schedule, copies)


def resolve_copies(
    is_scheduled: bool,  # whether a schedule decides what is drafted
    prior: Sequence[float] | None,
    draft_generation_config: GenerationConfig,
    call_config: GenerationConfig | None = None,
) -> CopyOptions | None:  # None where nothing is copied
    """Read `prompt_lookup_num_tokens` and `max_matching_ngram_size`.

    Unset, the schedule decides, and without one nothing is copied. 0 turns copying off, a number limits it.
    """
    most = chosen_knob("prompt_lookup_num_tokens", draft_generation_config, call_config)
    longest = chosen_knob("max_matching_ngram_size", draft_generation_config, call_config)
    if most is not None and (type(most) is not int or most < 0):
        raise ValueError(
            f"`prompt_lookup_num_tokens` must be an integer >= 0, got {most!r}. 0 turns copying from the text off; "
            "unset, the schedule decides."
        )
    if longest is not None and (type(longest) is not int or longest < 1):
        raise ValueError(f"`max_matching_ngram_size` must be an integer >= 1, got {longest!r}.")
    if most == 0 or (most is None and not is_scheduled):
        return None
    shortest = None if is_scheduled else min(SHORTEST_UNSCHEDULED_MATCH, longest or LONGEST_MATCH)
    return CopyOptions(most or MOST_COPIES, longest or LONGEST_MATCH, shortest, prior)


def criterion_for(options: DraftingOptions, config: DSparkConfig, do_sample: bool) -> AdaptiveConfidenceCriteria:
    """The criterion that the knobs ask for; times must not steer a random stream, so sampling does not learn them."""
    if options.confidence_threshold is not None:
        scheduler: Scheduler = ThresholdScheduler(options.confidence_threshold)
    elif options.schedule == "constant":
        scheduler = FixedScheduler(options.num_assistant_tokens)
    else:
        scheduler = PrefixScheduler() if options.schedule == "confidence" else LookaheadScheduler()
    return AdaptiveConfidenceCriteria(
        scheduler,
        config.num_draft_slots,
        acceptance_prior=config.acceptance_prior,
        learn_times=not do_sample,
        may_skip=options.confidence_threshold is None and options.schedule == "hardware",
        copies=options.copies,
    )


class AdaptiveConfidenceCriteria(DraftingPolicy, StoppingCriteria):
    """The drafting policy of a call as transformers' kind of criterion. See [`DraftingPolicy`] for its arguments.

    The drafter builds it from the user's knobs. It ends blocks of drafts, not the generation: do not pass it as
    `stopping_criteria`.
    """

    def __call__(
        self,
        input_ids: torch.Tensor,  # [R, s]  # noqa: ARG002
        scores: torch.Tensor,  # noqa: ARG002
        **kwargs: Any,  # `confidence` [R, k + 1], c of slots 0 to k, in [0, 1]; the requests have no past
    ) -> torch.Tensor:  # [R]
        """Decide whether to end the block before the last slot in `confidence`."""
        confidence = kwargs.get("confidence")
        if confidence is None:
            raise RuntimeError(
                "AdaptiveConfidenceCriteria ends blocks of drafts, not the generation. Do not pass it as "
                "`stopping_criteria`; set `draft.generation_config.assistant_confidence_threshold` instead."
            )
        histories = [self.new_history() for _ in confidence]
        return self.verify_lengths(histories, confidence) < confidence.shape[-1]
