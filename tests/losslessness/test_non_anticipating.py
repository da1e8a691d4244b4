# SPDX-License-Identifier: Apache-2.0
"""Whether a slot is sent to verification may not depend on its token or on anything after it.

The counterexample of the paper's appendix A in its own numbers, and what it asks of [`AdaptiveConfidenceCriteria`].
"""

from __future__ import annotations

import random

import pytest
import torch
from transformers import StoppingCriteriaList

from dspark_hf import AdaptiveConfidenceCriteria, RoundRecord
from dspark_hf.decoding import verification
from dspark_hf.scheduling import (
    RoundOutlook,
    SPSCurve,
    all_rules,
)
from dspark_hf.scheduling.acceptance import AcceptanceHistory
from tests.support.closeness import assert_close
from tests.support.models import oracle_draft, random_prompt, tiny_target
from tests.support.searching import SearchingScheduler


SPS = (1.0, 0.5, 0.45)  # target steps per second with 1, 2 and 3 tokens
P, Q = torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5])  # of the first slot, over the tokens A and B
NUM_ROWS = 80  # blocks of a seed whose admissions are compared
CONFIDENCE = {0: (0.8, 0.9), 1: (0.8, 0.0)}  # of both slots, by the token drawn for the first: the second has seen it


def acceptance_probability(monkeypatch, token: int) -> float:
    """Chance that our rule accepts a draft: the share of a fine grid of draws that it accepts."""
    grid = (torch.arange(10_000) + 0.5) / 10_000
    with monkeypatch.context() as patch:
        patch.setattr(torch, "rand_like", lambda like: grid[:, None])
        rows = (grid.shape[0], 1, 2)
        accepted = verification.accept_drafts(
            torch.full(rows[:2], token), P.log().expand(rows), Q.log().expand(rows), do_sample=True
        )
    return float(accepted.float().mean())


def bonus_probabilities(monkeypatch, rejected: bool) -> torch.Tensor:
    """What our rule draws the next token from, after a rejection or without a draft."""
    weights = []

    def capture(probabilities, num_samples, generator=None):
        weights.append(probabilities[0] / probabilities[0].sum())
        return torch.zeros(1, num_samples, dtype=torch.long)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "multinomial", capture)
        verification.select_bonus(P.log()[None], Q[None] if rejected else None, do_sample=True)
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
    assert_close(acceptance_probability(monkeypatch, 1), 0.6)
    assert_close(bonus_probabilities(monkeypatch, rejected=False), [0.7, 0.3])
    assert_close(bonus_probabilities(monkeypatch, rejected=True), [1.0, 0.0])
    assert [throughput(CONFIDENCE[0], n) for n in range(3)] == pytest.approx([1.0, 0.9, 1.134])
    assert [throughput(CONFIDENCE[1], n) for n in range(3)] == pytest.approx([1.0, 0.9, 0.81])
    assert [early_stop(CONFIDENCE[token]) for token in (0, 1)] == [0, 0]
    assert [best_length(CONFIDENCE[token]) for token in (0, 1)] == [2, 0]


def test_early_stop_keeps_the_distribution(monkeypatch):
    assert_close(first_token(monkeypatch, early_stop), [0.7, 0.3])


def test_sending_every_block_keeps_the_distribution(monkeypatch):
    assert_close(first_token(monkeypatch, lambda confidence: 2), [0.7, 0.3])


def test_search_over_all_lengths_changes_the_distribution(monkeypatch):
    assert_close(first_token(monkeypatch, best_length), [0.85, 0.15])


CAUSAL = all_rules(num_slots=0)  # those that look at confidences


def criterion_with(
    scheduler: str, slot_cost: float = 0.05, num_slots: int = 6, **options
) -> AdaptiveConfidenceCriteria:
    curve = SPSCurve.linear(slot_cost)
    return AdaptiveConfidenceCriteria(CAUSAL[scheduler](), num_slots, curve=curve)


@pytest.mark.parametrize("scheduler", CAUSAL)
@pytest.mark.parametrize("curve", [SPSCurve((1, 2, 3), tuple(1 / s for s in SPS)), *map(SPSCurve.linear, (0.05, 0.9))])
def test_our_criterion_keeps_the_distribution(monkeypatch, scheduler, curve):
    lengths = {}
    for token in (0, 1):
        criterion = AdaptiveConfidenceCriteria(CAUSAL[scheduler](), 2, curve=curve)
        lengths[token] = int(criterion.verify_lengths([criterion.new_history()], torch.tensor([CONFIDENCE[token]])))
    assert (lengths[0] == 0) == (lengths[1] == 0), "the first slot's admission follows the second slot's confidence"
    assert_close(first_token(monkeypatch, lambda c: lengths[0 if c[1] else 1]), [0.7, 0.3])


def test_a_search_would_change_the_distribution(monkeypatch):
    """So the tests here can fail."""
    curve = SPSCurve((1, 2, 3), tuple(1 / s for s in SPS))
    outlook = RoundOutlook(curve, (0.8, 0.4))

    def search(confidence) -> int:
        return int(SearchingScheduler().verify_lengths(torch.tensor([confidence]), outlook))

    assert [search(CONFIDENCE[token]) for token in (0, 1)] == [2, 0]
    assert_close(first_token(monkeypatch, search), [0.85, 0.15])


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


def experienced(criterion: AdaptiveConfidenceCriteria, seed: int) -> AcceptanceHistory:
    """The history of a request after some rounds of chance, so that nothing is at its prior."""
    rng, history = random.Random(seed), criterion.new_history()
    for _ in range(rng.randint(0, 30)):
        num_drafts = rng.randint(0, 6)
        seconds = {"verify_s": 0.01 + 0.002 * num_drafts * rng.random(), "draft_s": 0.003}
        confidence = [rng.random() for _ in range(6)]
        criterion.observe([history], [record(rng.randint(0, num_drafts), confidence, num_drafts, **seconds)])
    return history


@pytest.mark.parametrize("scheduler", CAUSAL)
@pytest.mark.parametrize("seed", range(8))
def test_admission_of_a_slot_ignores_later_confidences(scheduler, seed):
    generator = torch.Generator().manual_seed(seed)
    confidence = torch.rand(NUM_ROWS, 6, generator=generator).clamp(0, 0.999)

    def lengths(confidence: torch.Tensor) -> torch.Tensor:
        """One request at a time, each with the same past."""
        rows = []
        for row in confidence:
            criterion = criterion_with(scheduler, 0.1 + 0.1 * seed)
            rows.append(criterion.verify_lengths([experienced(criterion, seed)], row[None]))
        return torch.cat(rows)

    before = lengths(confidence)
    for slot in (0, 2, 4):
        changed = confidence.clone()
        changed[:, slot + 1 :] = torch.rand(NUM_ROWS, 5 - slot, generator=generator)
        assert torch.equal(lengths(changed) > slot, before > slot)
    assert len(before.unique()) > 1


def test_call_says_whether_the_block_ends_before_the_last_slot():
    criterion = criterion_with("threshold 0.5", num_slots=2)
    confidence = torch.tensor([[0.9, 0.6], [0.9, 0.4]])
    assert criterion(torch.zeros(2, 3), None, confidence=confidence).tolist() == [False, True]


def test_misuse_as_a_stopping_criterion_of_generate_is_refused():
    target = tiny_target()
    criteria = StoppingCriteriaList([criterion_with("look-ahead")])
    for assistant in (None, oracle_draft(target)):
        with pytest.raises(RuntimeError, match="ends blocks of drafts, not the generation"):
            target.generate(
                random_prompt(4),
                do_sample=False,
                max_new_tokens=4,
                assistant_model=assistant,
                stopping_criteria=criteria,
            )
