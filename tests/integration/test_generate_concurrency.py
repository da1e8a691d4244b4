# SPDX-License-Identifier: Apache-2.0
"""All state is in the call: repeated and simultaneous calls on one draft and one target do not meet."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

import dspark_hf
from tests.support.models import oracle_draft, random_prompt, tiny_target
from tests.support.scripted import lively_target, num_accepted, text_of


NUM_NEW = 24


def generate(target, prompt, draft=None, **kwargs):
    kwargs = {"do_sample": False, "max_new_tokens": NUM_NEW} | kwargs
    return target.generate(prompt, assistant_model=draft, **kwargs)


def rounds_and_text(target, prompt, draft):
    with dspark_hf.collect_rounds() as stats:
        text = generate(target, prompt, draft)
    return num_accepted(stats), text.tolist(), text_of(stats)


def fixed_length_oracle(target):
    draft = oracle_draft(target)
    draft.generation_config.num_assistant_tokens_schedule = "constant"  # the adaptive one follows the clock
    return draft


def test_repeated_calls_are_the_same():
    target = tiny_target("llama")
    draft, prompt = fixed_length_oracle(target), random_prompt(9)
    first = rounds_and_text(target, prompt, draft)
    assert sum(first[0]) > 0
    for _ in range(3):
        generate(target, random_prompt(14, seed=5), draft)  # another call in between
        assert rounds_and_text(target, prompt, draft) == first


def test_one_draft_serves_two_targets_in_turn():
    targets = [tiny_target("llama", seed=0), tiny_target("llama", seed=1)]
    draft, prompt = fixed_length_oracle(targets[0]), random_prompt(9)
    expected = [generate(target, prompt) for target in targets]
    for _ in range(2):
        for target, text in zip(targets, expected, strict=True):
            assert torch.equal(generate(target, prompt, draft), text)


def test_two_drafts_on_one_target():
    target, prompt = tiny_target("llama"), random_prompt(9)
    drafts = [fixed_length_oracle(target), oracle_draft(target, seed=7, block_size=3, target_layer_ids=[1])]
    expected = generate(target, prompt)
    for draft in (*drafts, *drafts):
        assert torch.equal(generate(target, prompt, draft), expected)


def test_threads_on_one_draft_and_one_target():
    target = tiny_target("llama")
    draft = fixed_length_oracle(target)
    prompts = [random_prompt(5 + i, seed=i) for i in range(8)]
    expected = [rounds_and_text(target, prompt, draft) for prompt in prompts]
    barrier = threading.Barrier(4)

    def run(prompt):
        barrier.wait(timeout=30)
        return rounds_and_text(target, prompt, draft)

    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert list(pool.map(run, prompts)) == expected


def test_a_plain_call_beside_a_drafted_one():
    target = lively_target("mistral")
    draft, prompt = oracle_draft(target), random_prompt(12)
    expected = generate(target, prompt)
    barrier = threading.Barrier(2)

    def run(assistant):
        barrier.wait(timeout=30)
        return [generate(target, prompt, assistant) for _ in range(4)]

    with ThreadPoolExecutor(2) as pool:
        for texts in pool.map(run, [None, draft]):
            assert all(torch.equal(text, expected) for text in texts)


def test_a_collector_sees_the_calls_of_its_own_thread():
    target = tiny_target("llama")
    draft, prompt = fixed_length_oracle(target), random_prompt(9)
    with dspark_hf.collect_rounds() as stats:
        thread = threading.Thread(target=generate, args=(target, prompt, draft))
        thread.start()
        thread.join(timeout=30)
    assert stats.rounds == []


def test_a_call_inside_a_call():
    # A criterion that itself generates with the same draft, as a judge or a guard does.
    target = tiny_target("llama")
    draft, prompt = fixed_length_oracle(target), random_prompt(9)
    expected, inner_expected = generate(target, prompt), generate(target, prompt[:, :5], max_new_tokens=6)

    def criterion(input_ids, scores, **kwargs):
        assert torch.equal(generate(target, prompt[:, :5], draft, max_new_tokens=6), inner_expected)
        return torch.tensor([False])

    assert torch.equal(generate(target, prompt, draft, stopping_criteria=[criterion]), expected)
