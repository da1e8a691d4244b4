# SPDX-License-Identifier: Apache-2.0
"""Every golden pair as users run it: under the default schedule with its measurement, one text and two."""

from pathlib import Path

import pytest
import torch
from huggingface_hub import constants as hub_constants
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from dspark_hf import DSparkConfig, DSparkDraftModel, Eagle3DraftModel, collect_rounds
from dspark_hf.profiling import automatic, profile_for
from dspark_hf.profiling.automatic import SWITCH
from tests.parity.golden import GOLDEN
from tests.support.models import random_prompt


MODELS = sorted(path.parent for path in GOLDEN.rglob("model.safetensors"))
TARGETS = [folder for folder in MODELS if folder.name == "target"]
# Eagle 3 drafts one text at a time.
CASES = [
    (folder, count)
    for folder in MODELS
    for count in (1, 2)
    if folder.name != "target" and (count == 1 or not folder.parent.name.startswith("eagle3"))
]
SETTINGS = {"do_sample": False, "max_new_tokens": 16}


def load_target(folder: Path) -> PreTrainedModel:
    target = AutoModelForCausalLM.from_pretrained(folder)
    target.generation_config = GenerationConfig(pad_token_id=0)
    return target


def prompts(target: PreTrainedModel, count: int) -> torch.Tensor:
    return torch.cat([random_prompt(11, seed=seed, vocab_size=target.config.vocab_size) for seed in range(count)])


@pytest.mark.parametrize(
    ("folder", "count"), CASES, ids=lambda value: str(value.relative_to(GOLDEN)) if isinstance(value, Path) else value
)
def test_golden_drafts(folder, count, tmp_path, monkeypatch):
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.setattr(hub_constants, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(automatic, "QUICK_REPEATS", 2)
    group = next(parent for parent in folder.parents if (parent / "target").is_dir())
    target = load_target(group / "target")
    is_eagle = group.name.startswith("eagle3")
    draft = (Eagle3DraftModel if is_eagle else DSparkDraftModel).from_pretrained(folder)
    ids = prompts(target, count)
    plain = target.generate(ids, **SETTINGS)
    with collect_rounds() as stats:
        text = target.generate(ids, assistant_model=draft, **SETTINGS)
    assert torch.equal(text, plain)
    assert stats.rounds
    if not is_eagle:
        assert profile_for(target, draft, 32).curves


@pytest.mark.parametrize("folder", TARGETS, ids=lambda folder: folder.parent.name)
def test_new_drafts_for_golden_targets(folder):
    target = load_target(folder)
    config = DSparkConfig.from_target(target.config, mask_token_id=target.config.vocab_size - 1, block_size=4)
    draft, ids = DSparkDraftModel(config).eval(), prompts(target, 2)
    assert torch.equal(target.generate(ids, assistant_model=draft, **SETTINGS), target.generate(ids, **SETTINGS))
