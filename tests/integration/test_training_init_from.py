# SPDX-License-Identifier: Apache-2.0
"""Training goes on with an earlier draft: its weights, its shape, and a vocabulary that may be cut down on the way."""

from __future__ import annotations

import pytest
import torch

from dspark_hf import DSparkDraftModel
from dspark_hf.training.run import DraftArguments, new_draft
from dspark_hf.training.warm_start import reduce_vocabulary
from tests.support.closeness import assert_close
from tests.support.models import oracle_draft, random_draft, random_prompt, tiny_target, uncached_block
from tests.support.training import greedy_sequences, word_tokenizer


KEPT = [2, 3, 5, 8, 13, 21, 34, 55, 89]


@pytest.fixture(scope="module")
def target():
    return tiny_target(context_scale=0.3)


@pytest.fixture(scope="module")
def sequences(target):
    return greedy_sequences(target, 6)


@pytest.fixture
def folder(target, tmp_path):
    draft = oracle_draft(target, noise=1.0)
    draft.config.acceptance_prior, draft.config.confidence_temperatures = [0.5] * 4, [2.0] * 4
    draft.save_pretrained(tmp_path / "earlier")
    return tmp_path / "earlier"


def go_on(target, sequences, folder, **arguments) -> DSparkDraftModel:
    # The shape that the arguments describe is another one on purpose: the earlier draft's counts.
    settings = DraftArguments(init_from=str(folder), draft_num_layers=1, block_size=2, markov_rank=0, **arguments)
    return new_draft(target, word_tokenizer(), sequences, settings)


def test_weights_and_shape_are_the_earlier_drafts(target, sequences, folder):
    earlier, draft = DSparkDraftModel.from_pretrained(folder), go_on(target, sequences, folder)
    shape = (draft.config.block_size, draft.config.num_hidden_layers, draft.config.markov_rank)
    assert shape == (4, 2, earlier.config.markov_rank)
    found, expected = draft.state_dict(), earlier.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert draft.config.acceptance_prior is None, "measured on the earlier draft"
    assert draft.config.confidence_temperatures is None


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", None])
def test_reduced_draft_says_the_same_of_the_kept_tokens(target, head):
    shape = {"markov_rank": 0, "confidence_head_with_markov": False} if head is None else {"markov_head_type": head}
    draft = random_draft(**shape)
    text = random_prompt(9)
    reduced = reduce_vocabulary(draft, target, KEPT)
    assert reduced.draft_token_ids().tolist() == KEPT
    hidden = torch.randn(3, draft.config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = draft.base_logits(hidden, draft.bind_target(target))
        part = reduced.base_logits(hidden, reduced.bind_target(target))
        assert_close(part, whole[:, KEPT])
        if head is not None:
            features = torch.randn(3, draft.config.markov_rank, generator=torch.Generator().manual_seed(1))
            bias = draft.markov_head.markov_w2(features)[:, KEPT]
            assert_close(reduced.markov_head.markov_w2(features), bias)
        block = uncached_block(target, reduced, text)
    assert set(block.token_ids[0].tolist()) <= set(KEPT)
    assert draft.config.draft_vocab_size is None, "the other draft is left alone"


def test_a_whole_vocabulary_is_cut_down_to_the_answers(target, sequences, folder):
    draft = go_on(target, sequences, folder, draft_vocab_size=20)
    assert draft.config.draft_vocab_size == 20
    answers = {token for sequence in sequences for token in sequence.input_ids[sequence.num_prompt_tokens :]}
    assert len(answers & set(draft.draft_token_ids().tolist())) >= min(19, len(answers))
    assert not draft.lm_head.weight.requires_grad


def test_a_reduced_vocabulary_is_not_changed_again(target, sequences, folder, tmp_path):
    go_on(target, sequences, folder, draft_vocab_size=20).save_pretrained(tmp_path / "reduced")
    again = go_on(target, sequences, tmp_path / "reduced", train_lm_head=True)
    assert again.config.draft_vocab_size == 20
    assert again.lm_head.weight.requires_grad
    with pytest.raises(ValueError, match="`draft_vocab_size` must be that of `init_from`, 20, or unset, got 10"):
        go_on(target, sequences, tmp_path / "reduced", draft_vocab_size=10)
    with pytest.raises(ValueError, match="whole vocabulary can be reduced, got one over 20 tokens"):
        reduce_vocabulary(again, target, KEPT)


def test_another_targets_draft_is_refused(sequences, folder):
    with pytest.raises(ValueError, match="vocab"):
        go_on(tiny_target(vocab_size=120), sequences, folder)
