# SPDX-License-Identifier: Apache-2.0
"""Targets with images and three-dimensional positions. The draft lies on the text positions."""

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

import dspark_hf
from tests.support.closeness import assert_close
from tests.support.scripted import (
    NUM_NEW,
    assert_same_cache,
    draft_config_for,
    expected_accepted,
    generate,
    num_accepted,
    scripted_draft,
    with_cache,
)


IMAGE, START, END = 90, 92, 93


@pytest.fixture(scope="module")
def target():
    return image_text_target()


def image_text_target():
    torch.manual_seed(0)
    text = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        "initializer_range": 0.3,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [1],
        "window_size": 56,
        "initializer_range": 0.3,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=91,
        vision_start_token_id=START,
        vision_end_token_id=END,
        initializer_range=0.3,
    )
    target = Qwen2_5_VLForConditionalGeneration(config).eval()
    target.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
    return target


def text_prompt(seed=3):
    return torch.randint(3, 88, (1, 11), generator=torch.Generator().manual_seed(seed))


def image_prompt(grid=(4, 4)):
    """Text with one image in it; two by two patches become one token."""
    height, width = grid
    text, num_tokens = text_prompt(), height * width // 4
    image = torch.tensor([[START, *[IMAGE] * num_tokens, END]])
    input_ids = torch.cat([text[:, :4], image, text[:, 4:]], dim=1)
    pixels = torch.randn(height * width, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(5))
    return input_ids, {
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, height, width]]),
        "mm_token_type_ids": (input_ids == IMAGE).long(),
    }


def check(target, prompt, num_pads=0, **inputs):
    plain = generate(target, prompt, **inputs)
    draft = scripted_draft(target, plain[:, num_pads:])
    with dspark_hf.collect_rounds() as stats:
        text = generate(target, prompt, draft, **inputs)
    assert torch.equal(text, plain)
    num_prompt = prompt.shape[1] - num_pads
    assert num_accepted(stats) == expected_accepted(num_prompt, NUM_NEW)
    assert draft.positions[0].tolist() == [list(range(num_prompt + 4))]
    return plain


def test_text_alone(target):
    check(target, text_prompt())


@pytest.mark.parametrize("grid", [(2, 2), (4, 4), (4, 8)])
def test_an_image(target, grid):
    prompt, inputs = image_prompt(grid)
    plain = check(target, prompt, **inputs)
    other = dict(inputs, pixel_values=-inputs["pixel_values"])
    assert not torch.equal(generate(target, prompt, **other), plain)  # the image is read


def test_an_image_after_padding(target):
    prompt, inputs = image_prompt()
    prompt = torch.cat([torch.zeros(1, 3, dtype=torch.long), prompt], dim=1)
    inputs["mm_token_type_ids"] = (prompt == IMAGE).long()
    check(target, prompt, num_pads=3, attention_mask=(torch.arange(prompt.shape[1]) >= 3).long()[None], **inputs)


def test_the_image_is_encoded_once(target):
    prompt, inputs = image_prompt()
    draft = scripted_draft(target, generate(target, prompt, **inputs))
    calls = []
    handle = target.model.visual.register_forward_pre_hook(lambda module, args: calls.append(1))
    generate(target, prompt, draft, **inputs)
    handle.remove()
    assert len(calls) == 1


def test_positions_of_one_call_do_not_reach_the_next(target):
    # The model remembers how far an image shifted its positions.
    prompt, inputs = image_prompt((4, 8))
    before = generate(target, text_prompt())
    check(target, prompt, **inputs)
    assert torch.equal(generate(target, text_prompt()), before)
    check(target, text_prompt())


def test_chat_about_an_image(target):
    prompt, inputs = image_prompt()
    caches = [DynamicCache(config=target.config.get_text_config()) for _ in range(2)]
    first = generate(target, prompt, **inputs, **with_cache(caches[0]))
    text = generate(target, prompt, scripted_draft(target, first), **inputs, **with_cache(caches[1]))
    assert torch.equal(text, first)
    assert_same_cache(caches[1], caches[0])

    # The image is in the cache: the second question comes without it.
    text = torch.cat([first, text_prompt(seed=8)], dim=1)
    inputs = {"mm_token_type_ids": (text == IMAGE).long(), "image_grid_thw": inputs["image_grid_thw"]}
    second = generate(target, text, **inputs, **with_cache(caches[0]))
    # The four tokens of the image take two positions, and in a continued chat the model shifts all rows by that much.
    assert int(target.model.rope_deltas) == -2
    draft = scripted_draft(target, second[:, 2:])
    with dspark_hf.collect_rounds() as stats:
        continued = generate(target, text, draft, **inputs, **with_cache(caches[1]))
    assert torch.equal(continued, second)
    assert num_accepted(stats) == expected_accepted(text.shape[1] - 2, NUM_NEW)
    assert_same_cache(caches[1], caches[0])


def test_base_logits_and_sizes_are_those_of_the_text_model(target):
    draft = dspark_hf.DSparkDraftModel(draft_config_for(target))
    with torch.no_grad():
        outputs = target(text_prompt(), output_hidden_states=True)
        logits = draft.bind_target(target).logits(outputs.hidden_states[-1])
    assert_close(logits, outputs.logits)


def test_a_chat_that_began_without_a_draft_goes_on_with_one(target):
    # The first call with a draft probes the target, which must not forget where the image put the text.
    prompt, inputs = image_prompt()
    cache, expected_cache = DynamicCache(config=target.config), DynamicCache(config=target.config)
    text = generate(target, prompt, **inputs, **with_cache(cache))
    assert torch.equal(generate(target, prompt, **inputs, **with_cache(expected_cache)), text)
    text = torch.cat([text, torch.tensor([[7, 8, 9]])], dim=1)
    shift = target.model.rope_deltas.clone()
    expected = generate(target, text, **with_cache(expected_cache))
    target.__dict__.pop("_dspark_hf_findings", None)
    target.model.rope_deltas = shift
    draft = scripted_draft(target, expected)
    assert torch.equal(generate(target, text, draft, **with_cache(cache)), expected)
