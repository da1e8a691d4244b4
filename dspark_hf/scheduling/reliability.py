# SPDX-License-Identifier: Apache-2.0
"""Compares confidences with outcomes: calibration error, reliability, Brier score, area under the curve.

Calibration errors are taken over bins of equal mass: as many rounds in each. The a_k of late slots are close to 0,
where bins of equal width would put nearly all rounds into one. Equal predictions share a bin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .observations import ConfidenceObservations


NUM_BINS = 10


@dataclass(frozen=True)
class ReliabilityBin:
    """Rounds with neighbouring predictions."""

    mean_prediction: float  # mean of what was predicted, in [0, 1]
    observed_rate: float  # share of the rounds in which it happened, in [0, 1]
    count: int  # rounds


@dataclass(frozen=True)
class SurvivalFigures:
    """Quality of the prefix survival a_k of one slot."""

    expected_calibration_error: float  # ECE, in [0, 1]
    noise_floor: float  # mean ECE of this many rounds if every prediction is exactly right
    area_under_curve: float  # chance that an accepted prefix was ranked above another; NaN if all are alike
    brier_score: float  # mean squared error, in [0, 1]
    reliability: tuple[ReliabilityBin, ...]  # the bins behind the ECE


def survival_figures(
    observations: ConfidenceObservations, temperatures: Sequence[float] | None = None, num_bins: int = NUM_BINS
) -> tuple[SurvivalFigures, ...]:  # one per slot
    """Judge the prefix survival of every slot."""
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
    probabilities: torch.Tensor,  # [*b, N], predictions, in [0, 1]
    outcomes: torch.Tensor,  # [N], what happened, True or False
    num_bins: int = NUM_BINS,
) -> torch.Tensor:  # [*b], fp64, in [0, 1]
    """ECE: distance of the mean prediction from the observed rate, mean over bins of equal mass weighted by count."""
    _check_predictions(probabilities, outcomes, num_bins)
    gaps = probabilities.double() - outcomes.double()
    return _bin_sums(gaps, _bins(probabilities, num_bins), num_bins).abs().sum(dim=-1) / outcomes.shape[0]


def noise_floor(
    probabilities: torch.Tensor,  # [N], predictions, in [0, 1]
    num_bins: int = NUM_BINS,
) -> float:  # in [0, 1]
    """Expected ECE if every prediction is exactly right: the sampling noise of the bins.

    Each bin deviates like a normal variable of its variance, so this is for bins of more than a few rounds. An ECE
    near this value is no evidence of miscalibration.
    """
    variances = (probabilities * (1 - probabilities)).double()
    deviations = _bin_sums(variances, _bins(probabilities, num_bins), num_bins).sqrt().sum()
    return float(deviations * math.sqrt(2 / math.pi) / probabilities.shape[0])


def reliability_table(
    probabilities: torch.Tensor,  # [N], predictions, in [0, 1]
    outcomes: torch.Tensor,  # [N], what happened, True or False
    num_bins: int = NUM_BINS,
) -> tuple[ReliabilityBin, ...]:  # by ascending prediction
    """Mean prediction against observed rate, bin by bin."""
    _check_predictions(probabilities, outcomes, num_bins)
    columns = (probabilities.double(), outcomes.double(), torch.ones_like(outcomes, dtype=torch.float64))
    bins = _bins(probabilities, num_bins)
    predicted, happened, counts = (_bin_sums(column, bins, num_bins).tolist() for column in columns)
    return tuple(
        ReliabilityBin(p / count, h / count, int(count))
        for p, h, count in zip(predicted, happened, counts, strict=True)
        if count
    )


def brier_score(
    probabilities: torch.Tensor,  # [N], predictions, in [0, 1]
    outcomes: torch.Tensor,  # [N], what happened, True or False
) -> float:  # in [0, 1]
    """Mean squared difference of prediction and outcome."""
    _check_predictions(probabilities, outcomes)
    return float((probabilities.double() - outcomes.double()).square().mean())


def area_under_curve(
    scores: torch.Tensor,  # [N]
    outcomes: torch.Tensor,  # [N], what happened, True or False
) -> float:  # in [0, 1]; NaN where all outcomes are the same
    """AUC: chance that a round in which it happened scores higher than one in which it did not; ties count half."""
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


def _check_predictions(probabilities: torch.Tensor, outcomes: torch.Tensor, num_bins: int = 1) -> None:
    if outcomes.ndim != 1 or not outcomes.shape[0] or probabilities.shape[-1:] != outcomes.shape:
        raise ValueError(
            "Predictions and outcomes must be as many, and at least one, got the shapes "
            f"{tuple(probabilities.shape)} and {tuple(outcomes.shape)}."
        )
    if num_bins < 1:
        raise ValueError(f"`num_bins` must be >= 1, got {num_bins}.")
