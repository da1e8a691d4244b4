# SPDX-License-Identifier: Apache-2.0
"""Whether a slot is sent to verification may not depend on its token or on anything after it.

The counterexample of the paper's appendix A in its own numbers, and what it asks of [`AdaptiveConfidenceCriteria`].
"""

from __future__ import annotations

import random

import pytest
import torch
from transformers import StoppingCriteriaList

from dspark_hf import AdaptiveConfidenceCriteria, RoundRecord, sampling
from tests.helpers import oracle_draft, random_prompt, tiny_target


SPS = (1.0, 0.5, 0.45)  # target steps per second with 1, 2 and 3 tokens
P, Q = torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5])  # of the first slot, over the tokens A and B
CONFIDENCE = {0: (0.8, 0.9), 1: (0.8, 0.0)}  # of both slots, by the token drawn for the first: the second has seen it


def acceptance_probability(monkeypatch, token: int) -> float:
    """Chance that our rule accepts a draft: the share of a fine grid of draws that it accepts."""
    grid = (torch.arange(10_000) + 0.5) / 10_000
    with monkeypatch.context() as patch:
        patch.setattr(torch, "rand_like", lambda like: grid[:, None])
        rows = (grid.shape[0], 1, 2)
        accepted = sampling.accept_drafts(
            torch.full(rows[:2], token), P.log().expand(rows), Q.log().expand(rows), do_sample=True
        )
    return float(accepted.float().mean())


def bonus_probabilities(monkeypatch, rejected: bool) -> torch.Tensor:
    """What our rule draws the next token from, after a rejection or without a draft."""
    weights = []

    def capture(probabilities, num_samples):
        weights.append(probabilities[0] / probabilities[0].sum())
        return torch.zeros(1, num_samples, dtype=torch.long)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "multinomial", capture)
        sampling.select_bonus(P.log()[None], Q.log()[None] if rejected else None, do_sample=True)
    return weights[0]


def throughput(confidence: tuple[float, ...], length: int) -> float:
    survival, tokens = 1.0, 1.0
    for c in confidence[:length]:
        survival *= c
        tokens += survival
    return tokens * SPS[length]


def early_stop(confidence: tuple[float, ...]) -> int:
    """Algorithm 1 for one request: admit slot by slot, stop at the first drop."""
    length = 0
    while length < len(confidence) and throughput(confidence, length + 1) > throughput(confidence, length):
        length += 1
    return length


def best_length(confidence: tuple[float, ...]) -> int:
    """The unconstrained search over all lengths, which looks at the confidence of later slots."""
    return max(range(len(confidence) + 1), key=lambda length: throughput(confidence, length))


def first_token(monkeypatch, rule) -> list[float]:
    """Exact distribution of the first committed token: over drafts, admissions and acceptances."""
    output = torch.zeros(2)
    for token in (0, 1):
        if rule(CONFIDENCE[token]) == 0:  # nothing is sent: a plain step
            output += Q[token] * bonus_probabilities(monkeypatch, rejected=False)
            continue
        accepted = acceptance_probability(monkeypatch, token)
        output[token] += Q[token] * accepted
        if accepted < 1:
            output += Q[token] * (1 - accepted) * bonus_probabilities(monkeypatch, rejected=True)
    return output.tolist()


def test_pieces_of_the_appendix(monkeypatch):
    assert acceptance_probability(monkeypatch, 0) == 1.0
    assert acceptance_probability(monkeypatch, 1) == pytest.approx(0.6)
    assert bonus_probabilities(monkeypatch, rejected=False).tolist() == pytest.approx([0.7, 0.3])
    assert bonus_probabilities(monkeypatch, rejected=True).tolist() == pytest.approx([1.0, 0.0])
    assert [throughput(CONFIDENCE[0], n) for n in range(3)] == pytest.approx([1.0, 0.9, 1.134])
    assert [throughput(CONFIDENCE[1], n) for n in range(3)] == pytest.approx([1.0, 0.9, 0.81])
    assert [early_stop(CONFIDENCE[token]) for token in (0, 1)] == [0, 0]
    assert [best_length(CONFIDENCE[token]) for token in (0, 1)] == [2, 0]


def test_early_stop_keeps_the_distribution(monkeypatch):
    assert first_token(monkeypatch, early_stop) == pytest.approx([0.7, 0.3])


def test_sending_every_block_keeps_the_distribution(monkeypatch):
    assert first_token(monkeypatch, lambda confidence: 2) == pytest.approx([0.7, 0.3])


def test_search_over_all_lengths_changes_the_distribution(monkeypatch):
    assert first_token(monkeypatch, best_length) == pytest.approx([0.85, 0.15])


@pytest.mark.parametrize("slot_cost", [0.05, 0.5, 0.75, 0.85, 0.95])
@pytest.mark.parametrize("threshold", [None, 0.0, 0.5, 0.81, 0.85])
def test_our_criterion_keeps_the_distribution(monkeypatch, slot_cost, threshold):
    criterion = AdaptiveConfidenceCriteria(threshold=threshold, slot_cost=slot_cost)
    lengths = {token: int(criterion.block_length(torch.tensor([CONFIDENCE[token]]))) for token in (0, 1)}
    assert (lengths[0] == 0) == (lengths[1] == 0), "the first slot's admission follows the second slot's confidence"
    assert first_token(monkeypatch, lambda c: lengths[0 if c[1] else 1]) == pytest.approx([0.7, 0.3])
    if threshold is None:  # 1.8 / (1 + cost) > 1
        assert (lengths[0] > 0) == (slot_cost < 0.8)
    else:
        assert (lengths[0] > 0) == (threshold <= 0.8)


# The criterion.


def record(num_accepted: int, confidence=(), num_drafts: int = 4, verify_s: float = 0.0, draft_s: float = 0.0):
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
    )


def experienced(criterion: AdaptiveConfidenceCriteria, seed: int) -> AdaptiveConfidenceCriteria:
    """After some rounds of chance, so that nothing is at its prior."""
    rng = random.Random(seed)
    for _ in range(rng.randint(0, 30)):
        num_drafts = rng.randint(0, 6)
        criterion.observe(
            record(
                rng.randint(0, num_drafts),
                [rng.random() for _ in range(6)],
                num_drafts,
                verify_s=0.01 + 0.002 * num_drafts * rng.random(),
                draft_s=0.003,
            )
        )
    return criterion


@pytest.mark.parametrize("threshold", [None, 0.0, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("seed", range(8))
def test_admission_of_a_slot_ignores_later_confidences(threshold, seed):
    generator = torch.Generator().manual_seed(seed)
    criterion = experienced(AdaptiveConfidenceCriteria(threshold=threshold, slot_cost=0.1 + 0.1 * seed), seed)
    confidence = torch.rand(200, 6, generator=generator).clamp(0, 0.999)
    lengths = criterion.block_length(confidence)
    for slot in range(6):
        changed = confidence.clone()
        changed[:, slot + 1 :] = torch.rand(200, 5 - slot, generator=generator)
        assert torch.equal(criterion.block_length(changed) > slot, lengths > slot)
        assert torch.equal(criterion.block_length(confidence[:, : slot + 1]), lengths.clamp(max=slot + 1))
    if threshold not in (0.0, 1.0):
        assert len(lengths.unique()) > 2


@pytest.mark.parametrize("slot_cost", [0.0, 0.02, 0.1, 0.3, 0.6, 1.0])
def test_adaptive_rule_is_the_first_drop_of_tokens_per_second(slot_cost):
    """Brute force: tokens / (1 + length * cost), admitted slot by slot while it grows."""
    generator = torch.Generator().manual_seed(1)
    confidence = torch.rand(500, 7, generator=generator, dtype=torch.float64) ** 0.3
    lengths = AdaptiveConfidenceCriteria(slot_cost=slot_cost).block_length(confidence)
    for row, length in zip(confidence.tolist(), lengths.tolist(), strict=True):
        expected, survival, tokens = 0, 1.0, 1.0
        for k, c in enumerate(row):
            survival *= c
            if (tokens + survival) / (1 + (k + 1) * slot_cost) <= tokens / (1 + k * slot_cost):
                break
            expected, tokens = k + 1, tokens + survival
        assert length == expected
    seen = set(lengths.tolist())
    assert seen == {7} if slot_cost == 0.0 else seen == {0} if slot_cost == 1.0 else len(seen) > 2


def test_adaptive_rule_by_hand():
    """cost 0.5: theta = 1; (1 + 0.8) / 1.5 = 1.2; (1.8 + 0.64) / 2 = 1.22; (2.44 + 0.064) / 2.5 = 1.0016: a drop."""
    criterion = AdaptiveConfidenceCriteria(slot_cost=0.5)
    assert criterion.block_length(torch.tensor([[0.8, 0.8, 0.1, 1.0]])).tolist() == [2]
    assert criterion.block_length(torch.tensor([[0.4, 1.0, 1.0, 1.0]])).tolist() == [0]  # 1.4 / 1.5 < 1
    assert criterion.block_length(torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.6, 0.1, 1.0, 1.0]])).tolist() == [4, 1]


@pytest.mark.parametrize(("threshold", "expected"), [(0.0, 4), (0.3, 4), (0.5, 2), (0.9, 1), (0.91, 0), (1.0, 0)])
def test_threshold_cuts_at_the_first_slot_below_it(threshold, expected):
    criterion = AdaptiveConfidenceCriteria(threshold=threshold)
    assert criterion.block_length(torch.tensor([[0.9, 0.5, 0.3, 0.95]])).tolist() == [expected]


def test_call_says_whether_the_block_ends_before_the_last_slot():
    criterion = AdaptiveConfidenceCriteria(threshold=0.5)
    confidence = torch.tensor([[0.9, 0.6], [0.9, 0.4]])
    assert criterion(torch.zeros(2, 3), None, confidence=confidence).tolist() == [False, True]


def test_misuse_as_a_stopping_criterion_of_generate_is_refused():
    target = tiny_target()
    criteria = StoppingCriteriaList([AdaptiveConfidenceCriteria()])
    for assistant in (None, oracle_draft(target)):
        with pytest.raises(RuntimeError, match="ends blocks of drafts, not the generation"):
            target.generate(
                random_prompt(4),
                do_sample=False,
                max_new_tokens=4,
                assistant_model=assistant,
                stopping_criteria=criteria,
            )


# What it learns.


def test_acceptance_corrects_confidence():
    """Slot 0 said 0.9 and was accepted in 2 of 8 rounds: factor (2 + 4) / (7.2 + 4); slot 1, reached twice, said 0.5
    and was accepted each time: (2 + 4) / (1 + 4); slot 2 was never judged."""
    criterion = AdaptiveConfidenceCriteria(slot_cost=0.05, learn_cost=False)
    for accepted in (True, False, False, False, True, False, False, False):
        criterion.observe(record(2 if accepted else 0, (0.9, 0.5, 0.4), num_drafts=2))
    corrected = criterion._corrected(torch.tensor([[0.9, 0.5, 0.4]]))
    torch.testing.assert_close(corrected, torch.tensor([[0.9 * 6 / 11.2, 0.5 * 6 / 5, 0.4]]))
    assert criterion._corrected(torch.tensor([[1.0, 1.0, 1.0]])).tolist()[0][1] == 1.0  # a chance, not 1.2


def test_a_draft_that_is_never_accepted_is_sent_less_and_less():
    criterion = AdaptiveConfidenceCriteria(slot_cost=0.2, learn_cost=False)
    sure = torch.full((1, 6), 0.95)
    assert int(criterion.block_length(sure)) == 6
    for _ in range(60):
        criterion.observe(record(0, (0.95,) * 6, num_drafts=max(1, int(criterion.block_length(sure)))))
    assert int(criterion.block_length(sure)) == 0


def test_prior_confidence_without_a_head():
    criterion = AdaptiveConfidenceCriteria(learn_cost=False)
    assert criterion.prior_confidence(2).tolist() == [[0.75, 0.75]]
    for num_accepted in (2, 1, 0, 0):
        criterion.observe(record(num_accepted, num_drafts=2))
    # Slot 0: 2 of 4, slot 1: 1 of 2, each with 4 pseudo-rounds at 0.75.
    assert criterion.prior_confidence(3).tolist() == [pytest.approx([5 / 8, 4 / 6, 0.75])]


@pytest.mark.parametrize("cost", [0.02, 0.1, 0.4])
def test_cost_is_learned_from_round_times(cost):
    rng = random.Random(0)
    criterion = AdaptiveConfidenceCriteria(slot_cost=0.05)
    base, draft_s = 0.020, 0.005
    for _ in range(300):
        n = rng.randint(0, 7)
        criterion.observe(record(0, num_drafts=n, verify_s=base + cost * (base + draft_s) * n, draft_s=draft_s))
    # A round without drafts takes base + draft_s; the prior keeps a little weight.
    assert criterion.slot_cost == pytest.approx(cost, rel=0.15)


def test_a_cost_that_changes_is_followed():
    rng = random.Random(0)
    criterion = AdaptiveConfidenceCriteria(slot_cost=0.05)
    for cost in (0.01, 0.3):
        for _ in range(200):
            n = rng.randint(0, 7)
            criterion.observe(record(0, num_drafts=n, verify_s=0.02 * (1 + cost * n)))
        assert criterion.slot_cost == pytest.approx(cost, rel=0.15, abs=0.01)


def test_equal_lengths_teach_no_slope():
    """Nothing can be said of a slope from one length only: the prior stays."""
    criterion = AdaptiveConfidenceCriteria(slot_cost=0.07)
    for _ in range(100):
        criterion.observe(record(0, num_drafts=4, verify_s=0.02))
    assert criterion.slot_cost == pytest.approx(0.07, rel=1e-3)


def test_one_stall_of_the_machine_hardly_counts():
    def after(stall_s: float) -> float:
        rng, criterion = random.Random(0), AdaptiveConfidenceCriteria(slot_cost=0.05)
        for i in range(60):
            n = 7 if i == 55 else rng.randint(0, 7)
            seconds = stall_s if i == 55 and stall_s else 0.02 * (1 + 0.1 * n)
            criterion.observe(record(0, num_drafts=n, verify_s=seconds))
        return criterion.slot_cost

    assert after(60.0) == after(600.0), "a longer stall counts more"
    assert after(60.0) < 2 * after(0.0)


def test_cost_stays_within_bounds():
    criterion = AdaptiveConfidenceCriteria(slot_cost=0.05)
    for i in range(100):  # shorter the more is sent, as noise can make it look
        criterion.observe(record(0, num_drafts=i % 8, verify_s=0.02 - 0.002 * (i % 8)))
    assert criterion.slot_cost == 0.0
    criterion = AdaptiveConfidenceCriteria(slot_cost=0.05)
    for i in range(100):
        criterion.observe(record(0, num_drafts=i % 8, verify_s=1e-6 + 0.01 * (i % 8)))
    assert criterion.slot_cost == 1.0
    criterion = AdaptiveConfidenceCriteria(slot_cost=0.05)
    criterion.observe(record(0))  # a clock that stands still
    assert 0 <= criterion.slot_cost <= 1


def test_without_learn_cost_time_is_ignored():
    confidence = torch.rand(50, 6)
    criteria = [AdaptiveConfidenceCriteria(slot_cost=0.2, learn_cost=False) for _ in range(2)]
    for i in range(50):
        for criterion, seconds in zip(criteria, (1e-4 * i, 0.3 * (i % 5)), strict=True):
            criterion.observe(record(i % 4, (0.8,) * 4, verify_s=seconds, draft_s=seconds))
    assert criteria[0].slot_cost == criteria[1].slot_cost == 0.2
    assert torch.equal(criteria[0].block_length(confidence), criteria[1].block_length(confidence))
