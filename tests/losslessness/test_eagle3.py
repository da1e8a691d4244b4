# SPDX-License-Identifier: Apache-2.0
"""With an Eagle3 draft, greedy decoding is plain greedy decoding to the token, and sampling draws from the target.

The random calls are those of `test_greedy_exact`, without the knobs that need confidences. The distributions are
compared by chi-square, and the statistic is shown to notice a wrong q.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from functools import cache

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    set_seed,
)
from transformers.generation import GenerationMixin

from dspark_hf import DraftProposal, collect_rounds, integration
from dspark_hf.decoding import drawing
from dspark_hf.decoding.eagle3_drafter import Eagle3CandidateGenerator
from tests.losslessness import test_greedy_exact as greedy
from tests.losslessness.distributions import (
    ALPHA,
    VOCAB_SIZE,
    chi_square_p_value,
    exact_texts,
    sampling_pair,
    transition_p_value,
    transitions,
)
from tests.support.closeness import SAFE_LEAD, assert_close
from tests.support.eagle3 import oracle_eagle3, random_eagle3, uncached_chain
from tests.support.models import random_prompt, tiny_target


KINDS = ("qwen3", "qwen3_sliding", "llama", "mistral", "gemma3")
BIGRAM = 0.003  # how little else than the last token counts in a target that the oracle knows
CASES_PER_KIND = 16  # 5 * 16 = 80 calls
DRAFTS = {
    "oracle": (oracle_eagle3, {}),
    "noisy": (oracle_eagle3, {"noise": 0.04, "ttt_length": 6}),
    "reduced": (oracle_eagle3, {"draft_vocab_size": 70, "ttt_length": 3}),
    "deep": (oracle_eagle3, {"noise": 0.0, "ttt_length": 9, "target_layer_ids": [-1]}),
    "random": (random_eagle3, {}),
    "random_reduced": (random_eagle3, {"draft_vocab_size": 48, "ttt_length": 1}),
}
NEEDS_CONFIDENCE = (greedy.threshold, greedy.schedule)
FEATURES = tuple(feature for feature in greedy.FEATURES if feature not in NEEDS_CONFIDENCE)
WEIGHTS = {greedy.num_assistant_tokens: 3, greedy.add_eos: 4, greedy.returned_everything: 2}


# Greedy.


@cache
def target_of(kind):
    return tiny_target(kind, context_scale=BIGRAM)


@cache
def draft_of(kind, name):
    build, overrides = DRAFTS[name]
    return build(**overrides) if build is random_eagle3 else build(target_of(kind), **overrides)


def build_case(kind, number):
    rng = random.Random(f"eagle3-{kind}-{number}")
    prompt = random_prompt(rng.randint(1, 40), seed=rng.randrange(10**6))
    length = rng.choice([1, 2, 3, rng.randint(4, 24), 24, 24])
    case = greedy.Case(kind, number, rng.choice(list(DRAFTS)), prompt, {"max_new_tokens": length})
    case.attention = rng.choice(["sdpa", "eager"])
    pool = [feature for feature in FEATURES for _ in range(WEIGHTS.get(feature, 1))]
    chosen = {rng.choice(pool) for _ in range(rng.randint(0, 4))}
    for feature in FEATURES:  # in their order: the ones that pick tokens from the text come last
        if feature in chosen:
            case.features.append(feature.__name__)
            feature(case, rng)
    return case


@cache
def run_kind(kind):
    """The calls of a kind, what the drafts changed in them, and their rounds."""
    failures, rounds, near_ties = [], [], 0
    with pytest.MonkeyPatch.context() as patch:  # the random calls run with these targets and drafts
        patch.setattr(greedy, "target_of", target_of)
        patch.setattr(greedy, "draft_of", draft_of)
        cases = [build_case(kind, number) for number in range(CASES_PER_KIND)]
        for case in cases:
            plain = greedy.run(case, with_draft=False)
            if plain.smallest_lead < SAFE_LEAD:  # rounding may decide this text: equality would be luck
                near_ties += 1
                continue
            with collect_rounds() as stats:
                drafted = greedy.run(case, with_draft=True)
            failures += [f"{case}: {difference}" for difference in greedy.differences(case, plain, drafted)]
            rounds += stats.rounds
    assert near_ties <= 1
    return cases, failures, rounds


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_nothing(kind):
    _, failures, _ = run_kind(kind)
    assert not failures, "\n".join(failures)


def test_the_mix_covers_every_kind_of_round_and_call():
    found = [run_kind(kind) for kind in KINDS]
    cases, records = [case for own, _, _ in found for case in own], [record for *_, own in found for record in own]
    features = Counter(name for case in cases for name in case.features)
    assert set(features) >= {feature.__name__ for feature in FEATURES} - {"static_cache"}
    assert {case.draft_name for case in cases} == set(DRAFTS)
    assert {case.attention for case in cases} == {"sdpa", "eager"}
    assert len(cases) == 80
    counts = Counter(
        "all" if record.num_accepted == record.verify_length else "some" if record.num_accepted else "none"
        for record in records
        if record.verify_length
    )
    assert min(counts[key] for key in ("all", "some", "none")) >= 40, counts
    assert sum(record.num_copied > 0 for record in records) >= 60
    assert {record.num_accepted for record in records} >= set(range(7))
    assert sum(record.truncated for record in records) >= 5


# Sampling.

PROMPT = torch.tensor([[3, 4]])
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "target_layer_ids": [-1],
    "num_target_layers": 1,
    "ttt_length": 4,
}


def pair(context_scale, **overrides):
    """The target of the sampling tests, and a draft that differs from it and reads all its context."""
    target, _ = sampling_pair(context_scale)
    draft = oracle_eagle3(target, noise=0.15, **(SIZES | overrides))
    with torch.no_grad():
        draft.fc.weight.normal_(std=0.3)
    return target, draft


def draw(target, draft, num_tokens, **kwargs):
    kwargs = {"do_sample": True, "max_new_tokens": num_tokens, "assistant_model": draft, "top_k": 0} | kwargs
    return target.generate(PROMPT, **kwargs)[0, PROMPT.shape[1] :].tolist()


CHAINS = {
    "temperature": ({"temperature": 0.5}, [TemperatureLogitsWarper(0.5)], {}),
    "top_k": ({"top_k": 3}, [TopKLogitsWarper(3)], {}),
    "top_p": ({"top_p": 0.7}, [TopPLogitsWarper(0.7)], {}),
    "reduced vocabulary top_k": ({"top_k": 4}, [TopKLogitsWarper(4)], {"draft_vocab_size": 7}),
}


@pytest.mark.parametrize("name", CHAINS)
@torch.no_grad()
def test_transitions_of_a_long_text(name):
    """The target is a Markov chain: every step of the text is a draw from a known distribution."""
    kwargs, processors, overrides = CHAINS[name]
    target, draft = pair(0.0, **overrides)
    with collect_rounds() as stats:
        text = draw(target, draft, 500, **kwargs)
    assert 0.1 < stats.acceptance_rate < 0.95, "no mix of accepted and rejected drafts"
    assert transition_p_value([4, *text], transitions(target, processors)) > ALPHA


@torch.no_grad()
def test_transitions_where_no_draft_is_allowed():
    target, draft = pair(0.0, draft_vocab_size=5)
    forbidden = draft.draft_token_ids().tolist()
    text = draw(target, draft, 200, suppress_tokens=forbidden)
    assert transition_p_value([4, *text], transitions(target, [SuppressTokensLogitsProcessor(forbidden)])) > ALPHA


EOS = 7
SHORT_TEXTS = {
    "no processor": ({}, []),
    "repetition penalty, temperature and EOS": (
        {"repetition_penalty": 2.0, "eos_token_id": EOS, "temperature": 0.8},
        [RepetitionPenaltyLogitsProcessor(2.0), TemperatureLogitsWarper(0.8)],
    ),
}


@pytest.mark.parametrize("num_draws", [300, pytest.param(4_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SHORT_TEXTS)
@torch.no_grad()
def test_short_texts(name, num_draws):
    """The target has a memory: every text of four tokens has a known probability. All but the first are drafted."""
    kwargs, processors = SHORT_TEXTS[name]
    target, draft = pair(0.3)
    expected = exact_texts(target, PROMPT, 4, LogitsProcessorList(processors), kwargs.get("eos_token_id"))
    with collect_rounds() as stats:
        texts = [tuple(draw(target, draft, 4, **kwargs)) for _ in range(num_draws)]
    assert 0.1 < stats.acceptance_rate < 0.95
    for start, end in ((0, 2), (1, 3), (2, 4)):
        marginal = Counter()
        for text, probability in expected.items():
            marginal[text[start:end]] += probability
        assert chi_square_p_value(Counter(text[start:end] for text in texts), marginal) > ALPHA


def test_a_wrong_q_is_noticed(monkeypatch):
    target, draft = pair(0.0)
    draft.generation_config.prompt_lookup_num_tokens = 0
    right = Eagle3CandidateGenerator.propose

    def flat_q(self, requests, *arguments, **named):
        (proposal,) = right(self, requests, *arguments, **named)
        if proposal.draft_logits is None:
            return [proposal]
        return [DraftProposal(proposal.token_ids, torch.zeros_like(proposal.draft_logits))]

    monkeypatch.setattr(Eagle3CandidateGenerator, "propose", flat_q)
    text = draw(target, draft, 700, temperature=0.5)
    assert transition_p_value([4, *text], transitions(target, [TemperatureLogitsWarper(0.5)])) < ALPHA


def test_the_same_seed_gives_the_same_text():
    target, draft = pair(0.3)
    texts = []
    for seed in (1, 1, 2):
        set_seed(seed)
        texts.append(draw(target, draft, 60))
    assert texts[0] == texts[1] != texts[2]


# The logits that come with drafts.

PROCESSORS = {
    "none": lambda: LogitsProcessorList(),
    "rowwise": lambda: LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(9)]),
    "text": lambda: LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7), TemperatureLogitsWarper(1.3)]),
}


@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("draft_vocab_size", [None, 48])
@torch.no_grad()
def test_logits_are_the_ones_sampled_from(monkeypatch, draft_vocab_size, processors):
    target, draft = tiny_target(), random_eagle3(draft_vocab_size=draft_vocab_size)
    drawn, draw_token = [], drawing.draw_token

    def spy(logits, do_sample):
        drawn.append(logits.clone())
        return draw_token(logits, do_sample)

    monkeypatch.setattr(drawing, "draw_token", spy)
    ids, text = draft.draft_token_ids(), random_prompt(12)

    def spread(rows):
        if ids is None or rows.shape[-1] == draft.config.vocab_size:
            return rows
        full = torch.full((*rows.shape[:-1], draft.config.vocab_size), float("-inf"))
        full[..., ids] = rows
        return full

    config = GenerationConfig(do_sample=True, max_length=512)
    generator = Eagle3CandidateGenerator(target, draft, config, PROCESSORS[processors]())
    outputs = target(text[:, :-1], output_hidden_states=True)
    longer, logits = generator.get_candidates(
        text, model_kwargs={}, model_outputs=outputs, is_first_iteration=False, n_last_matches=0
    )
    drafts = longer[:, 12:]
    assert (logits.dtype, logits.shape) == (torch.float32, (1, 4, draft.config.vocab_size))
    assert torch.equal(logits, torch.stack([spread(row) for row in drawn], dim=1))
    # The same from nothing: an uncached chain along these drafts, then the processors, each on its own prefix.
    chain = uncached_chain(target, draft, text, 4, drafts)
    for slot in range(4):
        row = PROCESSORS[processors]()(longer[:, : 12 + slot], spread(chain.draft_logits[:, slot]))
        assert_close(logits[:, slot], row)
        assert math.isfinite(float(logits[0, slot, drafts[0, slot]]))


# Under transformers' own assisted loop.


@pytest.fixture
def stock_loop(monkeypatch):
    """`generate` runs transformers' loop; only the drafting half is ours."""
    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", integration._originals["_assisted_decoding"])


def test_stock_loop_is_greedy_exact(stock_loop):
    for kind in ("llama", "mistral"):
        target = target_of(kind)
        for name in ("oracle", "reduced", "random"):
            prompt = random_prompt(9)
            plain = target.generate(prompt, do_sample=False, max_new_tokens=20)
            with collect_rounds() as stats:
                drafted = target.generate(
                    prompt, do_sample=False, max_new_tokens=20, assistant_model=draft_of(kind, name)
                )
            assert torch.equal(plain, drafted)
            assert stats.num_rounds == 0, "our own loop ran"


@torch.no_grad()
def test_stock_loop_samples_the_targets_distribution(stock_loop):
    target, draft = pair(0.0)
    text = draw(target, draft, 400, temperature=0.6, top_k=8)
    processors = [TemperatureLogitsWarper(0.6), TopKLogitsWarper(8)]
    assert transition_p_value([4, *text], transitions(target, processors)) > ALPHA
