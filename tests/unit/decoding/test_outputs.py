# SPDX-License-Identifier: Apache-2.0
"""What `generate` returns besides the tokens, against plain generation field by field."""

import pytest
import torch
from transformers.generation import GenerateDecoderOnlyOutput

from dspark_hf import AcceptanceStats, DSparkGenerateOutput
from dspark_hf._compat import CACHE_KEY
from tests.support.closeness import assert_close, assert_differs
from tests.support.models import TARGET_KINDS, oracle_draft, random_prompt, tiny_target


FIELDS = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
EVERYTHING = {"return_dict_in_generate": True} | dict.fromkeys(FIELDS, True)


def both(kind="qwen3", prompt_length=9, attention="eager", draft=None, **kwargs):
    target = tiny_target(kind)
    target.set_attn_implementation(attention)
    draft = draft or oracle_draft(target)
    kwargs = {"do_sample": False, "max_new_tokens": 18} | kwargs
    prompt = random_prompt(prompt_length, seed=4)
    return target.generate(prompt, **kwargs), target.generate(prompt, assistant_model=draft, **kwargs)


def shapes(entries):
    return [[tuple(layer.shape) for layer in entry] for entry in entries]


def test_type_and_rounds():
    plain, drafted = both(**EVERYTHING)
    assert isinstance(drafted, DSparkGenerateOutput)
    assert isinstance(drafted, GenerateDecoderOnlyOutput)
    assert set(plain.keys()) <= set(drafted.keys())
    stats = drafted.acceptance_stats
    assert isinstance(stats, AcceptanceStats)
    assert stats.num_committed == 17  # the prefill makes the first token
    assert stats.accepted_length > 1
    assert all(record.round_s >= record.draft_s + record.verify_s > 0 for record in stats.rounds)


def test_without_return_dict_a_tensor_comes_back():
    plain, drafted = both()
    assert isinstance(drafted, torch.Tensor)
    assert torch.equal(plain, drafted)


@pytest.mark.parametrize("field", FIELDS)
def test_only_what_was_asked_for(field):
    _, drafted = both(return_dict_in_generate=True, **{field: True})
    for name in FIELDS:
        value = getattr(drafted, name.removeprefix("output_"))
        assert (value is not None) == (name == field)
        assert value is None or len(value) == 18


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 18])
def test_one_entry_per_token(max_new_tokens):
    _, drafted = both(max_new_tokens=max_new_tokens, **EVERYTHING)
    for name in ("scores", "logits", "hidden_states", "attentions"):
        assert len(getattr(drafted, name)) == max_new_tokens


@pytest.mark.parametrize("prompt_length", [3, 20])
@pytest.mark.parametrize("kind", TARGET_KINDS)
def test_entries_have_the_shapes_and_values_of_plain_generation(kind, prompt_length):
    """A windowed layer keeps more keys while drafts may be taken back; what is returned does not show it."""
    plain, drafted = both(kind, prompt_length, **EVERYTHING)
    assert torch.equal(plain.sequences, drafted.sequences)
    for name in ("scores", "logits"):
        assert_close(getattr(drafted, name), getattr(plain, name))
    for name in ("hidden_states", "attentions"):
        assert shapes(getattr(drafted, name)) == shapes(getattr(plain, name)), name
        assert_close(getattr(drafted, name), getattr(plain, name))


@pytest.mark.parametrize("kind", TARGET_KINDS)
def test_cache_is_left_as_by_plain_generation(kind):
    plain, drafted = both(kind, 20, **EVERYTHING)
    ours, theirs = drafted[CACHE_KEY], plain[CACHE_KEY]
    assert ours.get_seq_length() == theirs.get_seq_length() == 20 + 18 - 1
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert_close(mine.keys, other.keys)
        assert_close(mine.values, other.values)
        assert getattr(mine, "record_past", None) == getattr(other, "record_past", None)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_attentions_over_a_static_cache_keep_its_length(kind):
    if CACHE_KEY != "cache":  # static caches cannot take tokens back before transformers 5.24
        with pytest.raises(ValueError, match="takes rejected tokens back"):
            both(kind, cache_implementation="static", **EVERYTHING)
        return
    plain, drafted = both(kind, cache_implementation="static", **EVERYTHING)
    assert torch.equal(plain.sequences, drafted.sequences)
    assert shapes(drafted.attentions) == shapes(plain.attentions)
    assert_close(drafted.attentions, plain.attentions)


def test_scores_are_processed_and_logits_are_not():
    kwargs = EVERYTHING | {"repetition_penalty": 1.7, "renormalize_logits": True}
    plain, drafted = both(**kwargs)
    assert_close(drafted.logits, plain.logits)
    assert_close(drafted.scores, plain.scores)
    assert_differs(drafted.scores[3], drafted.logits[3])


def test_logits_of_half_precision_are_returned_in_fp32():
    target = tiny_target().bfloat16()
    draft = oracle_draft(tiny_target()).bfloat16()
    output = target.generate(
        random_prompt(5),
        do_sample=False,
        max_new_tokens=8,
        assistant_model=draft,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
    )
    assert {tensor.dtype for tensor in output.logits + output.scores} == {torch.float32}


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_attentions_that_sdpa_does_not_compute(kind):
    plain, drafted = both(kind, attention="sdpa", **EVERYTHING)
    assert torch.equal(plain.sequences, drafted.sequences)
    assert plain.attentions == ((),) * 18
    assert drafted.attentions == plain.attentions
    assert len(drafted.hidden_states) == 18


def test_text_that_ends_inside_a_block_drops_the_rest():
    target = tiny_target("gemma3")
    target.set_attn_implementation("eager")
    draft = oracle_draft(target)
    prompt = random_prompt(9, seed=4)
    text = target.generate(prompt, do_sample=False, max_new_tokens=18)[0, 9:].tolist()
    stops = sorted({text.index(token) for token in text})
    dropped = 0
    for position in stops:
        kwargs = {"do_sample": False, "max_new_tokens": 18, "eos_token_id": text[position], **EVERYTHING}
        drafted = target.generate(prompt, assistant_model=draft, **kwargs)
        assert drafted.sequences[0, 9:].tolist() == text[: position + 1]
        assert [len(v) for v in (drafted.scores, drafted.logits, drafted.hidden_states)] == [position + 1] * 3
        assert drafted[CACHE_KEY].get_seq_length() == 9 + position
        dropped += any(record.truncated for record in drafted.acceptance_stats.rounds)
    assert dropped > 0
