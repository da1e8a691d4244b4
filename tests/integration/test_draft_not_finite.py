# SPDX-License-Identifier: Apache-2.0
"""Drafts whose numbers overflow or are NaN: blocks end there, drafting pauses, and the text is that of the target."""

import contextlib
import math

import pytest
import torch
from transformers.generation import GenerationMixin
from transformers.utils import logging as library_logging

from dspark_hf import collect_rounds, integration
from tests.support.eagle3 import oracle_eagle3, random_eagle3
from tests.support.models import oracle_draft, random_draft, random_prompt, tiny_target
from tests.support.scripted import captured_log


NUM_NEW = 24
BIGRAM = 0.003  # how little else than the last token counts in a target that the oracle knows well
HEADS = {
    "none": {"markov_rank": 0, "confidence_head_with_markov": False},
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "reduced": {"draft_vocab_size": 48},
}
MODES = {
    "greedy": {"do_sample": False},
    "greedy, reads text": {"do_sample": False, "repetition_penalty": 1.3},
    "sampling": {"do_sample": True, "top_k": 0},
    "sampling, top k": {"do_sample": True, "top_k": 20},
    "sampling, reads text": {"do_sample": True, "repetition_penalty": 1.3},
    "sampling, refuses NaN": {"do_sample": True, "eta_cutoff": 0.02},
    "sampling, hides NaN": {"do_sample": True, "remove_invalid_values": True},
}


def loud_target(scale: float = 3e5, ids: slice | int = slice(None), context_scale: float | None = None):
    """A target whose hidden states are beyond 65504, the end of float16; its text does not show it."""
    target = tiny_target(context_scale=context_scale)
    with torch.no_grad():
        target.model.embed_tokens.weight[ids] *= scale
    return target


@contextlib.contextmanager
def drafting_passes(draft):
    """Counts the passes of a draft."""
    passes, handle = [], None
    handle = draft.register_forward_pre_hook(lambda *_: passes.append(1))
    try:
        yield passes
    finally:
        handle.remove()


def run(target, draft, prompt=None, **kwargs):
    """Text, records, passes of the draft and warnings of a call."""
    library_logging.warning_once.cache_clear()
    prompt = random_prompt(9) if prompt is None else prompt
    arguments = {"do_sample": False, "max_new_tokens": NUM_NEW} | kwargs
    with (
        collect_rounds() as stats,
        captured_log("transformers.dspark_hf") as messages,
        drafting_passes(draft) as passes,
    ):
        text = target.generate(prompt, assistant_model=draft, **arguments)
    found = [message for message in messages if "not finite" in message]
    return text, stats.rounds, len(passes), found


def assert_sane(rounds):
    assert all(0 <= c <= 1 for record in rounds for c in record.confidence), "NaN is not in [0, 1]"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("head", HEADS)
def test_a_draft_that_overflows_is_not_used(head, mode):
    target, draft = loud_target(), random_draft(**HEADS[head]).half()
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    text, rounds, passes, found = run(target, draft, **MODES[mode])
    assert text.shape[1] == 9 + NUM_NEW
    if not MODES[mode]["do_sample"]:
        assert torch.equal(text, target.generate(random_prompt(9), max_new_tokens=NUM_NEW, **MODES[mode]))
    assert sum(record.verify_length for record in rounds) == 0
    assert passes == 3  # of 23 rounds: two failures, a pause of 8, a third failure, a pause of 16
    assert [record.drafted for record in rounds] == [i in (0, 1, 10) for i in range(NUM_NEW - 1)]
    assert_sane(rounds)
    assert len(found) == 1
    for part in ("logits that are not finite, in float16", "dtype=torch.bfloat16", "text is unaffected"):
        assert part in found[0]


@pytest.mark.parametrize("schedule", ["hardware", "confidence"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_no_schedule_learns_from_it(schedule, do_sample):
    target, draft = loud_target(), random_draft().half()
    draft.generation_config.num_assistant_tokens_schedule = schedule
    _, rounds, passes, _ = run(target, draft, do_sample=do_sample)
    assert passes <= 3
    assert_sane(rounds)


@pytest.mark.parametrize("mode", MODES)
def test_an_eagle3_draft_that_overflows_is_not_used(mode):
    target, draft = loud_target(), random_eagle3().half()
    draft.generation_config.prompt_lookup_num_tokens = 0
    text, rounds, _, found = run(target, draft, **MODES[mode])
    assert text.shape[1] == 9 + NUM_NEW
    if not MODES[mode]["do_sample"]:
        assert torch.equal(text, target.generate(random_prompt(9), max_new_tokens=NUM_NEW, **MODES[mode]))
    assert sum(record.verify_length for record in rounds) == 0
    assert [record.drafted for record in rounds] == [i in (0, 1, 10) for i in range(NUM_NEW - 1)]
    assert len(found) == 1


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_under_the_stock_loop(monkeypatch, kind, do_sample):
    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", integration._originals["_assisted_decoding"])
    target, draft = loud_target(), (random_draft() if kind == "dspark" else random_eagle3()).half()
    text, rounds, _, found = run(target, draft, do_sample=do_sample)
    assert (text.shape[1], rounds, len(found)) == (9 + NUM_NEW, [], 1)
    if not do_sample:
        assert torch.equal(text, target.generate(random_prompt(9), do_sample=False, max_new_tokens=NUM_NEW))


@pytest.mark.parametrize("do_sample", [False, True])
def test_one_row_of_a_batch_overflows(do_sample):
    """Its prompt holds a loud token; the other row is drafted for as if it were alone."""
    target = loud_target(1e6, ids=50, context_scale=BIGRAM)
    draft = oracle_draft(target, noise=0.01).half()
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    prompts = torch.cat([random_prompt(9, seed=4), random_prompt(9)])
    assert not (prompts == 50).any()
    prompts[0, 3] = 50
    text, rounds, _, found = run(target, draft, prompts, do_sample=do_sample, top_k=0)
    loud, quiet = ([record for record in rounds if record.request == row] for row in (0, 1))
    assert_sane(rounds)
    assert len(found) == 1
    assert sum(record.verify_length for record in loud) == 0
    assert sum(record.drafted for record in loud) == 3
    assert all(record.drafted for record in quiet if record.verify_length)
    assert sum(record.num_accepted for record in quiet) > NUM_NEW / 3
    if not do_sample:
        for row, prompt in zip(text, prompts.split(1), strict=True):
            assert torch.equal(row[None], target.generate(prompt, do_sample=False, max_new_tokens=NUM_NEW))
        _, alone, _, _ = run(target, draft, prompts[1:])
        assert [record.token_ids for record in quiet] == [record.token_ids for record in alone]


def test_a_markov_bias_that_overflows_costs_its_own_slots_alone():
    """Drafts after one token have no logits; blocks end behind it, and go on as soon as the text has passed it."""
    target = tiny_target(context_scale=BIGRAM)
    draft = oracle_draft(target, noise=0.01).half()
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    _, clean, _, found = run(target, draft)
    assert not found
    loud = clean[0].token_ids[1]  # slot 2 is drafted after it
    assert clean[0].num_accepted == 4
    with torch.no_grad():
        draft.markov_head.markov_w1.weight[loud] *= 60000
    text, rounds, passes, found = run(target, draft)
    assert torch.equal(text, target.generate(random_prompt(9), do_sample=False, max_new_tokens=NUM_NEW))
    assert len(found) == 1
    assert rounds[0].token_ids == clean[0].token_ids[:2]
    assert len(rounds[0].confidence) == 2
    for record in rounds:  # no slot behind the token is sent
        assert loud not in record.token_ids[:-1]
    assert sum(record.num_accepted for record in rounds[1:]) > 3
    assert passes >= len(rounds) - 1, "one bad token is no reason to pause"


@pytest.mark.parametrize("name", ["layers.0.mlp.down_proj.weight", "fc.weight", "markov_head.markov_w2.weight"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_weights_that_are_nan(name, do_sample):
    target, draft = tiny_target(), random_draft()
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    with torch.no_grad():
        draft.get_parameter(name).fill_(math.nan)
    text, rounds, passes, found = run(target, draft, do_sample=do_sample)
    assert (text.shape[1], passes) == (9 + NUM_NEW, 3)
    assert sum(record.verify_length for record in rounds) == 0
    assert len(found) == 1
    assert "in float32" in found[0]
    assert "check the checkpoint" in found[0]


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_mask_embedding_that_is_infinite(do_sample):
    """Only the draft reads it: the anchor's slot sees it through attention, and so do all others."""
    target, draft = tiny_target(), random_draft()
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    with torch.no_grad():
        target.model.embed_tokens.weight[draft.config.mask_token_id] = math.inf
    # The text itself must not come to the token, whose embedding is the target's, too.
    text, rounds, passes, found = run(target, draft, do_sample=do_sample, suppress_tokens=[draft.config.mask_token_id])
    assert (text.shape[1], passes, len(found)) == (9 + NUM_NEW, 3, 1)
    assert_sane(rounds)


@pytest.mark.parametrize("schedule", ["hardware", "confidence"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_confidences_alone_that_are_nan_stop_the_block(schedule, do_sample):
    target = tiny_target()
    draft = oracle_draft(target)
    draft.generation_config.update(num_assistant_tokens_schedule=schedule, prompt_lookup_num_tokens=0)
    with torch.no_grad():
        draft.confidence_head.proj.bias.fill_(math.nan)
    text, rounds, passes, found = run(target, draft, do_sample=do_sample)
    assert text.shape[1] == 9 + NUM_NEW
    assert sum(record.verify_length for record in rounds) == 0
    assert passes == 3 or (schedule == "hardware" and passes < 3)  # which may find sooner that it does not pay
    assert_sane(rounds)
    assert len(found) == 1
    assert "confidences that are not finite" in found[0]


def test_a_threshold_stops_at_a_confidence_that_is_nan():
    """The confidence after one token is NaN: blocks end before the slot that it is of."""
    target = tiny_target(context_scale=BIGRAM)
    draft = oracle_draft(target, noise=0.01)
    knobs = {"assistant_confidence_threshold": 1e-6}
    _, clean, _, _ = run(target, draft, **knobs)
    spoiled = clean[0].token_ids[1]

    class Spoiled(torch.nn.Module):
        def forward(self, hidden, embedding):
            return head(hidden, embedding).masked_fill(embedding[..., spoiled] == 1, math.nan)

    head, draft.confidence_head = draft.confidence_head, Spoiled()
    text, rounds, _, found = run(target, draft, **knobs)
    assert torch.equal(text, target.generate(random_prompt(9), do_sample=False, max_new_tokens=NUM_NEW))
    assert rounds[0].token_ids == clean[0].token_ids[:2]
    assert rounds[0].confidence[2] == 0.0
    assert len(found) == 1


def test_confidences_that_nobody_reads_may_be_nan():
    target = tiny_target()
    draft = oracle_draft(target)
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    _, clean, _, _ = run(target, draft)
    with torch.no_grad():
        draft.confidence_head.proj.bias.fill_(math.nan)
    _, rounds, _, found = run(target, draft)
    assert [record.token_ids for record in rounds] == [record.token_ids for record in clean]
    assert all(c == 0.0 for record in rounds for c in record.confidence)
    assert len(found) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_a_target_that_is_not_finite_fails_as_in_plain_generation(kind, value):
    target = tiny_target()
    draft = oracle_draft(target) if kind == "dspark" else oracle_eagle3(target)
    with torch.no_grad():
        target.lm_head.weight[5] = value
    errors = []
    for assistant in (None, draft):
        with pytest.raises(RuntimeError) as error:
            target.generate(random_prompt(9), do_sample=True, top_k=0, max_new_tokens=8, assistant_model=assistant)
        errors.append(str(error.value))
    assert errors[0] == errors[1]
    assert "probability tensor" in errors[0]


def test_drafts_of_the_right_dtype_are_not_warned_of():
    for build, target in ((random_draft, loud_target()), (random_eagle3, loud_target())):
        _, rounds, _, found = run(target, build().bfloat16(), num_assistant_tokens_schedule="constant")
        assert not found
        assert sum(record.verify_length for record in rounds) > 0
