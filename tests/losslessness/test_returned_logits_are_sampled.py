# SPDX-License-Identifier: Apache-2.0
"""The logits that come with drafts are the ones they were drawn from: transformers' own loop is lossless with them.

Several drafters returned raw logits, or more rows than drafts, where the tokens came from processed ones: greedy
decoding does not notice, sampling draws from the wrong distribution.
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import (
    GenerationMixin,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from dspark_hf import DSparkCandidateGenerator, collect_rounds, integration
from dspark_hf.decoding import drawing
from tests.losslessness.distributions import ALPHA, VOCAB_SIZE, sampling_pair, transition_p_value
from tests.support.closeness import assert_close
from tests.support.models import (
    oracle_draft,
    random_draft,
    random_prompt,
    spread_confidence,
    tiny_target,
    uncached_block,
)


DRAFTS = {
    "vanilla": (oracle_draft, {}),
    "gated": (oracle_draft, {"markov_head_type": "gated"}),
    "rnn": (oracle_draft, {"markov_head_type": "rnn", "block_size": 6}),
    "reduced": (oracle_draft, {"draft_vocab_size": 48}),
    "slot0_dropped": (oracle_draft, {"sample_from_anchor": False}),
    "dflash": (random_draft, {"markov_rank": 0, "confidence_head_with_markov": False}),
    "dflash_reduced": (random_draft, {"markov_rank": 0, "confidence_head_with_markov": False, "draft_vocab_size": 48}),
}
PROCESSORS = {
    "none": lambda: LogitsProcessorList(),
    "rowwise": lambda: LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(9)]),
    "text": lambda: LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7), TemperatureLogitsWarper(1.3)]),
}
KNOBS = {
    "constant": {"num_assistant_tokens_schedule": "constant"},
    "confidence": {"num_assistant_tokens_schedule": "confidence"},
    "threshold": {"assistant_confidence_threshold": 0.2},
    "two tokens": {"num_assistant_tokens_schedule": "constant", "num_assistant_tokens": 2},
}


def generator_for(target, draft, do_sample, processors, max_length=512):
    config = GenerationConfig(do_sample=do_sample, max_length=max_length)
    return DSparkCandidateGenerator(target, draft, config, processors)


@torch.no_grad()
def candidates(target, generator, text):
    """The first block after `text`, whose last token is the anchor, through transformers' protocol."""
    outputs = target(text[:, :-1], output_hidden_states=True)
    ids, logits = generator.get_candidates(
        text, model_kwargs={}, model_outputs=outputs, is_first_iteration=False, n_last_matches=0
    )
    return ids[:, text.shape[1] :], logits


def sampled_rows(monkeypatch):
    """Records what is drawn from, as (logits, tokens)."""
    drawn, draw_token = [], drawing.draw_token

    def spy(logits, do_sample):
        tokens, usable = draw_token(logits, do_sample)
        drawn.append((logits.clone(), tokens))
        return tokens, usable

    monkeypatch.setattr(drawing, "draw_token", spy)
    return drawn


def over_target_vocabulary(draft, rows):
    ids = draft.draft_token_ids()
    if ids is None or rows.shape[-1] == draft.config.vocab_size:
        return rows
    full = torch.full((*rows.shape[:-1], draft.config.vocab_size), float("-inf"))
    full[..., ids] = rows
    return full


@pytest.mark.parametrize("knobs", KNOBS)
@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("name", DRAFTS)
@torch.no_grad()
def test_logits_are_the_ones_sampled_from(monkeypatch, name, processors, knobs):
    target = tiny_target()
    build, overrides = DRAFTS[name]
    draft = build(**overrides) if build is random_draft else build(target, **overrides)
    spread_confidence(draft)
    draft.generation_config.update(**KNOBS[knobs])
    drawn, lengths = sampled_rows(monkeypatch), set()
    for seed in range(3):
        drawn.clear()
        text = random_prompt(12, seed)
        drafts, logits = candidates(target, generator_for(target, draft, True, PROCESSORS[processors]()), text)
        length = drafts.shape[1]
        lengths.add(length)
        if length == 0:
            assert logits is None
            continue
        assert logits.dtype == torch.float32
        assert logits.shape == (1, length, draft.config.vocab_size)
        for slot in range(length):
            row, _ = drawn[slot]
            assert torch.equal(logits[:, slot], over_target_vocabulary(draft, row))
        assert torch.isfinite(logits.gather(-1, drafts[..., None])).all()

        # The same from nothing: an uncached block along these drafts, then the processors, each on its own prefix.
        block = uncached_block(target, draft, text, drafts)
        for slot in range(length):
            prefix = torch.cat([text, drafts[:, :slot]], dim=1)
            row = over_target_vocabulary(draft, block.draft_logits[:, slot].float())
            assert_close(logits[:, slot], PROCESSORS[processors]()(prefix, row))
    assert max(lengths) > 0
    if knobs == "two tokens":
        assert lengths == {2}


@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_drafts_come_without_logits(name):
    target = tiny_target()
    build, overrides = DRAFTS[name]
    draft = build(**overrides) if build is random_draft else build(target, **overrides)
    draft.generation_config.update(**KNOBS["constant"])
    text = random_prompt(12)
    drafts, logits = candidates(target, generator_for(target, draft, False, LogitsProcessorList()), text)
    assert logits is None
    assert torch.equal(drafts, uncached_block(target, draft, text).token_ids)


def test_nothing_is_drafted_before_the_target_ran():
    target = tiny_target()
    generator = generator_for(target, oracle_draft(target), True, LogitsProcessorList())
    text = random_prompt(5)
    ids, logits = generator.get_candidates(
        text, model_kwargs={}, model_outputs=None, is_first_iteration=True, n_last_matches=0
    )
    assert ids is text
    assert logits is None


@pytest.mark.parametrize(("room", "expected"), [(0, 0), (1, 0), (2, 1), (4, 3), (5, 4), (9, 4)])
def test_drafts_leave_room_for_the_bonus_token(room, expected):
    target = tiny_target()
    draft = oracle_draft(target)
    draft.generation_config.update(**KNOBS["constant"])
    text = random_prompt(6)
    generator = generator_for(target, draft, True, LogitsProcessorList(), max_length=6 + room)
    drafts, logits = candidates(target, generator, text)
    assert drafts.shape[1] == expected
    assert (logits is None) == (expected == 0)


# Under transformers' own assisted loop.


@pytest.fixture
def stock_loop(monkeypatch):
    """`generate` runs transformers' loop; only the drafting half is ours."""
    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", integration._originals["_assisted_decoding"])
    calls, right = [], DSparkCandidateGenerator.get_candidates

    def spy(self, *args, **kwargs):
        ids, logits = right(self, *args, **kwargs)
        calls.append(ids.shape[1] - args[0].shape[1])
        return ids, logits

    monkeypatch.setattr(DSparkCandidateGenerator, "get_candidates", spy)
    return calls


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("kind", ["llama_tied", "mistral"])
def test_stock_loop_is_greedy_exact(stock_loop, kind, name):
    target = tiny_target(kind)
    build, overrides = DRAFTS[name]
    draft = build(**overrides) if build is random_draft else build(target, **overrides)
    for seed in range(2):
        prompt = random_prompt(4 + 11 * seed, seed)
        plain = target.generate(prompt, do_sample=False, max_new_tokens=20)
        with collect_rounds() as stats:
            drafted = target.generate(prompt, do_sample=False, max_new_tokens=20, assistant_model=draft)
        assert torch.equal(plain, drafted)
        assert stats.num_rounds == 0, "our own loop ran"
    assert sum(stock_loop) > 0
    if build is oracle_draft:
        assert len(stock_loop) < 40, "nothing was accepted"


def test_stock_loop_gives_returned_logits_per_token(stock_loop):
    target = tiny_target()
    kwargs = {"do_sample": False, "max_new_tokens": 20, "return_dict_in_generate": True, "output_logits": True}
    plain = target.generate(random_prompt(9), **kwargs)
    drafted = target.generate(random_prompt(9), assistant_model=oracle_draft(target), **kwargs)
    assert torch.equal(plain.sequences, drafted.sequences)
    assert_close(torch.cat(drafted.logits), torch.cat(plain.logits))
    assert sum(stock_loop) > 0


@pytest.mark.parametrize("knobs", ["constant", "confidence"])
def test_stock_loop_samples_the_targets_distribution(stock_loop, knobs):
    target, draft = sampling_pair(0.0, noise=0.8)
    spread_confidence(draft, 4.0)
    draft.generation_config.update(**KNOBS[knobs])
    prompt = torch.tensor([[3]])
    kwargs = {"do_sample": True, "max_new_tokens": 1_000, "assistant_model": draft, "temperature": 0.6, "top_k": 8}
    text = target.generate(prompt, **kwargs)[0].tolist()
    assert len(stock_loop) < 800
    logits = target(torch.arange(VOCAB_SIZE)[:, None]).logits[:, -1].float()
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.6), TopKLogitsWarper(8)])
    expected = processors(torch.arange(VOCAB_SIZE)[:, None], logits).softmax(-1)
    assert transition_p_value(text, expected) > ALPHA


def test_no_state_is_left_on_the_draft():
    target = tiny_target()
    draft = oracle_draft(target)
    before = copy.deepcopy({key: value for key, value in vars(draft).items() if not key.startswith("_")})
    first = target.generate(random_prompt(9), do_sample=False, max_new_tokens=12, assistant_model=draft)
    after = {key: value for key, value in vars(draft).items() if not key.startswith("_")}
    assert set(after) == set(before)
    assert after["generation_config"].to_dict() == before["generation_config"].to_dict()
    again = target.generate(random_prompt(9), do_sample=False, max_new_tokens=12, assistant_model=draft)
    assert torch.equal(first, again)
