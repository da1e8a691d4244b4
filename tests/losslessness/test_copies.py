# SPDX-License-Identifier: Apache-2.0
"""Drafts copied from the text change nothing: greedily token for token, sampled in distribution.

Copies are judged as point masses, alone and after drafts of a block that agree with them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    set_seed,
)

from dspark_hf import SPSCurve, collect_rounds, generate_many
from dspark_hf._compat import CACHE_KEY
from dspark_hf.decoding import verification
from dspark_hf.scheduling import DraftingPolicy, policy
from dspark_hf.scheduling.copying import CopySource
from tests.losslessness.distributions import (
    ALPHA,
    chi_square_p_value,
    exact_texts,
    sampling_pair,
    transition_p_value,
    transitions,
)
from tests.support.eagle3 import oracle_eagle3
from tests.support.models import (
    character_tokenizer,
    oracle_draft,
    random_draft,
    random_prompt,
    spread_confidence,
    tiny_target,
)


REPEATED = torch.tensor([[3, 4, 5, 6, 3, 4]])
# Whenever the last token occurred before: in these texts of twelve different tokens almost always.
UNPRICED = {
    "num_assistant_tokens_schedule": "constant",
    "prompt_lookup_num_tokens": 3,
    "max_matching_ngram_size": 1,
}
PRICED = {"num_assistant_tokens_schedule": "hardware"}


@pytest.fixture
def cheap(monkeypatch):
    """Rounds in which drafts cost almost nothing: whatever may be right is sent."""
    monkeypatch.setattr(policy, "UNMEASURED", SPSCurve.linear(1e-3, 1e-3))


@pytest.fixture
def trusting(monkeypatch):
    """Copies are believed in, whatever became of them: random texts would not be copied for long."""
    monkeypatch.setattr(CopySource, "PRIOR_TOKENS", 1e6)
    monkeypatch.setattr(CopySource, "TRUST_TOKENS", 1e6)


@pytest.fixture
def blocks_first(monkeypatch):
    """Blocks are drafted although a copy would be chosen, and a copy continues them wherever the two agree."""
    right = DraftingPolicy.plan

    def plan(self, histories, copy_limits, slots, tokens_left=None):
        found = right(self, histories, copy_limits, slots, tokens_left)
        drafts = tuple(count > 0 for count in slots)
        lengths = tuple(0 if own else n for own, n in zip(drafts, found.copy_lengths, strict=True))
        return dataclasses.replace(found, copy_lengths=lengths, drafts_block=drafts)

    monkeypatch.setattr(DraftingPolicy, "plan", plan)


def long_text(target, draft, num_tokens, **kwargs):
    with collect_rounds() as stats:
        output = target.generate(
            REPEATED,
            do_sample=True,
            max_new_tokens=num_tokens,
            assistant_model=draft,
            **({"top_k": 0} | kwargs),
        )
    return output[0, REPEATED.shape[1] - 1 :].tolist(), stats


# Sampling.

WARPERS = {
    "none": ({}, []),
    "cold": ({"temperature": 0.5}, [TemperatureLogitsWarper(0.5)]),
    "hot, top k": ({"temperature": 1.5, "top_k": 5}, [TemperatureLogitsWarper(1.5), TopKLogitsWarper(5)]),
    "top p": ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    "all": (
        {"temperature": 0.8, "top_k": 8, "top_p": 0.9},
        [TemperatureLogitsWarper(0.8), TopKLogitsWarper(8), TopPLogitsWarper(0.9)],
    ),
}


@pytest.mark.parametrize("knobs", [UNPRICED, PRICED], ids=["unpriced", "priced"])
@pytest.mark.parametrize("warpers", WARPERS)
@pytest.mark.usefixtures("cheap", "trusting")
@torch.no_grad()
def test_transitions(warpers, knobs):
    target, draft = sampling_pair(0.0, noise=0.8)
    spread_confidence(draft, 4.0)
    draft.generation_config.update(**knobs)
    kwargs, processors = WARPERS[warpers]
    text, stats = long_text(target, draft, 900, **kwargs)
    assert sum(record.source == "copy" for record in stats.rounds) > 50
    assert 0.005 < stats.num_copied_accepted / stats.num_copied < 0.8
    assert transition_p_value(text, transitions(target, processors)) > ALPHA


@pytest.mark.usefixtures("cheap", "blocks_first")
@torch.no_grad()
def test_transitions_of_blocks_that_a_copy_continues():
    target, draft = sampling_pair(0.0, noise=0.3)
    draft.generation_config.update(num_assistant_tokens=1, **UNPRICED)
    text, stats = long_text(target, draft, 1_500, temperature=0.6)
    both = [record for record in stats.rounds if record.source == "both"]
    assert len(both) > 40
    assert sum(record.num_accepted > record.num_drawn for record in both) > 10
    assert sum(record.num_accepted == record.num_drawn for record in both) > 5
    assert transition_p_value(text, transitions(target, [TemperatureLogitsWarper(0.6)])) > ALPHA


@pytest.mark.parametrize("wrong", ["the residual keeps the draft", "copies are accepted too often"])
@torch.no_grad()
def test_a_wrong_rule_is_noticed(monkeypatch, wrong):
    if wrong == "the residual keeps the draft":
        monkeypatch.setattr(verification, "one_hot_probs", lambda ids, like: torch.zeros_like(like))
    else:
        right = verification.accept_drafts

        def generous(*arguments):  # three tries
            return right(*arguments) | right(*arguments) | right(*arguments)

        monkeypatch.setattr(verification, "accept_drafts", generous)
    target, draft = sampling_pair(0.0, noise=0.8)
    draft.generation_config.update(**UNPRICED)
    text, _ = long_text(target, draft, 3_000)
    assert transition_p_value(text, transitions(target)) < ALPHA


NUM_NEW, EOS = 4, 7
PROCESSORS = {
    "none": ({}, []),
    "repetition penalty, temperature": (
        {"repetition_penalty": 1.8, "temperature": 0.7},
        [RepetitionPenaltyLogitsProcessor(1.8), TemperatureLogitsWarper(0.7)],
    ),
    "no repeated pair": ({"no_repeat_ngram_size": 2}, [NoRepeatNGramLogitsProcessor(2)]),
}


@pytest.mark.parametrize("eos", [None, EOS])
@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.usefixtures("cheap")
@torch.no_grad()
def test_short_texts(name, eos):
    """A target with memory, whose processors read the text: every text has a known probability."""
    prompt = torch.tensor([[5, EOS, 3, 4, 5]])
    target, draft = sampling_pair(0.3, noise=0.8)
    kwargs, processors = PROCESSORS[name]
    draft.generation_config.update(**UNPRICED)
    expected = exact_texts(target, prompt, NUM_NEW, LogitsProcessorList(processors), eos)
    kwargs = {"do_sample": True, "max_new_tokens": NUM_NEW, "eos_token_id": eos, "top_k": 0} | kwargs
    with collect_rounds() as stats:
        outputs = [target.generate(prompt, assistant_model=draft, **kwargs) for _ in range(450)]
    texts = [tuple(output[0, prompt.shape[1] :].tolist()) for output in outputs]
    assert stats.num_copied > 80
    if name != "no repeated pair":
        assert stats.num_copied_accepted >= 5
    assert chi_square_p_value(Counter(texts), expected) > ALPHA


@pytest.mark.usefixtures("cheap")
@torch.no_grad()
def test_rows_of_a_batch():
    """One prompt has much to copy, the others little; some texts end early."""
    target, draft = sampling_pair(0.5, noise=0.5)
    draft.generation_config.update(**UNPRICED)
    prompts, counts, copies = ([3, 4, 5, 3, 4, 5, 3, 4], [4, 5, 6, 7], [8, 3]), [Counter() for _ in range(3)], 100
    ids = torch.tensor([[0] * (8 - len(own)) + own for own in prompts])
    mask = torch.tensor([[0] * (8 - len(own)) + [1] * len(own) for own in prompts])
    set_seed(0)
    for _ in range(5):
        with collect_rounds() as stats:
            output = target.generate(
                ids, attention_mask=mask, num_return_sequences=copies, do_sample=True, top_k=0, max_new_tokens=3,
                eos_token_id=2, assistant_model=draft,
            )  # fmt: skip
        assert {"copy", "block"} <= {record.source for record in stats.rounds}
        for row, new_ids in enumerate(output[:, 8:].tolist()):
            end = new_ids.index(2) + 1 if 2 in new_ids else len(new_ids)
            counts[row // copies][tuple(new_ids[:end])] += 1
    for prompt, observed in zip(prompts, counts, strict=True):
        expected = exact_texts(target, torch.tensor([prompt]), 3, LogitsProcessorList(), eos_token_id=2)
        assert chi_square_p_value(observed, expected) > ALPHA


@pytest.mark.parametrize("knobs", [UNPRICED, PRICED], ids=["unpriced", "priced"])
@pytest.mark.usefixtures("cheap", "trusting")
def test_the_same_seed_gives_the_same_text(knobs):
    target, draft = sampling_pair(0.3, noise=0.8)
    draft.generation_config.update(**knobs)
    texts = []
    for seed in (1, 1, 2):
        set_seed(seed)
        text, stats = long_text(target, draft, 80)
        assert stats.num_copied
        texts.append(text)
    assert texts[0] == texts[1] != texts[2]


# Greedy: texts that repeat themselves, so that whole copies are accepted, and end inside of one.


@pytest.fixture(scope="module")
def looping():
    """A target whose greedy text goes round in circles, a draft that is never right, and a text of it."""
    target = tiny_target(context_scale=0.003)
    draft = random_draft(seed=6)
    prompt = random_prompt(6)
    return target, draft, prompt, target.generate(prompt, do_sample=False, max_new_tokens=80)


def test_most_rounds_copy(looping):
    target, draft, prompt, text = looping
    with collect_rounds() as stats:
        output = target.generate(prompt, do_sample=False, max_new_tokens=80, assistant_model=draft)
    assert torch.equal(output, text)
    assert stats.accepted_length > 3
    assert stats.num_copied_accepted > 40


@pytest.mark.parametrize("place", range(20, 60, 5))
@pytest.mark.parametrize("end", ["eos", "stop string", "length"])
def test_a_text_ends_inside_a_copy(looping, end, place):
    """The loop of the target begins early, so an end of text is met in the loop only if it is made one there."""
    target, draft, prompt, text = looping
    tokenizer, kwargs = character_tokenizer(), {"do_sample": False, "max_new_tokens": 80}
    if end == "eos":
        kwargs |= {"eos_token_id": int(text[0, prompt.shape[1] + place]), "min_new_tokens": place - 3}
    elif end == "stop string":
        stop = tokenizer.decode(text[0, prompt.shape[1] + place - 2 : prompt.shape[1] + place])
        kwargs |= {"stop_strings": [stop], "tokenizer": tokenizer}
    else:
        kwargs["max_new_tokens"] = place
    plain = target.generate(prompt, **kwargs)
    with collect_rounds() as stats:
        output = target.generate(prompt, assistant_model=draft, **kwargs)
    assert torch.equal(output, plain)
    if end != "stop string":
        assert stats.num_copied_accepted > 5


def test_rows_that_end_inside_a_copy(looping):
    target, draft, prompt, text = looping
    prompts = [random_prompt(length, seed=length) for length in (6, 3, 9)]
    eos = int(text[0, prompt.shape[1] + 30])
    options = {"do_sample": False, "max_new_tokens": 60, "eos_token_id": eos, "min_new_tokens": 20}
    alone = [target.generate(own, **options)[0, own.shape[1] :].tolist() for own in prompts]
    with collect_rounds() as stats:
        together = generate_many(target, draft, [own[0] for own in prompts], max_batch=2, **options)
    assert [own.tolist() for own in together] == alone
    assert {record.request for record in stats.rounds if record.num_copied} == {0, 1, 2}


def test_a_reused_chat_cache_copies_from_the_whole_text(looping):
    """The second turn continues the cache of the first; what it copies lies in the first."""
    target, draft, prompt, text = looping
    question = torch.cat([text[:, :40], random_prompt(3, seed=2), text[:, 10:16]], dim=1)
    caches = [DynamicCache(config=target.config) for _ in range(2)]
    for cache in caches:
        target.generate(text[:, :40], do_sample=False, max_new_tokens=1, **{CACHE_KEY: cache})
    plain = target.generate(question, do_sample=False, max_new_tokens=30, **{CACHE_KEY: caches[0]})
    with collect_rounds() as stats:
        output = target.generate(
            question, do_sample=False, max_new_tokens=30, assistant_model=draft, **{CACHE_KEY: caches[1]}
        )
    assert torch.equal(output, plain)
    assert caches[0].get_seq_length() == caches[1].get_seq_length()
    assert stats.num_copied_accepted > 5


def test_returned_scores_are_those_of_plain_generation(looping):
    target, draft, prompt, _ = looping
    options = {"do_sample": False, "max_new_tokens": 40, "return_dict_in_generate": True, "output_scores": True}
    plain = target.generate(prompt, **options)
    drafted = target.generate(prompt, assistant_model=draft, **options)
    assert torch.equal(plain.sequences, drafted.sequences)
    assert len(plain.scores) == len(drafted.scores)
    torch.testing.assert_close(torch.stack(drafted.scores), torch.stack(plain.scores), rtol=1e-4, atol=1e-4)


def test_eagle3_drafts_copy_as_well():
    target = tiny_target(context_scale=0.003)
    draft, prompt = oracle_eagle3(target, noise=0.3), random_prompt(6)
    plain = target.generate(prompt, do_sample=False, max_new_tokens=60)
    with collect_rounds() as stats:
        output = target.generate(prompt, do_sample=False, max_new_tokens=60, assistant_model=draft)
    assert torch.equal(output, plain)
    assert {"copy", "block"} <= {record.source for record in stats.rounds}


def test_a_dflash_draft_copies_as_well(looping):
    target, _, prompt, text = looping
    draft = random_draft(markov_rank=0, enable_confidence_head=False)
    with collect_rounds() as stats:
        output = target.generate(prompt, do_sample=False, max_new_tokens=80, assistant_model=draft)
    assert torch.equal(output, text)
    assert stats.num_copied_accepted > 40


# What runs


def test_a_round_that_copies_runs_no_draft(looping):
    target, draft, prompt, _ = looping
    passes = []
    handle = draft.register_forward_hook(lambda *_: passes.append(1))
    with collect_rounds() as stats:
        target.generate(prompt, do_sample=False, max_new_tokens=80, assistant_model=draft)
    handle.remove()
    assert len(passes) == sum(record.drafted for record in stats.rounds) < stats.num_rounds / 2


@pytest.mark.usefixtures("cheap")
def test_only_rows_that_draft_run_through_the_draft():
    """Blocks are those of a row alone, although another row copied meanwhile and waits with its context."""
    target = tiny_target(context_scale=0.003)
    draft = spread_confidence(oracle_draft(target, noise=0.02))
    draft.generation_config.update(num_assistant_tokens_schedule="confidence")
    prompts = [random_prompt(6), random_prompt(5, seed=9), random_prompt(8, seed=4)]
    rows, options = [], {"do_sample": False, "max_new_tokens": 40}
    handle = draft.register_forward_pre_hook(
        lambda _, __, kwargs: rows.append(len(kwargs["noise_embeds"])), with_kwargs=True
    )
    with collect_rounds() as stats:
        together = generate_many(target, draft, [own[0] for own in prompts], max_batch=3, **options)
    handle.remove()
    assert len(set(rows)) > 1, "all rows drafted in every round"
    assert sum(rows) == sum(record.drafted for record in stats.rounds)
    for prompt, answer in zip(prompts, together, strict=True):
        assert answer.tolist() == target.generate(prompt, **options)[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("where", ["draft", "call"])
def test_copying_is_turned_off(looping, where):
    target, draft, prompt, text = looping
    call = {"prompt_lookup_num_tokens": 0} if where == "call" else {}
    draft.generation_config.prompt_lookup_num_tokens = 0 if where == "draft" else None
    with collect_rounds() as stats:
        output = target.generate(prompt, do_sample=False, max_new_tokens=80, assistant_model=draft, **call)
    draft.generation_config.prompt_lookup_num_tokens = None
    assert torch.equal(output, text)
    assert stats.num_copied == 0


def test_copies_are_as_long_as_asked_for(looping):
    target, draft, prompt, text = looping
    for most in (1, 3, 30):
        with collect_rounds() as stats:
            output = target.generate(
                prompt, do_sample=False, max_new_tokens=80, assistant_model=draft, prompt_lookup_num_tokens=most
            )
        assert torch.equal(output, text)
        longest = max(record.num_copied for record in stats.rounds)
        assert longest == most if most < 30 else longest > 16
