# SPDX-License-Identifier: Apache-2.0
"""All requests judged together, against each judged alone; and draws from the best tokens."""

import random

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from dspark_hf.decoding.drafter import DraftProposal
from dspark_hf.decoding.judging import judge
from dspark_hf.decoding.processors import best_tokens
from dspark_hf.decoding.request import Request
from tests.support.closeness import assert_close


V = 11


class EndsAfterTwo(StoppingCriteria):
    """Ends a text at the second equal token in a row."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == input_ids[:, -2]


def request(index, length, rules=(), criteria=(), **config):
    text = torch.arange(3, 3 + length)[None] % V
    return Request(
        index,
        text,
        LogitsProcessorList(rules),
        StoppingCriteriaList(criteria),
        2**31,
        GenerationConfig(**config),
    )


def nothing(count):
    return [DraftProposal(torch.zeros(1, 0, dtype=torch.long))] * count


CRITERIA = {
    "none": lambda length: [],
    "length": lambda length: [MaxLengthCriteria(length + 2)],
    "ends": lambda length: [EosTokenCriteria([3, 5])],
    "two rules of ends": lambda length: [EosTokenCriteria([3]), MaxLengthCriteria(length + 3), EosTokenCriteria([7])],
    "a length to warn about": lambda length: [MaxLengthCriteria(length + 2, length + 1), EosTokenCriteria([3, 5])],
    "one that reads the text": lambda length: [EosTokenCriteria([3]), MaxLengthCriteria(length + 3), EndsAfterTwo()],
}


@pytest.mark.parametrize("rules", [[], [RepetitionPenaltyLogitsProcessor(1.5)], [TemperatureLogitsWarper(0.7)]])
@pytest.mark.parametrize("kind", CRITERIA)
def test_together_as_alone(kind, rules):
    """Greedy blocks of 0 to 4 drafts, most of them right, of texts of different lengths."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(1)
    num_cut = 0
    for _ in range(20):
        counts = [rng.randint(0, 4) for _ in range(rng.randint(2, 6))]
        logits = torch.randn(1, sum(counts) + len(counts), V, generator=generator)
        parts = logits.split([1 + count for count in counts], dim=1)
        drafts = [part.argmax(-1)[:, :-1] for part in parts]
        for own in drafts:
            if own.shape[1] and rng.random() < 0.4:
                own[0, rng.randrange(own.shape[1])] = rng.randrange(V)
        proposals = [DraftProposal(own) for own in drafts]

        lengths = [rng.randint(2, 9) for _ in counts]
        together, alone = ([request(i, n, rules, CRITERIA[kind](n)) for i, n in enumerate(lengths)] for _ in range(2))
        verdicts = judge(together, logits, proposals)
        for i, (own, part, proposal) in enumerate(zip(alone, parts, proposals, strict=True)):
            (expected,) = judge([own], part, [proposal])
            assert verdicts[i].new_ids.tolist() == expected.new_ids.tolist()
            assert (verdicts[i].num_accepted, verdicts[i].bonus_token) == (expected.num_accepted, expected.bonus_token)
            assert together[i].finished == own.finished
            num_cut += own.finished
    assert (num_cut > 0) == (kind != "none")


def test_logits_of_each_request_are_its_own():
    config = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    together = [request(i, 3 + i, [TemperatureLogitsWarper(0.5)], **config) for i in range(3)]
    logits = torch.randn(1, 6, V, generator=torch.Generator().manual_seed(0))
    proposals = [DraftProposal(torch.tensor([ids]).long().reshape(1, -1)) for ids in ([1, 2], [], [4])]
    parts = logits.split([3, 1, 2], dim=1)
    for verdict, part in zip(judge(together, logits, proposals), parts, strict=True):
        assert torch.equal(verdict.raw_logits, part)
        assert_close(verdict.scores, 2 * part)


# Draws


def test_a_request_alone_takes_the_random_numbers_of_plain_generation():
    rules = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(4)]
    logits = torch.randn(1, 1, V, generator=torch.Generator().manual_seed(0))
    probabilities = LogitsProcessorList(rules)(None, logits[0].clone()).softmax(-1)
    for seed in range(20):
        torch.manual_seed(seed)
        (verdict,) = judge([request(0, 3, rules, do_sample=True)], logits, nothing(1))
        torch.manual_seed(seed)
        assert verdict.new_ids.tolist() == torch.multinomial(probabilities, 1).tolist()


@pytest.mark.parametrize("rules", [[], [TopKLogitsWarper(4)]])
def test_a_generator_leaves_the_random_state_alone(rules):
    logits = torch.randn(1, 3, V, generator=torch.Generator().manual_seed(0))
    before, drawn = torch.get_rng_state(), []
    for _ in range(2):
        generator = torch.Generator().manual_seed(5)
        requests = [request(i, 3, rules, do_sample=True) for i in range(3)]
        drawn.append([own.new_ids.tolist() for own in judge(requests, logits, nothing(3), generator)])
        torch.rand(1)
        torch.set_rng_state(before)
    assert drawn[0] == drawn[1]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("levels", [2, 9, 10_000])
@pytest.mark.parametrize("top_k", [1, 5, 400])
def test_best_tokens_are_what_the_processors_leave(top_k, levels):
    """Also where many tokens are equal to the last of the top k, as in half precision."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, levels, (6, 300), generator=generator).float() * (8 / levels)
    for after in ([], [TopPLogitsWarper(0.837)], [MinPLogitsWarper(0.1), TypicalLogitsWarper(0.837)]):
        rules = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(top_k), *after])
        values, ids = best_tokens(rules, None, scores.clone())
        spread = torch.full_like(scores, -torch.inf).scatter(1, ids, values)
        expected = rules(None, scores.clone())
        # Which of equal tokens a nucleus leaves is up to the kernel that sorts them.
        assert torch.equal(spread.sort().values, expected.sort().values)
        if not after:
            assert torch.equal(spread, expected)


def test_best_tokens_of_rules_without_a_top_k():
    scores = torch.zeros(2, 300)
    assert best_tokens(LogitsProcessorList([TopPLogitsWarper(0.8)]), None, scores) is None
    late = LogitsProcessorList([TopKLogitsWarper(5), TopHLogitsWarper(0.4)])  # wants a hundred tokens
    assert best_tokens(late, None, scores) is None
    early = LogitsProcessorList([TopHLogitsWarper(0.4), TopKLogitsWarper(5)])
    assert best_tokens(early, None, scores) is not None
