# SPDX-License-Identifier: Apache-2.0
"""Targets wrapped by PEFT: adapters on, off, and on the very modules that the draft shares."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

import dspark_hf
from tests.support.closeness import assert_close
from tests.support.models import random_prompt
from tests.support.scripted import NUM_NEW, expected_accepted, lively_target, num_accepted, scripted_draft


def lora_target(*modules):
    torch.manual_seed(0)
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=list(modules), init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return get_peft_model(lively_target("llama"), config).eval()


def generate(target, prompt, draft=None, **kwargs):
    kwargs = {"do_sample": False, "max_new_tokens": NUM_NEW} | kwargs
    return target.generate(input_ids=prompt, assistant_model=draft, **kwargs)


def check(target, prompt, expected):
    draft = scripted_draft(target.get_base_model(), expected)
    with dspark_hf.collect_rounds() as stats:
        text = generate(target, prompt, draft)
    assert torch.equal(text, expected)
    assert num_accepted(stats) == expected_accepted(11, NUM_NEW)
    return draft


@pytest.mark.parametrize("modules", [("q_proj", "v_proj"), ("down_proj", "lm_head"), ("q_proj", "embed_tokens")])
def test_adapter(modules):
    target, prompt = lora_target(*modules), random_prompt(11)
    plain = generate(target, prompt)
    assert not torch.equal(plain, generate(lively_target("llama"), prompt))  # the adapter does something
    check(target, prompt, plain)


def test_adapter_switched_off_and_merged():
    target, prompt = lora_target("q_proj", "v_proj"), random_prompt(11)
    adapted = generate(target, prompt)
    with target.disable_adapter():
        check(target, prompt, generate(lively_target("llama"), prompt))
    target.merge_adapter()
    check(target, prompt, adapted)


@torch.no_grad()
def test_base_logits_pass_through_the_adapter_of_the_lm_head():
    target, prompt = lora_target("q_proj", "lm_head"), random_prompt(11)
    draft = scripted_draft(target.get_base_model(), prompt)
    outputs = target(prompt, output_hidden_states=True)
    for bound in (target, target.get_base_model()):
        logits = draft.bind_target(bound).logits(outputs.hidden_states[-1])
        assert_close(logits, outputs.logits)
