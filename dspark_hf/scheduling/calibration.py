# SPDX-License-Identifier: Apache-2.0
"""Sequential Temperature Scaling (paper section 3.2): temperatures that make confidences match acceptance rates.
Imports no model code.

Legend: N rounds, g slots per block, T temperatures tried. c is the confidence, a the prefix survival. The event that
a_k predicts is "slots 0 to k were all accepted".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..common.files import json_values
from .observations import ConfidenceObservations
from .reliability import NUM_BINS, SurvivalFigures, expected_calibration_error, survival_figures


MIN_ROUNDS = 30
# Steps of 2.3 %: finer than the rounds can tell apart.
TEMPERATURE_GRID = tuple(round(10 ** (step / 100), 4) for step in range(-100, 101))
# Weight of the unchanged temperature in the search, and of the pooled rate in the prior; it fades with more rounds.
PRIOR_ROUNDS = 4.0


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
    """Fit temperatures on some rounds and judge them on others."""
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
    rounds move a temperature little; among equals, the one closest to 1 is used.

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


def acceptance_prior(observations: ConfidenceObservations) -> tuple[float, ...]:  # in [0, 1], one per slot
    """P(slot k accepted | all before it were), usable from the first round on.

    Each rate is shrunk towards the rate of all slots together, with the weight of four rounds, so that a slot that was
    rarely or never reached gets neither 0 nor NaN.
    """
    accepted = observations.prefix_accepted.sum(dim=0).tolist()
    reached = [observations.num_rounds, *accepted[:-1]]
    pooled = sum(accepted) / sum(reached)
    return tuple((a + PRIOR_ROUNDS * pooled) / (r + PRIOR_ROUNDS) for a, r in zip(accepted, reached, strict=True))


def _mean_error(figures: Sequence[SurvivalFigures]) -> float:
    return sum(slot.expected_calibration_error for slot in figures) / len(figures)


def _check_num_rounds(observations: ConfidenceObservations) -> None:
    if observations.num_rounds < MIN_ROUNDS:
        raise ValueError(
            f"Calibration needs at least {MIN_ROUNDS} full blocks to fit to and as many to check on, got "
            f"{observations.num_rounds}; some thousands are better. Use more prompts, or longer answers."
        )
