# SPDX-License-Identifier: Apache-2.0
"""Sequential Temperature Scaling (paper section 3.2), and the figures that say whether a confidence means what it
says. Never sees a model.

Legend: N rounds, g slots per block, T temperatures tried. c is the confidence, a the prefix survival. The event that
a_k predicts is "slots 0 to k were all accepted".

Calibration errors are taken over bins of equal mass: as many rounds in each. The a_k of late slots lie close to 0,
where bins of equal width would put nearly all rounds into one. Equal predictions share a bin.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .json_values import json_values
from .metrics import RoundRecord
from .scheduling import prefix_survival


MIN_ROUNDS = 30
NUM_BINS = 10
# Steps of 2.3 %: finer than the rounds can tell apart.
TEMPERATURE_GRID = tuple(round(10 ** (step / 100), 4) for step in range(-100, 101))
# Weight of "leave it alone" in the search, and of the pooled rate in the prior; it fades as rounds come in.
PRIOR_ROUNDS = 4.0
# A confidence of 1.0 in fp32 still has a finite logit (13.8).
SMALLEST_PROBABILITY = 1e-6


@dataclass(frozen=True, eq=False)
class ConfidenceObservations:
    """What the confidence head said in N full blocks, and what became of them.

    A full block had all its g slots sent, so `num_accepted` says of every slot whether its prefix was accepted.

    Args:
        confidence_logits (`torch.Tensor` of shape `(N, g)`): Before the sigmoid, uncalibrated.
        num_accepted (`torch.LongTensor` of shape `(N,)`): Leading drafts that the target accepted, 0 to g.

    Raises:
        ValueError: If the shapes do not fit, a logit is not finite, or a count is out of range.

    Example:
        >>> observations = ConfidenceObservations(torch.zeros(2, 3), torch.tensor([3, 1]))
        >>> observations.conditional_acceptance
        (1.0, 0.5, 1.0)
    """

    confidence_logits: torch.Tensor
    num_accepted: torch.Tensor

    def __post_init__(self) -> None:
        logits, accepted = self.confidence_logits, self.num_accepted
        if logits.ndim != 2 or accepted.shape != logits.shape[:1]:
            raise ValueError(
                "`confidence_logits` must have the shape (N, g) and `num_accepted` (N,), got "
                f"{tuple(logits.shape)} and {tuple(accepted.shape)}."
            )
        if not torch.isfinite(logits).all():
            raise ValueError("`confidence_logits` must be finite. Clamp the confidences away from 0 and 1 first.")
        if ((accepted < 0) | (accepted > logits.shape[1])).any():
            raise ValueError(f"`num_accepted` must lie in [0, {logits.shape[1]}], got {accepted.tolist()}.")

    @classmethod
    def from_rounds(cls, rounds: Iterable[RoundRecord], num_draft_slots: int) -> ConfidenceObservations:
        """Take the full blocks out of recorded rounds; their confidences must be uncalibrated.

        Left out are rounds that sent fewer drafts than the block has slots (the text's length limit, a drafted end of
        sequence, a threshold), those without a confidence for every slot, and those whose text ended before the last
        slot was judged. A round of which fewer tokens were committed than accepted is judged in full, and counts.

        Args:
            rounds (`Iterable[RoundRecord]`): The rounds.
            num_draft_slots (`int`): g.

        Returns:
            [`ConfidenceObservations`]

        Raises:
            ValueError: If no round is left.
        """
        rounds = list(rounds)
        full = [record for record in rounds if record.is_full_block(num_draft_slots)]
        if not full:
            with_confidence = sum(len(record.confidence) == num_draft_slots for record in rounds)
            longest = max((record.verify_length for record in rounds), default=0)
            raise ValueError(
                f"Calibration needs rounds that send all {num_draft_slots} drafts of a block, got none among "
                f"{len(rounds)} rounds (most drafts sent: {longest}; with a confidence for every slot: "
                f'{with_confidence}). Use a draft with a confidence head and the schedule "constant", leave '
                "`num_assistant_tokens` and `assistant_confidence_threshold` unset, and generate longer texts."
            )
        confidence = torch.tensor([record.confidence for record in full], dtype=torch.float64)
        logits = torch.logit(confidence, eps=SMALLEST_PROBABILITY).float()
        return cls(logits, torch.tensor([record.num_accepted for record in full]))

    @property
    def num_rounds(self) -> int:
        """`int`: N."""
        return self.confidence_logits.shape[0]

    @property
    def num_slots(self) -> int:
        """`int`: g."""
        return self.confidence_logits.shape[1]

    @property
    def prefix_accepted(self) -> torch.Tensor:
        """`torch.BoolTensor` of shape `(N, g)`: whether slots 0 to k were all accepted."""
        return self.num_accepted[:, None] > torch.arange(self.num_slots)

    @property
    def conditional_acceptance(self) -> tuple[float, ...]:
        """`tuple[float, ...]`: P(slot k accepted | all before it were); NaN for a slot that no round reached."""
        accepted = self.prefix_accepted.sum(dim=0).tolist()
        reached = [self.num_rounds, *accepted[:-1]]
        return tuple(a / r if r else math.nan for a, r in zip(accepted, reached, strict=True))

    def survival(self, temperatures: Sequence[float] | None = None) -> torch.Tensor:
        """a_k after Sequential Temperature Scaling.

        Args:
            temperatures (`Sequence[float]`, *optional*): T_k of every slot; all 1 when not given.

        Returns:
            `torch.Tensor` of shape `(N, g)`, fp64.

        Raises:
            ValueError: If there is not one temperature for each slot.
        """
        divisor = torch.tensor(temperatures or [1.0] * self.num_slots, dtype=torch.float64)
        if divisor.shape[0] != self.num_slots:
            raise ValueError(f"There must be one temperature for each of {self.num_slots} slots, got {temperatures}.")
        return prefix_survival(torch.sigmoid(self.confidence_logits.double() / divisor))


@dataclass(frozen=True)
class ReliabilityBin:
    """Rounds whose predictions lie next to each other.

    Args:
        mean_prediction (`float`): Mean of what was predicted, in [0, 1].
        observed_rate (`float`): Share of the rounds in which it happened, in [0, 1].
        count (`int`): Rounds.
    """

    mean_prediction: float
    observed_rate: float
    count: int


@dataclass(frozen=True)
class SurvivalFigures:
    """How good the prefix survival a_k of one slot is.

    Args:
        expected_calibration_error (`float`): ECE, in [0, 1].
        noise_floor (`float`): ECE that so many rounds show on average where every prediction is exactly right.
        area_under_curve (`float`): Chance that an accepted prefix was ranked above another; NaN if all are alike.
        brier_score (`float`): Mean squared error, in [0, 1].
        reliability (`tuple[ReliabilityBin, ...]`): The bins behind the ECE.
    """

    expected_calibration_error: float
    noise_floor: float
    area_under_curve: float
    brier_score: float
    reliability: tuple[ReliabilityBin, ...]


@dataclass(frozen=True)
class CalibrationReport:
    """Temperatures, and the figures of every slot without and with them, on rounds that were not fitted to.

    Args:
        temperatures (`tuple[float, ...]`): T_k.
        before (`tuple[SurvivalFigures, ...]`): Per slot, with all temperatures 1.
        after (`tuple[SurvivalFigures, ...]`): Per slot, with these temperatures.
        conditional_acceptance (`tuple[float, ...]`): P(slot k accepted | all before it were), on the fitted rounds.
        num_rounds (`int`): Rounds fitted to.
        num_check_rounds (`int`): Rounds that `before` and `after` come from.
    """

    temperatures: tuple[float, ...]
    before: tuple[SurvivalFigures, ...]
    after: tuple[SurvivalFigures, ...]
    conditional_acceptance: tuple[float, ...]
    num_rounds: int
    num_check_rounds: int

    @property
    def mean_error_before(self) -> float:
        """`float`: ECE without the temperatures, mean over the slots."""
        return _mean_error(self.before)

    @property
    def mean_error_after(self) -> float:
        """`float`: ECE with the temperatures, mean over the slots."""
        return _mean_error(self.after)

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain values for JSON.

        Returns:
            `dict[str, Any]`: `None` in the place of NaN.
        """
        means = {"mean_error_before": self.mean_error_before, "mean_error_after": self.mean_error_after}
        return json_values(dataclasses.asdict(self) | means)


def calibration_report(fitted: ConfidenceObservations, check: ConfidenceObservations) -> CalibrationReport:
    """Fit temperatures on some rounds and judge them on others.

    Args:
        fitted (`ConfidenceObservations`): Rounds to fit to.
        check (`ConfidenceObservations`): Rounds to judge on; of other prompts, or the figures flatter.

    Returns:
        [`CalibrationReport`]

    Raises:
        ValueError: If there are too few rounds in either part.
    """
    _check_num_rounds(check)
    temperatures = fit_temperatures(fitted)
    return CalibrationReport(
        temperatures=temperatures,
        before=survival_figures(check),
        after=survival_figures(check, temperatures),
        conditional_acceptance=fitted.conditional_acceptance,
        num_rounds=fitted.num_rounds,
        num_check_rounds=check.num_rounds,
    )


def fit_temperatures(
    observations: ConfidenceObservations, grid: Sequence[float] = TEMPERATURE_GRID, num_bins: int = NUM_BINS
) -> tuple[float, ...]:
    """Sequential Temperature Scaling: slot by slot, the T_k that brings the ECE of a_k down most.

    The slots before k are held at their calibrated values. Each candidate also pays `|log T| * 4 / N`, so that few
    rounds move a temperature little; of equals, the one closest to 1 is taken.

    Args:
        observations (`ConfidenceObservations`): At least 30 rounds.
        grid (`Sequence[float]`, *optional*): Temperatures to try; 201 from 0.1 to 10 by default, evenly in log T.
        num_bins (`int`, *optional*, defaults to 10): Bins of the ECE.

    Returns:
        `tuple[float, ...]`: T_k, to be applied as `sigmoid(confidence_logits / temperatures)`.

    Raises:
        ValueError: If there are too few rounds, or a temperature of the grid is not positive and finite.
    """
    _check_num_rounds(observations)
    if not grid or not all(0 < temperature < math.inf for temperature in grid):
        raise ValueError(f"`grid` must hold temperatures that are positive and finite, got {tuple(grid)}.")
    ordered = sorted(grid, key=lambda temperature: abs(math.log(temperature)))
    candidates = torch.tensor(ordered, dtype=torch.float64)[:, None]  # [T, 1], the closest to 1 first
    penalty = candidates[:, 0].log().abs() * (PRIOR_ROUNDS / observations.num_rounds)
    logits, happened = observations.confidence_logits.double(), observations.prefix_accepted
    survival, chosen = logits.new_ones(observations.num_rounds), []
    for slot in range(observations.num_slots):
        tried = survival * torch.sigmoid(logits[:, slot] / candidates)  # [T, N]
        cost = expected_calibration_error(tried, happened[:, slot], num_bins) + penalty
        best = int((cost <= cost.min()).nonzero()[0])
        chosen.append(ordered[best])
        survival = tried[best]
    return tuple(chosen)


def acceptance_prior(observations: ConfidenceObservations) -> tuple[float, ...]:
    """P(slot k accepted | all before it were), usable from the first round on.

    Each rate is drawn towards the rate of all slots together, with the weight of four rounds, so that a slot that was
    seldom or never reached gets neither 0 nor NaN.

    Args:
        observations (`ConfidenceObservations`): At least one round.

    Returns:
        `tuple[float, ...]`: in [0, 1], one per slot.
    """
    accepted = observations.prefix_accepted.sum(dim=0).tolist()
    reached = [observations.num_rounds, *accepted[:-1]]
    pooled = sum(accepted) / sum(reached)
    return tuple((a + PRIOR_ROUNDS * pooled) / (r + PRIOR_ROUNDS) for a, r in zip(accepted, reached, strict=True))


def survival_figures(
    observations: ConfidenceObservations, temperatures: Sequence[float] | None = None, num_bins: int = NUM_BINS
) -> tuple[SurvivalFigures, ...]:
    """Judge the prefix survival of every slot.

    Args:
        observations (`ConfidenceObservations`): Rounds to judge on.
        temperatures (`Sequence[float]`, *optional*): T_k; all 1 when not given.
        num_bins (`int`, *optional*, defaults to 10): Bins of the ECE.

    Returns:
        `tuple[SurvivalFigures, ...]`, one per slot.
    """
    survival, happened = observations.survival(temperatures), observations.prefix_accepted
    return tuple(
        SurvivalFigures(
            expected_calibration_error=float(expected_calibration_error(predicted, outcomes, num_bins)),
            noise_floor=noise_floor(predicted, num_bins),
            area_under_curve=area_under_curve(predicted, outcomes),
            brier_score=brier_score(predicted, outcomes),
            reliability=reliability_table(predicted, outcomes, num_bins),
        )
        for predicted, outcomes in zip(survival.T.contiguous(), happened.T, strict=True)
    )


def expected_calibration_error(
    probabilities: torch.Tensor, outcomes: torch.Tensor, num_bins: int = NUM_BINS
) -> torch.Tensor:
    """ECE: distance of the mean prediction from the observed rate, mean over bins of equal mass weighted by count.

    Args:
        probabilities (`torch.Tensor` of shape `(*b, N)`): Predictions, in [0, 1].
        outcomes (`torch.Tensor` of shape `(N,)`): What happened, True or False.
        num_bins (`int`, *optional*, defaults to 10): Bins.

    Returns:
        `torch.Tensor` of shape `(*b,)`, fp64, in [0, 1].

    Raises:
        ValueError: If the shapes do not fit, there are no rounds, or `num_bins` < 1.

    Example:
        >>> p = torch.tensor([0.1, 0.3, 0.6, 0.8])
        >>> round(float(expected_calibration_error(p, torch.tensor([False, True, True, True]), num_bins=2)), 3)
        0.3
    """
    _check_predictions(probabilities, outcomes, num_bins)
    gaps = probabilities.double() - outcomes.double()
    return _bin_sums(gaps, _bins(probabilities, num_bins), num_bins).abs().sum(dim=-1) / outcomes.shape[0]


def noise_floor(probabilities: torch.Tensor, num_bins: int = NUM_BINS) -> float:
    """ECE to be expected where every prediction is exactly right: the bins' own sampling noise.

    Each bin deviates like a normal variable of its variance, so this is for bins of more than a few rounds. An ECE
    near this value is no evidence of miscalibration.

    Args:
        probabilities (`torch.Tensor` of shape `(N,)`): Predictions, in [0, 1].
        num_bins (`int`, *optional*, defaults to 10): Bins.

    Returns:
        `float`, in [0, 1].
    """
    variances = (probabilities * (1 - probabilities)).double()
    deviations = _bin_sums(variances, _bins(probabilities, num_bins), num_bins).sqrt().sum()
    return float(deviations * math.sqrt(2 / math.pi) / probabilities.shape[0])


def reliability_table(
    probabilities: torch.Tensor, outcomes: torch.Tensor, num_bins: int = NUM_BINS
) -> tuple[ReliabilityBin, ...]:
    """Mean prediction against observed rate, bin by bin.

    Args:
        probabilities (`torch.Tensor` of shape `(N,)`): Predictions, in [0, 1].
        outcomes (`torch.Tensor` of shape `(N,)`): What happened, True or False.
        num_bins (`int`, *optional*, defaults to 10): Bins; empty ones are left out.

    Returns:
        `tuple[ReliabilityBin, ...]`, by ascending prediction.

    Raises:
        ValueError: If the shapes do not fit, there are no rounds, or `num_bins` < 1.
    """
    _check_predictions(probabilities, outcomes, num_bins)
    columns = (probabilities.double(), outcomes.double(), torch.ones_like(outcomes, dtype=torch.float64))
    bins = _bins(probabilities, num_bins)
    predicted, happened, counts = (_bin_sums(column, bins, num_bins).tolist() for column in columns)
    return tuple(
        ReliabilityBin(p / count, h / count, int(count))
        for p, h, count in zip(predicted, happened, counts, strict=True)
        if count
    )


def brier_score(probabilities: torch.Tensor, outcomes: torch.Tensor) -> float:
    """Mean squared difference of prediction and outcome.

    Args:
        probabilities (`torch.Tensor` of shape `(N,)`): Predictions, in [0, 1].
        outcomes (`torch.Tensor` of shape `(N,)`): What happened, True or False.

    Returns:
        `float`, in [0, 1].

    Raises:
        ValueError: If the shapes do not fit, or there are no rounds.
    """
    _check_predictions(probabilities, outcomes)
    return float((probabilities.double() - outcomes.double()).square().mean())


def area_under_curve(scores: torch.Tensor, outcomes: torch.Tensor) -> float:
    """AUC: chance that a round in which it happened has a higher score than one in which it did not; ties count half.

    Args:
        scores (`torch.Tensor` of shape `(N,)`): Any increasing function of the prediction.
        outcomes (`torch.Tensor` of shape `(N,)`): What happened, True or False.

    Returns:
        `float`, in [0, 1]; NaN where all outcomes are the same.

    Raises:
        ValueError: If the shapes do not fit, or there are no rounds.
    """
    _check_predictions(scores, outcomes)
    happened = outcomes.bool()
    num_yes, num_no = int(happened.sum()), int((~happened).sum())
    if not num_yes or not num_no:
        return math.nan
    ordered = scores.sort().values
    below, up_to = torch.searchsorted(ordered, scores), torch.searchsorted(ordered, scores, right=True)
    mid_ranks = (below + up_to + 1).double() / 2  # from 1
    return float((mid_ranks[happened].sum() - num_yes * (num_yes + 1) / 2) / (num_yes * num_no))


def _bins(probabilities: torch.Tensor, num_bins: int) -> torch.Tensor:
    """Bin of each prediction, (*b, N): its rank, the first among equals, in units of N / num_bins."""
    probabilities = probabilities.contiguous()
    ranks = torch.searchsorted(probabilities.sort(dim=-1).values, probabilities)
    return ranks * num_bins // probabilities.shape[-1]


def _bin_sums(values: torch.Tensor, bins: torch.Tensor, num_bins: int) -> torch.Tensor:
    """Sum of the values in each bin, (*b, num_bins)."""
    return values.new_zeros(*values.shape[:-1], num_bins).scatter_add(-1, bins, values)


def _mean_error(figures: Sequence[SurvivalFigures]) -> float:
    return sum(slot.expected_calibration_error for slot in figures) / len(figures)


def _check_num_rounds(observations: ConfidenceObservations) -> None:
    if observations.num_rounds < MIN_ROUNDS:
        raise ValueError(
            f"Calibration needs at least {MIN_ROUNDS} full blocks to fit to and as many to check on, got "
            f"{observations.num_rounds}; some thousands are better. Use more prompts, or longer answers."
        )


def _check_predictions(probabilities: torch.Tensor, outcomes: torch.Tensor, num_bins: int = 1) -> None:
    if outcomes.ndim != 1 or not outcomes.shape[0] or probabilities.shape[-1:] != outcomes.shape:
        raise ValueError(
            "Predictions and outcomes must be as many, and at least one, got the shapes "
            f"{tuple(probabilities.shape)} and {tuple(outcomes.shape)}."
        )
    if num_bins < 1:
        raise ValueError(f"`num_bins` must be >= 1, got {num_bins}.")
