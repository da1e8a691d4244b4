# SPDX-License-Identifier: Apache-2.0
"""Sampling with a draft draws from the target's own distribution, by chi-square against exact probabilities.

Three views: the accept rule alone, on many rows at once; long texts of a target that is a Markov chain, whose
transitions are known; and short texts of a target with memory, enumerated with their processors. The statistics are
shown to notice wrong rules.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    set_seed,
)
from transformers.generation import MinPLogitsWarper

from dspark_hf import DSparkCandidateGenerator, collect_rounds
from dspark_hf.decoding.drafter import DraftProposal
from dspark_hf.decoding.verification import accept_drafts, select_bonus, verify_blocks
from tests.losslessness.distributions import (
    ALPHA,
    VOCAB_SIZE,
    chi_square_p_value,
    exact_texts,
    sampling_pair,
    transition_p_value,
    transitions,
)
from tests.support.models import spread_confidence


PROMPT = torch.tensor([[3, 4]])
CONSTANT = {"num_assistant_tokens_schedule": "constant"}
CONFIDENCE = {"num_assistant_tokens_schedule": "confidence"}
THRESHOLD = {"assistant_confidence_threshold": 0.5}


# The accept rule alone.


def chain_tables(vocab_size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of two Markov chains [previous, next], with supports that overlap in part."""
    generator = torch.Generator().manual_seed(seed)
    target, draft = torch.randn(2, vocab_size, vocab_size, generator=generator)
    target[0, 1], draft[1, 2] = float("-inf"), float("-inf")
    draft[2] = target[2]  # one row where p == q: never rejected
    return target, draft


def complete(rows: torch.Tensor, target: torch.Tensor, length: int) -> list[tuple[int, ...]]:
    """Texts of different lengths (-1 behind their end), each carried on by plain sampling to `length` tokens."""
    rows = torch.cat([rows, rows.new_full((rows.shape[0], 1), -1)], dim=1)
    for i in range(1, length):
        drawn = torch.multinomial(target[rows[:, i - 1]].softmax(-1), 1).squeeze(1)
        rows[:, i] = torch.where(rows[:, i] < 0, drawn, rows[:, i])
    return [tuple(row) for row in rows[:, :length].tolist()]


def chain_probabilities(target: torch.Tensor, anchor: int, length: int) -> dict[tuple[int, ...], float]:
    texts = {(): 1.0}
    probabilities = target.double().softmax(-1)
    for _ in range(length):
        texts = {
            (*text, token): p * float(probabilities[text[-1] if text else anchor, token])
            for text, p in texts.items()
            for token in range(target.shape[0])
        }
    return texts


def rejection_sample(
    target: torch.Tensor, draft: torch.Tensor, anchor: int, num_slots: int, num_rows: int, judge=None
):
    """Blocks of drafts, judged all at once; rows of committed tokens, -1 behind their end."""
    previous, tokens, q_rows, p_rows = torch.full((num_rows,), anchor), [], [], []
    for _ in range(num_slots):
        q_rows.append(draft[previous])
        p_rows.append(target[previous])
        previous = torch.multinomial(draft[previous].softmax(-1), 1).squeeze(1)
        tokens.append(previous)
    token_ids, q, p = torch.stack(tokens, 1), torch.stack(q_rows, 1), torch.stack(p_rows, 1)
    accepted = (judge or accept_drafts)(token_ids, p, q, True)
    count = accepted.long().cumprod(dim=1).sum(dim=1)
    committed = torch.cat([token_ids, token_ids.new_full((num_rows, 1), -1)], dim=1)
    committed[torch.arange(num_slots + 1) >= count[:, None]] = -1
    for n in range(num_slots + 1):
        rows = count == n
        if n < num_slots:
            committed[rows, n] = select_bonus(p[rows, n], q[rows, n].softmax(-1), True)
        else:
            committed[rows, n] = select_bonus(target[token_ids[rows, -1]], None, True)
    return committed, accepted


@pytest.mark.parametrize(("num_slots", "seed"), [(1, 0), (2, 1), (3, 2)])
def test_accept_rule_is_rejection_sampling(num_slots, seed):
    target, draft = chain_tables(5, seed)
    rows, accepted = rejection_sample(target, draft, 0, num_slots, 100_000)
    assert 0.3 < accepted.float().mean() < 0.95
    texts = Counter(complete(rows, target, num_slots + 1))
    assert chi_square_p_value(texts, chain_probabilities(target, 0, num_slots + 1)) > ALPHA


def test_accept_rule_when_p_and_q_share_no_token():
    target, draft = torch.full((4, 4), float("-inf")), torch.full((4, 4), float("-inf"))
    target[:, :2], draft[:, 2:] = torch.tensor([0.3, 1.0]), torch.tensor([0.0, 2.0])
    rows, accepted = rejection_sample(target, draft, 0, 2, 20_000)
    assert not accepted.any()
    texts = Counter(complete(rows, target, 2))
    assert chi_square_p_value(texts, chain_probabilities(target, 0, 2)) > ALPHA


def test_equal_distributions_are_always_accepted():
    target, _ = chain_tables(5, 3)
    rows, accepted = rejection_sample(target, target, 0, 3, 20_000)
    assert accepted.float().mean() > 0.9999  # a ratio of 1, up to rounding
    texts = Counter(complete(rows, target, 4))
    assert chi_square_p_value(texts, chain_probabilities(target, 0, 4)) > ALPHA


def test_verify_blocks_one_request_at_a_time():
    target, draft = chain_tables(4, 4)
    committed = []
    for _ in range(6_000):
        first = torch.multinomial(draft[0].softmax(-1), 1)
        second = torch.multinomial(draft[first].softmax(-1), 1)[0]
        ids = torch.cat([first, second])
        p = torch.stack([target[0], target[first[0]], target[second[0]]])
        q = torch.stack([draft[0], draft[first[0]]])
        result = verify_blocks(ids, p, q, [2], do_sample=True)
        count = int(result.num_accepted)
        row = [*ids[:count].tolist(), int(result.bonus_token)]
        committed.append(row + [-1] * (3 - len(row)))
    texts = Counter(complete(torch.tensor(committed), target, 3))
    assert chi_square_p_value(texts, chain_probabilities(target, 0, 3)) > ALPHA


def test_verify_blocks_of_many_requests():
    """Blocks of 0, 1 and 2 drafts in turn, all in one call: each text has the target's distribution."""
    target, draft = chain_tables(4, 5)
    lengths = [0, 1, 2] * 4_000
    first = torch.multinomial(draft[0].softmax(-1), len(lengths), replacement=True)
    second = torch.multinomial(draft[first].softmax(-1), 1)[:, 0]
    drafts = [(first[i], second[i])[:length] for i, length in enumerate(lengths)]
    ids = torch.stack([token for own in drafts for token in own])
    p = target[torch.stack([token for own in drafts for token in (first.new_tensor(0), *own)])]
    q = draft[torch.stack([token for own in drafts for token in (first.new_tensor(0), *own)[: len(own)]])]
    result = verify_blocks(ids, p, q, lengths, do_sample=True)
    counts, bonus = result.num_accepted.tolist(), result.bonus_token.tolist()
    for kind in range(3):
        rows = [[*(int(token) for token in drafts[i][: counts[i]]), bonus[i]] for i in range(kind, len(lengths), 3)]
        padded = torch.tensor([row + [-1] * (3 - len(row)) for row in rows])
        texts = Counter(complete(padded, target, 3))
        assert chi_square_p_value(texts, chain_probabilities(target, 0, 3)) > ALPHA


@pytest.mark.parametrize("wrong", ["q of another temperature", "drops unlikely drafts"])
def test_a_wrong_accept_rule_is_noticed(wrong):
    target, draft = chain_tables(5, 1)

    def judge(token_ids, p, q, do_sample):
        if wrong == "q of another temperature":
            return accept_drafts(token_ids, p, q * 0.8, do_sample)
        likely = q.softmax(-1).gather(-1, token_ids[..., None])[..., 0] >= 0.15
        return accept_drafts(token_ids, p, q, do_sample) & likely

    rows, _ = rejection_sample(target, draft, 0, 2, 100_000, judge)
    texts = Counter(complete(rows, target, 3))
    assert chi_square_p_value(texts, chain_probabilities(target, 0, 3)) < ALPHA


# Long texts of a Markov target: every transition is a draw from a known distribution.


def long_text(target, draft, num_tokens, knobs, **kwargs):
    draft.generation_config.update(**knobs)
    with collect_rounds() as stats:
        output = target.generate(
            PROMPT,
            do_sample=True,
            max_new_tokens=num_tokens,
            assistant_model=draft,
            top_k=kwargs.pop("top_k", 0),
            **kwargs,
        )
    return output[0, PROMPT.shape[1] - 1 :].tolist(), stats


CHAINS = {
    "constant": (CONSTANT, {}, [], {}),
    "confidence": (CONFIDENCE, {}, [], {}),
    "threshold": (THRESHOLD, {}, [], {}),
    "temperature": (CONSTANT, {"temperature": 0.5}, [TemperatureLogitsWarper(0.5)], {}),
    "temperature confidence": (CONFIDENCE, {"temperature": 1.6}, [TemperatureLogitsWarper(1.6)], {}),
    "top_k": (THRESHOLD, {"top_k": 3}, [TopKLogitsWarper(3)], {}),
    "top_p": (CONSTANT, {"top_p": 0.7}, [TopPLogitsWarper(0.7)], {}),
    "min_p": (CONFIDENCE, {"min_p": 0.4}, [MinPLogitsWarper(0.4)], {}),
    "reduced vocabulary": (CONSTANT, {}, [], {"draft_vocab_size": 7}),
    "reduced vocabulary top_k": (CONFIDENCE, {"top_k": 4}, [TopKLogitsWarper(4)], {"draft_vocab_size": 7}),
    "rnn": (CONSTANT, {"temperature": 0.7}, [TemperatureLogitsWarper(0.7)], {"markov_head_type": "rnn"}),
    "slot 0 dropped": (THRESHOLD, {}, [], {"sample_from_anchor": False}),
}


@pytest.mark.parametrize("num_tokens", [900, pytest.param(3_900, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CHAINS)
@torch.no_grad()
def test_transitions_of_long_texts(name, num_tokens):
    knobs, kwargs, processors, overrides = CHAINS[name]
    target, draft = sampling_pair(0.0, noise=0.8, **overrides)
    spread_confidence(draft, 4.0)
    text, stats = long_text(target, draft, num_tokens, knobs, **kwargs)
    assert len(text) == num_tokens + 1
    assert 0.1 < stats.acceptance_rate < 0.95, "no mix of accepted and rejected drafts"
    cut = sum(len(record.confidence) > record.verify_length for record in stats.rounds)
    assert (cut > 0.02 * stats.num_rounds) == (knobs is not CONSTANT)
    assert transition_p_value(text, transitions(target, processors)) > ALPHA


def test_transitions_where_no_draft_is_allowed():
    """Processors may forbid every id of a reduced vocabulary: then there is no q to normalise, but still a text."""
    target, draft = sampling_pair(0.0, noise=0.8, draft_vocab_size=5)
    forbidden = draft.draft_token_ids().tolist()
    text, _ = long_text(target, draft, 400, CONSTANT, suppress_tokens=forbidden)
    expected = transitions(target, [SuppressTokensLogitsProcessor(forbidden)])
    assert transition_p_value(text, expected) > ALPHA


def test_undo_of_temperature_in_q_is_noticed(monkeypatch):
    target, draft = sampling_pair(0.0, noise=0.8)
    right = DSparkCandidateGenerator.propose

    def raw_q(self, requests, *arguments, **named):
        (proposal,) = right(self, requests, *arguments, **named)
        if proposal.draft_logits is None:
            return [proposal]
        return [DraftProposal(proposal.token_ids, proposal.draft_logits * 0.5, proposal.confidence)]

    monkeypatch.setattr(DSparkCandidateGenerator, "propose", raw_q)
    text, _ = long_text(target, draft, 1_500, CONSTANT, temperature=0.5)
    expected = transitions(target, [TemperatureLogitsWarper(0.5)])
    assert transition_p_value(text, expected) < ALPHA


@pytest.mark.parametrize("rule", ["own probability", "next confidence"])
def test_a_cut_that_looks_ahead_is_noticed(monkeypatch, rule):
    target, draft = sampling_pair(0.0, noise=0.8)
    with torch.no_grad():  # confident after the tokens 0 to 5, not after the others
        draft.confidence_head.proj.weight.zero_()
        draft.confidence_head.proj.weight[0, -VOCAB_SIZE:] = torch.tensor([9.0] * 6 + [-9.0] * 6)
    right = DSparkCandidateGenerator.propose

    def cut(self, requests, *arguments, **named):
        (proposal,) = right(self, requests, *arguments, **named)
        ids, length = proposal.token_ids, proposal.token_ids.shape[1]
        if not length:
            return [proposal]
        if rule == "own probability":
            own = proposal.draft_logits.softmax(-1).gather(-1, ids[..., None])[0, :, 0]
            length = int((own >= 0.15).long().cumprod(0).sum())
        else:  # slot k is sent only if slot k + 1, which has seen its token, is confident
            following = torch.tensor([*proposal.confidence[1:], 1.0])[:length]
            length = int((following >= 0.5).long().cumprod(0).sum())
        return [DraftProposal(ids[:, :length], proposal.draft_logits[:, :length], proposal.confidence)]

    monkeypatch.setattr(DSparkCandidateGenerator, "propose", cut)
    text, _ = long_text(target, draft, 3_000, CONSTANT)
    assert transition_p_value(text, transitions(target)) < ALPHA


# Short texts of a target with memory: every text has a known probability.


def allowed_tokens(batch_id, input_ids):
    return [token for token in range(VOCAB_SIZE) if (token + int(input_ids[-1])) % 3]


NUM_NEW, EOS = 4, 7
EOS_TENSOR = torch.tensor([EOS])
SHORT_TEXTS = {
    "no processor": (CONFIDENCE, {}, [], {}),
    "repetition penalty and EOS": (
        CONSTANT,
        {"repetition_penalty": 2.0, "eos_token_id": EOS, "temperature": 0.8},
        [RepetitionPenaltyLogitsProcessor(2.0), TemperatureLogitsWarper(0.8)],
        {},
    ),
    "no repeated token, reduced vocabulary": (
        CONFIDENCE,
        {"no_repeat_ngram_size": 1, "suppress_tokens": [5]},
        [NoRepeatNGramLogitsProcessor(1), SuppressTokensLogitsProcessor([5])],
        {"draft_vocab_size": 8},
    ),
    "constraint, minimal length and EOS": (
        THRESHOLD,
        {"prefix_allowed_tokens_fn": allowed_tokens, "min_length": 4, "eos_token_id": EOS, "top_k": 5},
        [
            MinLengthLogitsProcessor(4, EOS_TENSOR),
            PrefixConstrainedLogitsProcessor(allowed_tokens, 1),
            TopKLogitsWarper(5),
        ],
        {},
    ),
}


@pytest.mark.parametrize("num_draws", [450, pytest.param(4_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SHORT_TEXTS)
def test_short_texts(name, num_draws):
    knobs, kwargs, processors, overrides = SHORT_TEXTS[name]
    target, draft = sampling_pair(0.3, noise=0.8, **overrides)
    spread_confidence(draft, 4.0)
    draft.generation_config.update(**knobs)
    expected = exact_texts(target, PROMPT, NUM_NEW, LogitsProcessorList(processors), kwargs.get("eos_token_id"))
    assert sum(expected.values()) == pytest.approx(1.0)
    kwargs = {"do_sample": True, "max_new_tokens": NUM_NEW, "assistant_model": draft, "top_k": 0} | kwargs
    with collect_rounds() as stats:
        texts = [tuple(target.generate(PROMPT, **kwargs)[0, 2:].tolist()) for _ in range(num_draws)]
    assert 0.2 < stats.acceptance_rate < 0.95
    assert chi_square_p_value(Counter(texts), expected) > ALPHA
    for start, end in ((0, 2), (1, 3), (2, 4)):  # neighbours alone: more counts per cell
        marginal = Counter()
        for text, probability in expected.items():
            marginal[text[start:end]] += probability
        assert chi_square_p_value(Counter(text[start:end] for text in texts), marginal) > ALPHA


@pytest.mark.parametrize("knobs", [CONSTANT, CONFIDENCE, THRESHOLD], ids=["constant", "confidence", "threshold"])
def test_the_same_seed_gives_the_same_text(knobs):
    target, draft = sampling_pair(0.3, noise=0.8)
    spread_confidence(draft, 4.0)

    def text(seed):
        set_seed(seed)
        return long_text(target, draft, 80, knobs)[0]

    first = text(1)
    assert text(1) == first
    assert text(2) != first


def test_the_statistic_refuses_the_impossible_and_knows_its_size():
    expected = {"a": 0.5, "b": 0.5, "c": 0.0}
    assert chi_square_p_value({"a": 50, "b": 50}, expected) == 1.0
    assert chi_square_p_value({"a": 49, "b": 50, "c": 1}, expected) == 0.0
    assert chi_square_p_value({"a": 60, "b": 40}, expected) == pytest.approx(0.0455003, rel=1e-6)  # chi2 = 4, 1 degree
    flat = torch.full((2, 2), 0.5)
    assert transition_p_value([0, 1] * 40, flat) < ALPHA
    generator = torch.Generator().manual_seed(0)
    assert transition_p_value(torch.randint(0, 2, (400,), generator=generator).tolist(), flat) > ALPHA
