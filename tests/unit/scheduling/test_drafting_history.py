# SPDX-License-Identifier: Apache-2.0
"""What rounds teach: acceptance, round times, and whether drafting pays."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from dspark_hf import RoundRecord
from dspark_hf.scheduling import RoundOutlook, SPSCurve
from dspark_hf.scheduling.acceptance import AcceptanceHistory
from dspark_hf.scheduling.gate import DraftingGate, DraftingPause, best_fixed_length
from dspark_hf.scheduling.live_curve import LiveRoundTimes
from dspark_hf.scheduling.request_history import RequestHistory
from tests.support.closeness import assert_close


def record(num_accepted=0, num_drafts=4, confidence=(), verify_s=0.0, draft_s=0.0, drafted=True) -> RoundRecord:
    return RoundRecord(
        anchor_id=1,
        token_ids=tuple(range(num_drafts)),
        confidence=tuple(confidence),
        num_accepted=num_accepted,
        bonus_token=2,
        num_committed=num_accepted + 1,
        draft_s=draft_s,
        verify_s=verify_s,
        round_s=verify_s + draft_s,
        drafted=drafted,
    )


def without_decay(monkeypatch, *classes) -> None:
    for cls in classes:
        monkeypatch.setattr(cls, "DECAY", 1.0)


# Acceptance.


def test_conditional_acceptance_by_hand(monkeypatch):
    """Slot 0: 3 of 4 accepted, slot 1: 1 of 3 that reached it, slot 2: 0 of 1; two pseudo-rounds at 0.6."""
    without_decay(monkeypatch, AcceptanceHistory)
    history = AcceptanceHistory(4)
    assert history.conditional_acceptance == pytest.approx([0.6] * 4)
    for num_accepted in (2, 1, 1, 0):
        history.observe(record(num_accepted, 3))
    expected = [(3 + 1.2) / 6, (1 + 1.2) / 5, (0 + 1.2) / 3, 0.6]
    assert history.conditional_acceptance == pytest.approx(expected)


def test_slots_that_were_not_sent_are_not_judged(monkeypatch):
    without_decay(monkeypatch, AcceptanceHistory)
    history = AcceptanceHistory(3)
    history.observe(record(1, 1, (0.9, 0.8, 0.7)))  # the only draft sent was accepted
    assert history.conditional_acceptance == pytest.approx([2.2 / 3, 0.6, 0.6])
    history.observe(record(0, 0, (0.1, 0.1, 0.1)))  # nothing sent, nothing learned
    assert history.conditional_acceptance == pytest.approx([2.2 / 3, 0.6, 0.6])


def test_tokens_per_round_by_hand(monkeypatch):
    """Four pseudo-rounds of 1.6, then one of 4, one of 1 and a copy that brings 6; a plain step does not count."""
    without_decay(monkeypatch, AcceptanceHistory)
    history = RequestHistory(AcceptanceHistory(3))
    assert history.tokens_per_round == pytest.approx(1.6)
    history.observe(record(3, 3))
    history.observe(record(0, 3))
    assert history.tokens_per_round == pytest.approx((6.4 + 4 + 1) / 6)
    history.observe(dataclasses.replace(record(0, 0), drafted=False))
    history.observe(dataclasses.replace(record(5, 5), drafted=False, num_copied=5))
    assert history.tokens_per_round == pytest.approx((6.4 + 4 + 1 + 6) / 7)
    assert RequestHistory(AcceptanceHistory(3, [0.5, 0.1, 0.1])).tokens_per_round == pytest.approx(1.5)


def test_copied_drafts_are_no_slots(monkeypatch):
    """One draft of the block and two copies, of which one is accepted: the block's slot was right, no other judged."""
    without_decay(monkeypatch, AcceptanceHistory)
    history = RequestHistory(AcceptanceHistory(3))
    history.observe(dataclasses.replace(record(2, 3), num_copied=2))
    assert history.blocks.conditional_acceptance == pytest.approx([2.2 / 3, 0.6, 0.6])


def test_calibrated_prior_weighs_four_rounds(monkeypatch):
    without_decay(monkeypatch, AcceptanceHistory)
    history = AcceptanceHistory(2, prior=[0.8, 0.5])
    history.observe(record(0, 2))
    assert history.conditional_acceptance == pytest.approx([3.2 / 5, 0.5])


def test_recent_rounds_weigh_more():
    early, late = AcceptanceHistory(1), AcceptanceHistory(1)
    for accepted in range(40):
        early.observe(record(int(accepted < 20), 1))
        late.observe(record(int(accepted >= 20), 1))
    assert early.conditional_acceptance[0] < 0.45 < 0.6 < late.conditional_acceptance[0]


def test_acceptance_corrects_confidence(monkeypatch):
    """Slot 0 said 0.9 and was accepted in 2 of 8 rounds: (2 + 4) / (7.2 + 4); slot 1, reached twice, said 0.5 and was
    accepted each time: (2 + 4) / (1 + 4); slot 2 was never judged."""
    without_decay(monkeypatch, AcceptanceHistory)
    history = AcceptanceHistory(3)
    for accepted in (True, False, False, False, True, False, False, False):
        history.observe(record(2 if accepted else 0, 2, (0.9, 0.5, 0.4)))
    corrected = history.corrected(torch.tensor([[0.9, 0.5, 0.4]]))
    assert_close(corrected, torch.tensor([[0.9 * 6 / 11.2, 0.5 * 6 / 5, 0.4]]))
    assert history.corrected(torch.tensor([[1.0, 1.0]])).tolist()[0][1] == 1.0  # a chance, not 1.2
    assert history.corrected(torch.tensor([[0.9]])).shape == (1, 1)  # near the length limit blocks are shorter


# Round times.


def slope(times: LiveRoundTimes) -> float:
    return times.curve.verify(2) / times.curve.plain_s - 1


@pytest.mark.parametrize("cost", [0.02, 0.1, 0.4])
def test_times_are_learned_in_any_unit(cost):
    rng = random.Random(0)
    times = LiveRoundTimes(SPSCurve.linear(0.05, 0.1), learn=True)
    for _ in range(300):
        n = rng.randint(0, 7)
        times.observe([record(num_drafts=n, verify_s=0.02 * (1 + cost * n), draft_s=0.005)])
    assert slope(times) == pytest.approx(cost, rel=0.15)
    assert times.curve.plain_s == pytest.approx(0.02, rel=0.1)
    assert times.curve.draft_s == pytest.approx(0.005, rel=0.1)


def test_a_machine_that_changes_is_followed():
    rng = random.Random(0)
    times = LiveRoundTimes(SPSCurve.linear(0.05), learn=True)
    for cost in (0.01, 0.3):
        for _ in range(200):
            n = rng.randint(0, 7)
            times.observe([record(num_drafts=n, verify_s=0.02 * (1 + cost * n))])
        assert slope(times) == pytest.approx(cost, rel=0.15, abs=0.01)


def test_equal_lengths_teach_the_unit_but_no_slope():
    times = LiveRoundTimes(SPSCurve.linear(0.07), learn=True)
    for _ in range(100):
        times.observe([record(num_drafts=4, verify_s=0.02 * 1.28)])
    assert slope(times) == pytest.approx(0.07, rel=1e-3)
    assert times.curve.plain_s == pytest.approx(0.02, rel=1e-3)


def test_a_measured_shape_is_kept():
    """A cliff stays where it was measured; twice as slow a machine is twice as slow everywhere."""
    prior = SPSCurve((1, 4, 5, 8), (1.0, 1.1, 2.0, 2.1), 0.2)
    times = LiveRoundTimes(prior, learn=True)
    for i in range(200):
        times.observe([record(num_drafts=i % 8, verify_s=2 * prior.verify(1 + i % 8), draft_s=0.4)])
    assert times.curve.verify_s == pytest.approx([2.0, 2.2, 4.0, 4.2], rel=1e-6)
    assert times.curve.draft_s == pytest.approx(0.4, rel=1e-6)


def test_one_stall_of_the_machine_hardly_counts():
    def after(stall_s: float) -> float:
        rng, times = random.Random(0), LiveRoundTimes(SPSCurve.linear(0.05), learn=True)
        for i in range(60):
            n = 7 if i == 55 else rng.randint(0, 7)
            seconds = stall_s if i == 55 and stall_s else 0.02 * (1 + 0.1 * n)
            times.observe([record(num_drafts=n, verify_s=seconds, draft_s=0.001)])
        return slope(times)

    assert after(60.0) == after(600.0), "a longer stall counts more"
    assert after(60.0) < 2 * after(0.0)


def test_times_stay_possible():
    times = LiveRoundTimes(SPSCurve.linear(0.05), learn=True)
    for i in range(100):  # shorter the more is sent, as noise can make it look
        times.observe([record(num_drafts=i % 8, verify_s=0.02 - 0.002 * (i % 8))])
    assert slope(times) == 0.0
    times = LiveRoundTimes(SPSCurve.linear(0.05), learn=True)
    for i in range(100):
        times.observe([record(num_drafts=i % 8, verify_s=1e-6 + 0.01 * (i % 8))])
    assert times.curve.plain_s > 0.0
    times = LiveRoundTimes(SPSCurve.linear(0.05), learn=True)
    times.observe([record()])  # a clock that stands still
    assert times.curve == SPSCurve.linear(0.05)


def test_without_learn_the_clock_is_ignored():
    curve = SPSCurve((1, 8), (1.0, 2.0), 0.3)
    times = LiveRoundTimes(curve, learn=False)
    for i in range(50):
        times.observe([record(i % 4, verify_s=0.3 * (i % 5), draft_s=2.0)])
    assert times.curve == curve


# Whether to draft.


def outlook(*survival: float, slot_cost=0.1, draft_cost=0.2) -> RoundOutlook:
    return RoundOutlook(SPSCurve.linear(slot_cost, draft_cost), survival)


def test_best_fixed_length_by_hand():
    """1.5 / 1.3, 1.75 / 1.4, 1.8 / 1.5 tokens per plain step: two drafts."""
    assert best_fixed_length(outlook(0.5, 0.25, 0.05)) == pytest.approx((1.75, 1.4))
    assert best_fixed_length(outlook(0.01, 0.0)) == pytest.approx((1.01, 1.3))


def decisions(gate: DraftingGate, rounds: int, look: RoundOutlook, num_accepted: int = 0, num_drafts: int = 2):
    drafted = []
    for _ in range(rounds):
        drafted.append(gate.should_draft(look))
        if drafted[-1]:
            gate.observe([record(num_accepted, num_drafts)], look.curve)
    return drafted


def test_good_drafts_are_always_drafted():
    assert decisions(DraftingGate(), 100, outlook(0.8, 0.6), num_accepted=1) == [True] * 100


def test_useless_drafts_are_probed_ever_less():
    drafted = decisions(DraftingGate(), 200, outlook(0.1, 0.01))
    probes = np.nonzero(drafted)[0].tolist()
    assert probes == [8, 8 + 17, 25 + 33, 58 + 65, 123 + 65]


def test_drafting_ends_when_rounds_do_not_bring_what_the_past_promised():
    """Each round brings 1 token in 1.4 plain steps, eight pseudo-rounds promise 1.75 in 1.4. With a decayed count n of
    rounds it ends where n + 14 < 0.92 * (1.4 * n + 11.2): from n = 12.83, the sixteenth round."""
    drafted = decisions(DraftingGate(), 30, outlook(0.5, 0.25))
    assert drafted[:16] == [True] * 16
    assert not any(drafted[16:24])


def test_chance_does_not_close_the_gate():
    """Half of the rounds bring 1 token and half bring 2, in 1.3 plain steps."""
    rng, gate, closed = random.Random(0), DraftingGate(), 0
    for _ in range(400):
        if gate.should_draft(outlook(0.5, 0.1)):
            gate.observe([record(rng.randint(0, 1), 1)], SPSCurve.linear(0.1, 0.2))
        else:
            closed += 1
    assert closed < 40


def test_a_probe_that_pays_is_followed_by_more():
    gate = DraftingGate()
    assert decisions(gate, 9, outlook(0.1, 0.01), num_accepted=2) == [False] * 8 + [True]
    assert decisions(gate, 3, outlook(0.1, 0.01), num_accepted=2) == [True] * 3


def test_the_gate_knows_no_clock():
    """Under another load the same rounds give the same decisions, as long as the shape of the curve is the same."""
    slow = RoundOutlook(SPSCurve((1, 2), (3.0, 3.6), 0.6), (0.5, 0.3))
    same = RoundOutlook(SPSCurve((1, 2), (1.0, 1.2), 0.2), (0.5, 0.3))
    rng = random.Random(3)
    gates, outcomes = (DraftingGate(), DraftingGate()), [rng.choice((0, 0, 0, 0, 2)) for _ in range(80)]
    chosen = [[], []]
    for num_accepted in outcomes:
        for gate, look, seen in zip(gates, (slow, same), chosen, strict=True):
            seen.append(gate.should_draft(look))
            if seen[-1]:
                gate.observe([record(num_accepted, 2)], look.curve)
    assert chosen[0] == chosen[1]
    assert 5 < sum(chosen[0]) < 80


def test_a_batch_is_judged_by_the_tokens_of_all():
    """Two rows, one of which gains what the other loses: 4 tokens in 1.6 passes over two, which bring 2 each."""
    curve = SPSCurve((2, 6), (1.0, 1.4), 0.2)
    look = RoundOutlook(curve, (0.5, 0.25))
    records = [record(2, 2), record(0, 2)]
    gate = DraftingGate()
    for _ in range(40):
        assert gate.should_draft(look, 2)
        gate.observe(records, curve)
    gate = DraftingGate()
    seen = []
    for _ in range(40):
        seen.append(gate.should_draft(look, 2))
        gate.observe([records[1], records[1]], curve)
    assert not all(seen)


def test_fixed_length_of_a_batch():
    """Two requests: 3, 3.5 tokens in 0.2 + 1.2, 0.2 + 1.4 seconds."""
    curve = SPSCurve((2, 6), (1.0, 1.4), 0.2)
    assert best_fixed_length(RoundOutlook(curve, (0.5, 0.25)), 2) == pytest.approx((3.5, 1.6))
    assert best_fixed_length(RoundOutlook(curve, (0.5, 0.05)), 2) == pytest.approx((3.0, 1.4))


def test_times_of_a_batch_are_those_of_its_pass():
    """Each record holds its share; three rows with one draft each make a pass of six tokens."""
    times = LiveRoundTimes(SPSCurve((1, 6), (1.0, 2.0), 0.3, 0.1), learn=True)
    for _ in range(60):
        times.observe([record(1, 1, verify_s=4.0 / 3, draft_s=1.0 / 3)] * 3)
    assert times.curve.verify(6) == pytest.approx(4.0, rel=0.02)
    assert times.curve.for_requests(3).draft_s == pytest.approx(1.0, rel=0.1)
    assert times.curve.draft_s == pytest.approx(0.6, rel=0.1)  # as the prior has it: 0.3 of 0.5


def test_a_pause_begins_with_the_second_failure_and_doubles():
    pause, asked = DraftingPause(), []
    for _ in range(60):
        asked.append(pause.passes())
        if asked[-1]:
            pause.observe(failed=True)
    assert [number for number, passes in enumerate(asked) if passes] == [0, 1, 10, 27]  # pauses of 8, 16, 32


def test_a_pause_ends_for_good_with_a_draft_that_can_be_used():
    pause = DraftingPause()
    for failed in (True, False, True, False, True):
        assert pause.passes()
        pause.observe(failed)
    assert pause.passes()
    pause.observe(failed=True)
    assert [pause.passes() for _ in range(9)] == [False] * 8 + [True]
    pause.observe(failed=False)
    pause.observe(failed=True)
    assert pause.passes(), "the first failure after a success is one"
