# SPDX-License-Identifier: Apache-2.0
"""Importing the package changes nothing for any other assistant, and `disable` takes it back without a trace."""

import inspect
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    PreTrainedModel,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation import GenerationMixin, candidate_generator
from transformers.generation import utils as generation_utils
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging as library_logging

import dspark_hf
from dspark_hf.integration import register_auto_classes
from tests.support.models import oracle_draft, random_prompt, tiny_target
from tests.support.scripted import NUM_NEW, StreamerSpy, captured_log, letter_tokenizer, lively_target, with_cache


PATCHED = ("generate", "_validate_generation_mode", "_assisted_decoding", "_get_candidate_generator")


@pytest.fixture(scope="module")
def small_model():
    """A plain assistant with the target's vocabulary."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
    return model


def dflash_model():
    torch.manual_seed(6)
    config = MuseGlimmerAssistantConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        block_size=4,
        mask_token_id=96,
        target_layer_ids=[0, 2],
    )
    return MuseGlimmerAssistantModel(config).eval()


def both_ways(call):
    """What `call` gives with the package enabled and disabled, from the same random state; also if it is an error."""
    results = []
    for switch in (dspark_hf.enable, dspark_hf.disable):
        switch()
        torch.manual_seed(0)
        try:
            results.append(call())
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
    dspark_hf.enable()
    return results


def same(first, second) -> bool:
    if torch.is_tensor(first):
        return torch.equal(first, second)
    if isinstance(first, str):
        return first == second
    return set(first.keys()) == set(second.keys()) and torch.equal(first.sequences, second.sequences)


@pytest.fixture(autouse=True)
def quiet_library():
    """The stock assistants use things that the library itself has deprecated."""
    verbosity = library_logging.get_verbosity()
    library_logging.set_verbosity_error()
    yield
    library_logging.set_verbosity(verbosity)


# Other assistants


OTHER_MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "beams_sampled": {"num_beams": 2, "do_sample": True},
    "batch_of_beams": {"num_beams": 2, "num_return_sequences": 2},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
    "prompt_lookup_sampled": {"prompt_lookup_num_tokens": 3, "do_sample": True},
    "outputs": {"return_dict_in_generate": True, "output_scores": True},
    "several": {"do_sample": True, "num_return_sequences": 3},
}


@pytest.mark.parametrize("name", OTHER_MODES)
def test_other_modes(target, name):
    prompt = torch.cat([random_prompt(8), random_prompt(8)], dim=1)  # something to look up
    kwargs = {"do_sample": False, "max_new_tokens": NUM_NEW} | OTHER_MODES[name]
    enabled, disabled = both_ways(lambda: target.generate(prompt, **kwargs))
    assert not isinstance(enabled, str), enabled
    assert same(enabled, disabled)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("extra", [{}, {"num_assistant_tokens": 3}, {"return_dict_in_generate": True}])
def test_plain_assistant_model(target, prompt, small_model, do_sample, extra):
    def call():
        small_model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)  # the stock loop writes to it
        return target.generate(
            prompt, do_sample=do_sample, max_new_tokens=NUM_NEW, assistant_model=small_model, **extra
        )

    enabled, disabled = both_ways(call)
    assert not isinstance(enabled, str), enabled
    assert same(enabled, disabled)
    assert type(enabled) is type(disabled)


def test_plain_assistant_with_a_streamer_and_its_own_tokenizer(target, prompt, small_model):
    def stream():
        spy = StreamerSpy()
        target.generate(prompt, do_sample=False, max_new_tokens=NUM_NEW, assistant_model=small_model, streamer=spy)
        return spy.puts

    enabled, disabled = both_ways(stream)
    assert enabled == disabled

    def universal():
        torch.manual_seed(5)
        other = LlamaForCausalLM(LlamaConfig.from_dict(small_model.config.to_dict() | {"vocab_size": 96})).eval()
        other.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
        tokenizers = {"tokenizer": letter_tokenizer(), "assistant_tokenizer": letter_tokenizer()}
        return target.generate(prompt, do_sample=False, max_new_tokens=6, assistant_model=other, **tokenizers)

    enabled, disabled = both_ways(universal)
    assert torch.equal(enabled, disabled)


def test_early_exit(prompt):
    # It fails in some releases, and leaves its target changed then.
    def call():
        return lively_target().generate(prompt, do_sample=False, max_new_tokens=NUM_NEW, assistant_early_exit=2)

    enabled, disabled = both_ways(call)
    assert same(enabled, disabled)


@pytest.mark.parametrize("do_sample", [False, True])
def test_dflash(target, prompt, do_sample, monkeypatch):
    assistant, built = dflash_model(), []
    original = candidate_generator.DFlashTokenCandidateGenerator

    class Recorded(original):
        def __init__(self, *args, **kwargs):
            built.append(type(kwargs["assistant_model"]).__name__)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(generation_utils, "DFlashTokenCandidateGenerator", Recorded)

    def call():
        return target.generate(
            prompt, do_sample=do_sample, max_new_tokens=NUM_NEW, assistant_model=assistant, speculation_type="dflash"
        )

    enabled, disabled = both_ways(call)
    assert torch.equal(enabled, disabled)
    assert built == ["MuseGlimmerAssistantModel"] * 2
    if not do_sample:
        assert torch.equal(enabled, target.generate(prompt, do_sample=False, max_new_tokens=NUM_NEW))


def test_mtp_reaches_the_original(target, prompt, monkeypatch):
    class Reached(Exception):
        pass

    class Generator:
        def __init__(self, **kwargs):
            raise Reached(sorted(kwargs))

    monkeypatch.setattr(generation_utils, "MTPCandidateGenerator", Generator)
    messages = []
    for switch in (dspark_hf.enable, dspark_hf.disable):
        switch()
        with pytest.raises(Reached) as caught:
            target.generate(prompt, do_sample=False, max_new_tokens=4, use_mtp=True)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "main_model" in messages[0]


def test_stock_assistants_still_get_their_inputs(target, prompt, small_model, monkeypatch):
    # `generate` looks at the loop's signature to decide whether it wants the inputs.
    seen = []
    original = candidate_generator.AssistedCandidateGenerator.__init__

    def record(self, *args, **kwargs):
        seen.append({name: value for name, value in kwargs.items() if name in ("inputs_tensor", "input_ids")})
        original(self, *args, **kwargs)

    monkeypatch.setattr(candidate_generator.AssistedCandidateGenerator, "__init__", record)
    target.generate(prompt, do_sample=False, max_new_tokens=4, assistant_model=small_model)
    assert torch.equal(seen[0]["inputs_tensor"], prompt)
    assert torch.equal(seen[0]["input_ids"], prompt)


def test_encoder_decoder_with_a_stock_assistant():
    # Such a target needs the inputs a second time, to run the assistant's encoder.
    def tiny_t5(seed, num_layers):
        torch.manual_seed(seed)
        config = T5Config(
            vocab_size=97, d_model=16, d_kv=8, d_ff=32, num_layers=num_layers, num_heads=2, decoder_start_token_id=0
        )
        model = T5ForConditionalGeneration(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.5)
        model.generation_config = GenerationConfig(pad_token_id=0, decoder_start_token_id=0)
        return model

    target, assistant = tiny_t5(0, 2), tiny_t5(1, 1)
    prompt = random_prompt(9)

    def call(model=assistant):
        return target.generate(prompt, do_sample=False, max_new_tokens=10, assistant_model=model)

    enabled, disabled = both_ways(call)
    assert torch.equal(enabled, disabled)
    assert torch.equal(enabled, call(None))


def test_errors_of_other_assistants_are_the_same(target, prompt, small_model):
    calls = {
        "batch": lambda: target.generate(prompt.repeat(2, 1), max_new_tokens=4, assistant_model=small_model),
        "sequences": lambda: target.generate(
            prompt, do_sample=True, num_return_sequences=2, max_new_tokens=4, assistant_model=small_model
        ),
        "no cache": lambda: target.generate(prompt, max_new_tokens=4, assistant_model=small_model, use_cache=False),
        "no tokenizer": lambda: target.generate(
            prompt, max_new_tokens=4, assistant_model=lively_target("llama", seed=3), assistant_tokenizer=object()
        ),
        "unknown": lambda: target.generate(prompt, max_new_tokens=4, no_such_option=1),
    }
    for name, call in calls.items():
        messages = []
        for switch in (dspark_hf.enable, dspark_hf.disable):
            switch()
            with pytest.raises(Exception) as caught:  # noqa: PT011
                call()
            messages.append((type(caught.value), str(caught.value)))
        assert messages[0] == messages[1], name


def test_custom_generate_callable_with_a_draft_at_hand(target, prompt):
    # transformers hands such a function neither assistant nor streamer; it is not our loop that runs.
    def recipe(model, input_ids, **kwargs):
        return input_ids + 0

    enabled, disabled = both_ways(lambda: target.generate(prompt, max_new_tokens=4, custom_generate=recipe))
    assert torch.equal(enabled, disabled)


# Switching on and off


def test_disable_gives_back_the_very_same_functions():
    dspark_hf.disable()
    originals = {name: GenerationMixin.__dict__[name] for name in PATCHED}
    assert not any("dspark_hf" in original.__module__ for original in originals.values())
    dspark_hf.enable()
    for name in PATCHED:
        assert GenerationMixin.__dict__[name] is not originals[name]
    dspark_hf.disable()
    for name in PATCHED:
        assert GenerationMixin.__dict__[name] is originals[name]


def test_enable_and_disable_are_idempotent():
    dspark_hf.disable()
    originals = {name: GenerationMixin.__dict__[name] for name in PATCHED}
    dspark_hf.enable()
    wrappers = {name: GenerationMixin.__dict__[name] for name in PATCHED}
    dspark_hf.enable()
    assert {name: GenerationMixin.__dict__[name] for name in PATCHED} == wrappers
    assert dspark_hf.is_enabled()
    dspark_hf.disable()
    dspark_hf.disable()
    assert {name: GenerationMixin.__dict__[name] for name in PATCHED} == originals
    assert not dspark_hf.is_enabled()


def test_nothing_else_is_changed():
    def members():
        return {name: value for name, value in vars(GenerationMixin).items() if name not in PATCHED}

    dspark_hf.disable()
    before, models = members(), dict(vars(PreTrainedModel))
    dspark_hf.enable()
    assert members() == before
    assert dict(vars(PreTrainedModel)) == models


@pytest.mark.parametrize("name", PATCHED)
def test_patched_methods_look_like_the_originals(name):
    dspark_hf.disable()
    original = getattr(GenerationMixin, name)
    dspark_hf.enable()
    patched = getattr(GenerationMixin, name)
    assert inspect.signature(patched) == inspect.signature(original)
    assert (patched.__name__, patched.__qualname__, patched.__doc__) == (
        original.__name__,
        original.__qualname__,
        original.__doc__,
    )
    assert patched.__wrapped__ is original


def test_a_subclass_that_overrides_a_patched_method_keeps_its_own(prompt):
    class Own(Qwen3ForCausalLM):
        def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
            raise RuntimeError("own rule")

    base = lively_target()
    own = Own(base.config)
    with pytest.raises(RuntimeError, match="own rule"):
        own.generate(prompt, max_new_tokens=2)


def test_a_patch_made_after_ours_survives_disabling(target, prompt):
    # Another package wraps a method once more; taking ours back must not take theirs with it.
    name = "_get_candidate_generator"
    dspark_hf.disable()
    original = getattr(GenerationMixin, name)
    dspark_hf.enable()
    ours, calls = getattr(GenerationMixin, name), []

    def theirs(self, *args, **kwargs):
        calls.append(1)
        return ours(self, *args, **kwargs)

    try:
        setattr(GenerationMixin, name, theirs)
        dspark_hf.disable()
        target.generate(prompt, do_sample=False, max_new_tokens=4, prompt_lookup_num_tokens=2)
    finally:
        dspark_hf.disable()
        setattr(GenerationMixin, name, original)
    assert calls == [1]


def test_a_draft_after_disabling_is_no_assistant_and_enabling_makes_it_one_again():
    target, prompt = tiny_target("llama"), random_prompt(11)
    draft = oracle_draft(target)
    plain = target.generate(prompt, do_sample=False, max_new_tokens=NUM_NEW)
    dspark_hf.disable()
    cache = DynamicCache(config=target.config)
    with pytest.raises((AttributeError, TypeError, ValueError, NotImplementedError)):
        target.generate(prompt, do_sample=False, max_new_tokens=NUM_NEW, assistant_model=draft, **with_cache(cache))
    assert torch.equal(target.generate(prompt, do_sample=False, max_new_tokens=NUM_NEW), plain)
    dspark_hf.enable()
    with dspark_hf.collect_rounds() as stats:
        text = target.generate(prompt, do_sample=False, max_new_tokens=NUM_NEW, assistant_model=draft)
    assert torch.equal(text, plain)
    assert stats.num_rounds > 0


def test_disabling_while_a_call_runs_lets_it_finish():
    target, prompt = tiny_target("llama"), random_prompt(11)
    draft = oracle_draft(target)
    plain = target.generate(prompt, do_sample=False, max_new_tokens=NUM_NEW)
    running, go_on = threading.Event(), threading.Event()
    texts = []

    class Streamer(StreamerSpy):
        def put(self, value):
            super().put(value)
            if len(self.puts) == 2:
                running.set()
                go_on.wait(timeout=30)

    def run():
        texts.append(
            target.generate(
                prompt, do_sample=False, max_new_tokens=NUM_NEW, assistant_model=draft, streamer=Streamer()
            )
        )

    thread = threading.Thread(target=run)
    thread.start()
    assert running.wait(timeout=30)
    dspark_hf.disable()
    go_on.set()
    thread.join(timeout=30)
    assert torch.equal(texts[0], plain)


def test_the_stock_loop_can_drive_our_generator(monkeypatch):
    # The generator follows transformers' protocol, so that the loop can be exchanged.
    target, prompt = tiny_target("llama"), random_prompt(11)
    draft = oracle_draft(target)
    plain = target.generate(prompt, do_sample=False, max_new_tokens=NUM_NEW)
    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", inspect.unwrap(GenerationMixin._assisted_decoding))
    text = target.generate(prompt, do_sample=False, max_new_tokens=NUM_NEW, assistant_model=draft)
    assert torch.equal(text, plain)


# The Auto classes


def test_a_model_type_that_is_taken_is_left_alone(monkeypatch):
    class Native(LlamaConfig):
        model_type = "dspark_draft"

    monkeypatch.setitem(CONFIG_MAPPING._extra_content, "dspark_draft", Native)
    with captured_log() as messages:
        register_auto_classes()
    assert type(AutoConfig.for_model("dspark_draft")) is Native
    assert len(messages) == 1
    assert "already knows a model type 'dspark_draft'" in messages[0]
    assert "DSparkDraftModel.from_pretrained" in messages[0]


def test_registering_again_is_silent():
    with captured_log() as messages:
        register_auto_classes()
    assert messages == []
    assert type(AutoConfig.for_model("dspark_draft")) is dspark_hf.DSparkConfig


# A fresh interpreter


def test_importing_is_silent_and_changes_no_text(tmp_path):
    code = """
        import torch
        from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
        from transformers.generation import GenerationMixin

        def model(seed, layers):
            torch.manual_seed(seed)
            config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=layers,
                num_attention_heads=2, num_key_value_heads=2, initializer_range=0.3)
            model = LlamaForCausalLM(config).eval()
            model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
            return model

        target, small = model(0, 2), model(1, 1)
        prompt = torch.tensor([[3, 4, 5, 3, 4]])

        def texts():
            out = []
            for kwargs in ({}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}, {"assistant_model": small}):
                torch.manual_seed(0)
                out.append(target.generate(prompt, do_sample=False, max_new_tokens=8, **kwargs).tolist())
                torch.manual_seed(0)
                if "num_beams" not in kwargs:
                    out.append(target.generate(prompt, do_sample=True, max_new_tokens=8, **kwargs).tolist())
            return out

        names = ("_validate_generation_mode", "_assisted_decoding", "_get_candidate_generator")
        before, originals = texts(), [GenerationMixin.__dict__[name] for name in names]
        random_state = torch.get_rng_state()
        import dspark_hf
        assert torch.equal(torch.get_rng_state(), random_state), "random state"
        assert texts() == before, "enabled"
        dspark_hf.disable()
        assert [GenerationMixin.__dict__[name] for name in names] == originals, "originals"
        assert texts() == before, "disabled"
        """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=dict(os.environ, PYTHONPATH=str(Path(dspark_hf.__file__).parents[1]), OMP_NUM_THREADS="1"),
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    assert "dspark" not in result.stderr.lower()
