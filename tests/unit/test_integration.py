# SPDX-License-Identifier: Apache-2.0
"""The seam into `generate`: on, off, and every call that is refused before a token is made."""

import re

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import GenerationMixin

import dspark_hf
from dspark_hf import integration
from tests.support.models import oracle_draft, random_draft, random_prompt, tiny_target


METHODS = ("generate", "_validate_generation_mode", "_assisted_decoding", "_get_candidate_generator")


def methods():
    return {name: getattr(GenerationMixin, name) for name in METHODS}


def test_importing_enables():
    assert dspark_hf.is_enabled()
    assert set(integration._originals) == set(METHODS)


def test_disable_gives_the_methods_back_and_enable_takes_them_again():
    wrapped, originals = methods(), dict(integration._originals)
    dspark_hf.disable()
    assert not dspark_hf.is_enabled()
    assert methods() == originals
    dspark_hf.disable()  # twice does no harm
    assert methods() == originals
    dspark_hf.enable()
    assert dspark_hf.is_enabled()
    assert methods() != originals
    assert dict(integration._originals) == originals
    assert {name: method.__wrapped__ for name, method in methods().items()} == originals
    assert methods().keys() == wrapped.keys()


def test_enabling_twice_wraps_once():
    before = methods()
    dspark_hf.enable()
    assert methods() == before


def test_disabled_a_draft_is_no_assistant():
    target = tiny_target()
    draft = oracle_draft(target)
    dspark_hf.disable()
    with pytest.raises(Exception, match=r".+"):
        target.generate(random_prompt(4), do_sample=False, max_new_tokens=4, assistant_model=draft)
    dspark_hf.enable()
    assert target.generate(random_prompt(4), do_sample=False, max_new_tokens=4, assistant_model=draft).shape == (1, 8)


def test_other_assistants_are_left_alone(monkeypatch, no_deprecated_calls):
    target, assistant = tiny_target("llama"), tiny_target("llama", seed=1)
    monkeypatch.setattr(integration, "decode", lambda *args, **kwargs: pytest.fail("our loop ran"))
    plain = target.generate(random_prompt(6), do_sample=False, max_new_tokens=12)
    assisted = target.generate(random_prompt(6), do_sample=False, max_new_tokens=12, assistant_model=assistant)
    lookup = target.generate(random_prompt(6), do_sample=False, max_new_tokens=12, prompt_lookup_num_tokens=3)
    assert torch.equal(assisted, plain)
    assert torch.equal(lookup, plain)
    no_deprecated_calls.clear()  # the library's own, in how it calls a plain assistant


REFUSALS = [
    ({"prompt_lookup_num_tokens": -3}, ValueError, "`prompt_lookup_num_tokens` must be an integer >= 0, got -3"),
    ({"assistant_early_exit": 2}, ValueError, "(`assistant_early_exit`=2)"),
    ({"num_beams": 2}, ValueError, "got generation mode"),
    ({"assistant_tokenizer": object(), "tokenizer": object()}, ValueError, "Do not pass `assistant_tokenizer`"),
    ({"synced_gpus": True}, NotImplementedError, "(`synced_gpus=True`)"),
    ({"use_cache": False}, ValueError, "DSpark needs a cache, got `use_cache=False`"),
    ({"num_assistant_tokens": 9}, ValueError, "`num_assistant_tokens` must lie in [1, 4]"),
    ({"assistant_ensemble_weight": 0.5}, ValueError, "`assistant_ensemble_weight` changes the text on purpose"),
]


@pytest.mark.parametrize(("kwargs", "error", "message"), REFUSALS, ids=[next(iter(row[0])) for row in REFUSALS])
def test_refused_before_anything_runs(monkeypatch, kwargs, error, message):
    target = tiny_target()
    draft = oracle_draft(target)
    monkeypatch.setattr(type(target), "forward", lambda *args, **kwargs: pytest.fail("the target ran"))
    with pytest.raises(error, match=re.escape(message)):
        target.generate(
            random_prompt(4), **({"do_sample": False, "max_new_tokens": 4, "assistant_model": draft} | kwargs)
        )


def test_draft_of_another_target_is_refused_before_anything_runs(monkeypatch):
    target, draft = tiny_target(), random_draft(hidden_size=64)
    monkeypatch.setattr(type(target), "forward", lambda *args, **kwargs: pytest.fail("the target ran"))
    with pytest.raises(ValueError, match="same `hidden_size`"):
        target.generate(random_prompt(4), max_new_tokens=4, assistant_model=draft)


def test_a_cache_that_cannot_take_tokens_back_is_refused():
    target = tiny_target("mistral")
    with pytest.raises(ValueError, match="takes rejected tokens back out of the cache.* 'static'"):
        target.generate(
            random_prompt(4),
            do_sample=False,
            max_new_tokens=30,
            assistant_model=oracle_draft(target),
            cache_implementation="static",
        )


def test_knobs_of_the_call_do_not_stay_on_target_or_draft():
    target = tiny_target()
    draft = oracle_draft(target)
    before = (target.generation_config.to_dict(), draft.generation_config.to_dict())
    target.generate(random_prompt(4), do_sample=False, max_new_tokens=4, assistant_model=draft, num_assistant_tokens=2)
    assert (target.generation_config.to_dict(), draft.generation_config.to_dict()) == before


def test_registering_again_is_silent(monkeypatch):
    monkeypatch.setattr(integration.logger, "warning_once", pytest.fail)
    integration.register_auto_classes()


def test_candidate_generator_is_dispatched_by_type():
    target = tiny_target()
    config = GenerationConfig(do_sample=False, max_length=20)
    generator = target._get_candidate_generator(
        generation_config=config,
        input_ids=random_prompt(4),
        inputs_tensor=random_prompt(4),
        assistant_model=oracle_draft(target),
        logits_processor=None,
        model_kwargs={},
    )
    assert type(generator) is dspark_hf.DSparkCandidateGenerator
