# SPDX-License-Identifier: Apache-2.0
"""Targets whose weights are not in memory: split by `device_map`, on disk, or fetched for each use."""

import pytest
import torch
from accelerate import cpu_offload
from transformers import GenerationConfig

import dspark_hf
from tests.support.models import random_prompt
from tests.support.scripted import NUM_NEW, expected_accepted, generate, lively_target, num_accepted, scripted_draft


DEVICE_MAPS = {
    "layers": {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.layers.2": "disk",
        "model.layers.3": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    },
    "lm_head": {"model": "cpu", "lm_head": "disk"},
    "embedding": {
        "model.embed_tokens": "disk",
        "model.layers": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    },
    "all": {"": "disk"},
}


def check(target, expected):
    prompt = random_prompt(11)
    assert torch.equal(generate(target, prompt), expected)
    draft = scripted_draft(target, expected)
    with dspark_hf.collect_rounds() as stats:
        text = generate(target, prompt, draft)
    assert torch.equal(text, expected)
    assert num_accepted(stats) == expected_accepted(11, NUM_NEW)


# A tied head cannot be parted from its embedding, so only whole models and layers are moved there.
@pytest.mark.parametrize(
    ("kind", "where"), [*(("qwen3", name) for name in DEVICE_MAPS), ("llama_tied", "layers"), ("llama_tied", "all")]
)
def test_disk(kind, where, tmp_path):
    original = lively_target(kind)
    expected = generate(original, random_prompt(11))
    original.save_pretrained(tmp_path / "target")
    target = type(original).from_pretrained(
        tmp_path / "target", device_map=DEVICE_MAPS[where], offload_folder=tmp_path / "offload", dtype=torch.float32
    )
    target.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
    generate(target, random_prompt(11))
    moved = [name for name, parameter in target.named_parameters() if parameter.device.type == "meta"]
    assert moved
    check(target, expected)
    # What was fetched for the draft is put back.
    assert [name for name, parameter in target.named_parameters() if parameter.device.type == "meta"] == moved


@pytest.mark.parametrize("kind", ["qwen3", "llama_tied"])
def test_weights_fetched_for_each_use(kind):
    target = lively_target(kind)
    expected = generate(target, random_prompt(11))
    cpu_offload(target, execution_device=torch.device("cpu"))
    assert target.get_output_embeddings().weight.device.type == "meta"
    check(target, expected)
