# SPDX-License-Identifier: Apache-2.0
"""Malformed and ambiguous config.json files: a clear error or a stated rule, in every layout, never a bare crash."""

import copy
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

from dspark_hf import DSparkConfig, DSparkDraftModel
from dspark_hf.drafts.formats import OPEN_FIELDS, convert_config
from tests.support.closeness import assert_close, assert_differs
from tests.support.models import random_draft, tiny_config
from tests.support.scripted import captured_log


GOLDEN = Path(__file__).parents[2] / "data" / "golden"
FOLDERS = {
    "deepspec": GOLDEN / "qwen3_gated" / "draft",
    "deepspec_dflash": GOLDEN / "qwen3_dflash" / "draft",
    "gemma4": GOLDEN / "gemma4_vanilla" / "draft",
    "speculators": GOLDEN / "speculators_dspark" / "sliding_causal" / "draft",
    "speculators_dflash": GOLDEN / "speculators_dflash" / "dflash" / "draft",
    "zlab": GOLDEN / "zlab_dflash" / "draft",
}
FILES = {name: json.loads((folder / "config.json").read_text()) for name, folder in FOLDERS.items()}
FILES["own"] = json.loads(tiny_config(draft_vocab_size=48).to_json_string())
HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")


def file_of(layout: str, changes: dict | None = None) -> dict:
    """A config.json; a dotted key changes a nested field, `None` removes it."""
    fields = copy.deepcopy(FILES[layout])
    for key, value in (changes or {}).items():
        *parts, name = key.split(".")
        part = fields
        for step in parts:
            part = part[step]
        if value is None:
            part.pop(name, None)
        else:
            part[name] = value
    return fields


def specforge(changes: dict | None = None) -> dict:
    """DeepSpec's gated draft as SpecForge writes one: 4.x RoPE, the draft's fields nested, slot convention unsaid."""
    fields = file_of("deepspec", {"rope_parameters": None, "num_anchors": None})
    nested = {name: fields.pop(name) for name in (*HEADS, "mask_token_id", "target_layer_ids")}
    fields |= {"architectures": ["DSparkDraftModel"], "rope_theta": 10000.0, "rope_scaling": None}
    fields["dflash_config"] = nested | {"projector_type": "dspark", "attention_mode": "gqa"} | (changes or {})
    return fields


# Any value of a wrong kind, in any place, in any layout.

WRONG = [None, "x", -1, 1.5, float("nan"), True, [], [[1]], {"a": 1}]


def places(fields: dict, before: tuple = ()):
    for name, value in fields.items():
        yield (*before, name)
        if isinstance(value, dict):
            yield from places(value, (*before, name))


@pytest.mark.parametrize("layout", FILES)
def test_wrong_values_are_named_or_harmless(layout):
    refused, built, messages = 0, set(), set()
    for place in places(FILES[layout]):
        for value in WRONG:
            fields = copy.deepcopy(FILES[layout])
            part = fields
            for step in place[:-1]:
                part = part[step]
            part[place[-1]] = copy.deepcopy(value)
            try:
                config = convert_config(fields, "some/draft")
                if place not in built:  # what is accepted can be built
                    with torch.device("meta"):
                        DSparkDraftModel(config)
                    built.add(place)
            except (ValueError, NotImplementedError) as error:
                refused += 1
                messages.add(str(error))
    assert refused >= 60
    assert min(len(message) for message in messages) > 40
    assert len(built) >= 5


MALFORMED = [
    ("deepspec", {"block_size": "7"}, "`block_size` must be >= 1 with `sample_from_anchor=True`, got '7'"),
    ("deepspec", {"block_size": 0}, "`block_size` must be >= 1"),
    ("deepspec", {"mask_token_id": "255"}, "`mask_token_id` must be an integer, got '255'"),
    ("deepspec", {"mask_token_id": 256}, "`mask_token_id` must be a row of the target's embedding, in [0, 256)"),
    ("deepspec", {"target_layer_ids": "0,1,3"}, "`target_layer_ids` must be a list of integers, got '0,1,3'"),
    ("deepspec", {"target_layer_ids": [3, 0, 1]}, "`target_layer_ids` must ascend without repeating a layer"),
    ("deepspec", {"target_layer_ids": [0, 1, 1]}, "`target_layer_ids` must ascend without repeating a layer"),
    ("deepspec", {"target_layer_ids": [-2, 1]}, "`target_layer_ids` must be >= -1"),
    ("deepspec", {"target_layer_ids": [0, 4]}, "must lie below the target's last layer 4"),
    ("deepspec", {"target_layer_ids": []}, "`target_layer_ids` must be a non-empty list"),
    ("deepspec", {"markov_rank": 0}, "`confidence_head_with_markov=True` needs the sequential head's token embedding"),
    ("deepspec", {"markov_rank": 2.5}, "`markov_rank` must be >= 0"),
    ("deepspec", {"markov_head_type": "lstm"}, "`markov_head_type` must be one of"),
    ("deepspec", {"enable_confidence_head": "yes"}, "`enable_confidence_head` must be true or false, got 'yes'"),
    ("deepspec", {"num_hidden_layers": 2.0}, "`num_hidden_layers` must be an integer >= 1, got 2.0"),
    ("deepspec", {"hidden_size": True}, "`hidden_size` must be an integer >= 1, got True"),
    ("deepspec", {"layer_types": "full_attention"}, "`layer_types` must be a list, got 'full_attention'"),
    ("deepspec", {"layer_types": ["full_attention"]}, "`layer_types` must hold one of"),
    ("deepspec", {"layer_types": ["full_attention", "linear_attention"]}, "`layer_types` must hold one of"),
    ("deepspec", {"hidden_act": "sulu"}, "`hidden_act` must be an activation that transformers knows, got 'sulu'"),
    ("deepspec", {"rms_norm_eps": -1e-6}, "`rms_norm_eps` must lie in (0, 1)"),
    ("deepspec", {"rope_parameters": [1]}, "`rope_parameters` must be a dictionary, got [1]"),
    ("deepspec", {"rope_parameters.rope_theta": "10000"}, "with a number as `rope_theta`"),
    ("deepspec", {"rope_parameters.rope_theta": -1.0}, "a positive number as `rope_theta`"),
    ("deepspec", {"rope_parameters.rope_type": "spiral"}, "must have a `rope_type` that transformers knows"),
    ("deepspec", {"rope_theta": 1e6}, "is 1000000.0 as `rope_theta`, but 10000.0 in `rope_parameters`"),
    ("deepspec", {"layer_types": None, "use_sliding_window": True, "sliding_window": 9}, "must set `layer_types`"),
    ("deepspec", {"dtype": "float17"}, "a field of a wrong type"),
    ("deepspec", {"architectures": 3}, "a field of a wrong type"),
    ("speculators", {"transformer_layer_config": [1]}, "`transformer_layer_config` must be a dictionary, got [1]"),
    (
        "speculators",
        {"aux_hidden_state_layer_ids": ["1", 2]},
        "`aux_hidden_state_layer_ids` must be a list of integers",
    ),
    ("speculators", {"aux_hidden_state_layer_ids": [2, 1, 4]}, "`aux_hidden_state_layer_ids` must ascend"),
    ("speculators", {"aux_hidden_state_layer_ids": [-1, 1]}, "`target_layer_ids` must be >= -1"),
    ("speculators", {"draft_vocab_size": 193}, "`draft_vocab_size` must lie in [1, vocab_size=192], got 193"),
    ("speculators", {"draft_vocab_size": "112"}, "`draft_vocab_size` must be an integer, got '112'"),
    ("speculators", {"transformer_layer_config.sliding_window": 0}, "`sliding_window` must be >= 1"),
    ("speculators", {"sample_from_anchor": "no"}, "`sample_from_anchor` must be true or false, got 'no'"),
    ("speculators", {"sample_from_anchor": False, "block_size": 1}, "`block_size` must be >= 2"),
    ("speculators", {"sliding_window_non_causal": 1}, "`sliding_window_non_causal` must be true or false, got 1"),
    ("zlab", {"dflash_config": 5}, "`dflash_config` must be a dictionary, got 5"),
    ("zlab", {"dflash_config.mask_token_id": None}, "must set `mask_token_id`, but it is missing"),
    (
        "zlab",
        {"dflash_config.target_layer_ids": None, "num_target_layers": None},
        "must set `target_layer_ids`, but it is missing",
    ),
    (
        "zlab",
        {"dflash_config.target_layer_ids": None, "num_target_layers": 4},
        "`target_layer_ids` must ascend without repeating a layer, got [1, 1]",
    ),
    ("zlab", {"block_size": None}, "must set `block_size`, but it is missing"),
    ("zlab", {"block_size": 1}, "`block_size` must be >= 2 with `sample_from_anchor=False`, got 1"),
    (
        "zlab",
        {"dflash_config.block_size": 8},
        "`block_size` is 6 at one place of the draft config of some/draft and 8",
    ),
    ("zlab", {"mask_token_id": 7}, "`mask_token_id` is 7 at one place"),
    ("gemma4", {"rope_parameters.full_attention": None}, "must set `full_attention`, but it is missing"),
    ("gemma4", {"rope_parameters.full_attention.rope_theta": None}, "must set `rope_theta`, but it is missing"),
    ("gemma4", {"rope_parameters.full_attention.partial_rotary_factor": 2}, "the latter in (0, 1]"),
    ("gemma4", {"global_head_dim": None}, "must set `global_head_dim`, but it is missing"),
    ("gemma4", {"hidden_activation": None}, "must set `hidden_activation`, but it is missing"),
    ("gemma4", {"attention_k_eq_v": None}, "must set `attention_k_eq_v`, but it is missing"),
    ("gemma4", {"layer_types": None}, "must set `layer_types`, but it is missing"),
    ("gemma4", {"layer_types": ["full_attention", "sliding_attention"]}, "must be all 'full_attention'"),
    (
        "gemma4",
        {"global_head_dim": None, "per_layer_config": {"0": {"head_dim": 32}}},
        "every layer of a draft the same",
    ),
    ("own", {"mask_token_id": 97}, "`mask_token_id` must be a row of the target's embedding"),
    ("own", {"layer_kind": "llama"}, "`layer_kind` must be one of ('qwen3', 'gemma4'), got 'llama'"),
    ("own", {"attention_k_eq_v": True}, "`attention_k_eq_v=True` needs `layer_kind='gemma4'`"),
]


@pytest.mark.parametrize(("layout", "changes", "message"), MALFORMED, ids=[f"{n} {c}" for n, c, _ in MALFORMED])
def test_malformed_config(layout, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        convert_config(file_of(layout, changes), "some/draft")


OTHER_KINDS = [
    ("deepspec", {"rope_parameters.partial_rotary_factor": 0.25}, "rotates a part of each head only"),
    ("deepspec", {"rope_is_neox_style": False}, "interleaves the halves of its RoPE"),
    (
        "deepspec",
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e6}}},
        "has another RoPE per layer type",
    ),
    ("zlab", {"dflash_config.projector_type": "domino"}, "a draft of another kind in the layout of z-lab"),
    ("zlab", {"dflash_config.attention_mode": "mla"}, "a draft of another kind in the layout of z-lab"),
    ("zlab", {"dflash_config.conv_kernel_size": 4, "dflash_config.selector_top_k": 16}, "conv_kernel_size"),
    ("zlab", {"dflash_config.causal": True}, "whose slots see only those before them (`causal`)"),
    ("zlab", {"is_causal": True}, "whose slots see only those before them (`is_causal`)"),
    ("gemma4", {"enable_moe_block": True}, "with `enable_moe_block` True"),
    ("gemma4", {"hidden_size_per_layer_input": 256}, "with `hidden_size_per_layer_input` 256"),
    ("gemma4", {"num_kv_shared_layers": 1}, "with `num_kv_shared_layers` 1"),
]


@pytest.mark.parametrize(("layout", "changes", "message"), OTHER_KINDS, ids=[f"{n} {c}" for n, c, _ in OTHER_KINDS])
def test_kinds_that_do_not_run_here(layout, changes, message):
    with pytest.raises(NotImplementedError, match=re.escape(message)) as caught:
        convert_config(file_of(layout, changes), "some/draft")
    assert "Serve it with" in str(caught.value)


# What a file leaves open.


def test_draft_that_does_not_say_what_its_first_slot_predicts():
    with pytest.raises(ValueError, match="must set `sample_from_anchor`") as caught:
        convert_config(specforge(), "some/draft")
    assert "pass `sample_from_anchor=...` to `from_pretrained`" in str(caught.value)
    assert "`dspark-hf doctor`" in str(caught.value)
    for value, drafts in ((True, 5), (False, 4)):
        config = convert_config(specforge(), "some/draft", {"sample_from_anchor": value})
        assert (config.sample_from_anchor, config.num_draft_slots) == (value, drafts)


def test_older_speculators_draft_is_as_open():
    fields = file_of("speculators", {"sample_from_anchor": None})
    with pytest.raises(ValueError, match=r"`dspark-hf doctor` shows how many drafts the target accepts with it"):
        convert_config(fields, "some/draft")
    assert convert_config(fields, "some/draft", {"sample_from_anchor": False}).num_draft_slots == 4


def test_older_speculators_dflash_draft_is_not():
    """The field was added with the convention of all files before it as its default."""
    config = convert_config(file_of("speculators_dflash", {"sample_from_anchor": None}), "x")
    assert config.sample_from_anchor is False


@pytest.mark.parametrize("value", [True, False])
def test_other_names_of_the_slot_convention(value):
    assert convert_config(specforge({"shift_label": value}), "x").sample_from_anchor is value
    assert convert_config(specforge({"sample_from_anchor": value}), "x").sample_from_anchor is value


@pytest.mark.parametrize("name", ["mask_token_id", "target_layer_ids", "markov_rank", "confidence_head_with_markov"])
def test_each_open_field_can_be_stated(name):
    fields = specforge({"sample_from_anchor": True})
    value = fields["dflash_config"].pop(name)
    with pytest.raises(ValueError, match=f"pass `{name}=...` to `from_pretrained`"):
        convert_config(fields, "x")
    assert getattr(convert_config(fields, "x", {name: value}), name) == value


def test_stated_layer_ids_are_ours_also_where_the_file_counts_otherwise():
    fields = file_of("speculators", {"aux_hidden_state_layer_ids": None})
    assert convert_config(fields, "x", {"target_layer_ids": [0, 1, 3]}).target_layer_ids == [0, 1, 3]
    assert convert_config(file_of("speculators"), "x", {"target_layer_ids": [0, 1, 3]}).target_layer_ids == [0, 1, 3]


@pytest.mark.parametrize("layout", ["deepspec", "speculators", "own"])
def test_what_is_stated_must_not_contradict_the_file(layout):
    with pytest.raises(
        ValueError, match=r"`sample_from_anchor=False` contradicts the draft config of x, which says T"
    ):
        convert_config(file_of(layout), "x", {"sample_from_anchor": False})
    with pytest.raises(ValueError, match=r"`block_size=99` contradicts"):
        convert_config(file_of(layout), "x", {"block_size": 99})
    assert convert_config(file_of(layout), "x", {"sample_from_anchor": True, "block_size": None}).sample_from_anchor


def test_open_fields_are_arguments_of_loading(tmp_path):
    write_draft(tmp_path, specforge(), load_file(FOLDERS["deepspec"] / "model.safetensors"))
    with pytest.raises(ValueError, match="must set `sample_from_anchor`"):
        DSparkDraftModel.from_pretrained(tmp_path)
    draft = DSparkDraftModel.from_pretrained(tmp_path, sample_from_anchor=False)
    assert draft.config.num_draft_slots == 4
    with pytest.raises(ValueError, match=r"`config` says everything, so \['sample_from_anchor'\] cannot be given"):
        DSparkDraftModel.from_pretrained(tmp_path, config=draft.config, sample_from_anchor=False)
    assert set(OPEN_FIELDS) <= set(DSparkConfig().to_dict())


def write_draft(folder: Path, fields: dict, tensors: dict) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# Stated rules.


def test_block_of_one_slot_is_a_draft_of_one_token():
    assert convert_config(file_of("deepspec", {"block_size": 1}), "x").num_draft_slots == 1


def test_our_own_file_may_leave_out_defaults_but_not_what_has_none():
    config = convert_config(file_of("own", {"block_size": None, "sample_from_anchor": None}), "x")
    assert (config.block_size, config.sample_from_anchor) == (7, True)
    for name in ("mask_token_id", "target_layer_ids"):
        with pytest.raises(ValueError, match=f"`{name}` must be set, got None"):
            DSparkDraftModel(convert_config(file_of("own", {name: None}), "x"))


def test_our_own_layers_need_not_ascend():
    """Ours are concatenated in the order of the list."""
    assert convert_config(file_of("own", {"target_layer_ids": [2, 0]}), "x").target_layer_ids == [2, 0]


@pytest.mark.parametrize("key", ["dflash_config", "dflash_architecture_config"])
def test_fields_may_lie_inside_or_be_lifted(key):
    fields = specforge({"sample_from_anchor": True})
    fields[key] = fields.pop("dflash_config")
    expected = convert_config(fields, "x").to_dict()
    lifted = copy.deepcopy(fields) | {"architectures": ["Qwen3DSparkModel"], "mask_token_id": 255}
    lifted |= {name: lifted[key].pop(name) for name in HEADS}
    assert convert_config(lifted, "x").to_dict() == expected


def test_other_name_of_the_confidence_head():
    fields = specforge({"sample_from_anchor": True, "enable_confidence_head": None, "use_confidence_head": False})
    assert convert_config(fields, "x").enable_confidence_head is False


# Depths of the target and of the draft, and 1 + i * (n - 4) / (m - 1) worked out by hand.
SPREAD = {
    (36, 5): [1, 9, 17, 25, 33],  # steps of 8
    (40, 5): [1, 10, 19, 28, 37],  # of 9
    (9, 3): [1, 4, 6],  # 3.5 is rounded up, to the even number
    (7, 3): [1, 2, 4],  # 2.5 is rounded down
    (48, 8): [1, 7, 14, 20, 26, 32, 39, 45],  # of 44 / 7
    (64, 2): [1, 61],
    (36, 1): [18],
    (7, 1): [3],
}


@pytest.mark.parametrize(("depths", "ids"), SPREAD.items(), ids=str)
def test_layer_ids_that_a_zlab_file_leaves_out_are_spread_as_zlab_does(depths, ids):
    changes = dict(zip(("num_target_layers", "num_hidden_layers"), depths, strict=True))
    fields = file_of("zlab", changes | {"dflash_config.target_layer_ids": None, "layer_types": None})
    with captured_log() as log:
        config = convert_config(fields, "my-draft")
    assert (config.target_layer_ids, config.num_target_layers) == (ids, depths[0])
    assert "my-draft has no `target_layer_ids`" in log[0]
    assert str(ids) in log[0]


def test_layer_ids_that_are_said_are_never_computed():
    changes = {"num_target_layers": 36, "num_hidden_layers": 5, "layer_types": None}
    with captured_log() as log:
        said = convert_config(file_of("zlab", changes | {"dflash_config.target_layer_ids": [2, 5]}), "x")
        silent = file_of("zlab", changes | {"dflash_config.target_layer_ids": None})
        stated = convert_config(silent, "x", {"target_layer_ids": [0, 3]})
        lifted = convert_config(silent | {"target_layer_ids": [4, 8]}, "x")
    assert [config.target_layer_ids for config in (said, stated, lifted)] == [[2, 5], [0, 3], [4, 8]]
    assert log == []


def test_layer_ids_of_drafts_with_heads_and_of_other_layouts_are_never_computed():
    for fields in (
        specforge({"sample_from_anchor": True, "target_layer_ids": None}) | {"num_target_layers": 36},
        file_of("deepspec", {"target_layer_ids": None, "num_target_layers": 36}),
    ):
        with pytest.raises(ValueError, match="must set `target_layer_ids`, but it is missing"):
            convert_config(fields, "x")


def test_weights_for_other_layers_than_the_spread_ones_are_refused(tmp_path):
    # Two draft layers read two target layers by the formula; the weights were made for three.
    fields = file_of("zlab", {"dflash_config.target_layer_ids": None})
    write_draft(tmp_path, fields, load_file(FOLDERS["zlab"] / "model.safetensors"))
    with pytest.raises(ValueError, match=r"tensors of other shapes than its config says: .*fc\.weight"):
        DSparkDraftModel.from_pretrained(tmp_path)


def test_block_size_may_be_nested():
    fields = file_of("zlab", {"block_size": None, "dflash_config.block_size": 6})
    assert convert_config(fields, "x").block_size == 6


def test_sliding_layers_of_zlab_files_are_open():
    """z-lab's own code looks both ways inside a window, vLLM's only back."""
    changes = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    with pytest.raises(ValueError, match="pass `sliding_window_non_causal=...` to `from_pretrained`"):
        convert_config(file_of("zlab", changes), "x")
    config = convert_config(file_of("zlab", changes), "x", {"sliding_window_non_causal": True})
    assert (config.sliding_window, config.sliding_window_non_causal) == (4, True)
    said = file_of("zlab", changes | {"dflash_config.causal": False})
    assert convert_config(said, "x").sliding_window_non_causal is True


# RoPE.


def test_rope_in_both_schemas_is_the_same_rotation():
    scaling = {"factor": 4.0, "original_max_position_embeddings": 128}
    old = file_of("zlab", {"rope_theta": 5e5, "rope_scaling": scaling | {"type": "yarn"}})
    new = file_of("zlab", {"rope_theta": None, "rope_scaling": None})
    new["rope_parameters"] = scaling | {"rope_type": "yarn", "rope_theta": 5e5}
    rotations = [DSparkDraftModel(convert_config(fields, "x")).rotary_emb for fields in (old, new)]
    assert torch.equal(rotations[0].inv_freq, rotations[1].inv_freq)
    plain = DSparkDraftModel(convert_config(file_of("zlab", {"rope_theta": 5e5}), "x")).rotary_emb
    assert_differs(rotations[0].inv_freq, plain.inv_freq)
    both = new | {"rope_theta": 5e5}
    assert convert_config(both, "x").rope_parameters == convert_config(new, "x").rope_parameters


def test_sections_of_multimodal_rope_are_dropped():
    rope = {"rope_type": "mrope", "rope_theta": 1e6, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
    config = convert_config(file_of("deepspec", {"rope_parameters": rope}), "x")
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}


def test_one_rope_named_per_layer_type():
    rope = {"full_attention": {"rope_theta": 77.0, "rope_type": "default"}}
    assert convert_config(file_of("deepspec", {"rope_parameters": rope}), "x").rope_parameters["rope_theta"] == 77.0


def test_speculators_takes_the_rope_of_sliding_layers():
    rope = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 55.0, "rope_type": "default"}}
    config = convert_config(file_of("speculators", {"transformer_layer_config.rope_parameters": rope}), "x")
    assert config.rope_parameters["rope_theta"] == 55.0


def test_reading_leaves_the_file_alone():
    for layout, fields in FILES.items():
        before = copy.deepcopy(fields)
        convert_config(fields, "x")
        assert fields == before, layout


# Files of other releases.


def test_heads_in_a_container(tmp_path):
    """Early SpecForge files; saved again, they have the names of today."""
    tensors = load_file(FOLDERS["deepspec"] / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(("embed_tokens", "lm_head"))}
    heads = ("markov_head.", "confidence_head.")
    old = {("logit_head." + name if name.startswith(heads) else name): tensor for name, tensor in tensors.items()}
    assert set(old) != set(tensors)
    write_draft(tmp_path / "old", specforge(), old)
    draft = DSparkDraftModel.from_pretrained(tmp_path / "old", sample_from_anchor=True)
    assert all(torch.equal(draft.state_dict()[name], tensor) for name, tensor in tensors.items())
    draft.save_pretrained(tmp_path / "new")
    assert set(load_file(tmp_path / "new" / "model.safetensors")) == set(tensors)


def test_gemma4_heads_in_the_newer_schema():
    """transformers >= 5.19 writes what differs per layer in place of the two fields."""
    own = {"head_dim": 32, "num_key_value_heads": 1}
    changes = {"global_head_dim": None, "num_global_key_value_heads": None, "per_layer_config": {"0": own, "1": own}}
    assert convert_config(file_of("gemma4", changes), "x").to_dict() == convert_config(FILES["gemma4"], "x").to_dict()


def test_gemma4_draft_is_saved_as_our_own(tmp_path):
    draft = DSparkDraftModel.from_pretrained(FOLDERS["gemma4"])
    draft.save_pretrained(tmp_path)
    again = DSparkDraftModel.from_pretrained(tmp_path)
    assert (again.config.layer_kind, again.config.attention_k_eq_v) == ("gemma4", True)
    assert again.layers[0].self_attn.v_proj is None
    states = draft.state_dict(), again.state_dict()
    assert set(states[0]) == set(states[1])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_fresh_gemma4_layers_are_sound():
    draft = random_draft(layer_kind="gemma4", hidden_act="gelu_pytorch_tanh")
    assert [float(layer.layer_scalar) for layer in draft.layers] == [1.0, 1.0]
    assert torch.equal(draft.layers[0].pre_feedforward_layernorm.weight, torch.ones(32))
    assert draft.layers[0].self_attn.scaling == 1.0
    assert draft.layers[0].self_attn.v_norm.weight is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_of_gemma4_layers_rounds_as_gemma4_does(dtype):
    norm = random_draft(layer_kind="gemma4").norm.to(dtype)
    theirs = Gemma4RMSNorm(32, eps=norm.eps).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(32))
        theirs.weight.copy_(norm.weight)
        states = (torch.randn(50, 32) * 3).to(dtype)
        ours, expected = norm(states), theirs(states)
    assert_close(ours, expected, factor=0)  # the same steps in the same order, or bf16 rounds elsewhere


def test_every_layout_is_told_by_its_content(tmp_path):
    """Class names say little: two projects share one, and converters change them."""
    for layout in ("speculators", "zlab", "own"):
        fields = file_of(layout) | {"architectures": ["DSparkDraftModel"]}
        expected = convert_config(FILES[layout], "x").to_dict()
        read = convert_config(fields, "x").to_dict()
        assert {k: v for k, v in read.items() if k != "architectures"} == {
            k: v for k, v in expected.items() if k != "architectures"
        }
    shutil.copyfile(FOLDERS["deepspec"] / "model.safetensors", tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(b"{not json")
    with pytest.raises(OSError, match=r"config\.json.* is not a valid JSON"):
        DSparkDraftModel.from_pretrained(tmp_path)
