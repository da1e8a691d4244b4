# SPDX-License-Identifier: Apache-2.0
"""Where a block of drafts ends: the user's knobs, and the criterion that cuts before verification.

Lossless under sampling because whether slot k is sent depends only on c_0..c_k and on earlier rounds, never on x_k or
anything after it (paper section 3.2.2, Appendix A).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria

from ._compat import LIBRARY_DEFAULTS
from .configuration_dspark import DSparkConfig
from .metrics import RoundRecord


SCHEDULES = ("constant", "confidence")


@dataclass(frozen=True)
class DraftingOptions:
    """What the user asked of the drafting half, resolved from the generation configs.

    Args:
        num_assistant_tokens (`int`): Most drafts sent per round.
        confidence_threshold (`float`, *optional*): Cut at the first slot whose own confidence is below it.
        schedule (`str`): `"constant"` or `"confidence"`; a threshold takes precedence over it.
    """

    num_assistant_tokens: int
    confidence_threshold: float | None
    schedule: str


def resolve_options(
    config: DSparkConfig, draft_generation_config: GenerationConfig, call_config: GenerationConfig | None = None
) -> DraftingOptions:
    """Read the knobs: the call's own values first, then the draft's `generation_config`, then the defaults.

    transformers merges 20 tokens, threshold 0.4 and "constant" into every call, so those values in `call_config` are
    nobody's choice and count as unset; on the draft's `generation_config` every value counts.

    Args:
        config (`DSparkConfig`): The draft's configuration.
        draft_generation_config (`GenerationConfig`): `draft.generation_config`.
        call_config (`GenerationConfig`, *optional*): The call's merged config.

    Returns:
        [`DraftingOptions`]

    Raises:
        ValueError: If a knob is out of range, unknown, or needs a confidence head that the draft lacks.
    """

    def chosen(name: str) -> Any:
        call_value = getattr(call_config, name, None)
        if call_value is not None and call_value != LIBRARY_DEFAULTS.get(name):
            return call_value
        return getattr(draft_generation_config, name, None)

    num_tokens = chosen("num_assistant_tokens")
    threshold = chosen("assistant_confidence_threshold")
    schedule = chosen("num_assistant_tokens_schedule") or "confidence"
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


class AdaptiveConfidenceCriteria(StoppingCriteria):
    """Ends a block at the slot where going on no longer pays.

    With a `threshold`: at the first slot whose own confidence is below it. Without: slot k is sent while the chance
    that its whole prefix survives, times the length of the round so far, outweighs the cost of one more verified
    token, `a_k * (1 + k * cost) > cost * (1 + a_0 + ... + a_{k-1})`, with cost in units of a round without drafts.
    That is the first drop of tokens per second for a verification time that is linear in its tokens (Algorithm 1 for
    one request).

    Both sides are learned from the rounds so far. The acceptance of each slot corrects its confidence, with a few
    pseudo-rounds of prior. The cost follows the measured round times, but only if `learn_cost`: under sampling the
    lengths steer the random stream, and the same seed has to give the same text.

    It is built by the candidate generator. It is no criterion for `generate(stopping_criteria=...)`.

    Args:
        threshold (`float`, *optional*): Fixed threshold in [0, 1].
        slot_cost (`float`, *optional*, defaults to 0.05):
            Cost of verifying one more token, in units of a round without drafts; the prior where it is learned.
        learn_cost (`bool`, *optional*, defaults to `True`): Whether to learn the cost from round times.
    """

    PRIOR_ROUNDS = 4.0
    PRIOR_ACCEPTANCE = 0.75
    PRIOR_TOKEN_SPREAD = 8.0
    TIME_DECAY = 0.95

    def __init__(self, threshold: float | None = None, slot_cost: float = 0.05, learn_cost: bool = True):
        self.threshold = threshold
        self.learn_cost = learn_cost
        self._slot_cost = slot_cost
        self._prior_cost = slot_cost
        self._expected: dict[int, float] = {}
        self._accepted: dict[int, int] = {}
        self._reached: dict[int, int] = {}
        self._times = [0.0] * 6  # decayed sums: 1, tokens, seconds, tokens^2, tokens * seconds, drafting seconds

    @property
    def slot_cost(self) -> float:
        """`float`: Current cost of one more verified token, in units of a round without drafts."""
        return self._slot_cost

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:  # noqa: ARG002
        """Whether to end the block before the last slot in `confidence`.

        Args:
            input_ids (`torch.LongTensor` of shape `(R, s)`): Text and drafts so far; not read.
            scores (`torch.Tensor`): Not read.
            confidence (`torch.Tensor` of shape `(R, k + 1)`): c of slots 0 to k, in [0, 1].

        Returns:
            `torch.BoolTensor` of shape `(R,)`.

        Raises:
            RuntimeError: If there is no `confidence`, as in `generate(stopping_criteria=...)`.
        """
        confidence = kwargs.get("confidence")
        if confidence is None:
            raise RuntimeError(
                "AdaptiveConfidenceCriteria ends blocks of drafts, not the generation. Do not pass it as "
                "`stopping_criteria`; set `draft.generation_config.assistant_confidence_threshold` instead."
            )
        return self.block_length(confidence) < confidence.shape[-1]

    def block_length(self, confidence: torch.Tensor) -> torch.Tensor:
        """Drafts to send, from the confidences of a whole block; slot k's admission reads c_0 to c_k only.

        Args:
            confidence (`torch.Tensor` of shape `(R, g)`): c_k, in [0, 1].

        Returns:
            `torch.LongTensor` of shape `(R,)`, values 0 to g.
        """
        if self.threshold is not None:
            admitted = confidence >= self.threshold
        else:
            survival = self._corrected(confidence).cumprod(dim=-1)  # a_k
            tokens_before = 1 + survival.cumsum(dim=-1) - survival
            slots = torch.arange(confidence.shape[-1], device=confidence.device)
            admitted = survival * (1 + slots * self._slot_cost) > self._slot_cost * tokens_before
        return admitted.long().cumprod(dim=-1).sum(dim=-1)

    def prior_confidence(self, num_slots: int) -> torch.Tensor:
        """Stand-in for the confidences of a draft without a confidence head: the acceptance seen so far.

        Args:
            num_slots (`int`): g.

        Returns:
            `torch.Tensor` of shape `(1, g)`, fp32.
        """
        weight = self.PRIOR_ROUNDS
        rates = [
            (self._accepted.get(k, 0) + weight * self.PRIOR_ACCEPTANCE) / (self._reached.get(k, 0) + weight)
            for k in range(num_slots)
        ]
        return torch.tensor([rates])

    def observe(self, record: RoundRecord) -> None:
        """Learn from a finished round.

        Args:
            record (`RoundRecord`): The round.
        """
        for slot in range(min(record.num_accepted + 1, record.verify_length)):
            self._reached[slot] = self._reached.get(slot, 0) + 1
            self._accepted[slot] = self._accepted.get(slot, 0) + (record.num_accepted > slot)
            if record.confidence:
                self._expected[slot] = self._expected.get(slot, 0.0) + record.confidence[slot]
        if self.learn_cost:
            self._learn_cost(record)

    def _corrected(self, confidence: torch.Tensor) -> torch.Tensor:
        if not self._expected:
            return confidence
        weight = self.PRIOR_ROUNDS
        factors = [
            (self._accepted.get(k, 0) + weight) / (self._expected[k] + weight) if k in self._expected else 1.0
            for k in range(confidence.shape[-1])
        ]
        return (confidence * confidence.new_tensor(factors)).clamp(max=1.0)

    def _learn_cost(self, record: RoundRecord) -> None:
        """Decayed least squares of verification seconds on drafts sent, shrunk towards the prior slope."""
        tokens, seconds = record.verify_length, record.verify_s
        if self._times[0] > 1:  # a stall of the machine says nothing about the cost of a token
            seconds = min(seconds, 2 * self._times[2] / self._times[0])
        new = (1.0, tokens, seconds, tokens * tokens, tokens * seconds, record.draft_s)
        self._times = [self.TIME_DECAY * old + value for old, value in zip(self._times, new, strict=True)]
        count, sum_x, sum_y, sum_xx, sum_xy, sum_draft = self._times
        spread, covariance = sum_xx - sum_x**2 / count, sum_xy - sum_x * sum_y / count
        mean_s, mean_tokens, weight = sum_y / count, sum_x / count, self.PRIOR_TOKEN_SPREAD
        prior_slope = self._prior_cost * mean_s / (1 + self._prior_cost * mean_tokens)
        slope = max(0.0, (covariance + weight * prior_slope) / (spread + weight))
        base_s = max(mean_s - slope * mean_tokens, 1e-9) + sum_draft / count
        self._slot_cost = min(slope / base_s, 1.0)
