# SPDX-License-Identifier: Apache-2.0
"""z-lab's DFlash checkpoints give z-lab's numbers: slot 0 repeats the anchor, nothing of the target is stored."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from dspark_hf import DSparkDraftModel
from tests.parity.golden import GOLDEN, check_block, check_cached_rounds, check_decoding, load_pair
from tests.support.closeness import assert_close
from tests.support.models import uncached_block


FOLDER = GOLDEN / "zlab_dflash"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_block(attention):
    check_block(FOLDER, *load_pair(FOLDER, attention=attention))


@torch.no_grad()
def test_the_round_after():
    """The reference kept its cache and cropped it; ours is computed from the whole text."""
    golden, (target, draft) = load_file(FOLDER / "block.safetensors"), load_pair(FOLDER)
    accepted = int(golden["accepted_draft_tokens"])
    assert accepted > 0
    drafts = golden["draft_tokens"][:, :accepted]
    text = torch.cat([golden["prompt"], golden["anchor"][None], drafts, golden["round2_anchor"][None]], dim=1)
    block = uncached_block(target, draft, text)
    assert_close(block.hidden, golden["round2_block_hidden"][:, 1:])
    assert_close(block.draft_logits, golden["round2_draft_logits"])
    assert torch.equal(block.token_ids, golden["round2_draft_tokens"])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_cached_rounds(attention, monkeypatch):
    assert check_cached_rounds(FOLDER, *load_pair(FOLDER, attention=attention), monkeypatch) >= 6


def test_decoding():
    target, draft = load_pair(FOLDER)
    cases = json.loads((FOLDER / "decoding.json").read_text())["cases"]
    assert sum(check_decoding(case, target, draft)[0] for case in cases) >= 100
    assert {1, 6} < {length for case in cases for length in case["accepted_lengths"]}
    assert any(case["stop_token_ids"] for case in cases)


def test_configuration():
    config = load_pair(FOLDER)[1].config
    assert (config.sample_from_anchor, config.block_size, config.num_draft_slots) == (False, 6, 5)
    assert (config.target_layer_ids, config.mask_token_id, config.num_target_layers) == ([0, 2, 4], 223, 6)
    assert (config.markov_rank, config.enable_confidence_head) == (0, False)
    assert config.rope_parameters["rope_theta"] == 1e6  # the 4.x key


def test_the_reference_converter_describes_the_same_draft(tmp_path):
    """speculators' converter leaves the weights alone and writes the layer ids plus one."""
    shutil.copyfile(FOLDER / "draft" / "model.safetensors", tmp_path / "model.safetensors")
    shutil.copyfile(FOLDER / "converted_config.json", tmp_path / "config.json")
    converted = DSparkDraftModel.from_pretrained(tmp_path).config.to_dict()
    ours = load_pair(FOLDER)[1].config.to_dict()
    differing = {name for name in ours if ours[name] != converted[name]}
    assert differing <= {"_name_or_path", "target_name_or_path", "num_target_layers", "architectures"}
