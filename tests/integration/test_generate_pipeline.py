# SPDX-License-Identifier: Apache-2.0
"""`pipeline("text-generation", ..., assistant_model=draft)`, with the draft as an object and as a folder."""

import pytest
import torch
from transformers import AutoConfig, AutoModel, pipeline

import dspark_hf
from tests.support.models import oracle_draft, random_prompt, tiny_target
from tests.support.scripted import letter_tokenizer


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def draft(target):
    draft = oracle_draft(target)
    draft.generation_config.num_assistant_tokens_schedule = "constant"  # no busy machine keeps it from drafting
    return draft


@pytest.fixture(scope="module")
def text():
    return letter_tokenizer().decode(random_prompt(9)[0])


def build(target, do_sample=False, **kwargs):
    # Not as arguments of the call: in some releases the pipeline then mixes both, which the library itself deprecates.
    target.generation_config.do_sample, target.generation_config.max_new_tokens = do_sample, 16
    return pipeline("text-generation", model=target, tokenizer=letter_tokenizer(), device="cpu", **kwargs)


def run(target, text, **kwargs):
    generator = build(target, **kwargs)
    with dspark_hf.collect_rounds() as stats:
        output = generator(text)
    return output, stats


def test_draft_as_an_object(target, draft, text):
    expected, _ = run(target, text)
    output, stats = run(target, text, assistant_model=draft)
    assert output == expected
    assert len(output[0]["generated_text"]) > len(text)
    assert stats.num_committed == 16 - 1
    assert sum(record.num_accepted for record in stats.rounds) > 0


def test_draft_as_a_folder(target, draft, text, tmp_path):
    draft.save_pretrained(tmp_path)
    letter_tokenizer().save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).model_type == "dspark_draft"
    assert isinstance(AutoModel.from_pretrained(tmp_path), dspark_hf.DSparkDraftModel)
    expected, _ = run(target, text)
    output, stats = run(target, text, assistant_model=str(tmp_path))
    assert output == expected
    assert stats.num_committed == 16 - 1
    assert sum(record.num_accepted for record in stats.rounds) > 0


def test_several_texts_one_after_another(target, draft, text):
    texts = [text, text[:4], text[2:]]
    expected, _ = run(target, texts)
    output, stats = run(target, texts, assistant_model=draft)
    assert output == expected
    assert stats.num_committed == 3 * 15


def test_chat_messages(target, draft, text):
    def chat(assistant):
        generator = build(target, assistant_model=assistant)
        generator.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        return generator([{"role": "user", "content": text}])[0]["generated_text"]

    assert chat(draft) == chat(None)
    assert chat(draft)[-1]["role"] == "assistant"


def test_a_batch(target, draft, text):
    def answers(**kwargs):
        generator = build(target, **kwargs)
        generator.tokenizer.pad_token_id, generator.tokenizer.padding_side = 0, "left"
        return [answer[0]["generated_text"] for answer in generator([text, text[:3], text[2:]])]

    assert answers(assistant_model=draft, batch_size=3) == answers()


def test_sampled_pipeline(target, draft, text):
    generator = build(target, do_sample=True, assistant_model=draft)
    torch.manual_seed(0)
    first = generator(text)
    torch.manual_seed(0)
    assert generator(text) == first
