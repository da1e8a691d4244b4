# SPDX-License-Identifier: Apache-2.0
"""The drafting half with an Eagle3 draft: one token at a time, from the target's states as far as they are known."""

import re

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import SuppressTokensLogitsProcessor

import dspark_hf
from dspark_hf import collect_rounds, generate_many
from dspark_hf._compat import CACHE_KEY, LIBRARY_DEFAULTS
from dspark_hf.decoding.eagle3_drafter import Eagle3CandidateGenerator, resolve_eagle3
from dspark_hf.scheduling import CopyOptions
from tests.support.closeness import assert_close, assert_differs
from tests.support.drafting import OneText
from tests.support.eagle3 import oracle_eagle3, random_eagle3, tiny_eagle3_config, uncached_chain
from tests.support.models import random_prompt, tiny_target


BIGRAM = 0.003  # how little else than the last token counts in a target that the oracle knows


def build(target, draft, processors=None, **config):
    config = GenerationConfig(**({"do_sample": False, "max_length": 512} | config))
    return Eagle3CandidateGenerator(target, draft, config, processors)


@torch.no_grad()
def hidden_states(target, ids, **kwargs):
    return target(ids, output_hidden_states=True, **kwargs).hidden_states


# Context


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_chain_follows_the_context_of_many_rounds(attention):
    """Context arrives in pieces, as rounds commit it; a piece without a proposal waits for the next one."""
    target, draft = tiny_target(), random_eagle3(target_layer_ids=[2, -1])
    draft.set_attn_implementation(attention)
    generator, text = OneText(build(target, draft)), random_prompt(20)
    states = hidden_states(target, text)
    start, chains = 0, []
    for end, draws in ((7, True), (8, False), (11, False), (12, True), (17, True)):
        generator.add_context(tuple(layer[:, start:end] for layer in states), end - start, {})
        start = end
        if draws:
            proposal = generator.propose(text[:, : end + 1])
            chains.append(uncached_chain(target, draft, text[:, : end + 1], 4).token_ids)
            assert torch.equal(proposal.token_ids, chains[-1])
            assert (proposal.draft_logits, proposal.confidence, proposal.drafted) == (None, (), True)
            assert generator.drafter._cache.get_seq_length() == end, "drafts are left in the cache"
    assert not torch.equal(chains[0], chains[1])


@torch.no_grad()
def test_rows_of_rejected_drafts_are_no_context():
    target, draft = tiny_target(), random_eagle3()
    text = random_prompt(10)
    generator = OneText(build(target, draft))
    generator.add_context(hidden_states(target, text), 6, {})
    expected = uncached_chain(target, draft, text[:, :7], 4)
    assert torch.equal(generator.propose(text[:, :7]).token_ids, expected.token_ids)


@torch.no_grad()
def test_target_states_take_the_place_of_the_drafts_own():
    """After a round, the accepted drafts are read again, with the states that the target has for them."""
    target = tiny_target(context_scale=BIGRAM)
    draft = oracle_eagle3(target)
    with torch.no_grad():
        draft.fc.weight.normal_(std=0.1)
    text = random_prompt(9)
    generator = OneText(build(target, draft, num_assistant_tokens=3))
    generator.add_context(hidden_states(target, text[:, :-1]), 8, {})
    drafts = generator.propose(text).token_ids
    longer = torch.cat([text, drafts, drafts[:, :1]], dim=1)  # two accepted drafts, another one as bonus token
    states = hidden_states(target, longer[:, :11])
    generator.add_context(tuple(layer[:, 8:] for layer in states), 3, {})
    chain = uncached_chain(target, draft, longer[:, :12], 3)
    assert torch.equal(generator.propose(longer[:, :12]).token_ids, chain.token_ids)
    assert generator.drafter._cache.get_seq_length() == 11


@torch.no_grad()
@pytest.mark.parametrize("num_pads", [1, 4])
def test_left_padding_is_no_context(num_pads):
    target, draft = tiny_target(), random_eagle3()
    text = random_prompt(9)
    padded = torch.cat([torch.zeros(1, num_pads, dtype=torch.long), text], dim=1)
    mask = (torch.arange(9 + num_pads) >= num_pads).long()[None]
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    states = hidden_states(target, padded[:, :-1], attention_mask=mask[:, :-1], position_ids=position_ids[:, :-1])
    generator = OneText(build(target, draft))
    generator.add_context(states, num_pads + 8, {"attention_mask": mask, "position_ids": position_ids})
    assert torch.equal(generator.propose(padded).token_ids, uncached_chain(target, draft, text, 4).token_ids)
    assert generator.drafter._cache.get_seq_length() == 8


@torch.no_grad()
@pytest.mark.parametrize("num_pads", [1, 4])
def test_padding_that_waits_has_no_positions(num_pads):
    """A padded prompt that is not read at once: what follows it continues its positions, not those of its padding."""
    target, draft = tiny_target(), random_eagle3()
    text = random_prompt(9)
    padded = torch.cat([torch.zeros(1, num_pads, dtype=torch.long), text], dim=1)
    mask = (torch.arange(9 + num_pads) >= num_pads).long()[None]
    states = hidden_states(target, text[:, :-1])
    with_pads = tuple(torch.nn.functional.pad(layer, (0, 0, num_pads, 0)) for layer in states)
    generator, end = OneText(build(target, draft, do_sample=True)), num_pads + 5
    generator.add_context(tuple(layer[:, :end] for layer in with_pads), end, {"attention_mask": mask[:, : end + 1]})
    generator.add_context(tuple(layer[:, end:] for layer in with_pads), 3, {})
    assert_close(
        generator.propose(padded).draft_logits[:, 0], uncached_chain(target, draft, text, 1).draft_logits[:, 0]
    )


@torch.no_grad()
def test_text_positions_come_first_in_multimodal_ones():
    target, draft = tiny_target(), random_eagle3()
    text = random_prompt(9)
    states = hidden_states(target, text[:, :-1])
    positions = torch.stack([torch.arange(9)[None] + 5, *(torch.randint(0, 50, (1, 9)) for _ in range(3))])
    drawn = []
    for given in (positions, positions.flip(0)):
        generator = OneText(build(target, draft, do_sample=True))
        generator.add_context(states, 8, {"position_ids": given})
        drawn.append(generator.propose(text).draft_logits[:, 0])
    expected = uncached_chain(target, draft, text, 1).draft_logits[:, 0]
    assert_close(drawn[0], expected)
    assert_differs(drawn[1], expected)


def test_prompt_of_embeddings_has_no_ids_to_read():
    """What comes after its tokens is not known, but for the last: the draft begins there."""
    target = tiny_target(context_scale=BIGRAM)
    draft = oracle_eagle3(target)
    embeds = target.get_input_embeddings()(random_prompt(9))
    plain = target.generate(inputs_embeds=embeds, do_sample=False, max_new_tokens=16)
    with collect_rounds() as stats:
        drafted = target.generate(inputs_embeds=embeds, do_sample=False, max_new_tokens=16, assistant_model=draft)
    assert torch.equal(plain, drafted)
    assert stats.accepted_length > 2


def test_chat_cache_is_continued():
    target = tiny_target(context_scale=BIGRAM)
    draft = oracle_eagle3(target)
    text, texts = random_prompt(9), []
    for assistant in (None, draft):
        first = target.generate(
            text, do_sample=False, max_new_tokens=8, assistant_model=assistant, return_dict_in_generate=True
        )
        longer = torch.cat([first.sequences, random_prompt(5, seed=8)], dim=1)
        with collect_rounds() as stats:
            kwargs = {"assistant_model": assistant, CACHE_KEY: first[CACHE_KEY]}
            texts.append(target.generate(longer, do_sample=False, max_new_tokens=12, **kwargs))
    assert torch.equal(*texts)
    assert stats.accepted_length > 2


# Length and end


@pytest.mark.parametrize(("room", "expected"), [(0, 0), (1, 0), (2, 1), (4, 3), (5, 4), (9, 4)])
@torch.no_grad()
def test_drafts_leave_room_for_the_bonus_token(room, expected):
    target, draft = tiny_target(), random_eagle3()
    text = random_prompt(6)
    of_call, own = OneText(build(target, draft, max_length=6 + room)), OneText(build(target, draft))
    own.request.max_length = 6 + room
    for generator in (of_call, own):
        generator.add_context(hidden_states(target, text[:, :-1]), 5, {})
        proposal = generator.propose(text)
        assert proposal.token_ids.shape == (1, expected)
        assert proposal.drafted == (expected > 0)


@torch.no_grad()
def test_nothing_is_sent_after_an_eos():
    target, draft = tiny_target(), random_eagle3()
    text = random_prompt(9)
    chain = uncached_chain(target, draft, text, 4).token_ids[0].tolist()
    assert len(set(chain)) > 2
    for eos, expected in (([chain[0]], 1), ([chain[2], 90], 1 + chain.index(chain[2])), ([95], 4)):
        config = GenerationConfig(do_sample=False, max_length=512)
        config._eos_token_tensor = torch.tensor(eos)
        generator = OneText(Eagle3CandidateGenerator(target, draft, config))
        generator.add_context(hidden_states(target, text[:, :-1]), 8, {})
        assert generator.propose(text).token_ids[0].tolist() == chain[:expected]


@torch.no_grad()
def test_a_constraint_outside_a_reduced_vocabulary_ends_the_drafts():
    target, draft = tiny_target(), random_eagle3(draft_vocab_size=48)
    text = random_prompt(9)
    generator = OneText(build(target, draft, [SuppressTokensLogitsProcessor(draft.draft_token_ids().tolist())]))
    generator.add_context(hidden_states(target, text[:, :-1]), 8, {})
    proposal = generator.propose(text)
    assert (proposal.token_ids.shape, proposal.draft_logits) == ((1, 0), None)
    assert generator.drafter._cache.get_seq_length() == 8


# Knobs


def test_number_of_drafts():
    config, unset = tiny_eagle3_config(), GenerationConfig()
    merged = GenerationConfig(**LIBRARY_DEFAULTS)
    assert LIBRARY_DEFAULTS["num_assistant_tokens"] == 20
    assert resolve_eagle3(config, unset) == resolve_eagle3(config, unset, merged) == (4, CopyOptions())
    own, call = GenerationConfig(num_assistant_tokens=6), GenerationConfig(num_assistant_tokens=2)
    assert resolve_eagle3(config, own, merged) == (6, CopyOptions())
    assert resolve_eagle3(config, own, call) == (2, CopyOptions())
    constant = GenerationConfig(num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0)
    assert resolve_eagle3(config, constant, merged) == (4, None)


WRONG_KNOBS = [
    ({"num_assistant_tokens": 0}, "`num_assistant_tokens` must be an integer >= 1, got 0"),
    ({"num_assistant_tokens": 2.5}, "`num_assistant_tokens` must be an integer >= 1, got 2.5"),
    ({"num_assistant_tokens": True}, "`num_assistant_tokens` must be an integer >= 1, got True"),
    ({"assistant_confidence_threshold": 0.3}, "needs a confidence head, which Eagle3 drafts do not have; got 0.3"),
    ({"num_assistant_tokens_schedule": "hardware"}, "must be 'constant' with an Eagle3 draft, got 'hardware'"),
]


@pytest.mark.parametrize(("knobs", "message"), WRONG_KNOBS, ids=[str(knobs) for knobs, _ in WRONG_KNOBS])
def test_wrong_knobs_are_refused_before_anything_runs(monkeypatch, knobs, message):
    target, draft = tiny_target(), random_eagle3()
    draft.bind_target(target)  # which probes it
    monkeypatch.setattr(type(target), "forward", lambda *args, **kwargs: pytest.fail("the target ran"))
    draft.generation_config.update(**knobs)
    with pytest.raises(ValueError, match=re.escape(message)):
        target.generate(random_prompt(4), do_sample=False, max_new_tokens=4, assistant_model=draft)


def test_drafts_may_be_deeper_than_trained():
    target = tiny_target(context_scale=BIGRAM)
    draft = oracle_eagle3(target, noise=0.0)
    with collect_rounds() as stats:
        target.generate(
            random_prompt(9), do_sample=False, max_new_tokens=24, assistant_model=draft, num_assistant_tokens=9
        )
    assert max(record.num_accepted for record in stats.rounds) > draft.config.ttt_length
    assert {record.verify_length for record in stats.rounds} <= set(range(10))


# One row at a time


def test_batches_are_refused_before_anything_runs(monkeypatch):
    target, draft = tiny_target(), random_eagle3()
    draft.bind_target(target)  # which probes it
    monkeypatch.setattr(type(target), "forward", lambda *args, **kwargs: pytest.fail("the target ran"))
    kwargs = {"do_sample": True, "max_new_tokens": 4, "assistant_model": draft}
    with pytest.raises(NotImplementedError, match="Eagle3 drafts one row at a time, got 2 rows"):
        target.generate(random_prompt(4).expand(2, -1), **kwargs)
    with pytest.raises(NotImplementedError, match="Eagle3 drafts one row at a time, got 3 rows"):
        target.generate(random_prompt(4), num_return_sequences=3, **kwargs)
    with pytest.raises(NotImplementedError, match="Eagle3 drafts one row at a time, got rows that wait"):
        generate_many(target, draft, [random_prompt(4)[0]] * 2, max_batch=1, max_new_tokens=4)


def test_generator_holds_one_request():
    generator = build(tiny_target(), random_eagle3())
    request = generator._stock_request(random_prompt(4))
    generator.keep_requests([])
    with pytest.raises(NotImplementedError, match="got 2 rows"):
        generator.add_requests([request])


# The rest of the interface


@torch.no_grad()
def test_target_without_hidden_states_is_refused():
    target = tiny_target()
    generator = build(target, random_eagle3())
    states = hidden_states(target, random_prompt(5))
    generator.check_hidden_states(states)
    for wrong in ((), (states[0], None, states[2], states[3], states[4])):
        with pytest.raises(ValueError, match=r"returned no hidden states for `target_layer_ids` \[0, 2\]"):
            generator.check_hidden_states(wrong)
    with pytest.raises(ValueError, match="hidden states of 2 dimensions"):
        generator.check_hidden_states(tuple(layer[0] for layer in states))


def test_generator_is_built_by_the_kind_of_the_draft():
    target, draft = tiny_target(), random_eagle3()
    generator = target._get_candidate_generator(
        generation_config=GenerationConfig(do_sample=False, max_length=20),
        input_ids=random_prompt(4),
        inputs_tensor=random_prompt(4),
        assistant_model=draft,
        logits_processor=None,
        model_kwargs={},
    )
    assert type(generator) is Eagle3CandidateGenerator
    assert generator.needs_curve is False
    assert generator.requires_model_outputs is True


def test_disabled_a_draft_is_no_assistant():
    target, draft = tiny_target(), random_eagle3()
    dspark_hf.disable()
    with pytest.raises(Exception, match=r".+"):
        target.generate(random_prompt(4), do_sample=False, max_new_tokens=4, assistant_model=draft)


def test_draft_without_weights_is_refused():
    with torch.device("meta"):
        draft = random_eagle3()
    with pytest.raises(ValueError, match=r"Load it with Eagle3DraftModel\.from_pretrained"):
        tiny_target().generate(random_prompt(4), do_sample=False, max_new_tokens=4, assistant_model=draft)


def test_statistics_of_a_call():
    target = tiny_target(context_scale=BIGRAM)
    draft = oracle_eagle3(target)
    output = target.generate(
        random_prompt(9), do_sample=False, max_new_tokens=24, assistant_model=draft, return_dict_in_generate=True
    )
    stats = output.acceptance_stats
    assert stats.num_committed == 23  # the prefill made the first
    assert 2 < stats.accepted_length == 23 / stats.num_rounds <= 5
    assert 0 < stats.acceptance_rate < 1
    assert all(0 <= share <= 1 for share in stats.conditional_acceptance)
    assert len(stats.conditional_acceptance) == 4
    assert stats.draft_s > 0
    assert all(record.confidence == () for record in stats.rounds)


def test_no_state_is_left_on_the_draft():
    target = tiny_target(context_scale=BIGRAM)
    draft = oracle_eagle3(target)
    before = {key: value for key, value in vars(draft).items() if not key.startswith("_")}
    texts = [
        target.generate(random_prompt(9), do_sample=False, max_new_tokens=12, assistant_model=draft) for _ in range(2)
    ]
    assert {key: value for key, value in vars(draft).items() if not key.startswith("_")} == before
    assert torch.equal(*texts)
