# SPDX-License-Identifier: Apache-2.0
"""The speculators package (0.9.0) loads what is exported to its layout, and computes the same logits.

`speculators_package.py` records what the package did. Here the writer must still write what the package was shown,
and the reader must agree with the package's numbers and read what it writes.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dspark_hf import DSparkDraftModel
from dspark_hf.export.convert import convert_draft
from tests.parity.golden import GOLDEN
from tests.parity.speculators_package import ANCHOR, CASES
from tests.support.closeness import assert_close, assert_differs
from tests.support.models import uncached_block


FOLDER = GOLDEN / "speculators_package"


def our_block(draft: DSparkDraftModel, text: torch.Tensor):
    target = AutoModelForCausalLM.from_pretrained(FOLDER / "target")
    return uncached_block(target, draft, text[:, : ANCHOR + 1], token_ids=text[:, ANCHOR + 1 :])


@pytest.mark.parametrize("case", CASES)
def test_the_writer_writes_what_the_package_was_shown(case, tmp_path, monkeypatch):
    export = FOLDER / case / "export"
    convert_draft(export, "dspark", tmp_path / "own")
    monkeypatch.chdir(FOLDER)  # the record names its target relatively
    convert_draft(tmp_path / "own", "speculators", tmp_path / "again", target="target")
    shown, written = (json.loads((folder / "config.json").read_text()) for folder in (export, tmp_path / "again"))
    assert written == shown
    shown, written = (load_file(folder / "model.safetensors") for folder in (export, tmp_path / "again"))
    assert set(written) == set(shown)
    assert all(torch.equal(written[name], shown[name]) for name in shown)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_confidence_of_the_package(case):
    golden = load_file(FOLDER / case / "block.safetensors")
    draft = DSparkDraftModel.from_pretrained(FOLDER / case / "export")
    slots, block = draft.config.num_draft_slots, our_block(draft, golden["text"])
    assert_close(block.draft_logits, golden["draft_logits"][:, -slots:])
    assert (block.confidence_logits is None) == ("confidence_logits" not in golden) == (case == "dflash")
    if block.confidence_logits is not None:
        assert_close(block.confidence_logits, golden["confidence_logits"][:, -slots:])


@pytest.mark.parametrize("case", CASES)
def test_the_reader_reads_what_the_package_writes(case, tmp_path):
    """Its tensors are those of the export; its config is written again."""
    shutil.copyfile(FOLDER / case / "written" / "config.json", tmp_path / "config.json")
    shutil.copyfile(FOLDER / case / "export" / "model.safetensors", tmp_path / "model.safetensors")
    assert (tmp_path / "config.json").read_text() != (FOLDER / case / "export" / "config.json").read_text()
    ours, theirs = (DSparkDraftModel.from_pretrained(f).config for f in (FOLDER / case / "export", tmp_path))
    ours, theirs = ({k: v for k, v in c.to_dict().items() if k != "_name_or_path"} for c in (ours, theirs))
    assert theirs == ours


CHANGES = {
    "reduced_sliding": {"sliding_window_non_causal": True},
    "rnn_looking_both_ways": {"sliding_window_non_causal": False},
    "dflash": {"sliding_window": 7},
    "vanilla": {"target_layer_ids": [1, 2]},
    "first_slot_repeats": {"rope_parameters": {"rope_type": "default", "rope_theta": 9000.0}},
}


@pytest.mark.parametrize("case", CASES)
def test_another_reading_of_the_config_would_show(case):
    golden = load_file(FOLDER / case / "block.safetensors")
    config = DSparkDraftModel.from_pretrained(FOLDER / case / "export").config
    for name, value in CHANGES[case].items():
        assert getattr(config, name) != value
        setattr(config, name, value)
    draft = DSparkDraftModel.from_pretrained(FOLDER / case / "export", config=config)
    logits = our_block(draft, golden["text"]).draft_logits
    assert_differs(logits, golden["draft_logits"][:, -draft.config.num_draft_slots :])
