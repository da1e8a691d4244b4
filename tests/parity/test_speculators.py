# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the speculators package give its numbers: reduced vocabularies, windows, slots and layers."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.parity.golden import GOLDEN, check_block, check_cached_rounds, check_decoding, load_pair


DSPARK = {
    "full": GOLDEN / "speculators_dspark" / "full",
    "sliding_causal": GOLDEN / "speculators_dspark" / "sliding_causal",
    "sliding_noncausal": GOLDEN / "speculators_dspark" / "sliding_noncausal",
    "dspark_full_vocab": GOLDEN / "speculators_dflash" / "dspark_full_vocab",
}
FOLDERS = DSPARK | {"dflash": GOLDEN / "speculators_dflash" / "dflash"}


def load(name: str, attention: str = "sdpa"):
    return load_pair(FOLDERS[name], FOLDERS[name].parent / "target", attention)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", FOLDERS)
@torch.no_grad()
def test_block(name, attention):
    check_block(FOLDERS[name], *load(name, attention))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", FOLDERS)
def test_cached_rounds(name, attention, monkeypatch):
    assert check_cached_rounds(FOLDERS[name], *load(name, attention), monkeypatch) >= 6


@pytest.mark.parametrize("name", FOLDERS)
def test_decoding(name):
    target, draft = load(name)
    cases = json.loads((FOLDERS[name] / "decoding.json").read_text())["cases"]
    compared = sum(check_decoding(case, target, draft)[0] for case in cases)
    assert {case["threshold"] for case in cases} == {0.0}
    assert compared >= 20
    assert {1, 6} < {length for case in cases for length in case["accepted_lengths"]}


def test_configuration():
    full, causal, bidirectional, full_vocab = (load(name)[1] for name in DSPARK)
    drafts = (full, causal, bidirectional, full_vocab)
    dflash = load("dflash")[1]
    assert (dflash.config.sample_from_anchor, dflash.config.num_draft_slots) == (False, 5)
    assert (dflash.markov_head, dflash.confidence_head, dflash.config.draft_vocab_size) == (None, None, 112)
    for draft in drafts:
        assert draft.config.target_layer_ids == [0, 1, 3]  # theirs count from the embedding output: 1, 2, 4
        assert (draft.config.block_size, draft.config.mask_token_id) == (5, 191)
        assert draft.config.sample_from_anchor is True
        assert draft.config.target_name_or_path == "target"
    assert [draft.config.draft_vocab_size for draft in drafts] == [112, 112, 112, None]
    assert [draft.config.sliding_window for draft in drafts] == [None, 6, 6, 7]
    assert bidirectional.config.layer_types == ["sliding_attention", "full_attention"]
    assert [draft.config.sliding_window_non_causal for draft in (causal, bidirectional)] == [False, True]
    assert (bidirectional.config.markov_head_type, full_vocab.config.markov_head_type) == ("gated", "rnn")
    assert bidirectional.config.confidence_head_with_markov is False
    assert full_vocab.lm_head is None
    assert full.lm_head.weight.shape == (112, 48)


def test_reduced_vocabulary_agrees_with_the_membership_mask():
    draft = load("full")[1]
    tensors = load_file(FOLDERS["full"] / "draft" / "model.safetensors")
    assert torch.equal(draft.draft_token_ids(), tensors["t2d"].nonzero().flatten())
    assert not torch.equal(draft.d2t, draft.draft_token_ids()), "offsets and ids are the same here"
