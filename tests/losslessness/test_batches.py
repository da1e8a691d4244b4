# SPDX-License-Identifier: Apache-2.0
"""Every row of a batch is what it would be alone: greedily token for token, sampled in distribution."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from transformers import LogitsProcessorList

from dspark_hf import SPSCurve, collect_rounds, generate_many
from dspark_hf.decoding.criterion import SCHEDULES
from dspark_hf.scheduling import policy
from tests.losslessness.distributions import ALPHA, chi_square_p_value, exact_texts, sampling_pair
from tests.support.models import TARGET_KINDS, oracle_draft, random_prompt, spread_confidence, tiny_target


def left_padded(prompts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    longest = max(map(len, prompts))
    ids, mask = torch.zeros(2, len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def random_options(rng: random.Random) -> dict:
    options = {"max_new_tokens": rng.randint(1, 24), "do_sample": False}
    if rng.random() < 0.7:
        options["eos_token_id"] = [rng.randint(3, 90) for _ in range(3)]
    if rng.random() < 0.25:
        options["repetition_penalty"] = 1.3
    if rng.random() < 0.25:
        options["min_new_tokens"] = min(options["max_new_tokens"], rng.randint(1, 8))
        options.setdefault("eos_token_id", [5])
    if rng.random() < 0.15:
        options["no_repeat_ngram_size"] = 3
    if rng.random() < 0.15:
        options |= {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": [7]}
    if rng.random() < 0.15:
        options["forced_eos_token_id"] = 9
    if rng.random() < 0.15:
        options["begin_suppress_tokens"] = [rng.randint(3, 90) for _ in range(30)]
    if rng.random() < 0.15:
        options["suppress_tokens"] = [rng.randint(3, 90) for _ in range(5)]
    return options


def compare_batches(kind: str, count: int, seed: int) -> tuple[int, int, int]:
    """Rows compared, rounds and accepted drafts over random batches."""
    target = tiny_target(kind)
    draft = spread_confidence(oracle_draft(target))
    rng = random.Random(seed)
    compared = rounds = accepted = 0
    for number in range(count):
        prompts = [
            random_prompt(rng.randint(1, 60), seed=1000 * (seed + number) + row)[0] for row in range(rng.randint(2, 9))
        ]
        options, batch = random_options(rng), left_padded(prompts)
        draft.generation_config.num_assistant_tokens_schedule = rng.choice(SCHEDULES)
        draft.generation_config.num_assistant_tokens = rng.randint(1, draft.config.num_draft_slots)
        with collect_rounds() as stats:
            output = target.generate(**batch, assistant_model=draft, **options)
        padded_length = batch["input_ids"].shape[1]
        assert torch.equal(output[:, :padded_length], batch["input_ids"])
        for row, prompt in enumerate(prompts):
            alone = target.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), **options)
            answer = alone[0, len(prompt) :]
            assert output[row, padded_length:][: len(answer)].tolist() == answer.tolist(), (number, row, options)
            assert not output[row, padded_length + len(answer) :].any()  # the padding token
            compared += 1
        rounds, accepted = rounds + stats.num_rounds, accepted + sum(r.num_accepted for r in stats.rounds)
    return compared, rounds, accepted


@pytest.mark.parametrize("kind", TARGET_KINDS)
def test_rows_equal_plain_generation_alone(kind):
    compared, rounds, accepted = compare_batches(kind, 8, seed=TARGET_KINDS.index(kind))
    assert compared >= 16
    assert accepted / rounds > 0.05  # drafts were accepted, and not always all of them


@pytest.mark.slow
@pytest.mark.parametrize("kind", TARGET_KINDS)
def test_many_rows_equal_plain_generation_alone(kind):
    compared, _, _ = compare_batches(kind, 60, seed=100 + TARGET_KINDS.index(kind))
    assert compared >= 120


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_answers_of_many_prompts_are_theirs_alone(kind, schedule):
    target = tiny_target(kind)
    draft = spread_confidence(oracle_draft(target))
    draft.generation_config.num_assistant_tokens_schedule = schedule
    rng = random.Random(kind + schedule)
    prompts = [random_prompt(rng.randint(1, 40), seed=row)[0].tolist() for row in range(9)]
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": [5, 17, 33], "min_new_tokens": 2}
    answers = generate_many(target, draft, prompts, max_batch=3, **options)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        alone = target.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert answer.tolist() == alone[0, len(prompt) :].tolist()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sampled_rows_follow_the_target(schedule, monkeypatch):
    """Texts of three prompts in one batch, some of which end early, against their exact probabilities."""
    monkeypatch.setattr(policy, "UNMEASURED", SPSCurve.linear(1e-4, 1e-3))  # drafting pays for hundreds
    target, draft = sampling_pair(0.5, noise=0.5)
    spread_confidence(draft)
    draft.generation_config.num_assistant_tokens_schedule = schedule
    prompts = [torch.tensor(ids) for ids in ([3], [4, 5, 6, 7], [8, 3])]
    torch.manual_seed(0)
    copies, eos, counts = 120, 2, [Counter() for _ in prompts]
    rounds = 0
    for _ in range(6):
        with collect_rounds() as stats:
            output = target.generate(
                **left_padded(prompts),
                num_return_sequences=copies,
                do_sample=True,
                top_k=0,
                max_new_tokens=3,
                eos_token_id=eos,
                assistant_model=draft,
            )
        rounds += sum(record.verify_length > 0 for record in stats.rounds)
        for row, ids in enumerate(output[:, 4:].tolist()):
            end = ids.index(eos) + 1 if eos in ids else len(ids)
            counts[row // copies][tuple(ids[:end])] += 1
    assert rounds > 100
    for prompt, observed in zip(prompts, counts, strict=True):
        expected = exact_texts(target, prompt[None], 3, LogitsProcessorList(), eos_token_id=eos)
        assert chi_square_p_value(observed, expected) > ALPHA
    wrong = exact_texts(target, prompts[1][None], 3, LogitsProcessorList(), eos_token_id=eos)
    assert chi_square_p_value(counts[0], wrong) < ALPHA  # rows are not exchangeable: mixing them up would be seen
