# SPDX-License-Identifier: Apache-2.0
"""Targets and drafts named on the command line: which ones are loaded, and what is said of those that are not."""

import json
import shutil
import sys

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file

from dspark_hf import DSparkDraftModel
from dspark_hf.common.model_sources import looks_like_path
from dspark_hf.drafts.target_loading import find_target, load_target_model
from tests.integration.test_targets_multimodal import image_text_target
from tests.support.commands import run
from tests.support.models import VOCAB_SIZE, random_draft, tiny_target
from tests.support.scripted import captured_log
from tests.support.training import word_tokenizer, words


TEXT = words(10, 11, 12)
PREPARE = ["--max-new-tokens", "6", "--rows", "2"]


def succeed(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result


def refused(*arguments):
    """The message: exit status 2, one short sentence or three, no traceback."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output + repr(result.exception)
    assert isinstance(result.exception, SystemExit)
    message = [line for line in result.stderr.splitlines() if line.startswith("Error: ")][-1]
    assert len(message) < 600
    return message


def save(folder, model, tokenizer=None):
    model.save_pretrained(folder)
    (tokenizer or word_tokenizer()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Folders of a target and of a draft that fits it."""
    folder = tmp_path_factory.mktemp("pair")
    save(folder / "target", tiny_target())
    random_draft().save_pretrained(folder / "draft")
    return folder / "target", folder / "draft"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": words(10 + i, 11 + i)}) + "\n" for i in range(4)))
    return path


COMMANDS = ("compare", "generate", "calibrate", "profile", "demo", "doctor", "eval", "prepare", "train", "convert")


def command_line(name, target, draft, prompts, output, *options):
    """A short run of each command with a pair."""
    named = ["--target", target, "--draft", draft]
    few, one = ["--max-new-tokens", "6"], ["--dtype", "float32", *options]
    return {
        "compare": ["compare", TEXT, *named, *few, *one],
        "generate": ["generate", TEXT, *named, *few, *one],
        "calibrate": ["calibrate", "--prompts", prompts, *named, *one, "--max-new-tokens", "48", "-o", output],
        "profile": ["profile", *named, *one, "--context-lengths", "8", "--repeats", "2", "-o", output],
        "demo": ["demo", *named, *one],
        "doctor": ["doctor", target, draft, "--no-speed", *few, *one],
        "eval": ["eval", prompts, *named, *few, *one, "--limit", "1", "--temperatures", "0", "-o", output],
        "prepare": ["prepare", "--target", target, "--prompts", prompts, *PREPARE, *one, "-o", output],
        "train": ["train", "--target", target, "--data", prompts, "--output_dir", output, "--use_cpu", *one],
        "convert": ["convert", draft, "--to", "dspark", "--target", target, *options, "-o", output],
    }[name]


# Names that are no models


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_that_a_folder_is_missing(name, pair, prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for missing, shown in (
        ("./gone", "./gone"),
        ("~/gone", f"{tmp_path}/gone"),
        (tmp_path / "gone", tmp_path / "gone"),
    ):
        message = refused(*command_line(name, missing, pair[1], prompts, tmp_path / "out"))
        assert f"There is no folder '{shown}'" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("prepare", "train")])
def test_every_command_says_that_the_folder_of_a_draft_is_missing(name, pair, prompts, tmp_path):
    message = refused(*command_line(name, pair[0], tmp_path / "gone", prompts, tmp_path / "out"))
    assert f"There is no folder '{tmp_path}/gone'" in message


def test_the_folder_of_an_earlier_draft_is_missing(pair, prompts, tmp_path):
    train = command_line("train", *pair, prompts, tmp_path / "out", "--init_from", "./gone")
    assert "There is no folder './gone'" in refused(*train)


def test_the_home_folder_is_found(pair, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(pair[0].parent))
    succeed("generate", TEXT, "--target", "~/target", "--draft", "~/draft", "--max-new-tokens", "4")
    assert DSparkDraftModel.from_pretrained("~/draft").config.block_size == 4
    succeed("convert", "~/draft", "--to", "dspark", "-o", tmp_path / "out")


@pytest.mark.parametrize("name", ["no-such-model", "no-such-owner/no-such-model"])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_hub_id_that_is_not_in_the_cache_names_the_offline_mode(name, role, pair, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    named = dict(zip(("target", "draft"), pair, strict=True)) | {role: name}
    message = refused("generate", TEXT, "--target", named["target"], "--draft", named["draft"])
    assert f"There is no folder '{name}' here, and the Hub's model of that name is not in the cache" in message
    assert "HF_HUB_OFFLINE" in message


def test_paths_and_hub_ids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drafts").mkdir()
    for name in (".", "./a", "../a", "~/a", "/a", "a/b/c", "drafts/a", "drafts/", "a/"):
        assert looks_like_path(name), name
    for name in ("a", "owner/a", "Qwen/Qwen3-4B", "owner/a.b-c_d"):
        assert not looks_like_path(name), name


def test_folders_and_files_without_a_model(pair, tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("notes", "weights"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes" / "readme.txt").write_text("x")
    (tmp_path / "weights" / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "run" / "checkpoint-2").mkdir(parents=True)
    shutil.copy(pair[1] / "config.json", tmp_path / "run" / "checkpoint-2")
    cases = {
        tmp_path / "empty": "is empty, without a config.json. Give one with a model",
        tmp_path / "notes": "has no config.json, so it holds no model. Give the folder that `save_pretrained` wrote",
        tmp_path / "weights": "holds a GGUF file and no config.json.*`from_pretrained",
        tmp_path / "weights" / "model.gguf": "is a GGUF file, and a model is given as a folder",
        tmp_path / "run": f"has no config.json.*Did you mean '{tmp_path}/run/checkpoint-2'",
        pair[0] / "config.json": f"is a file. Give the folder that holds it, '{pair[0]}'",
        "": "got an empty name",
    }
    for name, match in cases.items():
        for named in (("--target", name, "--draft", pair[1]), ("--target", pair[0], "--draft", name)):
            message = refused("generate", TEXT, *named)
            assert match.split(".*")[0] in message
            assert match.split(".*")[-1] in message


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "convert"])
def test_a_draft_is_no_target(name, pair, prompts, tmp_path):
    message = refused(*command_line(name, pair[1], pair[1], prompts, tmp_path / "out"))
    assert f"{pair[1]} is a draft, and a target is needed" in message


def test_a_draft_of_another_layout_is_no_target(pair, tmp_path):
    # By its model type it would be loaded as a Qwen3 of random weights.
    fields = json.loads((pair[0] / "config.json").read_text()) | {"dflash_config": {"mask_token_id": 96}}
    shutil.copytree(pair[0], tmp_path / "zlab")
    (tmp_path / "zlab" / "config.json").write_text(json.dumps(fields))
    assert "is a draft" in refused("generate", TEXT, "--target", tmp_path / "zlab", "--draft", pair[1])


@pytest.mark.parametrize("name", ["compare", "generate", "calibrate", "profile", "demo", "convert"])
def test_a_target_is_no_draft(name, pair, prompts, tmp_path):
    message = refused(*command_line(name, pair[0], pair[0], prompts, tmp_path / "out"))
    assert f"{pair[0]} is not a DSpark draft" in message
    assert not (tmp_path / "out").exists()


# Models that are none of a target's kind


def broken(pair, tmp_path, **changes):
    """A copy of the target whose config.json has other fields."""
    folder = shutil.copytree(pair[0], tmp_path / "broken")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | changes))
    return folder


def test_a_model_type_that_transformers_does_not_know(pair, tmp_path):
    folder = broken(pair, tmp_path, model_type="zork")
    message = refused("generate", TEXT, "--target", folder, "--draft", pair[1])
    assert "`model_type` 'zork', which transformers" in message
    assert "Update transformers" in message


@pytest.mark.parametrize("text", ["{nope", "[1]", '"x"'])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_config_that_is_no_json_object(text, role, pair, tmp_path):
    folders = dict(zip(("target", "draft"), pair, strict=True))
    folders[role] = shutil.copytree(folders[role], tmp_path / "broken")
    (folders[role] / "config.json").write_text(text)
    message = refused("generate", TEXT, "--target", folders["target"], "--draft", folders["draft"])
    assert str(folders[role]) in message
    assert "JSON" in message


def test_weights_that_are_missing_or_cut_short(pair, tmp_path):
    folder = shutil.copytree(pair[0], tmp_path / "cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    named = ("--target", folder, "--draft", pair[1])
    assert "not a readable safetensors file" in refused("generate", TEXT, *named)
    weights.unlink()
    assert "no file named model.safetensors" in refused("generate", TEXT, *named)


def test_a_model_without_an_lm_head_is_not_run_with_a_random_one(pair, tmp_path):
    folder = save(tmp_path / "base", tiny_target("llama").model)
    message = refused("generate", TEXT, "--target", folder, "--draft", pair[1])
    assert "lacks weights that LlamaForCausalLM needs, which would be random: lm_head.weight" in message


def test_models_that_write_no_text_or_read_it_otherwise(pair, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = save(tmp_path / "vit", transformers.ViTModel(transformers.ViTConfig(**sizes)))
    assert "no class that writes text for ViTConfig" in refused(
        "generate", TEXT, "--target", vision, "--draft", pair[1]
    )
    config = transformers.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    t5 = save(tmp_path / "t5", transformers.T5ForConditionalGeneration(config))
    assert "encoder-decoder model (T5Config)" in refused("generate", TEXT, "--target", t5, "--draft", pair[1])


def test_a_target_without_a_tokenizer(pair, tmp_path):
    for kind in ("qwen3", "llama"):  # for one of the two transformers makes up an empty tokenizer
        tiny_target(kind).save_pretrained(tmp_path / kind)
        message = refused("generate", TEXT, "--target", tmp_path / kind, "--draft", pair[1])
        assert "tokenizer" in message
        assert "save_pretrained" in message


# Image-text models


def test_an_image_text_target(prompts, tmp_path):
    folder = save(tmp_path / "vl", image_text_target())
    draft = random_draft(num_key_value_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    draft.save_pretrained(tmp_path / "draft")
    result = succeed("generate", TEXT, "--target", folder, "--draft", tmp_path / "draft", "--max-new-tokens", "6")
    assert "accepted length" in result.stderr
    for name in ("prepare", "profile", "convert"):
        succeed(*command_line(name, folder, tmp_path / "draft", prompts, tmp_path / name))
    model = load_target_model(find_target(folder))
    assert type(model) is transformers.Qwen2_5_VLForConditionalGeneration
    written = json.loads((tmp_path / "convert" / "config.json").read_text())
    assert written["target_name_or_path"] == str(folder)


# Code that comes with a model

CONFIGURATION = """
from transformers import LlamaConfig
open({marker!r}, "a").write("configuration ")
class TinyConfig(LlamaConfig):
    model_type = "tiny_remote"
"""
MODELING = """
from transformers import LlamaForCausalLM
from .configuration_tiny import TinyConfig
class TinyForCausalLM(LlamaForCausalLM):
    config_class = TinyConfig
"""


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """A target that needs code of its own, which leaves a mark where it runs."""
    cache = str(tmp_path / "modules")
    for place in ("dynamic_module_utils", "utils.hub"):
        monkeypatch.setattr(f"transformers.{place}.HF_MODULES_CACHE", cache, raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path, cache])
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)  # a package of another test's cache
    folder = save(tmp_path / "remote", tiny_target("llama"))
    (folder / "configuration_tiny.py").write_text(CONFIGURATION.format(marker=str(tmp_path / "ran")))
    (folder / "modeling_tiny.py").write_text(MODELING)
    fields = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "configuration_tiny.TinyConfig", "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"}
    (folder / "config.json").write_text(json.dumps(fields | {"model_type": "tiny_remote", "auto_map": code}))
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_code_does_not_run_unless_it_is_allowed(name, remote, pair, prompts, tmp_path):
    message = refused(*command_line(name, remote, pair[1], prompts, tmp_path / "out"))
    assert f"configuration_tiny.py, modeling_tiny.py of {remote}" in message
    assert "--trust-remote-code" in message
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["generate", "prepare", "convert", "doctor"])
def test_code_that_is_allowed_runs_and_is_named_once(name, remote, pair, prompts, tmp_path):
    with captured_log() as log:
        result = run(*command_line(name, remote, pair[1], prompts, tmp_path / "out", "--trust-remote-code"))
    assert result.exit_code == 0 or name == "doctor", result.output + repr(result.exception)
    assert result.exit_code < 2, result.output
    assert (tmp_path / "ran").exists()
    said = [message for message in log if "Code that comes with the model runs" in message]
    assert said == [f"Code that comes with the model runs: configuration_tiny.py, modeling_tiny.py of {remote}."]


def test_trust_says_nothing_where_there_is_no_code(pair):
    with captured_log() as log:
        succeed(
            "generate", TEXT, "--target", pair[0], "--draft", pair[1], "--max-new-tokens", "4", "--trust-remote-code"
        )
    assert not [message for message in log if "Code that comes" in message]


def test_code_of_a_tokenizer_counts_as_well(pair, tmp_path):
    folder = shutil.copytree(pair[0], tmp_path / "target")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "OurTokenizer", "auto_map": {"AutoTokenizer": ["owner/words--words.Ours", None]}}
        )
    )
    message = refused("generate", TEXT, "--target", folder, "--draft", pair[1])
    assert "words.py of owner/words" in message
    assert "--trust-remote-code" in message


def test_an_image_text_class_of_its_own_code_is_chosen_by_the_auto_map(remote):
    fields = json.loads((remote / "config.json").read_text())
    fields["auto_map"]["AutoModelForImageTextToText"] = fields["auto_map"].pop("AutoModelForCausalLM")
    (remote / "config.json").write_text(json.dumps(fields))
    model = load_target_model(find_target(remote, trust_remote_code=True))
    assert type(model).__name__ == "TinyForCausalLM"


# Adapters


@pytest.fixture(scope="module")
def adapter(pair, tmp_path_factory):
    """An adapter of the target's attention and LM head, and the model with it."""
    torch.manual_seed(0)
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "lm_head"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = get_peft_model(tiny_target(), config)
    model.peft_config["default"].base_model_name_or_path = str(pair[0])
    folder = tmp_path_factory.mktemp("adapters") / "adapter"
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder, model.eval()


def test_an_adapter_is_put_on_its_base(adapter, pair):
    folder, model = adapter
    prompt = torch.tensor([[1, 3, 10, 11, 12, 2, 1, 4]])  # <bos> user w10 w11 w12 <eos> <bos> assistant
    expected = model.generate(input_ids=prompt, do_sample=False, max_new_tokens=12)
    plain = tiny_target().generate(prompt, do_sample=False, max_new_tokens=12)
    assert not torch.equal(expected, plain)  # the adapter does something
    named = ["--target", folder, "--draft", pair[1], "--dtype", "float32", "--max-new-tokens", "12"]
    result = succeed("generate", TEXT, *named)
    tokenizer = word_tokenizer()
    assert result.stdout.strip() == tokenizer.decode(expected[0, 8:], skip_special_tokens=True).strip()


@pytest.mark.parametrize("name", ["compare", "calibrate", "profile", "doctor", "eval", "prepare", "convert"])
def test_every_command_takes_an_adapter(name, adapter, pair, prompts, tmp_path):
    result = run(*command_line(name, adapter[0], pair[1], prompts, tmp_path / "out"))
    assert result.exit_code in ((0, 1) if name == "doctor" else (0,)), result.output + repr(result.exception)
    if name == "prepare":  # what is recorded is the adapter, not its base
        assert '"target": "adapter"' in (tmp_path / "out.settings.json").read_text()
    if name == "convert":
        assert json.loads((tmp_path / "out" / "config.json").read_text())["target_name_or_path"] == str(adapter[0])


def test_an_adapter_is_merged_where_weights_are_written(adapter, pair, tmp_path):
    folder, model = adapter
    succeed("convert", pair[1], "--to", "deepspec", "--target", folder, "-o", tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    target = tiny_target()
    lora = model.base_model.model.lm_head
    merged = target.lm_head.weight + 2 * lora.lora_B["default"].weight @ lora.lora_A["default"].weight  # alpha / r = 2
    torch.testing.assert_close(written["lm_head.weight"], merged.detach())
    assert not torch.equal(written["lm_head.weight"], target.lm_head.weight)
    assert torch.equal(written["embed_tokens.weight"], target.model.embed_tokens.weight)


def test_other_engines_cannot_load_an_adapter_by_name(adapter, pair, tmp_path):
    message = refused("convert", pair[1], "--to", "speculators", "--target", adapter[0], "-o", tmp_path / "out")
    assert "is a PEFT adapter. Merge it into its base" in message
    assert not (tmp_path / "out").exists()


def changed_adapter(adapter, tmp_path, **changes):
    folder = shutil.copytree(adapter[0], tmp_path / "changed")
    fields = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(fields | changes))
    return folder


def test_adapters_without_their_base(adapter, pair, tmp_path):
    for base, match in (
        (None, "does not name its base model"),
        ("./gone", "its base model is not there. There is no folder './gone'"),
        (str(adapter[0]), "another adapter. Merge that one into its base first"),
    ):
        folder = changed_adapter(adapter, tmp_path, base_model_name_or_path=base)
        assert match in refused("generate", TEXT, "--target", folder, "--draft", pair[1])
        shutil.rmtree(folder)


def test_adapters_that_are_no_weights_or_of_another_model(adapter, pair, tmp_path):
    prompt = get_peft_model(tiny_target(), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    prompt.peft_config["default"].base_model_name_or_path = str(pair[0])
    prompt.save_pretrained(tmp_path / "prompt")
    other = save(tmp_path / "other", tiny_target(vocab_size=VOCAB_SIZE + 3))
    for folder in (tmp_path / "prompt", changed_adapter(adapter, tmp_path, base_model_name_or_path=str(other))):
        message = refused("generate", TEXT, "--target", folder, "--draft", pair[1])
        assert f"The PEFT adapter {folder} cannot be put on" in message


def test_an_adapter_without_peft(adapter, pair, monkeypatch):
    monkeypatch.setattr("dspark_hf.drafts.target_loading.is_peft_available", lambda: False)
    message = refused("generate", TEXT, "--target", adapter[0], "--draft", pair[1])
    assert "PEFT is not installed: pip install peft" in message


def test_an_adapter_is_no_draft(adapter, pair):
    assert "is a PEFT adapter" in refused("generate", TEXT, "--target", pair[0], "--draft", adapter[0])


def test_the_merged_model_is_the_adapted_one(adapter):
    folder, model = adapter
    prompt = torch.tensor([[1, 3, 10, 11, 12, 2, 1, 4]])
    beside = load_target_model(find_target(folder), torch.float32)
    merged = load_target_model(find_target(folder), torch.float32, merge_adapter=True)
    assert not isinstance(merged, PeftModel)
    expected = model(input_ids=prompt).logits
    torch.testing.assert_close(beside(prompt).logits, expected)
    torch.testing.assert_close(merged(prompt).logits, expected, rtol=1e-4, atol=1e-4)
