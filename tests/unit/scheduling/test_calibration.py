# SPDX-License-Identifier: Apache-2.0

import json
import math

import pytest
import torch

from dspark_hf.common.records import RoundRecord
from dspark_hf.scheduling.calibration import MIN_ROUNDS, acceptance_prior, calibration_report, fit_temperatures
from dspark_hf.scheduling.observations import ConfidenceObservations
from dspark_hf.scheduling.reliability import (
    area_under_curve,
    brier_score,
    expected_calibration_error,
    noise_floor,
    reliability_table,
    survival_figures,
)
from tests.support.closeness import assert_close


TRUE_TEMPERATURES = (0.5, 2.0, 1.0, 3.0)


def synthetic(num_rounds: int, temperatures=TRUE_TEMPERATURES, seed: int = 0) -> ConfidenceObservations:
    """Rounds whose logits are `temperatures` times too large; divided by them, every confidence is exactly right."""
    generator = torch.Generator().manual_seed(seed)
    right = 0.8 + 1.5 * torch.randn(num_rounds, len(temperatures), generator=generator)
    accepted = torch.rand(right.shape, generator=generator) < right.sigmoid()
    return ConfidenceObservations(right * torch.tensor(temperatures), accepted.long().cumprod(dim=1).sum(dim=1))


def record(confidence, num_accepted: int, num_drafts: int = 2, bonus_token=7, num_committed=None) -> RoundRecord:
    committed = num_accepted + 1 if num_committed is None else num_committed
    return RoundRecord(1, tuple(range(num_drafts)), tuple(confidence), num_accepted, bonus_token, committed)


def tensor(*values) -> torch.Tensor:
    return torch.tensor(values)


# Observations


def test_rounds_become_logits():
    observations = ConfidenceObservations.from_rounds([record((0.5, 0.75), 2), record((0.2, 0.9), 0)], 2)
    assert observations.confidence_logits.dtype == torch.float32
    expected = [[0.0, math.log(3)], [math.log(0.25), math.log(9)]]
    assert_close(observations.confidence_logits, torch.tensor(expected))
    assert observations.num_accepted.tolist() == [2, 0]
    assert (observations.num_rounds, observations.num_slots) == (2, 2)


def test_certain_confidences_stay_finite():
    observations = ConfidenceObservations.from_rounds([record((1.0, 0.0), 1)], 2)
    assert_close(observations.confidence_logits, tensor([math.log(1e6 - 1), -math.log(1e6 - 1)]))


@pytest.mark.parametrize(
    ("left_out", "why"),
    [
        (record((0.1, 0.1), 1, num_drafts=1), "a draft was cut"),
        (record((), 1), "no confidence head"),
        (record((0.1,), 1), "a confidence is missing"),
        (record((0.1, 0.1), 1, bonus_token=None, num_committed=1), "ended at slot 0: nobody knows about slot 1"),
    ],
)
def test_rounds_that_say_too_little_are_left_out(left_out, why):
    observations = ConfidenceObservations.from_rounds([record((0.6, 0.7), 2), left_out], 2)
    assert observations.num_accepted.tolist() == [2], why


@pytest.mark.parametrize(
    "truncated",
    [
        record((0.6, 0.7), 2, num_committed=1),  # a stop string in the middle: judged before it was cut
        record((0.6, 0.7), 2, bonus_token=None, num_committed=2),  # ended with the last draft
    ],
)
def test_truncated_rounds_count_what_was_accepted(truncated):
    assert truncated.truncated
    assert ConfidenceObservations.from_rounds([truncated], 2).num_accepted.tolist() == [2]


def test_no_full_block_is_an_error():
    rounds = [record((0.1, 0.1), 1, num_drafts=1), record((), 1)]
    message = r"send all 2 drafts of a block, got none among 2 rounds \(most drafts sent: 2; .* every slot: 1\)"
    with pytest.raises(ValueError, match=message):
        ConfidenceObservations.from_rounds(rounds, 2)
    with pytest.raises(ValueError, match="none among 0 rounds"):
        ConfidenceObservations.from_rounds([], 2)


@pytest.mark.parametrize(
    ("logits", "accepted", "message"),
    [
        (torch.zeros(3), torch.zeros(3), r"shape \(N, g\)"),
        (torch.zeros(3, 2), torch.zeros(2), r"got \(3, 2\) and \(2,\)"),
        (torch.full((1, 2), math.inf), torch.zeros(1), "must be finite"),
        (torch.zeros(1, 2), tensor(3), r"must lie in \[0, 2\], got \[3\]"),
        (torch.zeros(1, 2), tensor(-1), r"got \[-1\]"),
    ],
)
def test_observations_that_contradict_are_refused(logits, accepted, message):
    with pytest.raises(ValueError, match=message):
        ConfidenceObservations(logits, accepted)


def test_events_and_rates_by_hand():
    """Slot 0: 3 of 4. Slot 1: reached by 3, accepted by 2. Slot 2: reached by 2, accepted by none."""
    observations = ConfidenceObservations(torch.zeros(4, 3), tensor(2, 0, 1, 2))
    assert observations.prefix_accepted.tolist() == [
        [True, True, False],
        [False, False, False],
        [True, False, False],
        [True, True, False],
    ]
    assert observations.conditional_acceptance == (0.75, pytest.approx(2 / 3), 0.0)
    # 5 of 9 judged slots; 4 rounds of that rate are added to each.
    pooled = 4 * 5 / 9
    assert acceptance_prior(observations) == pytest.approx(((3 + pooled) / 8, (2 + pooled) / 7, pooled / 6))


def test_slot_that_was_never_reached():
    observations = ConfidenceObservations(torch.zeros(2, 3), tensor(0, 0))
    assert observations.conditional_acceptance[0] == 0.0
    assert math.isnan(observations.conditional_acceptance[1])
    assert acceptance_prior(observations) == (0.0, 0.0, 0.0)
    some = acceptance_prior(ConfidenceObservations(torch.zeros(2, 3), tensor(1, 0)))
    assert some[2] == pytest.approx(1 / 3)  # nothing known of this slot: the rate of all, 1 of 3


def test_survival_divides_the_logits():
    observations = ConfidenceObservations(tensor([math.log(9), math.log(3)]).float(), tensor(1))
    assert_close(observations.survival(), tensor([0.9, 0.675]).double())
    halved = observations.survival((2.0, 1.0))  # sigmoid(ln 3) = 0.75
    assert_close(halved, tensor([0.75, 0.5625]).double())
    with pytest.raises(ValueError, match="for each of 2 slots"):
        observations.survival((2.0,))


# Figures


def test_expected_calibration_error_by_hand():
    """Bins {0.1, 0.3} and {0.6, 0.8}: |0.2 - 0.5| and |0.7 - 1| by mean, half of the rounds each."""
    probabilities, outcomes = tensor(0.6, 0.1, 0.8, 0.3), tensor(True, False, True, True)
    assert_close(float(expected_calibration_error(probabilities, outcomes, 2)), 0.3)
    # One bin: |0.45 - 0.75|. Four: 0.4, 0.1, 0.2, 0.7, a quarter each.
    assert_close(float(expected_calibration_error(probabilities, outcomes, 1)), 0.3)
    assert_close(float(expected_calibration_error(probabilities, outcomes, 4)), 0.35)
    assert_close(float(expected_calibration_error(1 - probabilities, outcomes, 1)), 0.2)


def test_equal_predictions_share_a_bin():
    """Ten times 0.3, three of which come true, is perfect, wherever the three stand."""
    outcomes = torch.zeros(10, dtype=torch.bool)
    outcomes[:3] = True
    assert_close(float(expected_calibration_error(torch.full((10,), 0.3), outcomes, 5)), 0.0, scale=1.0)


def test_many_predictions_at_once():
    probabilities = torch.rand(3, 2, 40, generator=torch.Generator().manual_seed(0))
    outcomes = torch.arange(40) % 3 > 0
    errors = expected_calibration_error(probabilities, outcomes, 5)
    assert errors.shape == (3, 2)
    alone = [[float(expected_calibration_error(row, outcomes, 5)) for row in rows] for rows in probabilities]
    assert_close(errors, torch.tensor(alone).double())
    assert errors.std() > 0


def test_reliability_table_by_hand():
    table = reliability_table(tensor(0.75, 0.25, 0.0, 0.5, 1.0), tensor(True, False, False, True, True), 2)
    # Ranks 0 to 4 of 5 in two bins: 0, 1, 2 and 3, 4.
    assert [(b.mean_prediction, b.observed_rate, b.count) for b in table] == [
        (pytest.approx(0.25), pytest.approx(1 / 3), 3),
        (pytest.approx(0.875), 1.0, 2),
    ]
    assert len(reliability_table(tensor(0.5, 0.5), tensor(True, False), 10)) == 1  # empty bins are left out


def test_reliability_table_is_what_the_error_is_made_of():
    observations = synthetic(500)
    figures = survival_figures(observations)[1]
    gap = sum(b.count * abs(b.mean_prediction - b.observed_rate) for b in figures.reliability) / 500
    assert_close(figures.expected_calibration_error, gap)
    assert [b.count for b in figures.reliability] == [50] * 10


def test_noise_floor_by_hand():
    """Two bins of two rounds, variances 0.5 and 0.18: sqrt(2/pi) * (sqrt(0.5) + sqrt(0.18)) / 4."""
    value = noise_floor(tensor(0.5, 0.1, 0.5, 0.1), 2)
    assert_close(value, math.sqrt(2 / math.pi) * (math.sqrt(0.5) + math.sqrt(0.18)) / 4)


def test_noise_floor_is_the_mean_error_of_a_perfect_prediction():
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(1000, generator=generator)
    draws = [torch.rand(1000, generator=generator) < probabilities for _ in range(200)]
    errors = [float(expected_calibration_error(probabilities, outcomes)) for outcomes in draws]
    assert sum(errors) / 200 == pytest.approx(noise_floor(probabilities), rel=0.05)


def test_brier_score_by_hand():
    assert_close(brier_score(tensor(0.8, 0.4), tensor(True, False)), (0.04 + 0.16) / 2)
    assert brier_score(tensor(1.0, 0.0), tensor(True, False)) == 0.0


@pytest.mark.parametrize(
    ("scores", "outcomes", "expected"),
    [
        ((0.1, 0.4, 0.35, 0.8), (False, False, True, True), 0.75),  # 3 of 4 pairs in order
        ((1.0, 2.0, 3.0), (False, True, True), 1.0),
        ((3.0, 2.0, 1.0), (False, True, True), 0.0),
        ((5.0, 5.0, 5.0), (False, True, True), 0.5),
        ((0.2, 0.5, 0.5, 0.9), (False, False, True, True), 0.875),  # one tie among four pairs
    ],
)
def test_area_under_curve_by_hand(scores, outcomes, expected):
    assert area_under_curve(torch.tensor(scores), torch.tensor(outcomes)) == pytest.approx(expected)


def test_area_under_curve_needs_both_outcomes():
    assert math.isnan(area_under_curve(tensor(0.1, 0.2), tensor(True, True)))
    assert math.isnan(area_under_curve(tensor(0.1, 0.2), tensor(False, False)))


@pytest.mark.parametrize("figure", [expected_calibration_error, reliability_table, brier_score, area_under_curve])
def test_predictions_that_do_not_fit_their_outcomes_are_refused(figure):
    with pytest.raises(ValueError, match=r"got the shapes \(2,\) and \(3,\)"):
        figure(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="at least one"):
        figure(torch.zeros(0), torch.zeros(0))


def test_bins_are_at_least_one():
    with pytest.raises(ValueError, match="`num_bins` must be >= 1, got 0"):
        expected_calibration_error(torch.zeros(2), torch.zeros(2), 0)


# Sequential Temperature Scaling


def test_known_temperatures_are_recovered():
    temperatures = fit_temperatures(synthetic(5_000))
    assert len(temperatures) == 4
    for found, true in zip(temperatures, TRUE_TEMPERATURES, strict=True):
        assert found == pytest.approx(true, rel=0.25)


def test_error_goes_down_on_rounds_that_were_not_fitted_to():
    report = calibration_report(synthetic(4_000), synthetic(5_000, seed=1))
    assert report.mean_error_before > 0.04
    assert report.mean_error_after < report.mean_error_before / 3
    floor = sum(figures.noise_floor for figures in report.after) / 4
    assert report.mean_error_after < 2 * floor
    for before, after in zip(report.before, report.after, strict=True):
        assert after.brier_score < before.brier_score + 1e-3
    assert report.after[0].brier_score < report.before[0].brier_score - 0.005
    assert (report.num_rounds, report.num_check_rounds) == (4_000, 5_000)


def test_order_within_a_slot_stays():
    observations = synthetic(2_000)
    report = calibration_report(observations, observations)
    for slot, temperature in enumerate(report.temperatures):
        reached = observations.num_accepted >= slot
        confidence_logits = observations.confidence_logits[reached, slot]
        outcomes = observations.num_accepted[reached] > slot
        before = area_under_curve(confidence_logits.sigmoid(), outcomes)
        after = area_under_curve((confidence_logits / temperature).sigmoid(), outcomes)
        assert 0.7 < before < 1.0
        assert_close(after, before, factor=1000)  # neighbours may round to the same probability
    # Slot 0 has no slot before it, so its prefix survival is its confidence.
    assert report.temperatures[0] != 1.0
    assert_close(report.after[0].area_under_curve, report.before[0].area_under_curve, factor=1000)


def test_slots_before_are_held_at_their_calibrated_values():
    """Were slot 1 fitted beside an uncalibrated slot 0, it would have to make up for that one's error."""
    observations = synthetic(5_000, (4.0, 1.0))
    first, second = fit_temperatures(observations)
    assert first == pytest.approx(4.0, rel=0.25)
    assert second == pytest.approx(1.0, rel=0.25)
    already = ConfidenceObservations(observations.confidence_logits / tensor(4.0, 1.0), observations.num_accepted)
    assert fit_temperatures(already)[1] == pytest.approx(second, rel=0.1)


def test_later_slots_do_not_matter_to_earlier_ones():
    observations = synthetic(500)
    changed = ConfidenceObservations(observations.confidence_logits.clone(), observations.num_accepted)
    changed.confidence_logits[:, 2:] *= 7
    ours, theirs = fit_temperatures(observations), fit_temperatures(changed)
    assert theirs[:2] == ours[:2]
    assert theirs[2] > ours[2]


def test_the_search_takes_the_best_of_its_grid():
    observations = synthetic(3_000)
    (best, *_), grid = fit_temperatures(observations, (0.25, 0.5, 2.0)), (0.25, 0.5, 2.0)
    happened = observations.prefix_accepted[:, 0]
    errors = {
        T: float(expected_calibration_error((observations.confidence_logits[:, 0].double() / T).sigmoid(), happened))
        for T in grid
    }
    assert best == min(errors, key=errors.get) == 0.5


def test_ties_go_to_the_temperature_closest_to_one():
    """A logit of 0 is 0.5 at every temperature."""
    observations = ConfidenceObservations(torch.zeros(60, 1), torch.arange(60) % 2)
    assert fit_temperatures(observations) == (1.0,)
    assert fit_temperatures(observations, (4.0, 0.5, 3.0)) == (0.5,)


def test_few_rounds_move_a_temperature_less_than_many():
    """The same 50 rounds, and the same ones a hundred times: the penalty counts a hundredth."""
    few = synthetic(50, (1.3,), seed=3)
    many = ConfidenceObservations(few.confidence_logits.repeat(100, 1), few.num_accepted.repeat(100))
    (small,), (large,) = fit_temperatures(few), fit_temperatures(many)
    assert abs(math.log(small)) < abs(math.log(large))


@pytest.mark.parametrize("grid", [(), (0.0, 1.0), (-1.0,), (math.inf,), (math.nan,)])
def test_bad_grids_are_refused(grid):
    with pytest.raises(ValueError, match="`grid` must hold temperatures that are positive and finite"):
        fit_temperatures(synthetic(60), grid)


def test_too_few_rounds_are_refused():
    assert fit_temperatures(synthetic(MIN_ROUNDS))
    message = f"at least {MIN_ROUNDS} full blocks .* got {MIN_ROUNDS - 1}.*Use more prompts"
    with pytest.raises(ValueError, match=message):
        fit_temperatures(synthetic(MIN_ROUNDS - 1))
    with pytest.raises(ValueError, match=message):
        calibration_report(synthetic(MIN_ROUNDS), synthetic(MIN_ROUNDS - 1))


def test_report_is_strict_json():
    observations = ConfidenceObservations(torch.randn(60, 2), torch.zeros(60, dtype=torch.long))
    report = calibration_report(observations, observations)
    written = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert math.isnan(report.before[0].area_under_curve)
    assert written["before"][0]["area_under_curve"] is None  # no slot was ever accepted
    assert written["conditional_acceptance"] == [0.0, None]
    assert written["temperatures"] == list(report.temperatures)
    assert written["mean_error_after"] == report.mean_error_after
    assert sum(b["count"] for b in written["after"][1]["reliability"]) == 60
