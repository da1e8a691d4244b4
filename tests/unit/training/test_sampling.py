# SPDX-License-Identifier: Apache-2.0
"""Answers written in rows are those of plain generation, whatever shares the batch with them."""

import math
from typing import NamedTuple

import pytest
import torch
from scipy.stats import chisquare
from transformers import GenerationConfig, StoppingCriteriaList

from dspark_hf.decoding.drafter import DraftProposal
from dspark_hf.decoding.judging import judge
from dspark_hf.decoding.request import Request
from dspark_hf.training.dataset import target_features
from dspark_hf.training.sampling import SamplingSettings, sample_answers
from tests.losslessness.distributions import ALPHA
from tests.support.closeness import assert_close
from tests.support.models import random_prompt, tiny_target


GREEDY = SamplingSettings(max_new_tokens=12, temperature=0)
LENGTHS = [9, 3, 1, 14, 1, 6, 2, 70, 5, 1, 8]


class Prompt(NamedTuple):
    key: int
    ids: tuple[int, ...]


def requests(lengths=LENGTHS):
    return [Prompt(i, tuple(random_prompt(n, seed=40 + i)[0].tolist())) for i, n in enumerate(lengths)]


_PLAIN = {}


def plain_answer(target, request):
    """What plain generation says; generated once, since every test asks for the same prompts."""
    key = (target, request.ids)
    if key not in _PLAIN:
        prompt = torch.tensor([request.ids])
        output = target.generate(prompt, do_sample=False, max_new_tokens=12)
        _PLAIN[key] = output[0, prompt.shape[1] :].tolist()
    return _PLAIN[key]


def answers(target, wanted, num_rows, eos=(), settings=GREEDY):
    return {answer.key: answer for answer in sample_answers(target, iter(wanted), settings, frozenset(eos), num_rows)}


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def target(request):
    return tiny_target(request.param, context_scale=0.2)


@pytest.mark.parametrize("num_rows", [1, 3, 8, 32], ids=lambda n: f"{n} rows")
def test_greedy_answers_are_those_of_plain_generation(target, num_rows):
    """11 prompts of 1 to 70 tokens: rows are refilled while prompts wait, and dropped when none is left."""
    wanted = requests()
    found = answers(target, wanted, num_rows)
    assert sorted(found) == list(range(11))
    for request in wanted:
        assert list(found[request.key].token_ids) == plain_answer(target, request)
        assert found[request.key].finish_reason == "length"


@pytest.mark.parametrize("num_rows", [2, 5])
def test_answers_end_at_an_end_token(target, num_rows):
    """Ends come at different steps, so refilled rows start in the middle of others."""
    wanted = requests()
    plain = {request.key: plain_answer(target, request) for request in wanted}
    eos = sorted({tokens[2 + key % 7] for key, tokens in plain.items()})
    found = answers(target, wanted, num_rows, eos)
    lengths = set()
    for request in wanted:
        ids = plain[request.key]
        end = next((i for i, token in enumerate(ids) if token in eos), None)
        expected = ids if end is None else ids[: end + 1]  # the end token included
        assert list(found[request.key].token_ids) == expected
        assert found[request.key].finish_reason == ("length" if end is None else "stop")
        lengths.add(len(expected))
    assert len(lengths) > 2


def test_answers_come_as_they_end(target):
    wanted = requests([4, 4, 4])
    plain = [plain_answer(target, request) for request in wanted]
    eos = next(token for token in plain[2] if token not in plain[0] + plain[1])
    order = [answer.key for answer in sample_answers(target, wanted, GREEDY, frozenset({eos}), 3)]
    assert order[0] == 2


def test_prompts_of_one_token(target):
    """Nothing to prefill: neither for fewer prompts than rows, nor for a row that held another prompt before."""
    for count, num_rows in ((2, 4), (6, 4), (5, 1)):
        wanted = [Prompt(i, (10 + i,)) for i in range(count)]
        found = answers(target, wanted, num_rows)
        assert [list(found[i].token_ids) for i in range(count)] == [plain_answer(target, r) for r in wanted]


def test_one_token_prompt_after_a_long_one(target):
    wanted = [Prompt(0, requests()[7].ids), Prompt(1, (10,))]
    found = answers(target, wanted, 1)
    assert list(found[1].token_ids) == plain_answer(target, wanted[1])


def test_no_requests(target):
    assert answers(target, [], 4) == {}


def test_requests_are_taken_as_rows_get_free(target):
    taken = []

    def stream():
        for request in requests([3] * 9):
            taken.append(request.key)
            yield request

    running = sample_answers(target, stream(), GREEDY, frozenset(), 3)
    next(running)
    assert len(taken) == 4  # one of them is ahead
    assert sorted(answer.key for answer in running) == [key for key in range(9) if key != 0]


# What the target is left as


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_target_is_left_as_it_was_found(implementation):
    target, ids = tiny_target(), random_prompt(12)
    target.set_attn_implementation(implementation)
    before = target_features(target, ids, [0, 2]).last_hidden_states
    list(sample_answers(target, requests([3, 5]), GREEDY, frozenset(), 2))
    assert target.config._attn_implementation == implementation
    assert torch.equal(target_features(target, ids, [0, 2]).last_hidden_states, before)
    assert target.training is False


def test_target_attends_to_the_past_only_while_rows_are_written():
    """A callback may use the target: without a mask of its own, the implementation would look ahead."""
    target, ids = tiny_target(), random_prompt(12)
    before = target_features(target, ids, [0, 2]).last_hidden_states
    plain = target.generate(ids, do_sample=False, max_new_tokens=4)
    for _ in sample_answers(target, requests([3, 5]), GREEDY, frozenset(), 2):
        during = target_features(target, ids, [0, 2]).last_hidden_states
        assert_close(during, before)
        assert torch.equal(target.generate(ids, do_sample=False, max_new_tokens=4), plain)


def test_abandoned_run_leaves_the_target_as_it_was():
    target = tiny_target()
    running = sample_answers(target, requests(), GREEDY, frozenset(), 2)
    next(running)
    running.close()
    assert target.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kind", ["mistral", "gemma3", "qwen3_sliding"])
def test_windowed_targets(kind):
    target = tiny_target(kind)
    wanted = requests([30, 3, 12])  # the windows are 8 wide
    found = answers(target, wanted, 2)
    for request in wanted:
        assert list(found[request.key].token_ids) == plain_answer(target, request)


def test_other_layers_are_refused():
    target = tiny_target()
    target.config.layer_types = ["full_attention", "linear_attention"] * 2
    with pytest.raises(NotImplementedError, match=r"full or sliding attention, .+ has \['linear_attention'\]"):
        next(sample_answers(target, requests(), GREEDY, frozenset(), 2))


# Sampling


def test_same_seed_same_answers(target):
    first, second, other = (
        answers(target, requests(), 4, settings=SamplingSettings(8, 1.0, 50, 1.0, seed)) for seed in (1, 1, 2)
    )
    assert first == second
    assert first != other


def drawn(logits, settings):
    """The token that the loop draws from each row of logits."""
    config = GenerationConfig(do_sample=settings.temperature > 0)
    text, nothing = torch.tensor([[1]]), DraftProposal(torch.zeros(1, 0, dtype=torch.long))
    rows = [Request(row, text, settings.processors, StoppingCriteriaList(), 9, config) for row in range(len(logits))]
    verdicts = judge(rows, logits[None], [nothing] * len(rows), torch.Generator().manual_seed(0))
    return torch.cat([verdict.new_ids for verdict in verdicts])[:, 0]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "expected"),
    [
        (1.0, 10, 1.0, [0.5, 0.25, 0.15, 0.1]),
        (2.0, 10, 1.0, [math.sqrt(p) for p in (0.5, 0.25, 0.15, 0.1)]),
        (1.0, 2, 1.0, [0.5, 0.25, 0, 0]),
        (1.0, 10, 0.7, [0.5, 0.25, 0, 0]),  # 0.5 is not yet 0.7
        (1.0, 10, 0.5, [0.5, 0, 0, 0]),
        (1.0, 10, 0.1, [0.5, 0, 0, 0]),  # the first always stays
        (1.0, 3, 0.8, [0.5, 0.25, 0, 0]),  # inside the top 3, 0.75 of 0.9 is 0.83
        (0.5, 1, 1.0, [0.5, 0, 0, 0]),
        (0.0, 10, 0.1, [0.5, 0, 0, 0]),
    ],
)
def test_distribution_of_sampled_tokens(temperature, top_k, top_p, expected):
    """Tokens 3, 0, 2, 1 have probability 0.5, 0.25, 0.15, 0.1."""
    logits = torch.tensor([0.25, 0.1, 0.15, 0.5]).log().expand(10000, -1)
    tokens = drawn(logits, SamplingSettings(1, temperature, top_k, top_p))
    counts = torch.bincount(tokens, minlength=4)[[3, 0, 2, 1]].double()
    probs = torch.tensor(expected, dtype=torch.float64)
    probs /= probs.sum()
    assert not counts[probs == 0].any()
    if (probs > 0).sum() > 1:
        assert chisquare(counts[probs > 0].numpy(), 10000 * probs[probs > 0].numpy()).pvalue > ALPHA


def test_rows_are_sampled_independently():
    logits = torch.tensor([[0.0, 0.0], [0.0, -100.0]]).repeat(5000, 1)
    tokens = drawn(logits, SamplingSettings(1, 1.0, 2, 1.0)).view(-1, 2)
    assert not tokens[:, 1].any()
    assert abs(tokens[:, 0].float().mean().item() - 0.5) < 5 * 0.5 / math.sqrt(5000)


def test_sampled_answers_have_the_targets_distribution():
    """First token of 3000 answers, rows refilled all the time, against softmax(logits / T) of one forward."""
    target = tiny_target(context_scale=0.2)
    prompt = (11, 23, 5)
    with torch.no_grad():
        logits = target(torch.tensor([prompt])).logits[0, -1]
    best = logits.topk(8)
    probs = torch.softmax(best.values.double() / 1.5, dim=-1)
    settings = SamplingSettings(1, 1.5, 8, 1.0)
    wanted = [Prompt(i, prompt) for i in range(3000)]
    tokens = [answer.token_ids[0] for answer in sample_answers(target, wanted, settings, frozenset(), 64)]
    counts = torch.bincount(torch.tensor(tokens), minlength=logits.shape[0])[best.indices]
    assert counts.sum() == 3000
    assert chisquare(counts.numpy(), 3000 * probs.numpy()).pvalue > ALPHA


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_new_tokens", 0), ("temperature", -0.1), ("top_k", 0), ("top_p", 0.0), ("top_p", 1.5)],
)
def test_settings_out_of_range(field, value):
    with pytest.raises(ValueError, match=f"`{field}` must .+, got {value}"):
        SamplingSettings(**{field: value})


def test_settings_left_to_a_server_are_none_here():
    settings = SamplingSettings(8, None, None, 0.9, None)
    with pytest.raises(
        ValueError, match=r"need all sampling settings, got None for \['temperature', 'top_k', 'seed'\]"
    ):
        next(sample_answers(tiny_target(), requests(), settings, frozenset()))
