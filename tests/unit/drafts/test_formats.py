# SPDX-License-Identifier: Apache-2.0
"""Reading of foreign checkpoints: each refusal, each missing field, each kind of broken weights."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dspark_hf import DSparkDraftModel
from dspark_hf.drafts import target_binding
from dspark_hf.drafts.formats import convert_config, hub_arguments, read_config, read_embedding_sample
from tests.support.models import random_draft, rewrite


GOLDEN = Path(__file__).parents[2] / "data" / "golden"
DEEPSPEC, DFLASH = GOLDEN / "qwen3_gated" / "draft", GOLDEN / "qwen3_dflash" / "draft"
SPECULATORS = GOLDEN / "speculators_dspark" / "sliding_causal" / "draft"
GEMMA4, ZLAB = GOLDEN / "gemma4_vanilla" / "draft", GOLDEN / "zlab_dflash" / "draft"
LAYOUTS = {"deepspec": DEEPSPEC, "speculators": SPECULATORS, "gemma4": GEMMA4, "zlab": ZLAB}


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


# Configurations.


def test_deepspec_config():
    config = convert_config(config_of(DEEPSPEC), "x")
    assert (config.markov_head_type, config.markov_rank, config.block_size) == ("gated", 16, 5)
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (64, 128, 2)
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert config.sample_from_anchor is True
    assert config.target_layer_ids == [0, 1, 3]
    assert config.enable_confidence_head is True
    assert config.confidence_head_with_markov is True


def test_deepspec_dflash_config():
    config = convert_config(config_of(DFLASH), "x")
    assert config.markov_rank == 0
    assert config.enable_confidence_head is False


def test_speculators_config():
    config = convert_config(config_of(SPECULATORS), "x")
    assert config.target_layer_ids == [0, 1, 3]
    assert config.draft_vocab_size == 112
    assert (config.sliding_window, config.sliding_window_non_causal) == (6, False)
    assert config.target_name_or_path == "target"


def test_our_own_config():
    config = random_draft().config
    assert convert_config(config.to_dict(), "x").to_dict() == config.to_dict()


def test_rope_in_the_old_schema():
    fields = config_of(DEEPSPEC)
    del fields["rope_parameters"]
    assert convert_config(fields | {"rope_theta": 777.0}, "x").rope_parameters["rope_theta"] == 777.0


def test_sliding_layers_count_only_where_the_stack_says_so():
    """Qwen3 configs carry a window that nothing uses."""
    assert convert_config(config_of(DEEPSPEC) | {"sliding_window": 9}, "x").layer_types == ["full_attention"] * 2


DEEPSPEC_FIELDS = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "rope_parameters",
]


@pytest.mark.parametrize("value", ["missing", None])
@pytest.mark.parametrize("name", DEEPSPEC_FIELDS)
def test_deepspec_field_must_be_there(name, value):
    fields = config_of(DEEPSPEC) | {name: None}
    if value == "missing":
        del fields[name]
    with pytest.raises(ValueError, match=f"The draft config of some/draft must set `{name}`, but it is missing"):
        convert_config(fields, "some/draft")


SPECULATORS_FIELDS = [
    "transformer_layer_config",
    "block_size",
    "mask_token_id",
    "sample_from_anchor",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "aux_hidden_state_layer_ids",
    "draft_vocab_size",
]


@pytest.mark.parametrize("name", SPECULATORS_FIELDS)
def test_speculators_field_must_be_there(name):
    fields = config_of(SPECULATORS)
    del fields[name]
    with pytest.raises(ValueError, match=f"must set `{name}`, but it is missing"):
        convert_config(fields, "some/draft")


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "sliding_window", "rope_parameters"])
def test_speculators_layer_field_must_be_there(name):
    fields = config_of(SPECULATORS)
    del fields["transformer_layer_config"][name]
    with pytest.raises(ValueError, match=f"must set `{name}`, but it is missing"):
        convert_config(fields, "some/draft")


def test_speculators_draft_of_another_width_is_refused():
    with pytest.raises(ValueError, match="must equal the draft's hidden size 48, got 64 in some/draft"):
        convert_config(config_of(SPECULATORS) | {"target_hidden_size": 64}, "some/draft")
    convert_config(config_of(SPECULATORS) | {"target_hidden_size": 48}, "some/draft")


REFUSALS = [
    ({"dspark_block_size": 5, "architectures": ["DeepseekV4ForCausalLM"]}, NotImplementedError, "inside the target's"),
    ({"dspark_noise_token_id": 5}, NotImplementedError, "Serve it with vLLM or SGLang"),
    ({"speculators_model_type": "eagle3"}, NotImplementedError, "speculators draft of type 'eagle3'"),
    ({"speculators_model_type": "mtp"}, NotImplementedError, "only 'dspark' and 'dflash' are supported"),
    ({"architectures": ["DeepseekV4DSparkModel"]}, NotImplementedError, "DeepSpec draft of class DeepseekV4DSpark"),
    ({"architectures": ["Gemma4Eagle3Model"]}, NotImplementedError, "only Qwen3DSparkModel and Gemma4DSparkModel are"),
    ({"architectures": ["Qwen3Eagle3Model"]}, ValueError, "Load it with Eagle3DraftModel.from_pretrained"),
    ({"architectures": ["DFlashDraftModel"]}, ValueError, "which several projects use"),
    ({"architectures": ["DSparkDraftModel"]}, ValueError, "which several projects use"),
    (
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        ValueError,
        "is not a DSpark draft: its config.json has architectures ['LlamaForCausalLM'] and model_type 'llama'",
    ),
    ({}, ValueError, "is not a DSpark draft: its config.json has architectures [] and model_type None"),
    ({"architectures": None}, ValueError, "is not a DSpark draft"),
]


@pytest.mark.parametrize(("fields", "error", "message"), REFUSALS, ids=[str(fields) for fields, _, _ in REFUSALS])
def test_other_configs_are_refused(fields, error, message):
    with pytest.raises(error, match=re.escape(message)) as caught:
        convert_config(fields, "some/model")
    assert "some/model" in str(caught.value)


def test_read_config_finds_files(tmp_path):
    assert read_config(DEEPSPEC, {}).block_size == 5
    assert read_config(DEEPSPEC.parent, {"subfolder": "draft"}).block_size == 5
    with pytest.raises(OSError, match=r"config\.json"):
        read_config(tmp_path, {})


def test_hub_arguments_are_those_that_find_files():
    given = {"revision": "v1", "token": "t", "dtype": "auto", "device_map": "cpu", "subfolder": "draft"}
    assert hub_arguments(given) == {"revision": "v1", "token": "t", "subfolder": "draft"}


# Weights.


@pytest.fixture(params=["own", "deepspec", "speculators", "gemma4", "zlab"])
def folder(request, tmp_path):
    """A loadable draft in each layout, to be broken."""
    if request.param == "own":
        random_draft(draft_vocab_size=48).save_pretrained(tmp_path)
    else:
        source = LAYOUTS[request.param]
        shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    assert isinstance(DSparkDraftModel.from_pretrained(tmp_path), DSparkDraftModel)
    return tmp_path


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        DSparkDraftModel.from_pretrained(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("name", ["fc.weight", "layers.1.mlp.up_proj.weight", "layers.0.self_attn.k_norm.weight"])
def test_missing_tensor(folder, name):
    rewrite(folder, lambda tensors: tensors.pop(name))
    refused(folder, f"lacks tensors that its config asks for: {re.escape(name)}")


@pytest.mark.parametrize("name", ["confidence_head.proj.bias", "markov_head.markov_w2.weight"])
def test_tensor_of_a_head_missing_or_left_over(folder, name):
    if name in load_file(folder / "model.safetensors"):
        rewrite(folder, lambda tensors: tensors.pop(name))
        refused(folder, f"lacks tensors that its config asks for: {re.escape(name)}")
    else:  # DFlash has no heads
        rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(1)}))
        refused(folder, f"has tensors that its config does not account for: {re.escape(name)}")


def test_missing_scalar_of_a_layer(tmp_path):
    shutil.copytree(GEMMA4, tmp_path, dirs_exist_ok=True)
    rewrite(tmp_path, lambda tensors: tensors.pop("layers.1.layer_scalar"))
    refused(tmp_path, r"lacks tensors that its config asks for: layers\.1\.layer_scalar")


def test_scalar_of_a_layer_that_is_not_finite(tmp_path):
    shutil.copytree(GEMMA4, tmp_path, dirs_exist_ok=True)
    rewrite(tmp_path, lambda tensors: tensors.update({"layers.1.layer_scalar": torch.tensor([float("nan")])}))
    refused(tmp_path, r"holds NaN or infinity in layers\.1\.layer_scalar")


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_copy_of_another_targets_tensor(tmp_path, name):
    shutil.copytree(DEEPSPEC, tmp_path, dirs_exist_ok=True)
    rewrite(tmp_path, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    refused(tmp_path, rf"of other shapes than its config says: {re.escape(name)} is \(255, 64\), not \(256, 64\)")


@pytest.mark.parametrize("change", ["another id", "another length"])
def test_membership_mask_of_other_tokens(tmp_path, change):
    shutil.copytree(SPECULATORS, tmp_path, dirs_exist_ok=True)

    def spoil(tensors):
        mask = tensors["t2d"].clone()
        mask[[int(mask.nonzero()[0]), int((~mask).nonzero()[0])]] = torch.tensor([False, True])
        tensors["t2d"] = mask if change == "another id" else tensors["t2d"][:-1].clone()

    rewrite(tmp_path, spoil)
    refused(tmp_path, "is another in `t2d` than in `d2t`")


def test_head_of_a_reduced_vocabulary_without_its_config(tmp_path):
    """The rows would be those of a whole LM head that is left out."""
    shutil.copytree(SPECULATORS, tmp_path, dirs_exist_ok=True)
    config = config_of(tmp_path) | {"draft_vocab_size": 192}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(tmp_path, "has tensors (that its config does not account for: d2t|of other shapes)")


def test_weights_in_several_files(tmp_path):
    """Named by an index; each rule about stored copies holds there as well."""
    shutil.copytree(DEEPSPEC, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    parts = {f"model-0000{i + 1}-of-00002.safetensors": sorted(tensors)[i::2] for i in range(2)}
    for name, names in parts.items():
        save_file({key: tensors[key] for key in names}, tmp_path / name, metadata={"format": "pt"})
    weight_map = {key: name for name, names in parts.items() for key in names}
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = DSparkDraftModel.from_pretrained(tmp_path)
    assert all(torch.equal(loaded.state_dict()[name], tensors[name]) for name in loaded.state_dict())
    assert len(loaded.embedding_sample) == 16
    path = tmp_path / weight_map["embed_tokens.weight"]
    part = load_file(path)
    save_file(part | {"embed_tokens.weight": part["embed_tokens.weight"][1:].clone()}, path)
    refused(tmp_path, "of other shapes than its config says: embed_tokens.weight")
    path.unlink()
    with pytest.raises(OSError, match=path.name):
        DSparkDraftModel.from_pretrained(tmp_path)


def test_unexpected_tensor(folder):
    rewrite(folder, lambda tensors: tensors.update({"layers.7.mlp.up_proj.weight": torch.zeros(2)}))
    refused(folder, r"has tensors that its config does not account for: layers\.7\.mlp\.up_proj\.weight")


def test_many_unexpected_tensors_are_counted(folder):
    rewrite(folder, lambda tensors: tensors.update({f"extra.{i}": torch.zeros(1) for i in range(20)}))
    refused(folder, r"extra\.0, .* \(20 in all\)")


def test_more_layers_in_the_file_than_in_the_config(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    stack = config.get("transformer_layer_config", config)
    stack |= {"num_hidden_layers": 1, "layer_types": stack["layer_types"][:1]}
    path.write_text(json.dumps(config))
    refused(folder, "has tensors that its config does not account for: layers.1.")


def test_tensor_of_another_shape(folder):
    rewrite(folder, lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"][:-1].clone()}))
    refused(folder, r"has tensors of other shapes than its config says: .*fc\.weight")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_tensor_that_is_not_finite(folder, value):
    def spoil(tensors):
        tensors["norm.weight"][3] = value

    rewrite(folder, spoil)
    refused(folder, r"holds NaN or infinity in norm\.weight")


def test_truncated_file(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    refused(folder, "not a readable safetensors file")


def test_file_that_is_no_safetensors(folder):
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    refused(folder, "not a readable safetensors file")


def test_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        DSparkDraftModel.from_pretrained(folder)


def test_pickled_weights_are_not_read(folder):
    path = folder / "model.safetensors"
    torch.save(load_file(path), folder / "pytorch_model.bin")
    path.unlink()
    with pytest.raises(OSError, match="safetensors"):
        DSparkDraftModel.from_pretrained(folder)


def reduced(tmp_path, change):
    draft = random_draft(draft_vocab_size=48)
    change(draft.d2t)
    draft.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", ["above", "below", "unsorted", "repeated", "ids instead of offsets"])
def test_reduced_vocabulary_must_fit(tmp_path, kind):
    def change(d2t):
        ids = d2t + torch.arange(48)
        if kind == "above":
            d2t[-1] = 97 - 47
        elif kind == "below":
            d2t[0] = -1
        elif kind == "unsorted":
            ids[[3, 4]] = ids[[4, 3]]
            d2t.copy_(ids - torch.arange(48))
        elif kind == "repeated":
            d2t[5] = ids[4] - 5
        else:
            d2t.copy_(ids)

    refused(reduced(tmp_path, change), r"must map ascending draft ids into \[0, 97\)")


def test_edges_of_a_reduced_vocabulary(tmp_path):
    def change(d2t):
        d2t.fill_(0)
        d2t[-1] = 96 - 47

    draft = DSparkDraftModel.from_pretrained(reduced(tmp_path, change))
    assert draft.draft_token_ids().tolist() == [*range(47), 96]


def test_missing_map_of_a_reduced_vocabulary(tmp_path):
    folder = reduced(tmp_path, lambda d2t: None)
    rewrite(folder, lambda tensors: tensors.pop("d2t"))
    refused(folder, "lacks tensors that its config asks for: d2t")


# What published drafts carry besides.


def test_frozen_copies_of_the_targets_tensors_are_left_out():
    assert {"embed_tokens.weight", "lm_head.weight"} <= set(load_file(DEEPSPEC / "model.safetensors"))
    draft = DSparkDraftModel.from_pretrained(DEEPSPEC)
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(draft.state_dict())
    assert draft.lm_head is None


def test_membership_mask_is_left_out_but_the_head_of_a_reduced_vocabulary_is_not():
    draft = DSparkDraftModel.from_pretrained(SPECULATORS)
    assert "t2d" not in draft.state_dict()
    assert torch.equal(draft.lm_head.weight, load_file(SPECULATORS / "model.safetensors")["lm_head.weight"])


@pytest.mark.parametrize("source", [DEEPSPEC, DFLASH, *LAYOUTS.values()][1:])
def test_every_other_tensor_is_loaded_as_it_is_and_can_be_saved_as_our_own(source, tmp_path):
    draft = DSparkDraftModel.from_pretrained(source)
    published, loaded = load_file(source / "model.safetensors"), draft.state_dict()
    assert set(loaded) <= set(published)
    assert all(torch.equal(loaded[name], published[name]) for name in loaded)
    draft.save_pretrained(tmp_path)
    assert config_of(tmp_path)["model_type"] == "dspark_draft"
    again = DSparkDraftModel.from_pretrained(tmp_path)
    assert all(torch.equal(again.state_dict()[name], loaded[name]) for name in loaded)
    assert again.config.target_layer_ids == draft.config.target_layer_ids


def test_dtype_of_the_file_is_kept_and_can_be_chosen():
    assert DSparkDraftModel.from_pretrained(DEEPSPEC).dtype == torch.float32
    assert DSparkDraftModel.from_pretrained(DEEPSPEC, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_rows_of_the_frozen_embedding_are_read():
    weight = load_file(DEEPSPEC / "model.safetensors")["embed_tokens.weight"]
    sample = read_embedding_sample(DEEPSPEC, {})
    assert list(sample) == list(range(0, 256, 16))
    assert all(torch.equal(row, weight[i]) for i, row in sample.items())
    assert DSparkDraftModel.from_pretrained(DEEPSPEC).embedding_sample.keys() == sample.keys()
    assert read_embedding_sample(DEEPSPEC.parent, {"subfolder": "draft"}).keys() == sample.keys()


def test_a_checkpoint_without_embedding_has_no_sample(tmp_path):
    assert read_embedding_sample(SPECULATORS, {}) == {}
    assert read_embedding_sample(tmp_path, {}) == {}


def test_rows_that_a_writer_left_unset_are_no_sample(tmp_path):
    shutil.copytree(DEEPSPEC, tmp_path, dirs_exist_ok=True)
    rewrite(tmp_path, lambda tensors: tensors["embed_tokens.weight"][:200].fill_(float("nan")))
    assert list(read_embedding_sample(tmp_path, {})) == [208, 224, 240]
    DSparkDraftModel.from_pretrained(tmp_path)  # the copy is not used


def test_the_target_of_the_golden_data_is_recognised(monkeypatch):
    monkeypatch.setattr(target_binding.logger, "warning_once", pytest.fail)
    target = AutoModelForCausalLM.from_pretrained(DEEPSPEC.parent / "target")
    DSparkDraftModel.from_pretrained(DEEPSPEC).bind_target(target)
    warnings = []
    monkeypatch.setattr(target_binding.logger, "warning_once", warnings.append)
    with torch.no_grad():
        target.get_input_embeddings().weight += 0.5
    DSparkDraftModel.from_pretrained(DEEPSPEC).bind_target(target)
    assert len(warnings) == 1
