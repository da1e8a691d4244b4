# SPDX-License-Identifier: Apache-2.0
"""DeepSpec's checkpoints give DeepSpec's numbers."""

import json

import pytest
import torch

from tests.parity.golden import GOLDEN, check_block, check_cached_rounds, check_decoding, load_pair


NAMES = ("qwen3_vanilla", "qwen3_gated", "qwen3_rnn", "qwen3_dflash")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_block(name, attention):
    check_block(GOLDEN / name, *load_pair(GOLDEN / name, attention=attention))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", NAMES)
def test_cached_rounds(name, attention, monkeypatch):
    folder = GOLDEN / name
    assert check_cached_rounds(folder, *load_pair(folder, attention=attention), monkeypatch) >= 6


@pytest.mark.parametrize("name", NAMES)
def test_decoding(name):
    folder = GOLDEN / name
    target, draft = load_pair(folder)
    cases = json.loads((folder / "decoding.json").read_text())["cases"]
    thresholds, compared, shortened = set(), 0, 0
    for case in cases:
        if case["threshold"] and draft.confidence_head is None:
            continue
        thresholds.add(case["threshold"])
        counts = check_decoding(case, target, draft)
        compared, shortened = compared + counts[0], shortened + counts[1]
    assert thresholds == ({0.0} if name == "qwen3_dflash" else {0.0, 0.5})
    assert compared >= 20
    assert shortened <= 5 * len(cases)  # one per token of a block at most
    # The data hold rounds with all, some and none of the drafts accepted.
    assert {1, 6} < {length for case in cases for length in case["accepted_lengths"]}


def test_thresholds_cut_blocks():
    for name in NAMES[:3]:
        cases = json.loads((GOLDEN / name / "decoding.json").read_text())["cases"]
        lengths = {n for case in cases if case["threshold"] for n in case["proposal_lengths"]}
        assert {1, 3, 4, 5} <= lengths, "the data cut too little"


@pytest.mark.parametrize("name", NAMES)
def test_configuration(name):
    _, draft = load_pair(GOLDEN / name)
    config = draft.config
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (5, 255, [0, 1, 3])
    assert config.sample_from_anchor is True
    assert config.num_draft_slots == 5
    assert config.num_target_layers == 5
    assert config.draft_vocab_size is None
    assert config.layer_types == ["full_attention"] * 2
    head = {"qwen3_vanilla": "MarkovHead", "qwen3_gated": "GatedMarkovHead", "qwen3_rnn": "RNNHead"}.get(name)
    assert (type(draft.markov_head).__name__ if head else draft.markov_head) == head
    assert (draft.confidence_head is None) == (head is None)
