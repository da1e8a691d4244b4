# SPDX-License-Identifier: Apache-2.0
"""The knobs of drafting: the call's values, then the draft's, then the defaults. transformers' own do not count."""

import pytest
import torch
from transformers import GenerationConfig

import dspark_hf
from tests.support.closeness import assert_close
from tests.support.scripted import (
    NUM_NEW,
    captured_log,
    expected_accepted,
    lively_target,
    num_accepted,
    scripted_draft,
)


@pytest.fixture
def draft(target, plain):
    """Accepts everything, so that what is sent shows; with confidences of 0.9, 0.8, 0.7, 0.6 in every block."""
    draft = scripted_draft(target, plain, spoil=1000)
    draft.confidence_head = FixedConfidence()
    return draft


class FixedConfidence(torch.nn.Module):
    def forward(self, hidden, embedding=None):
        return torch.logit(torch.tensor([[0.9, 0.8, 0.7, 0.6]])[:, : hidden.shape[1]])


def sent(target, prompt, draft, plain, **kwargs):
    """Drafts sent per round, where there was room for a whole block."""
    if "generation_config" not in kwargs:
        kwargs = {"do_sample": False, "max_new_tokens": NUM_NEW} | kwargs
    with dspark_hf.collect_rounds() as stats:
        text = target.generate(prompt, assistant_model=draft, **kwargs)
    assert torch.equal(text, plain)
    lengths, room = [], NUM_NEW - 1
    for record in stats.rounds:
        if room > 4:
            lengths.append(record.verify_length)
        room -= record.num_committed
    return lengths


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("where", ["call", "call_config", "target_config", "draft_config"])
def test_num_assistant_tokens(target, prompt, plain, draft, num_tokens, where):
    kwargs = {}
    if where == "call":
        kwargs = {"num_assistant_tokens": num_tokens}
    elif where == "call_config":
        config = GenerationConfig(num_assistant_tokens=num_tokens, do_sample=False, max_new_tokens=NUM_NEW)
        kwargs = {"generation_config": config}
    elif where == "target_config":
        target = lively_target()
        target.generation_config.num_assistant_tokens = num_tokens
    else:
        draft.generation_config.num_assistant_tokens = num_tokens
    lengths = sent(target, prompt, draft, plain, **kwargs)
    assert set(lengths) == {num_tokens}


def test_the_call_beats_the_draft(target, prompt, plain, draft):
    draft.generation_config.num_assistant_tokens = 3
    assert set(sent(target, prompt, draft, plain, num_assistant_tokens=1)) == {1}
    assert set(sent(target, prompt, draft, plain)) == {3}  # and only for that call


def test_library_defaults_are_nobodys_choice(target, prompt, plain, draft):
    # transformers puts 20 tokens, a threshold of 0.4 and "constant" into every call.
    draft.generation_config.num_assistant_tokens = 2
    defaults = {
        "num_assistant_tokens": 20,
        "assistant_confidence_threshold": 0.4,
        "num_assistant_tokens_schedule": "constant",
    }
    assert set(sent(target, prompt, draft, plain, **defaults)) == {2}
    draft.generation_config.num_assistant_tokens = None
    draft.generation_config.assistant_confidence_threshold = 0.75
    assert set(sent(target, prompt, draft, plain, **defaults)) == {2}


def test_nothing_chosen_sends_what_pays(target, prompt, plain, draft):
    draft.generation_config = GenerationConfig()
    assert min(sent(target, prompt, draft, plain)) >= 1


@pytest.mark.parametrize(
    ("threshold", "length"),
    # The slot whose confidence falls below the threshold is not sent; that of 0 cuts nothing, that of 1 sends nothing.
    [(0.0, 4), (0.5, 4), (0.65, 3), (0.75, 2), (0.85, 1), (0.95, 0), (1.0, 0)],
)
@pytest.mark.parametrize("where", ["call", "draft_config"])
def test_confidence_threshold(target, prompt, plain, draft, threshold, length, where):
    kwargs = {}
    if where == "call":
        kwargs = {"assistant_confidence_threshold": threshold}
    else:
        draft.generation_config.assistant_confidence_threshold = threshold
    assert set(sent(target, prompt, draft, plain, **kwargs)) == {length}


def test_threshold_and_number_together(target, prompt, plain, draft):
    kwargs = {"assistant_confidence_threshold": 0.65}
    assert set(sent(target, prompt, draft, plain, num_assistant_tokens=2, **kwargs)) == {2}
    assert set(sent(target, prompt, draft, plain, num_assistant_tokens=4, **kwargs)) == {3}


def test_confidences_of_cut_slots_are_recorded(target, prompt, plain, draft):
    with dspark_hf.collect_rounds() as stats:
        target.generate(
            prompt, assistant_model=draft, do_sample=False, max_new_tokens=NUM_NEW, assistant_confidence_threshold=0.75
        )
    assert stats.rounds[0].verify_length == 2
    assert_close(stats.rounds[0].confidence, [0.9, 0.8, 0.7, 0.6])


def test_constant_schedule_always_sends_the_block(target, prompt, plain, draft):
    draft.confidence_head = None
    draft.config.enable_confidence_head = False
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    assert set(sent(target, prompt, draft, plain)) == {4}


def test_adaptive_schedule_sends_less_of_what_is_not_accepted(target, prompt, plain):
    hopeless = scripted_draft(target, plain, spoil=1)
    hopeless.generation_config.num_assistant_tokens_schedule = "confidence"
    with dspark_hf.collect_rounds() as stats:  # sampled, where the clock has no say
        text = target.generate(prompt, assistant_model=hopeless, do_sample=True, top_k=1, max_new_tokens=NUM_NEW)
    assert torch.equal(text, plain)
    lengths = [record.verify_length for record in stats.rounds]
    assert sum(lengths[-8:-2]) < sum(lengths[:6])


def test_knobs_survive_saving(target, prompt, plain, tmp_path):
    draft = scripted_draft(target, plain, spoil=1000)
    draft.generation_config.num_assistant_tokens = 2
    draft.generation_config.assistant_confidence_threshold = 0.0
    draft.save_pretrained(tmp_path)
    loaded = type(draft).from_pretrained(tmp_path)
    loaded.script, loaded.spoil = draft.script, draft.spoil
    assert set(sent(target, prompt, loaded, plain)) == {2}


def test_block_size_of_one(target, prompt, plain):
    draft = scripted_draft(target, plain, block_size=1)
    assert set(sent(target, prompt, draft, plain)) == {1}


def test_slots_that_start_after_the_anchor(target, prompt, plain):
    # Slot 0 repeats the anchor and is dropped: three drafts of a block of four.
    draft = scripted_draft(target, plain, sample_from_anchor=False)
    with dspark_hf.collect_rounds() as stats:
        text = target.generate(prompt, assistant_model=draft, do_sample=False, max_new_tokens=NUM_NEW)
    assert torch.equal(text, plain)
    assert num_accepted(stats) == expected_accepted(11, NUM_NEW, block_size=3)


def test_options_of_other_assistants_are_ignored(target, prompt, plain, draft):
    others = {"assistant_lookbehind": 3, "target_lookbehind": 3, "max_matching_ngram_size": 4}
    assert set(sent(target, prompt, draft, plain, **others)) == {4}


def test_temperature_reaches_the_draft(target, prompt):
    # At a temperature near zero sampling is greedy; a draft that ignored it would draw at random and be rejected.
    plain = target.generate(prompt, do_sample=False, max_new_tokens=NUM_NEW)
    draft = scripted_draft(target, plain, spoil=1000)
    draft.script_logit = 1.0
    with dspark_hf.collect_rounds() as stats:
        text = target.generate(
            prompt, assistant_model=draft, do_sample=True, temperature=1e-3, top_k=0, max_new_tokens=NUM_NEW
        )
    assert torch.equal(text, plain)
    assert num_accepted(stats) == expected_accepted(11, NUM_NEW, spoil=1000)


def test_sampling_repeats_itself_with_the_same_seed(target, prompt, draft):
    def sample(seed):
        torch.manual_seed(seed)
        return target.generate(prompt, assistant_model=draft, do_sample=True, max_new_tokens=NUM_NEW)

    assert torch.equal(sample(0), sample(0))
    assert not torch.equal(sample(0), sample(1))


def test_a_draft_in_training_mode_or_with_gradients_is_no_different(target, prompt, plain, draft):
    draft.train()
    draft.requires_grad_(True)
    text = target.generate(prompt, assistant_model=draft, do_sample=False, max_new_tokens=NUM_NEW)
    assert torch.equal(text, plain)
    assert draft.training
    assert all(parameter.grad is None for parameter in draft.parameters())


def test_inference_mode(target, prompt, plain, draft):
    with torch.inference_mode():
        text = target.generate(prompt, assistant_model=draft, do_sample=False, max_new_tokens=NUM_NEW)
    assert torch.equal(text, plain)
    # And nothing of it is left for a later call.
    text = target.generate(prompt, assistant_model=draft, do_sample=False, max_new_tokens=NUM_NEW)
    assert torch.equal(text, plain)


def test_ids_of_four_bytes(target, prompt, plain, draft):
    kwargs = {"do_sample": False, "max_new_tokens": NUM_NEW}
    expected = target.generate(prompt.int(), **kwargs)
    text = target.generate(prompt.int(), assistant_model=draft, **kwargs)
    assert torch.equal(text, expected)
    assert text.dtype == expected.dtype
    assert torch.equal(text, plain)


def test_the_users_config_is_not_changed(target, prompt, plain, draft):
    config = GenerationConfig(do_sample=False, max_new_tokens=NUM_NEW, num_assistant_tokens=2)
    before, on_draft = config.to_dict(), draft.generation_config.to_dict()
    assert torch.equal(target.generate(prompt, generation_config=config, assistant_model=draft), plain)
    assert config.to_dict() == before
    assert draft.generation_config.to_dict() == on_draft


def test_supported_options_are_silent(target, prompt, draft):
    with captured_log("transformers") as messages:
        target.generate(
            prompt,
            assistant_model=draft,
            do_sample=False,
            max_new_tokens=NUM_NEW,
            num_assistant_tokens=2,
            assistant_confidence_threshold=0.5,
            num_assistant_tokens_schedule="confidence",
        )
    assert messages == []
