# SPDX-License-Identifier: Apache-2.0
"""What `generate(assistant_model=draft)` returns: lengths, scores, states, statistics; and that it prints nothing."""

import pytest
import torch
from transformers import GenerationConfig

import dspark_hf
from dspark_hf._compat import CACHE_KEY
from dspark_hf.decoding.hopeless import HOPELESS_ROUNDS
from tests.support.closeness import assert_close
from tests.support.models import random_prompt
from tests.support.scripted import (
    NUM_NEW,
    ForwardCounter,
    assert_same_cache,
    captured_log,
    expected_accepted,
    generate,
    lively_target,
    num_accepted,
    scripted_draft,
    text_of,
)


@pytest.fixture(scope="module")
def plain(target, prompt):
    text = target.generate(prompt, do_sample=False, max_new_tokens=NUM_NEW)
    assert len(set(text[0, 11:].tolist())) > 5  # a text that repeats one token would prove nothing
    return text


# The text


def test_scripted_draft_is_accepted_as_computed_by_hand(target, prompt, plain, draft):
    # 11 tokens and the prefill's one. Positions 12, 15, ... are spoiled: nothing of the first block is accepted, two
    # of each later one. The last token is the target's own.
    assert expected_accepted(11, NUM_NEW) == [0, 2, 2, 2, 2, 2, 0]
    with dspark_hf.collect_rounds() as stats:
        text = generate(target, prompt, draft)
    assert torch.equal(text, plain)
    assert num_accepted(stats) == [0, 2, 2, 2, 2, 2, 0]
    assert [record.verify_length for record in stats.rounds] == [4, 4, 4, 4, 4, 3, 0]


@pytest.mark.parametrize("num_new", range(1, 9))
@pytest.mark.parametrize("spoil", [1, 3, 1000])
def test_length_is_exact(target, prompt, plain, num_new, spoil):
    draft = scripted_draft(target, plain, spoil=spoil)
    output = generate(
        target,
        prompt,
        draft,
        max_new_tokens=num_new,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    assert torch.equal(output.sequences, plain[:, : 11 + num_new])
    assert len(output.scores) == len(output.logits) == num_new
    assert num_accepted(output.acceptance_stats) == expected_accepted(11, num_new, spoil=spoil)


def test_no_forward_is_wasted(target, prompt, plain):
    # A perfect draft of 4 slots: 1 token of the prefill, then 5 per round, the last round cut to what is left.
    draft = scripted_draft(target, plain, spoil=1000)
    with ForwardCounter(target) as forwards:
        generate(target, prompt, draft, max_new_tokens=13)
    assert forwards.count == 1 + 3
    assert [call["input_ids"].shape[1] for call in forwards.calls] == [11, 5, 5, 2]


@pytest.mark.parametrize("max_length", [12, 13, 20])
def test_max_length(target, prompt, plain, draft, max_length):
    text = target.generate(prompt, do_sample=False, max_length=max_length, assistant_model=draft)
    assert torch.equal(text, plain[:, :max_length])


def test_one_token_prompt(target):
    prompt = random_prompt(1)
    plain = generate(target, prompt)
    text = generate(target, prompt, scripted_draft(target, plain))
    assert torch.equal(text, plain)


def test_prompt_from_bos_alone(target):
    plain = target.generate(do_sample=False, max_new_tokens=NUM_NEW)
    text = target.generate(do_sample=False, max_new_tokens=NUM_NEW, assistant_model=scripted_draft(target, plain))
    assert torch.equal(text, plain)


def test_no_eos_configured_anywhere(prompt, plain):
    target = lively_target()
    target.config.eos_token_id = None
    target.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
    text = generate(target, prompt, scripted_draft(target, plain, eos_token_id=None))
    assert torch.equal(text, plain)


@pytest.mark.parametrize("place", range(12, 24))
def test_eos_at_every_place_of_a_block(target, prompt, plain, draft, place):
    eos_token_id = int(plain[0, place])
    expected = generate(target, prompt, eos_token_id=eos_token_id, return_dict_in_generate=True)
    output = generate(target, prompt, draft, eos_token_id=eos_token_id, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected.sequences)
    assert output.sequences.shape[1] <= place + 1
    assert_same_cache(output[CACHE_KEY], expected[CACHE_KEY])


def test_several_eos_ids(target, prompt, plain, draft):
    eos_token_id = [int(plain[0, 20]), int(plain[0, 17]), 95]
    expected = generate(target, prompt, eos_token_id=eos_token_id)
    assert torch.equal(generate(target, prompt, draft, eos_token_id=eos_token_id), expected)


# What comes with it


def test_outputs_equal_those_of_plain_generation(prompt):
    target = lively_target()
    target.set_attn_implementation("eager")
    wanted = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
        "output_attentions": True,
        "repetition_penalty": 1.3,  # so that scores and logits are not the same
    }
    expected = generate(target, prompt, **wanted)
    draft = scripted_draft(target, expected.sequences)
    output = generate(target, prompt, draft, **wanted)

    assert isinstance(output, dspark_hf.DSparkGenerateOutput)
    assert num_accepted(output.acceptance_stats) == expected_accepted(11, NUM_NEW)
    assert torch.equal(output.sequences, expected.sequences)
    for name in ("scores", "logits"):
        ours, theirs = getattr(output, name), getattr(expected, name)
        assert len(ours) == len(theirs) == NUM_NEW
        for entry, expected_entry in zip(ours, theirs, strict=True):
            assert entry.dtype == expected_entry.dtype
            assert_close(entry, expected_entry)
    assert not torch.equal(output.scores[0], output.logits[0])
    for name in ("hidden_states", "attentions"):
        ours, theirs = getattr(output, name), getattr(expected, name)
        assert len(ours) == len(theirs) == NUM_NEW
        for entry, expected_entry in zip(ours, theirs, strict=True):
            assert len(entry) == len(expected_entry)
            for layer, expected_layer in zip(entry, expected_entry, strict=True):
                assert_close(layer, expected_layer)


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_attentions_of_windowed_targets(kind, prompt):
    target = lively_target(kind)
    target.set_attn_implementation("eager")
    wanted = {"return_dict_in_generate": True, "output_attentions": True}
    expected = generate(target, prompt, **wanted)
    output = generate(target, prompt, scripted_draft(target, expected.sequences), **wanted)
    assert torch.equal(output.sequences, expected.sequences)
    for entry, expected_entry in zip(output.attentions, expected.attentions, strict=True):
        for layer, expected_layer in zip(entry, expected_entry, strict=True):
            # The window of a block starts before that of its later tokens: keys in front of theirs have no weight.
            num_front = layer.shape[-1] - expected_layer.shape[-1]
            assert 0 <= num_front < 5
            assert not layer[..., :num_front].any()
            assert_close(layer[..., num_front:], expected_layer)


def test_attentions_asked_of_an_implementation_that_has_none(target, prompt, plain, draft):
    wanted = {"return_dict_in_generate": True, "output_attentions": True}
    expected = generate(target, prompt, **wanted)
    output = generate(target, prompt, draft, **wanted)
    assert torch.equal(output.sequences, plain)
    assert [len(entry) for entry in output.attentions or ()] == [len(entry) for entry in expected.attentions]


def test_outputs_are_none_unless_asked_for(target, prompt, draft):
    output = generate(target, prompt, draft, return_dict_in_generate=True)
    assert output.scores is output.logits is output.hidden_states is output.attentions is None
    assert output[CACHE_KEY].get_seq_length() == 11 + NUM_NEW - 1
    assert set(output.keys()) == {"sequences", CACHE_KEY, "acceptance_stats"}


def test_output_scores_alone_return_a_tensor(target, prompt, plain, draft):
    # Without `return_dict_in_generate` they are ignored, as in plain generation.
    text = generate(target, prompt, draft, output_scores=True, output_hidden_states=True)
    assert torch.equal(text, plain)


def test_transition_scores(target, prompt, draft):
    wanted = {"return_dict_in_generate": True, "output_scores": True}
    expected, output = generate(target, prompt, **wanted), generate(target, prompt, draft, **wanted)
    scores = target.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
    expected_scores = target.compute_transition_scores(expected.sequences, expected.scores, normalize_logits=True)
    assert_close(scores, expected_scores)


# Statistics


def test_statistics_agree_with_the_text(target, prompt, plain, draft):
    with dspark_hf.collect_rounds() as stats:
        output = generate(target, prompt, draft, return_dict_in_generate=True)
    assert output.acceptance_stats.rounds == stats.rounds
    new_tokens = output.sequences[0, 11:].tolist()
    assert 1 + stats.num_committed == len(new_tokens) == NUM_NEW
    assert new_tokens[1:] == text_of(stats)
    place = 11
    for record in stats.rounds:
        assert record.anchor_id == output.sequences[0, place]
        assert record.num_accepted <= record.verify_length <= 4
        assert 1 <= record.num_committed <= record.accepted_length
        assert 0 < record.draft_s + record.verify_s <= record.round_s
        place += record.num_committed
    assert stats.accepted_length == pytest.approx((NUM_NEW - 1) / stats.num_rounds)
    assert stats.num_verified == stats.num_drafted + stats.num_rounds


def test_statistics_of_a_round_that_eos_cuts(target, prompt, plain, draft):
    eos_token_id = int(plain[0, 13])
    with dspark_hf.collect_rounds() as stats:
        text = generate(target, prompt, draft, eos_token_id=eos_token_id)
    assert 1 + stats.num_committed == text.shape[1] - 11
    assert text[0, 12:].tolist() == text_of(stats)


def test_statistics_of_no_rounds(target, prompt, draft):
    output = generate(target, prompt, draft, max_new_tokens=1, return_dict_in_generate=True)
    assert output.acceptance_stats.rounds == []


def test_collectors_nest_and_add_up(target, prompt, draft):
    with dspark_hf.collect_rounds() as outer:
        generate(target, prompt, draft)
        with dspark_hf.collect_rounds() as inner:
            generate(target, prompt, draft, max_new_tokens=5)
    generate(target, prompt, draft)  # outside: counted nowhere
    assert 1 + inner.num_committed == 5
    assert 2 + outer.num_committed == NUM_NEW + 5


def test_plain_generation_is_not_counted(target, prompt):
    with dspark_hf.collect_rounds() as stats:
        generate(target, prompt)
    assert stats.rounds == []


# Silence, and the one warning


def test_nothing_is_printed(target, prompt, draft, capfd):
    with captured_log() as messages:
        generate(target, prompt, draft)
        generate(target, prompt, draft, do_sample=True, max_new_tokens=8)
    assert capfd.readouterr() == ("", "")
    assert messages == []


def test_a_draft_that_is_never_accepted_warns_with_the_causes_and_the_figures_of_the_call(target, prompt, plain):
    draft = scripted_draft(target, plain, spoil=1)
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    with captured_log() as messages:
        text = generate(target, prompt, draft)
        for count in (HOPELESS_ROUNDS + 2, HOPELESS_ROUNDS + 7):
            generate(target, prompt, draft, max_new_tokens=count)
    assert torch.equal(text, plain)
    # The prefill and the last round send no drafts; the first call is too short to say anything.
    assert [message.split(":")[1].split(",")[0] for message in messages] == [
        f" {count} rounds of this call sent drafts and brought 1.00 tokens each"
        for count in (HOPELESS_ROUNDS, HOPELESS_ROUNDS + 5)
    ]
    for part in ("almost never accepted", "another target", "template", "layer ids", "still decides every token"):
        assert part in messages[0]


def test_a_short_text_or_a_fair_draft_does_not_warn(target, prompt, plain, draft):
    hopeless = scripted_draft(target, plain, spoil=1)
    with captured_log() as messages:
        generate(target, prompt, hopeless, max_new_tokens=8)
        generate(target, prompt, draft, max_new_tokens=64)
    assert messages == []
