# SPDX-License-Identifier: Apache-2.0
"""Eagle3 drafts: configuration, files, forward, and what must fit the target."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, DynamicCache

from dspark_hf import DSparkDraftModel
from dspark_hf.drafts import formats, target_binding
from dspark_hf.drafts.configuration_eagle3 import Eagle3Config
from dspark_hf.drafts.formats import is_dspark
from dspark_hf.drafts.modeling_eagle3 import Eagle3DraftModel
from tests.support.closeness import assert_close, assert_differs
from tests.support.eagle3 import oracle_eagle3, random_eagle3, tiny_eagle3_config
from tests.support.models import VOCAB_SIZE, oracle_draft, random_draft, random_prompt, rewrite, tiny_target


def convert_eagle3(fields, source, stated=None):
    return formats.convert_config(fields, source, stated, Eagle3Config)


GOLDEN = Path(__file__).parents[2] / "data" / "golden"
DEEPSPEC = GOLDEN / "eagle3_qwen3" / "draft"


def contents(config):
    """All fields but those that say where and by what a config was written."""
    where = ("_name_or_path", "architectures", "dtype", "transformers_version")
    return {name: value for name, value in config.to_dict().items() if name not in where}


def deepspec_fields(**changes):
    fields = json.loads((DEEPSPEC / "config.json").read_text()) | changes
    return {name: value for name, value in fields.items() if value is not ...}


# Configuration


def test_defaults():
    config = tiny_eagle3_config(num_key_value_heads=None, head_dim=None, draft_vocab_size=VOCAB_SIZE)
    assert (config.num_key_value_heads, config.head_dim, config.draft_vocab_size) == (4, 8, None)
    assert config.num_draft_slots == config.ttt_length == 4
    assert Eagle3Config().ttt_length == 7


WRONG_FIELDS = [
    ({"num_hidden_layers": 2}, "`num_hidden_layers` must be 1, got 2"),
    ({"num_hidden_layers": "1"}, "`num_hidden_layers` must be an integer >= 1"),
    ({"ttt_length": 0}, "`ttt_length` must be an integer >= 1, got 0"),
    ({"ttt_length": 2.0}, "`ttt_length` must be an integer >= 1, got 2.0"),
    ({"ttt_length": True}, "`ttt_length` must be an integer >= 1, got True"),
    ({"vocab_size": 0}, "`vocab_size` must be an integer >= 1, got 0"),
    ({"hidden_size": "32"}, "`hidden_size` must be an integer >= 1, got '32'"),
    ({"num_key_value_heads": 3}, "must be a multiple of `num_key_value_heads`, got 4 and 3"),
    ({"target_layer_ids": [0, 3]}, "must lie below the target's last layer 3, got [0, 3]"),
    ({"target_layer_ids": [1, 1]}, "must not repeat a layer, got [1, 1]"),
    ({"target_layer_ids": []}, "must be a non-empty list of integers, got []"),
    ({"draft_vocab_size": 98}, "`draft_vocab_size` must lie in [1, vocab_size=97], got 98"),
    ({"draft_vocab_size": 0}, "`draft_vocab_size` must lie in [1, vocab_size=97], got 0"),
    ({"hidden_act": "nothing"}, "`hidden_act` must be an activation that transformers knows, got 'nothing'"),
    ({"rms_norm_eps": 2.0}, "`rms_norm_eps` must lie in (0, 1), got 2.0"),
    ({"attention_bias": "no"}, "`attention_bias` must be true or false, got 'no'"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, "a positive number as `rope_theta`"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG_FIELDS, ids=[str(fields) for fields, _ in WRONG_FIELDS])
def test_wrong_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny_eagle3_config(**fields)


def test_layer_ids_cannot_be_guessed():
    with pytest.raises(ValueError, match="`target_layer_ids` must be set, got None"):
        Eagle3DraftModel(tiny_eagle3_config(target_layer_ids=None))


def test_config_survives_json(tmp_path):
    config = tiny_eagle3_config(draft_vocab_size=48, target_name_or_path="some/target", training_info={"steps": 3})
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(again, Eagle3Config)
    assert (
        contents(again) == contents(formats.read_config(tmp_path, {}, config_class=Eagle3Config)) == contents(config)
    )
    assert contents(config)["training_info"] == {"steps": 3}


# Foreign configs


@pytest.mark.parametrize(
    "name", ["hidden_size", "vocab_size", "num_attention_heads", "rope_parameters", "ttt_length", "target_layer_ids"]
)
def test_field_must_be_there(name):
    with pytest.raises(ValueError, match=f"some/draft must set `{name}`, but it is missing"):
        convert_eagle3(deepspec_fields(**{name: ...}), "some/draft")


def test_layer_ids_can_be_given_where_they_are_missing():
    fields = deepspec_fields(target_layer_ids=...)
    assert convert_eagle3(fields, "some/draft", {"target_layer_ids": [0, 2]}).target_layer_ids == [0, 2]
    with pytest.raises(ValueError, match=re.escape("`target_layer_ids=[0, 2]` contradicts the draft config")):
        convert_eagle3(deepspec_fields(), "some/draft", {"target_layer_ids": [0, 2]})


WRONG_CONFIGS = [
    ({"draft_num_hidden_layers": 2}, ValueError, "`draft_num_hidden_layers` is 2 and `num_hidden_layers` is 1"),
    ({"draft_num_hidden_layers": 2, "num_hidden_layers": 2}, ValueError, "`num_hidden_layers` must be 1, got 2"),
    ({"layer_types": ["sliding_attention"], "sliding_window": 8}, NotImplementedError, "with a sliding window"),
    ({"target_layer_ids": [1, 0]}, ValueError, "must ascend without repeating a layer, got [1, 0]"),
    ({"target_layer_ids": [0, 1, 3, 4, 6]}, ValueError, "must lie below the target's last layer 6"),
    ({"target_layer_ids": "0"}, ValueError, "must be a list of integers, got '0'"),
    ({"rope_parameters": 3}, ValueError, "`rope_parameters` must be a dictionary, got 3"),
    ({"architectures": ["Gemma4Eagle3Model"]}, NotImplementedError, "class 'Gemma4Eagle3Model'"),
    ({"architectures": ["LlamaForCausalLMEagle3"]}, NotImplementedError, "Serve it with vLLM or SGLang"),
    ({"architectures": [], "speculators_model_type": "eagle3"}, NotImplementedError, "of another layout"),
    ({"architectures": ["Qwen3ForCausalLM"]}, ValueError, "is not an Eagle3 draft: its config.json has architectures"),
    ({"architectures": None}, ValueError, "has architectures [] and model_type 'qwen3'"),
    ({"architectures": 7}, ValueError, "has a field of a wrong type"),
]


@pytest.mark.parametrize(("fields", "error", "message"), WRONG_CONFIGS, ids=[str(row[0]) for row in WRONG_CONFIGS])
def test_other_configs_are_refused(fields, error, message):
    with pytest.raises(error, match=re.escape(message)) as caught:
        convert_eagle3(deepspec_fields(**fields), "some/draft")
    if "must be 1" not in message and "last layer" not in message:
        assert "some/draft" in str(caught.value)


def test_old_rope_keys_mean_the_same():
    old = convert_eagle3(deepspec_fields(rope_parameters=..., rope_theta=10000.0, rope_scaling=None), "some/draft")
    assert old.rope_parameters == convert_eagle3(deepspec_fields(), "some/draft").rope_parameters


def test_each_class_names_the_other(tmp_path):
    random_eagle3().save_pretrained(tmp_path / "eagle3")
    random_draft().save_pretrained(tmp_path / "dspark")
    for folder in (DEEPSPEC, tmp_path / "eagle3"):
        assert not is_dspark(json.loads((folder / "config.json").read_text()))
        with pytest.raises(ValueError, match=r"is an Eagle3 draft\. Load it with Eagle3DraftModel\.from_pretrained\."):
            DSparkDraftModel.from_pretrained(folder)
    foreign = ("qwen3_vanilla", "gemma4_mix", "zlab_dflash", "speculators_dspark/full")
    for folder in (tmp_path / "dspark", *(GOLDEN / name / "draft" for name in foreign)):
        with pytest.raises(ValueError, match=r"is a DSpark draft\. Load it with DSparkDraftModel\.from_pretrained\."):
            Eagle3DraftModel.from_pretrained(folder)


# Files


@pytest.fixture(params=["own", "deepspec"])
def folder(request, tmp_path):
    """A loadable draft in each layout, to be broken."""
    if request.param == "own":
        random_eagle3(draft_vocab_size=48).save_pretrained(tmp_path)
    else:
        shutil.copytree(DEEPSPEC, tmp_path, dirs_exist_ok=True)
    assert isinstance(Eagle3DraftModel.from_pretrained(tmp_path), Eagle3DraftModel)
    return tmp_path


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Eagle3DraftModel.from_pretrained(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "layers.0.hidden_norm.weight"])
def test_missing_tensor(folder, name):
    rewrite(folder, lambda tensors: tensors.pop(name))
    refused(folder, f"lacks tensors that its config asks for: {re.escape(name)}")


def test_unexpected_tensor(folder):
    rewrite(folder, lambda tensors: tensors.update({"layers.1.mlp.up_proj.weight": torch.zeros(2)}))
    refused(folder, r"has tensors that its config does not account for: layers\.1\.mlp\.up_proj\.weight")


@pytest.mark.parametrize("name", ["fc.weight", "layers.0.self_attn.q_proj.weight"])
def test_tensor_of_another_shape(folder, name):
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name][:, 1:].clone()}))
    refused(folder, f"has tensors of other shapes than its config says: .*{re.escape(name)}")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_tensor_that_is_not_finite(folder, value):
    def spoil(tensors):
        tensors["layers.0.input_layernorm.weight"][3] = value

    rewrite(folder, spoil)
    refused(folder, r"holds NaN or infinity in layers\.0\.input_layernorm\.weight")


def test_truncated_file(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    refused(folder, "not a readable safetensors file")


def test_folder_without_config_or_weights(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        Eagle3DraftModel.from_pretrained(folder)
    (folder / "config.json").unlink()
    with pytest.raises(OSError, match=r"config\.json"):
        Eagle3DraftModel.from_pretrained(folder)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_copy_of_another_targets_tensor(tmp_path, name):
    shutil.copytree(DEEPSPEC, tmp_path, dirs_exist_ok=True)
    rewrite(tmp_path, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    refused(tmp_path, rf"of other shapes than its config says: {re.escape(name)} is \(191, 48\), not \(192, 48\)")


@pytest.mark.parametrize("change", ["too large", "negative", "not ascending", "twice the same"])
def test_map_of_a_reduced_vocabulary_that_is_none(tmp_path, change):
    random_eagle3(draft_vocab_size=48).save_pretrained(tmp_path)

    def spoil(tensors):
        ids = tensors["d2t"] + torch.arange(48)
        if change == "too large":
            ids[-1] = VOCAB_SIZE
        elif change == "negative":
            ids[0] = -1
        elif change == "not ascending":
            ids[[3, 4]] = ids[[4, 3]]
        else:
            ids[4] = ids[3]
        tensors["d2t"] = ids - torch.arange(48)

    rewrite(tmp_path, spoil)
    refused(tmp_path, r"must map ascending draft ids into \[0, 97\)")


@pytest.mark.parametrize("agrees", [True, False])
def test_membership_mask_is_compared_with_the_map(tmp_path, agrees):
    draft = random_eagle3(draft_vocab_size=48)
    draft.save_pretrained(tmp_path)
    mask = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    mask[draft.draft_token_ids()] = True
    mask[int((~mask).nonzero()[0])] |= not agrees
    rewrite(tmp_path, lambda tensors: tensors.update({"t2d": mask}))
    if agrees:
        Eagle3DraftModel.from_pretrained(tmp_path)
    else:
        refused(tmp_path, "is another in `t2d` than in `d2t`")


@pytest.mark.parametrize("draft_vocab_size", [None, 48])
def test_round_trip_is_bit_for_bit(tmp_path, draft_vocab_size):
    draft = random_eagle3(draft_vocab_size=draft_vocab_size)
    draft.generation_config.num_assistant_tokens = 3
    draft.save_pretrained(tmp_path)
    for loaded in (Eagle3DraftModel.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        assert type(loaded) is Eagle3DraftModel
        assert not loaded.training
        assert loaded.state_dict().keys() == draft.state_dict().keys()
        assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in draft.state_dict().items())
        assert contents(loaded.config) == contents(draft.config)
        assert loaded.generation_config.num_assistant_tokens == 3
    stored = load_file(tmp_path / "model.safetensors")
    assert set(stored) == set(draft.state_dict())
    assert ("lm_head.weight" in stored) == ("d2t" in stored) == (draft_vocab_size is not None)


def test_deepspec_draft_is_saved_in_our_layout(tmp_path):
    draft = Eagle3DraftModel.from_pretrained(DEEPSPEC)
    draft.save_pretrained(tmp_path)
    again, stored = Eagle3DraftModel.from_pretrained(tmp_path), load_file(DEEPSPEC / "model.safetensors")
    assert set(stored) - set(again.state_dict()) == {"embed_tokens.weight", "lm_head.weight"}
    assert all(torch.equal(tensor, stored[name]) for name, tensor in again.state_dict().items())
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "eagle3_draft"
    assert again.config.target_layer_ids == draft.config.target_layer_ids


def test_loading_takes_the_usual_arguments(tmp_path):
    random_eagle3().save_pretrained(tmp_path / "draft")
    draft = Eagle3DraftModel.from_pretrained(tmp_path, subfolder="draft", dtype=torch.bfloat16)
    assert draft.dtype == torch.bfloat16
    draft, info = Eagle3DraftModel.from_pretrained(tmp_path / "draft", output_loading_info=True)
    assert not info["missing_keys"]
    with pytest.raises(ValueError, match=r"`config` says everything, so \['target_layer_ids'\]"):
        Eagle3DraftModel.from_pretrained(tmp_path / "draft", config=draft.config, target_layer_ids=[0, 2])


# The target


def test_draft_of_another_target_is_refused(monkeypatch):
    target = tiny_target()
    monkeypatch.setattr(type(target), "forward", lambda *args, **kwargs: pytest.fail("the target ran"))
    for fields, message in (
        ({"hidden_size": 64}, "same `hidden_size`, got 32 in Qwen3ForCausalLM and 64"),
        ({"vocab_size": 90}, "same `vocab_size`, got 97 in Qwen3ForCausalLM and 90"),
        ({"num_target_layers": 5}, "made for a target of 5 layers, got 4"),
        ({"num_target_layers": None, "target_layer_ids": [0, 3]}, "below the target's last layer 3"),
    ):
        draft = random_eagle3(**fields)
        with pytest.raises(ValueError, match=message):
            draft.bind_target(target)
        with pytest.raises(ValueError, match=message):
            target.generate(random_prompt(4), do_sample=False, max_new_tokens=4, assistant_model=draft)


def test_another_embedding_than_in_training_is_warned_of(monkeypatch):
    warnings = []
    monkeypatch.setattr(target_binding.logger, "warning_once", warnings.append)
    draft = random_eagle3()
    draft.embedding_sample = {i: torch.full((32,), 0.5) for i in (3, 9)}
    draft.bind_target(tiny_target())
    assert "trained with another embedding" in warnings[0]
    assert len(Eagle3DraftModel.from_pretrained(DEEPSPEC).embedding_sample) == 16


# The forward


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_pieces_give_what_the_whole_gives(attention):
    draft = random_eagle3()
    draft.set_attn_implementation(attention)
    embeds, hidden = torch.randn(2, 1, 11, 32)
    positions = torch.arange(11)[None] + 3
    whole = draft(embeds, hidden, positions).last_hidden_state
    cache, pieces = DynamicCache(), []
    for start, end in ((0, 5), (5, 6), (6, 9), (9, 11)):
        part = slice(start, end)
        pieces.append(draft(embeds[:, part], hidden[:, part], positions[:, part], cache=cache).last_hidden_state)
    assert_close(torch.cat(pieces, dim=1), whole)
    mask = torch.ones(11, 11, dtype=torch.bool).tril()[None, None]
    assert_close(draft(embeds, hidden, positions, mask).last_hidden_state, whole)
    both = draft(embeds, hidden, positions, torch.ones_like(mask)).last_hidden_state
    assert_differs(both[:, 0], whole[:, 0])
    assert_close(both[:, -1], whole[:, -1])


@torch.no_grad()
def test_attention_implementations_agree():
    draft, (embeds, hidden) = random_eagle3(), torch.randn(2, 2, 9, 32)
    positions = torch.arange(9).expand(2, -1)
    outputs = []
    for attention in ("eager", "sdpa"):
        draft.set_attn_implementation(attention)
        outputs.append(draft(embeds, hidden, positions).last_hidden_state)
    assert_close(outputs[0], outputs[1])


@torch.no_grad()
def test_residual_is_the_raw_hidden_state():
    draft = random_eagle3()
    layer = draft.layers[0]
    for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
        projection.weight.zero_()
    embeds, hidden = torch.randn(2, 1, 4, 32)
    assert torch.equal(draft(embeds, hidden, torch.arange(4)[None]).last_hidden_state, hidden)


@torch.no_grad()
def test_logits_of_a_reduced_vocabulary_are_its_own_head():
    target, draft = tiny_target(), random_eagle3(draft_vocab_size=48)
    binding, hidden = draft.bind_target(target), torch.randn(1, 3, 32)
    logits = draft.draft_logits(hidden, binding)
    assert torch.equal(logits, draft.lm_head(draft.norm(hidden)))
    whole = random_eagle3()
    assert torch.equal(whole.draft_logits(hidden, binding), target.lm_head(whole.norm(hidden)))
    ids = draft.draft_token_ids()
    assert (len(ids), whole.draft_token_ids()) == (48, None)
    assert bool((ids[1:] > ids[:-1]).all())


def test_dspark_drafts_are_as_before():
    target = tiny_target()
    with pytest.raises(ValueError, match="same `hidden_size`"):
        random_draft(hidden_size=64).bind_target(target)
    for draft in (oracle_draft(target), oracle_eagle3(target)):
        assert draft.bind_target(target).lm_head is target.lm_head
