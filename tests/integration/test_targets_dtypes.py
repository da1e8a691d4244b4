# SPDX-License-Identifier: Apache-2.0
"""Targets and drafts in every pair of dtypes. In half precision texts may part where two tokens nearly tie."""

import pytest
import torch
from transformers import DynamicCache

import dspark_hf
from tests.support.models import oracle_draft, random_prompt, tiny_target
from tests.support.scripted import (
    NUM_NEW,
    assert_same_up_to_near_ties,
    expected_accepted,
    generate,
    lively_target,
    num_accepted,
    scripted_draft,
    text_of,
    with_cache,
)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PAIRS = [(target, draft) for target in DTYPES for draft in DTYPES if "fp16" not in (target, draft) or target == draft]


@pytest.mark.parametrize(("target_dtype", "draft_dtype"), PAIRS)
def test_greedy_text(target_dtype, draft_dtype):
    target = lively_target().to(DTYPES[target_dtype])
    prompt = random_prompt(11)
    plain = generate(target, prompt)
    draft = scripted_draft(target, plain).to(DTYPES[draft_dtype])
    with dspark_hf.collect_rounds() as stats:
        text = generate(target, prompt, draft)
    if target_dtype == "fp32":  # whatever the draft's dtype is, the text is the target's, bit by bit
        assert torch.equal(text, plain)
        assert num_accepted(stats) == expected_accepted(11, NUM_NEW)
    assert_same_up_to_near_ties(target, text, plain, gap=1e-2)
    assert draft.contexts[0].dtype == DTYPES[draft_dtype]
    assert text[0, 12:].tolist() == text_of(stats)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize(("target_dtype", "draft_dtype"), PAIRS)
def test_heads_and_sampling(target_dtype, draft_dtype, head):
    # Every module of a draft sees its own dtype, and sampling runs in fp32.
    target, prompt = tiny_target("llama"), random_prompt(11)
    draft = oracle_draft(target, markov_head_type=head).to(DTYPES[draft_dtype])
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    target = target.to(DTYPES[target_dtype])
    plain = generate(target, prompt)
    with dspark_hf.collect_rounds() as stats:
        assert_same_up_to_near_ties(target, generate(target, prompt, draft), plain, gap=1e-2)
        sampled = generate(target, prompt, draft, do_sample=True, temperature=0.8, top_p=0.9)
    assert sampled.shape == (1, 11 + NUM_NEW)
    assert sum(num_accepted(stats)) > 0


@pytest.mark.parametrize("draft_dtype", ["fp32", "bf16"])
def test_reduced_vocabulary(draft_dtype):
    target, prompt = tiny_target("llama").bfloat16(), random_prompt(11)
    draft = oracle_draft(target, draft_vocab_size=50).to(DTYPES[draft_dtype])
    plain = generate(target, prompt)
    assert_same_up_to_near_ties(target, generate(target, prompt, draft), plain, gap=1e-2)
    assert generate(target, prompt, draft, do_sample=True).shape == (1, 11 + NUM_NEW)


def test_dtypes_of_the_outputs_and_of_the_cache():
    target, prompt = lively_target().bfloat16(), random_prompt(11)
    cache = DynamicCache(config=target.config)
    draft = scripted_draft(target, generate(target, prompt))
    output = generate(
        target,
        prompt,
        draft,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_hidden_states=True,
        **with_cache(cache),
    )
    assert {scores.dtype for scores in (*output.scores, *output.logits)} == {torch.float32}
    assert {layer.dtype for entry in output.hidden_states for layer in entry} == {torch.bfloat16}
    assert {layer.keys.dtype for layer in cache.layers} == {torch.bfloat16}


def test_scores_equal_logits_to_the_last_bit_without_processors():
    # Rounding on the way to fp32 would show here.
    target, prompt = lively_target().bfloat16(), random_prompt(11)
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    output = generate(target, prompt, scripted_draft(target, generate(target, prompt)), **wanted)
    for scores, logits in zip(output.scores, output.logits, strict=True):
        assert torch.equal(scores, logits)


def test_autocast_around_the_call():
    target, prompt = lively_target(), random_prompt(11)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = generate(target, prompt)
        draft = scripted_draft(target, plain)
        text = generate(target, prompt, draft)
        assert_same_up_to_near_ties(target, text, plain, gap=1e-2)
