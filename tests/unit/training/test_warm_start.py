# SPDX-License-Identifier: Apache-2.0
"""Starting values: bigram tables by hand, rows and layers of the target."""

import math

import pytest
import torch
import transformers

from dspark_hf import DSparkDraftModel
from dspark_hf.training.dataset import TrainingSequence
from dspark_hf.training.warm_start import (
    copy_target_head,
    scale_final_norm,
    start_from_bigrams,
    start_from_target_layers,
)
from tests.support.closeness import assert_close
from tests.support.models import HIDDEN_SIZE, VOCAB_SIZE, random_draft, tiny_config, tiny_target


# Prompts 1, 2; answers 3 4 3 4 5 and 3 3. Pairs, the step from the prompt to the answer included: 2-3, 3-4, 4-3,
# 3-4, 4-5, and 2-3, 3-3.
CORPUS = [TrainingSequence((1, 2, 3, 4, 3, 4, 5), 2), TrainingSequence((1, 2, 3, 3), 2)]
PAIRS = {(2, 3): 2, (3, 4): 2, (4, 3): 1, (4, 5): 1, (3, 3): 1}
NEXT = {3: 4, 4: 2, 5: 1}


def expected_table(size: int, smoothing: float, scale: float) -> torch.Tensor:
    """log(1 + count / (smoothing * p(next))): what a pair adds to an unseen one of the same row."""
    table = torch.zeros(size, size)
    for (first, second), count in PAIRS.items():
        p_next = (NEXT[second] + 0.1) / (7 + 0.1 * size)
        table[first, second] = scale * math.log(1 + count / (smoothing * p_next))
    return table


def table_of(draft: DSparkDraftModel) -> torch.Tensor:
    head = draft.markov_head
    return head.markov_w2(head.markov_w1.weight).detach()


@pytest.mark.parametrize(("smoothing", "scale"), [(1.0, 1.0), (0.5, 2.0)])
def test_bigrams_at_full_rank(smoothing, scale):
    draft = random_draft(markov_rank=VOCAB_SIZE)
    kept = start_from_bigrams(draft, CORPUS, smoothing, scale)
    assert_close(table_of(draft), expected_table(VOCAB_SIZE, smoothing, scale))
    assert_close(kept, 1.0)


def test_bigrams_raise_the_odds_as_counted():
    """Of 3, two of three successors are 4: the table puts log p(4 | 3) / p(5 | 3) where the smoothed counts do."""
    draft = random_draft(markov_rank=VOCAB_SIZE)
    start_from_bigrams(draft, CORPUS)
    unigram = {token: (count + 0.1) / (7 + 9.7) for token, count in NEXT.items()}
    row = table_of(draft)[3]
    ours = (row[4] + math.log(unigram[4])) - (row[5] + math.log(unigram[5]))
    conditional = {4: (2 + unigram[4]) / (3 + 1), 5: (0 + unigram[5]) / (3 + 1)}
    assert_close(ours, math.log(conditional[4] / conditional[5]))


def test_low_rank_is_the_best_one():
    draft = random_draft(markov_rank=2)
    kept = start_from_bigrams(draft, CORPUS)
    table = expected_table(VOCAB_SIZE, 1.0, 1.0)
    squares = torch.linalg.svdvals(table).square()
    left = (table_of(draft) - table).square().sum()
    assert squares[2:].sum() <= left + 1e-4 <= squares[2:].sum() * 1.01 + 2e-4
    assert_close(kept, squares[:2].sum() / squares.sum(), factor=1e4)  # the best, up to the power iterations


def test_bigrams_of_a_reduced_vocabulary():
    """Kept 2, 3, 4: pairs with 5 are left out, and so the table is counted over the others."""
    draft = DSparkDraftModel(tiny_config(markov_rank=3, draft_vocab_size=3))
    copy_target_head(draft, tiny_target(), [2, 3, 4])
    kept = start_from_bigrams(draft, CORPUS)
    assert_close(kept, 1.0)
    p_next = {3: (4 + 0.1) / (6 + 0.3), 4: (2 + 0.1) / (6 + 0.3)}
    expected = torch.zeros(VOCAB_SIZE, 3)  # [previous: target id, next: draft id]
    for (first, second), count in PAIRS.items():
        if second != 5:
            expected[first, second - 2] = math.log(1 + count / p_next[second])
    assert_close(table_of(draft), expected)


def test_rank_beyond_the_vocabulary_is_left_at_zero():
    draft = DSparkDraftModel(tiny_config(markov_rank=8, draft_vocab_size=3))
    copy_target_head(draft, tiny_target(), [2, 3, 4])
    start_from_bigrams(draft, CORPUS)
    assert not draft.markov_head.markov_w1.weight[:, 3:].any()
    assert not draft.markov_head.markov_w2.weight[:, 3:].any()


def test_bigrams_need_a_sequential_head():
    draft = random_draft(markov_rank=0, confidence_head_with_markov=False)
    with pytest.raises(ValueError, match="`start_from_bigrams` needs a sequential head, but `markov_rank` is 0"):
        start_from_bigrams(draft, CORPUS)


def test_reduced_head_is_rows_of_the_target():
    target, draft = tiny_target(), DSparkDraftModel(tiny_config(draft_vocab_size=4))
    copy_target_head(draft, target, [0, 5, 6, 96])
    assert draft.draft_token_ids().tolist() == [0, 5, 6, 96]
    assert draft.d2t.tolist() == [0, 4, 4, 93]
    assert torch.equal(draft.lm_head.weight, target.lm_head.weight[[0, 5, 6, 96]])
    binding, hidden = draft.bind_target(target), torch.randn(2, HIDDEN_SIZE)
    assert_close(draft.base_logits(hidden, binding), binding.logits(hidden)[:, [0, 5, 6, 96]])


@pytest.mark.parametrize("factor", [1, 5])
def test_final_norm_gives_base_logits_of_deviation_one(factor):
    """For hidden states of rms 1 the variance over the vocabulary is the LM head's, summed over its columns."""
    target, draft = tiny_target(), random_draft()
    target.lm_head.weight.data.mul_(factor)
    state = torch.get_rng_state()
    constant = scale_final_norm(draft, target)
    assert torch.equal(torch.get_rng_state(), state)
    assert constant == pytest.approx(1 / target.lm_head.weight.var(dim=0).sum().sqrt().item(), rel=0.05)
    assert torch.equal(draft.norm.weight, torch.full((HIDDEN_SIZE,), constant))
    hidden = draft.norm(torch.randn(500, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1)))
    logits = draft.base_logits(hidden, draft.bind_target(target))
    assert logits.std(dim=-1).mean().item() == pytest.approx(1, rel=0.05)


def test_final_norm_for_a_reduced_vocabulary():
    """Its own rows count, here two opposite ones: their logits lie 2 |row . hidden| apart."""
    target, draft = tiny_target(), DSparkDraftModel(tiny_config(draft_vocab_size=2))
    with torch.no_grad():
        draft.lm_head.weight.copy_(torch.tensor([[3.0], [-3.0]]).expand(2, HIDDEN_SIZE))
    expected = 1 / (18 * HIDDEN_SIZE) ** 0.5  # the variance of x and -x is 2 x ^ 2
    assert scale_final_norm(draft, target) == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_layers_are_copies_of_the_targets_last_ones(kind):
    target = tiny_target(kind)
    draft = random_draft(intermediate_size=64)
    before = draft.state_dict()["layers.0.self_attn.q_norm.weight"].clone()
    start_from_target_layers(draft, target)
    for index, layer in enumerate(draft.layers):
        theirs = dict(target.model.layers[2 + index].named_parameters())
        ours = dict(layer.named_parameters())
        assert set(theirs) <= set(ours)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    if kind == "llama":  # has no such norm
        assert torch.equal(draft.layers[0].self_attn.q_norm.weight, before)
    assert torch.equal(draft.norm.weight, target.model.norm.weight)


def test_context_projection_averages_the_taps():
    draft = random_draft(intermediate_size=64)
    start_from_target_layers(draft, tiny_target())
    states = torch.randn(3, HIDDEN_SIZE), torch.randn(3, HIDDEN_SIZE)
    assert_close(draft.fc(torch.cat(states, dim=-1)), (states[0] + states[1]) / 2)


def test_other_shapes_stay_as_they_were():
    draft = random_draft(intermediate_size=48)  # the target's MLPs have 64
    before = draft.layers[0].mlp.up_proj.weight.clone()
    start_from_target_layers(draft, tiny_target())
    assert torch.equal(draft.layers[0].mlp.up_proj.weight, before)


def test_layers_of_another_kind_are_refused():
    """Gemma's norms scale by 1 + weight and stand elsewhere, under names that the draft has, too."""
    with pytest.raises(NotImplementedError, match="of Llama's or Qwen3's kind only, got those of Gemma3ForCausalLM"):
        start_from_target_layers(random_draft(), tiny_target("gemma3"))


def test_more_layers_than_the_target_has():
    with pytest.raises(ValueError, match="must not have more of them, got 5 and 4. Lower `draft_num_layers`"):
        start_from_target_layers(random_draft(num_hidden_layers=5), tiny_target())


def other_kind(name, **fields):
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = getattr(transformers, f"{name}Config")(**(sizes | {"intermediate_size": 64, "pad_token_id": 0} | fields))
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Olmo", {}),  # norms without weights
        ("StableLm", {}),  # norms that take the mean away
        ("Olmo2", {}),  # norms behind attention and MLP
        ("Phi3", {"eos_token_id": 2}),  # one projection for queries, keys and values
        ("GPT2", {"n_embd": HIDDEN_SIZE}),  # layers of another name
        ("GPTNeoX", {}),  # final norm of another name
        ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": HIDDEN_SIZE}),
    ],
)
def test_layers_of_other_kinds_are_refused_and_nothing_changes(name, fields):
    target, draft = other_kind(name, **fields), random_draft(intermediate_size=64)
    before = {key: value.clone() for key, value in draft.state_dict().items()}
    with pytest.raises(
        NotImplementedError, match=f"Llama's or Qwen3's kind only, got those of {type(target).__name__}"
    ):
        start_from_target_layers(draft, target)
    assert all(torch.equal(before[key], value) for key, value in draft.state_dict().items())


def test_layers_of_an_image_target_are_those_of_its_language_model():
    text = {"vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE, "intermediate_size": 64, "num_hidden_layers": 3}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        text_config=text | {"model_type": "llama"}, vision_config=vision | {"model_type": "clip_vision_model"}
    )
    target, draft = transformers.LlavaForConditionalGeneration(config), random_draft(intermediate_size=64)
    start_from_target_layers(draft, target)
    theirs = target.model.language_model.layers[-1].self_attn.q_proj.weight
    assert torch.equal(draft.layers[-1].self_attn.q_proj.weight, theirs)
