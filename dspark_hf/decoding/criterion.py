# SPDX-License-Identifier: Apache-2.0
"""Decides where a block of drafts ends and whether one is drafted: the user's knobs and the criterion they select.

Lossless under sampling because whether slot k is sent depends only on c_0..c_k and on earlier rounds, never on x_k or
anything after it (paper section 3.2.2, Appendix A).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria

from ..common.records import RoundRecord
from ..drafts.configuration_dspark import DSparkConfig
from ..scheduling.acceptance import AcceptanceHistory
from ..scheduling.curve import SPSCurve
from ..scheduling.gate import DraftingGate
from ..scheduling.live_curve import RoundTimes
from ..scheduling.rules import (
    CapacityScheduler,
    LookaheadScheduler,
    PrefixScheduler,
    RoundOutlook,
    Scheduler,
    SearchScheduler,
    ThresholdScheduler,
    mean_survival,
)
from ..scheduling.weights import kept_pace, token_weights
from .drafter_inputs import chosen_knob


SCHEDULES = ("constant", "confidence", "capacity", "lookahead", "hardware")
# Used without measured round times: one more verified token costs 5 % of a plain step, drafting 10 %.
UNMEASURED = SPSCurve.linear(slot_cost=0.05, draft_cost=0.1)


@dataclass(frozen=True)
class DraftingOptions:
    """The user's drafting options, resolved from the generation configs."""

    num_assistant_tokens: int  # most drafts sent per round
    confidence_threshold: float | None  # cut at the first slot whose own confidence is below it
    schedule: str  # one of `SCHEDULES`; a threshold takes precedence over it


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
        raise ValueError(
            f"`num_assistant_tokens_schedule` must be one of {SCHEDULES} with a DSpark draft, got {schedule!r}."
        )
    if threshold is not None:
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1:
            raise ValueError(f"`assistant_confidence_threshold` must lie in [0, 1], got {threshold!r}.")
        if threshold > 0 and not config.enable_confidence_head:
            raise ValueError(
                "`assistant_confidence_threshold` needs a confidence head, which this draft does not have; got "
                f"{threshold}. Unset it, or limit the drafts with `num_assistant_tokens`."
            )
    return DraftingOptions(num_tokens, threshold, schedule)


def scheduler_for(options: DraftingOptions, do_sample: bool) -> Scheduler | None:  # None where every draft is sent
    """The scheduler that the knobs ask for."""
    if options.confidence_threshold is not None:
        return ThresholdScheduler(options.confidence_threshold)
    if options.schedule == "confidence":
        return PrefixScheduler()
    if options.schedule == "capacity":
        return CapacityScheduler()
    if options.schedule == "lookahead":
        return LookaheadScheduler()
    if options.schedule == "hardware":
        return LookaheadScheduler() if do_sample else SearchScheduler()
    return None


class AdaptiveConfidenceCriteria(StoppingCriteria):
    """Ends a block at the slot where further drafts no longer pay off, and skips drafting where it does not pay off.

    A scheduler decides, on confidences corrected by the acceptance of the rounds so far and on the round times of the
    machine. It is built by the candidate generator. Do not pass it as `stopping_criteria`.

    Args:
        scheduler (`Scheduler`): Decides how many drafts are sent.
        num_slots (`int`): g.
        acceptance_prior (`Sequence[float]`, *optional*): P(slot k accepted | all before it were), from calibration.
        curve (`SPSCurve`, *optional*): Round times of the machine; defaults to those of a typical accelerator.
        learn_times (`bool`, *optional*, defaults to `True`): Whether to adapt to measured round times.
        may_skip (`bool`, *optional*, defaults to `False`): Whether rounds may skip drafting where it does not pay off.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        num_slots: int,
        acceptance_prior: Sequence[float] | None = None,
        curve: SPSCurve | None = None,
        learn_times: bool = True,
        may_skip: bool = False,
    ):
        self.scheduler = scheduler
        self._new_history = functools.partial(AcceptanceHistory, num_slots, acceptance_prior)
        self.histories = [self._new_history()]
        self._learn_times = learn_times
        self.use_curve(curve if curve is not None else UNMEASURED)
        self._gate = DraftingGate() if may_skip else None

    @property
    def needs_curve(self) -> bool:
        """`bool`: Whether round times make a difference."""
        return not isinstance(self.scheduler, ThresholdScheduler)

    @property
    def curve(self) -> SPSCurve:
        """`SPSCurve`: Round times as of now."""
        return self._times.curve

    def use_curve(self, curve: SPSCurve) -> None:
        """Start from measured round times.

        Args:
            curve (`SPSCurve`): Round times of the pair on this machine.
        """
        self._times = RoundTimes(curve, self._learn_times)

    def add_requests(self, num_requests: int) -> None:
        """Track more requests, after the present ones; there is one from the start.

        Args:
            num_requests (`int`): How many.
        """
        self.histories += [self._new_history() for _ in range(num_requests)]

    def keep_requests(self, requests: Sequence[int]) -> None:
        """Forget all other requests.

        Args:
            requests (`Sequence[int]`): Requests to keep, in their new order.
        """
        self.histories = [self.histories[request] for request in requests]

    def worth_drafting(self, tokens_left: Sequence[int] | None = None) -> bool:
        """Decide whether to draft in the next round; called once per round.

        Args:
            tokens_left (`Sequence[int]` of length R, *optional*):
                Tokens that each text may still grow by, where the call ends with the last of them.

        Returns:
            `bool`
        """
        if self._gate is None:
            return True
        kept = kept_pace(self.curve, self._paces, tokens_left)
        return self._gate.opens(self._outlook(), len(self.histories), kept)

    def __call__(
        self,
        input_ids: torch.Tensor,  # [R, s]  # noqa: ARG002
        scores: torch.Tensor,  # noqa: ARG002
        **kwargs: Any,  # `confidence` [R, k + 1], c of slots 0 to k, in [0, 1]
    ) -> torch.Tensor:  # [R]
        """Decide whether to end the block before the last slot in `confidence`."""
        confidence = kwargs.get("confidence")
        if confidence is None:
            raise RuntimeError(
                "AdaptiveConfidenceCriteria ends blocks of drafts, not the generation. Do not pass it as "
                "`stopping_criteria`; set `draft.generation_config.assistant_confidence_threshold` instead."
            )
        return self.verify_lengths(confidence) < confidence.shape[-1]

    def verify_lengths(self, confidence: torch.Tensor, tokens_left: Sequence[int] | None = None) -> torch.Tensor:
        """Choose how many drafts to send, from the confidences of a whole block.

        Args:
            confidence (`torch.Tensor` of shape `(R, g)`): c_k, in [0, 1].
            tokens_left (`Sequence[int]` of length R, *optional*):
                Tokens that each text may still grow by, where the call ends with the last of them.

        Returns:
            `torch.LongTensor` of shape `(R,)`, values 0 to g.
        """
        if self.needs_curve:  # the user's threshold applies to the uncorrected confidence
            rows = zip(self.histories, confidence.split(1), strict=True)
            confidence = torch.cat([history.corrected(row) for history, row in rows])
        weights = token_weights(self.curve, self._paces, tokens_left)
        return self.scheduler.verify_lengths(confidence, self._outlook(weights))

    def stand_in_confidence(self, num_slots: int) -> torch.Tensor:
        """Confidences of a draft without a confidence head: the acceptance so far.

        Args:
            num_slots (`int`): g.

        Returns:
            `torch.Tensor` of shape `(R, g)`, fp32.
        """
        return torch.tensor([history.conditional_acceptance[:num_slots] for history in self.histories])

    def observe(self, records: Sequence[RoundRecord]) -> None:
        """Learn from a finished round.

        Args:
            records (`Sequence[RoundRecord]` of length R): The round of each request.
        """
        self._times.observe(records)
        for history, record in zip(self.histories, records, strict=True):
            if record.drafted:
                history.observe(record)
        if self._gate is not None and any(record.drafted for record in records):
            self._gate.observe(records, self.curve)

    @property
    def _paces(self) -> list[float]:
        return [history.tokens_per_round for history in self.histories]

    def _outlook(self, weights: tuple[float, ...] | None = None) -> RoundOutlook:
        survival = [mean_survival(history.conditional_acceptance) for history in self.histories]
        return RoundOutlook(
            self.curve.for_requests(len(survival)),
            tuple(sum(slot) / len(survival) for slot in zip(*survival, strict=True)),
            weights,
        )
