# SPDX-License-Identifier: Apache-2.0
"""Caches, chats, masks and embedded prompts: what the target sees is what it sees in plain generation."""

import pytest
import torch
from transformers import DynamicCache, Lfm2Config, Lfm2ForCausalLM, StaticCache
from transformers.cache_utils import Cache, QuantizedLayer

import dspark_hf
from dspark_hf._compat import CACHE_KEY
from tests.support.models import random_prompt
from tests.support.scripted import (
    NUM_NEW,
    STATIC_CACHE_CAN_CROP,
    ForwardCounter,
    StreamerSpy,
    assert_same_cache,
    expected_accepted,
    lively_target,
    num_accepted,
    scripted_draft,
    with_cache,
)


def lfm2_target():
    """Short convolutions, whose states are rolled back like keys and values."""
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=97,
        hidden_size=32,
        block_ff_dim=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        conv_L_cache=3,
        initializer_range=0.3,
    )
    target = Lfm2ForCausalLM(config).eval()
    target.generation_config.eos_token_id, target.generation_config.pad_token_id = None, 0
    return target


BUILDERS = {kind: lambda kind=kind: lively_target(kind) for kind in ("qwen3", "mistral", "gemma3")}
BUILDERS["lfm2"] = lfm2_target


@pytest.fixture(scope="module", params=BUILDERS)
def any_target(request):
    return BUILDERS[request.param]()


@pytest.fixture(scope="module")
def plain(target, prompt):
    return generate(target, prompt)


def generate(target, input_ids=None, draft=None, **kwargs):
    kwargs = {"do_sample": False, "max_new_tokens": NUM_NEW} | kwargs
    return target.generate(input_ids, **kwargs, assistant_model=draft)


def pad_left(input_ids, num_pads):
    padded = torch.cat([torch.zeros(1, num_pads, dtype=torch.long), input_ids], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :num_pads] = 0
    return padded, mask


# Chats


@pytest.mark.parametrize("num_prompt", [5, 12])
def test_the_users_cache_is_left_as_plain_generation_leaves_it(any_target, num_prompt):
    # Twelve tokens are more than the windows hold, five are fewer.
    prompt = random_prompt(num_prompt)
    expected_cache, cache = DynamicCache(config=any_target.config), DynamicCache(config=any_target.config)
    plain = generate(any_target, prompt, **with_cache(expected_cache))
    draft = scripted_draft(any_target, plain)
    with dspark_hf.collect_rounds() as stats:
        output = generate(any_target, prompt, draft, return_dict_in_generate=True, **with_cache(cache))
    assert torch.equal(output.sequences, plain)
    assert output[CACHE_KEY] is cache
    assert num_accepted(stats) == expected_accepted(num_prompt, NUM_NEW)
    assert cache.get_seq_length() == num_prompt + NUM_NEW - 1
    assert_same_cache(cache, expected_cache)


@pytest.mark.parametrize("num_first", [1, 6, 7])
def test_chat_goes_on_from_the_whole_text(any_target, num_first):
    prompt, question = random_prompt(11), random_prompt(5, seed=8)
    expected_cache, cache = DynamicCache(config=any_target.config), DynamicCache(config=any_target.config)

    def turn(input_ids, num_new):
        expected = generate(any_target, input_ids, max_new_tokens=num_new, **with_cache(expected_cache))
        draft = scripted_draft(any_target, expected)
        with dspark_hf.collect_rounds() as stats, ForwardCounter(any_target) as forwards:
            text = generate(any_target, input_ids, draft, max_new_tokens=num_new, **with_cache(cache))
        assert torch.equal(text, expected)
        assert num_accepted(stats) == expected_accepted(input_ids.shape[1], num_new)
        assert_same_cache(cache, expected_cache)
        return text, forwards

    text, _ = turn(prompt, num_first)
    input_ids = torch.cat([text, question], dim=1)
    text, forwards = turn(input_ids, NUM_NEW)
    assert torch.equal(text, generate(any_target, input_ids))  # and as without any cache
    # What the cache holds is not run again: the first turn's last token and the question are.
    assert forwards.calls[0]["input_ids"].shape[1] == 1 + 5
    turn(torch.cat([text, question], dim=1), 6)


def test_plain_generation_goes_on_from_our_cache_and_we_from_its(any_target):
    prompt, question = random_prompt(11), random_prompt(5, seed=8)
    first = generate(any_target, prompt)
    second_prompt = torch.cat([first, question], dim=1)
    second = generate(any_target, second_prompt)
    for drafted_turn in (0, 1):
        cache = DynamicCache(config=any_target.config)
        for turn, (input_ids, expected) in enumerate([(prompt, first), (second_prompt, second)]):
            draft = scripted_draft(any_target, expected) if turn == drafted_turn else None
            assert torch.equal(generate(any_target, input_ids, draft, **with_cache(cache)), expected)


@pytest.mark.parametrize("num_pads", [0, 3])
@pytest.mark.parametrize("only_new", [False, True], ids=["whole_text", "only_new_ids"])
def test_chat_with_a_mask(any_target, num_pads, only_new):
    prompt, mask = pad_left(random_prompt(11), num_pads)
    question = random_prompt(5, seed=8)
    expected_cache, cache = DynamicCache(config=any_target.config), DynamicCache(config=any_target.config)
    first = generate(any_target, prompt, attention_mask=mask, **with_cache(expected_cache))
    draft = scripted_draft(any_target, first[:, num_pads:])
    assert torch.equal(generate(any_target, prompt, draft, attention_mask=mask, **with_cache(cache)), first)

    text = torch.cat([first, question], dim=1)
    mask = torch.cat([mask, mask.new_ones(1, NUM_NEW + 5)], dim=1)
    start = cache.get_seq_length() if only_new else 0
    # A fresh cache says what the text has to be; plain generation with its own cache, what the cache has to be.
    second = generate(any_target, text, attention_mask=mask)
    generate(any_target, text[:, start:], attention_mask=mask, **with_cache(expected_cache))
    draft = scripted_draft(any_target, second[:, num_pads:])
    with dspark_hf.collect_rounds() as stats:
        continued = generate(any_target, text[:, start:], draft, attention_mask=mask, **with_cache(cache))
    assert torch.equal(continued, second[:, start:])
    assert num_accepted(stats) == expected_accepted(text.shape[1] - num_pads, NUM_NEW)
    assert_same_cache(cache, expected_cache)


def test_context_of_a_continued_chat_is_the_new_part(target, prompt):
    # Hidden states of what is in the cache are gone: the draft starts from the new tokens, at their true positions.
    cache = DynamicCache(config=target.config)
    first = generate(target, prompt, **with_cache(cache))
    text = torch.cat([first, random_prompt(5, seed=8)], dim=1)
    draft = scripted_draft(target, generate(target, text))
    generate(target, text, draft, **with_cache(cache))
    assert draft.contexts[0].shape[1] == 1 + 5
    assert draft.positions[0][0].tolist() == list(range(28, 28 + 6 + 4))


def test_a_long_prompt(any_target):
    # Longer than any window, and than what the draft's own buffers hold at first.
    prompt = random_prompt(300)
    plain = generate(any_target, prompt)
    draft = scripted_draft(any_target, plain)
    with dspark_hf.collect_rounds() as stats:
        text = generate(any_target, prompt, draft)
    assert torch.equal(text, plain)
    assert num_accepted(stats) == expected_accepted(300, NUM_NEW)
    assert sum(context.shape[1] for context in draft.contexts) == 300 + sum(
        record.num_committed for record in stats.rounds[: len(draft.contexts) - 1]
    )


# Masks and positions


@pytest.mark.parametrize("num_pads", [1, 6])
def test_left_padding(any_target, num_pads):
    prompt = random_prompt(11)
    padded, mask = pad_left(prompt, num_pads)
    expected = generate(any_target, padded, attention_mask=mask)
    draft = scripted_draft(any_target, expected[:, num_pads:])
    with dspark_hf.collect_rounds() as stats:
        text = generate(any_target, padded, draft, attention_mask=mask)
    assert torch.equal(text, expected)
    assert num_accepted(stats) == expected_accepted(11, NUM_NEW)
    # The draft never sees the padding.
    assert draft.contexts[0].shape[1] == 11
    assert draft.positions[0][0].tolist() == list(range(11 + 4))


def test_no_mask_and_a_mask_of_ones(target, prompt, plain, draft):
    for mask in (None, torch.ones_like(prompt), torch.ones_like(prompt, dtype=torch.bool)):
        assert torch.equal(generate(target, prompt, draft, attention_mask=mask), plain)


def test_pad_ids_inside_the_prompt_without_a_mask(target):
    # transformers then builds a mask from the pad ids.
    prompt, _ = pad_left(random_prompt(8), 3)
    expected = generate(target, prompt)
    assert torch.equal(generate(target, prompt, scripted_draft(target, expected[:, 3:])), expected)


def test_mask_with_holes(target, prompt):
    mask = torch.ones_like(prompt)
    mask[:, 4:6] = 0
    expected = generate(target, prompt, attention_mask=mask)
    assert torch.equal(generate(target, prompt, scripted_draft(target, expected), attention_mask=mask), expected)


def test_positions_of_the_user(target, prompt):
    position_ids = torch.arange(11)[None] + 7
    expected = generate(target, prompt, position_ids=position_ids)
    assert not torch.equal(expected, generate(target, prompt, position_ids=2 * torch.arange(11)[None]))
    text = torch.cat([torch.zeros(1, 7, dtype=torch.long), expected], dim=1)
    draft = scripted_draft(target, text)
    assert torch.equal(generate(target, prompt, draft, position_ids=position_ids), expected)
    assert draft.positions[0][0].tolist() == list(range(7, 7 + 11 + 4))


# Embedded prompts


def test_embedded_prompt(any_target):
    prompt = random_prompt(11)
    embeds = any_target.get_input_embeddings()(prompt)
    expected = generate(any_target, inputs_embeds=embeds)
    assert expected.shape == (1, NUM_NEW)
    draft = scripted_draft(any_target, torch.cat([prompt, expected], dim=1))
    with dspark_hf.collect_rounds() as stats:
        text = generate(any_target, inputs_embeds=embeds, draft=draft)
    assert torch.equal(text, expected)
    assert num_accepted(stats) == expected_accepted(11, NUM_NEW)


def test_embedded_prompt_with_its_ids(target, prompt, plain, draft):
    embeds = target.get_input_embeddings()(prompt) * 1.5  # so that it matters which of the two is read
    expected = generate(target, prompt, inputs_embeds=embeds)
    assert not torch.equal(expected, plain)
    assert torch.equal(generate(target, prompt, scripted_draft(target, expected), inputs_embeds=embeds), expected)


def test_embedded_prompt_with_padding(target, prompt):
    padded, mask = pad_left(prompt, 3)
    embeds = target.get_input_embeddings()(padded)
    expected = generate(target, inputs_embeds=embeds, attention_mask=mask)
    draft = scripted_draft(target, torch.cat([prompt, expected], dim=1))
    assert torch.equal(generate(target, inputs_embeds=embeds, attention_mask=mask, draft=draft), expected)


@pytest.mark.parametrize("num_new", range(1, 6))
def test_embedded_prompt_has_an_exact_length(target, prompt, num_new):
    embeds = target.get_input_embeddings()(prompt)
    expected = generate(target, inputs_embeds=embeds, max_new_tokens=num_new)
    draft = scripted_draft(target, torch.cat([prompt, expected], dim=1), spoil=1000)
    text = generate(target, inputs_embeds=embeds, draft=draft, max_new_tokens=num_new)
    assert torch.equal(text, expected)


# Chunked prefill


@pytest.mark.parametrize(("chunk_size", "num_pads"), [(1, 0), (3, 2), (4, 0), (11, 0), (64, 2)])
def test_chunked_prefill(any_target, chunk_size, num_pads):
    prompt, mask = pad_left(random_prompt(11), num_pads)
    inputs = {"attention_mask": mask, "prefill_chunk_size": chunk_size}
    expected = generate(any_target, prompt, **inputs)
    assert torch.equal(expected, generate(any_target, prompt, attention_mask=mask))
    draft = scripted_draft(any_target, expected[:, num_pads:])
    with dspark_hf.collect_rounds() as stats:
        text = generate(any_target, prompt, draft, **inputs)
    assert torch.equal(text, expected)
    assert num_accepted(stats) == expected_accepted(11, NUM_NEW)


# Kinds of caches


def test_static_cache(target, prompt, plain, draft):
    for static in (
        {"cache_implementation": "static"},
        with_cache(StaticCache(target.config, max_cache_len=11 + NUM_NEW - 1)),
    ):
        if STATIC_CACHE_CAN_CROP:
            assert torch.equal(generate(target, prompt, draft, **static), plain)
            continue
        with pytest.raises(ValueError, match="takes rejected tokens back .* Use a dynamic cache"):
            generate(target, prompt, draft, **static)


def test_static_cache_of_a_chat(target, prompt):
    cache = StaticCache(target.config, max_cache_len=64)
    if not STATIC_CACHE_CAN_CROP:
        with pytest.raises(ValueError, match="Use a dynamic cache"):
            generate(target, prompt, scripted_draft(target, prompt), **with_cache(cache))
        return
    expected_cache = StaticCache(target.config, max_cache_len=64)
    text = prompt
    for seed in (8, 9):
        expected = generate(target, text, **with_cache(expected_cache))
        text = generate(target, text, scripted_draft(target, expected), **with_cache(cache))
        assert torch.equal(text, expected)
        assert cache.get_seq_length() == expected_cache.get_seq_length() == text.shape[1] - 1
        text = torch.cat([text, random_prompt(5, seed=seed)], dim=1)


def test_static_cache_with_windows_is_refused(prompt):
    # A static window forgets what a rollback would need.
    target, spy = lively_target("mistral"), StreamerSpy()
    draft = scripted_draft(target, prompt)
    with (
        ForwardCounter(target) as forwards,
        pytest.raises(ValueError, match="'static' does not allow. Use a dynamic cache"),
    ):
        generate(target, prompt, draft, cache_implementation="static", streamer=spy)
    assert forwards.num_prompts == 0
    assert spy.puts == [prompt[0].tolist()]


def test_dynamic_cache_by_name(target, prompt, plain, draft):
    assert torch.equal(generate(target, prompt, draft, cache_implementation="dynamic"), plain)


def test_quantised_cache_is_refused(target, prompt, draft):
    class Rounded(QuantizedLayer):
        def _quantize(self, tensor, axis):
            return tensor.half()

        def _dequantize(self, tensor):
            return tensor.float()

    def quantised_cache():
        return Cache(layers=[Rounded(q_group_size=8, residual_length=4) for _ in range(4)])

    assert generate(target, prompt, **with_cache(quantised_cache())).shape[1] == 11 + NUM_NEW  # plain generation can
    spy = StreamerSpy()
    with (
        ForwardCounter(target) as forwards,
        pytest.raises(ValueError, match="takes rejected tokens back .* Use a dynamic"),
    ):
        generate(target, prompt, draft, streamer=spy, **with_cache(quantised_cache()))
    assert forwards.num_prompts == 0
    assert spy.puts == [prompt[0].tolist()]


def test_cache_without_a_config(target, prompt, plain, draft):
    cache = DynamicCache()  # its layers appear with the first forward
    assert torch.equal(generate(target, prompt, draft, **with_cache(cache)), plain)
    assert cache.get_seq_length() == 11 + NUM_NEW - 1


def test_the_draft_keeps_nothing_of_a_call(target, prompt, plain, draft):
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    attributes = set(vars(draft))
    generate(target, prompt, draft)
    assert set(vars(draft)) == attributes
    assert all(torch.equal(tensor, before[name]) for name, tensor in draft.state_dict().items())
