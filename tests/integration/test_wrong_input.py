# SPDX-License-Identifier: Apache-2.0
"""Every wrong input is refused before the first token, with the rule, the value received and the remedy."""

import pytest
import torch
from transformers import (
    GenerationConfig,
    LlamaModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import Cache, DynamicLayer

import dspark_hf
from dspark_hf.scheduling import ThresholdScheduler
from tests.support.models import random_draft, random_prompt, tiny_config, tiny_target
from tests.support.scripted import (
    STATIC_CACHE_CAN_CROP,
    ForwardCounter,
    StreamerSpy,
    draft_config_for,
    letter_tokenizer,
    with_cache,
)


PROMPT = random_prompt(11)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def draft():
    return random_draft()


def refused(target, draft, error, match, *, prompt=PROMPT, num_forwards=0, num_puts=1, **kwargs):
    """The message of the refusal; nothing was generated and at most the prompt was streamed."""
    spy = StreamerSpy()
    kwargs = {"do_sample": False, "max_new_tokens": 4, "streamer": spy} | kwargs
    with ForwardCounter(target) as forwards, pytest.raises(error, match=match) as caught:
        target.generate(prompt, assistant_model=draft, **kwargs)
    assert forwards.num_prompts == num_forwards
    assert len(spy.puts) <= num_puts
    if spy.puts:
        assert spy.puts[0] == prompt.flatten().tolist()
    is_ours = isinstance(draft, dspark_hf.DSparkDraftModel)  # other calls are transformers' own
    assert spy.num_ends == (1 if is_ours else 0), "a consumer would wait"
    return str(caught.value)


def assert_readable(message):
    """One paragraph of whole sentences that names something in code font or quotes, or a class."""
    assert 20 < len(message) < 400
    assert "\n" not in message
    assert message[0].isupper() or message[0] == "`"
    assert message.rstrip().endswith((".", ")"))


# Knobs of the call and of the draft

KNOBS = {
    "too many": ("num_assistant_tokens", 5, r"`num_assistant_tokens` .*\[1, 4\].* 5"),
    "none": ("num_assistant_tokens", 0, r"`num_assistant_tokens` .*\[1, 4\].* 0"),
    "negative": ("num_assistant_tokens", -1, r"`num_assistant_tokens` .*\[1, 4\].* -1"),
    "a fraction": ("num_assistant_tokens", 2.5, r"`num_assistant_tokens` .* 2.5"),
    "a flag": ("num_assistant_tokens", True, r"`num_assistant_tokens` .* True"),
    "a word": ("num_assistant_tokens", "four", r"`num_assistant_tokens` .* 'four'"),
    "above one": ("assistant_confidence_threshold", 1.5, r"`assistant_confidence_threshold` .*\[0, 1\].* 1.5"),
    "below zero": ("assistant_confidence_threshold", -0.1, r"`assistant_confidence_threshold` .*\[0, 1\].* -0.1"),
    "no number": ("assistant_confidence_threshold", float("nan"), r"`assistant_confidence_threshold` .* nan"),
    "a threshold in words": ("assistant_confidence_threshold", "high", r"`assistant_confidence_threshold` .*high"),
    "of transformers": (
        "num_assistant_tokens_schedule",
        "heuristic",
        r"`num_assistant_tokens_schedule` .*'heuristic'",
    ),
    "unheard of": ("num_assistant_tokens_schedule", "sometimes", r"`num_assistant_tokens_schedule` .*'sometimes'"),
}


@pytest.mark.parametrize("where", ["call", "draft"])
@pytest.mark.parametrize("case", KNOBS)
def test_knobs(target, draft, case, where):
    name, value, match = KNOBS[case]
    if where == "call":
        message = refused(target, draft, ValueError, match, num_puts=0, **{name: value})
    else:
        setattr(draft.generation_config, name, value)
        message = refused(target, draft, ValueError, match, num_puts=0)
    assert_readable(message)


def test_threshold_without_a_confidence_head(target):
    draft = random_draft(enable_confidence_head=False, confidence_head_with_markov=False)
    message = refused(target, draft, ValueError, "confidence head", num_puts=0, assistant_confidence_threshold=0.5)
    assert "0.5" in message
    assert_readable(message)


def test_more_drafts_than_slots_that_predict(target):
    # With the first slot repeating the anchor, a block of four has three drafts.
    draft = random_draft(sample_from_anchor=False)
    refused(target, draft, ValueError, r"\[1, 3\].* 4", num_puts=0, num_assistant_tokens=4)


# Options of `generate` that do not go with a draft

OPTIONS = {
    "assistant_ensemble_weight": (0.5, ValueError, r"`assistant_ensemble_weight` .* 0.5"),
    "prompt_lookup_num_tokens": (-3, ValueError, r"`prompt_lookup_num_tokens` must be an integer >= 0, got -3"),
    "max_matching_ngram_size": (0, ValueError, r"`max_matching_ngram_size` must be an integer >= 1, got 0"),
    "assistant_early_exit": (2, ValueError, r"`assistant_early_exit`=2"),
    "use_mtp": (True, ValueError, r"`use_mtp`=True"),
    "speculation_type": ("dflash", ValueError, r"`speculation_type`='dflash'"),
    "num_beams": (2, ValueError, r"`num_beams`=2"),
    "synced_gpus": (True, NotImplementedError, r"`synced_gpus=True`"),
    "use_cache": (False, ValueError, r"`use_cache=False`"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(target, draft, name):
    value, error, match = OPTIONS[name]
    message = refused(target, draft, error, match, num_puts=0, **{name: value})
    assert_readable(message)


def test_options_on_the_targets_own_config(draft):
    target = tiny_target()
    target.generation_config.assistant_early_exit = 3
    refused(target, draft, ValueError, "`assistant_early_exit`=3", num_puts=0)


def test_sampled_beams(target, draft):
    refused(target, draft, ValueError, "`num_beams`=3", num_puts=0, num_beams=3, do_sample=True)


@pytest.mark.parametrize("num_rows", [2, 3])
def test_batch_for_one_streamer(target, draft, num_rows):
    message = refused(
        target,
        draft,
        ValueError,
        f"a streamer for each row, got one StreamerSpy for {num_rows} rows. Pass `RowStreamer",
        prompt=PROMPT.repeat(num_rows, 1),
    )
    assert_readable(message)


def test_batch_of_embedded_prompts(target, draft):
    embeds = target.get_input_embeddings()(PROMPT).repeat(2, 1, 1)
    with (
        ForwardCounter(target) as forwards,
        pytest.raises(NotImplementedError, match="text inputs, and got .'inputs_embeds'"),
    ):
        target.generate(inputs_embeds=embeds, assistant_model=draft, do_sample=False, max_new_tokens=4)
    assert forwards.count == 0


def test_tokenizer_of_the_draft(target, draft):
    for extra in ({}, {"tokenizer": letter_tokenizer()}):
        message = refused(
            target,
            draft,
            ValueError,
            "shares its target's vocabulary.*`assistant_tokenizer`",
            num_puts=0,
            assistant_tokenizer=letter_tokenizer(),
            **extra,
        )
        assert_readable(message)


def test_unknown_option(target, draft):
    refused(target, draft, ValueError, "confidence_treshold", num_puts=0, confidence_treshold=0.3)


def test_stop_strings_without_a_tokenizer(target, draft):
    refused(target, draft, ValueError, "tokenizer", stop_strings=["!"])


def test_our_criterion_as_a_stopping_criterion(target, draft):
    criteria = StoppingCriteriaList([dspark_hf.AdaptiveConfidenceCriteria(ThresholdScheduler(0.5), num_slots=4)])
    message = refused(
        target,
        draft,
        RuntimeError,
        "Do not pass it as `stopping_criteria`",
        num_forwards=1,
        stopping_criteria=criteria,
    )
    assert_readable(message)
    with pytest.raises(RuntimeError, match="Do not pass it as `stopping_criteria`"):  # and without a draft
        target.generate(PROMPT, stopping_criteria=criteria, do_sample=False, max_new_tokens=4)


def test_continuous_batching(target, draft):
    refused(target, draft, NotImplementedError, "assistant_model", num_puts=0, cache_implementation="paged")


def test_a_prompt_as_long_as_the_limit(target, draft):
    refused(target, draft, ValueError, "max_length", max_length=11, max_new_tokens=None)


# Caches


class Uncroppable(DynamicLayer):
    is_croppable = False


def test_cache_that_cannot_take_tokens_back(target, draft):
    cache = Cache(layers=[Uncroppable() for _ in range(4)])
    message = refused(target, draft, ValueError, "'Cache' does not allow.* dynamic cache", **with_cache(cache))
    assert_readable(message)
    assert cache.get_seq_length() == 0


def test_cache_of_a_past_release(target, draft):
    refused(target, draft, (ValueError, TypeError, AttributeError), ".", **with_cache(((torch.zeros(1),) * 2,) * 4))


def test_static_cache_where_it_cannot_be_cropped(draft):
    target = tiny_target("llama") if not STATIC_CACHE_CAN_CROP else tiny_target("mistral")
    message = refused(target, draft, ValueError, "'static' does not allow", cache_implementation="static")
    assert_readable(message)


# Targets and drafts that do not belong together

MISMATCHES = {
    "vocabulary": ({"vocab_size": 110}, ValueError, r"`vocab_size`.* 97 .* 110"),
    "hidden size": ({"hidden_size": 48}, ValueError, r"`hidden_size`.* 32 .* 48"),
    "number of layers": ({"num_target_layers": 6}, ValueError, r"6 layers.* 4"),
    "a layer beyond the last": (
        {"target_layer_ids": [0, 9], "num_target_layers": None},
        ValueError,
        r"`target_layer_ids`.* 3.*\[0, 9\]",
    ),
    "the last layer": ({"target_layer_ids": [3], "num_target_layers": None}, ValueError, r"`target_layer_ids`.*\[3\]"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_mismatch(target, case):
    overrides, error, match = MISMATCHES[case]
    draft = random_draft(**overrides)
    message = refused(target, draft, error, match, num_puts=0)
    assert_readable(message)
    assert "Qwen3ForCausalLM" in message or case.startswith(("a layer", "the last"))
    with pytest.raises(error, match=match):  # and where it is asked for without generating
        draft.bind_target(target)


def test_mismatch_names_the_target_that_the_draft_was_made_for(target):
    draft = random_draft(vocab_size=110, target_name_or_path="some/target")
    refused(target, draft, ValueError, "some/target", num_puts=0)


def test_mask_token_beyond_the_embedding(draft):
    # A config that promises more rows than there are.
    target = tiny_target()
    target.set_input_embeddings(torch.nn.Embedding(90, 32))
    message = refused(target, draft, ValueError, r"`mask_token_id`.* 90.* 96", num_puts=0)
    assert_readable(message)


def test_mask_token_beyond_the_vocabulary():
    with pytest.raises(ValueError, match=r"`mask_token_id`.*\[0, 97\).* 97") as caught:
        tiny_config(mask_token_id=97)
    assert_readable(str(caught.value))


@pytest.mark.parametrize("name", ["mask_token_id", "target_layer_ids"])
def test_draft_without_what_cannot_be_guessed(name):
    with pytest.raises(ValueError, match=f"`{name}` must be set, got None"):
        dspark_hf.DSparkDraftModel(tiny_config(**{name: None}))


def test_encoder_decoder_target():
    config = T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=4, num_heads=2, decoder_start_token_id=0)
    target = T5ForConditionalGeneration(config).eval()
    target.generation_config = GenerationConfig(pad_token_id=0, decoder_start_token_id=0)
    message = refused(
        target, random_draft(), NotImplementedError, "decoder-only.*T5ForConditionalGeneration", num_puts=0
    )
    assert_readable(message)


def test_target_without_an_lm_head(draft):
    model = LlamaModel(tiny_target("llama").config)
    with pytest.raises(ValueError, match="LlamaModel lacks one.*ForCausalLM") as caught:
        draft.bind_target(model)
    assert_readable(str(caught.value))


class Silent(Qwen3ForCausalLM):
    """As old or remote code does: asked for hidden states, it returns none."""

    def forward(self, *args, **kwargs):
        kwargs.pop("output_hidden_states", None)
        return super().forward(*args, **kwargs)


def test_target_that_returns_no_hidden_states(draft):
    original = tiny_target()
    target = Silent(original.config).eval()
    target.generation_config = original.generation_config
    message = refused(target, draft, ValueError, "returned no hidden states.*`output_hidden_states`")
    assert_readable(message)


class Partial(Qwen3ForCausalLM):
    """Returns fewer hidden states than it has layers."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.hidden_states = outputs.hidden_states[:1]
        return outputs


def test_target_that_returns_too_few_hidden_states(draft):
    original = tiny_target()
    target = Partial(original.config).eval()
    target.generation_config = original.generation_config
    message = refused(target, draft, ValueError, "hidden states")
    assert_readable(message)


def test_draft_without_weights(target):
    # Built on the meta device and never loaded.
    with torch.device("meta"):
        draft = dspark_hf.DSparkDraftModel(draft_config_for(target))
    message = refused(target, draft, (ValueError, NotImplementedError), "meta", num_puts=0)
    assert_readable(message)
    assert "draft" in message


@pytest.mark.parametrize(
    "wrong", ["a path", tiny_config(), dspark_hf.DSparkDraftModel], ids=["path", "config", "class"]
)
def test_something_that_is_no_model(target, wrong):
    refused(target, wrong, Exception, ".", num_puts=0)


def test_a_wrapped_draft_is_no_assistant(target, draft):
    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module
            self.config = module.config

    refused(target, Wrapper(draft), Exception, ".", num_puts=1)


def test_refusals_leave_everything_usable(target, draft):
    # After every refusal above the same objects still work.
    plain = target.generate(PROMPT, do_sample=False, max_new_tokens=8)
    refused(target, draft, ValueError, "`num_beams`=2", num_puts=0, num_beams=2)
    refused(target, draft, ValueError, "num_assistant_tokens", num_puts=0, num_assistant_tokens=9)
    text = target.generate(PROMPT, do_sample=False, max_new_tokens=8, assistant_model=draft)
    assert torch.equal(text, plain)


def test_a_wrong_call_does_not_spoil_the_next_config(target, draft):
    config = GenerationConfig(do_sample=False, max_new_tokens=4, num_assistant_tokens=9)
    with pytest.raises(ValueError, match="num_assistant_tokens"):
        target.generate(PROMPT, generation_config=config, assistant_model=draft)
    assert config.num_assistant_tokens == 9
    assert draft.generation_config.num_assistant_tokens is None


def test_target_config_of_another_family():
    # The sizes fit by chance; nothing more is asked of a target than what the draft reads.
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
    )
    target = Qwen3ForCausalLM(config).eval()
    target.generation_config = GenerationConfig(pad_token_id=0)
    plain = target.generate(PROMPT, do_sample=False, max_new_tokens=8)
    assert torch.equal(
        target.generate(PROMPT, do_sample=False, max_new_tokens=8, assistant_model=random_draft()), plain
    )
