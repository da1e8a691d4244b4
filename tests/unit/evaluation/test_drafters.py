# SPDX-License-Identifier: Apache-2.0

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dspark_hf import DSparkDraftModel
from dspark_hf.drafts.modeling_eagle3 import Eagle3DraftModel
from dspark_hf.evaluation.drafters import (
    Drafter,
    check_names,
    default_drafters,
    load_drafters,
    load_own_draft,
    parse_drafter,
)
from tests.support.eagle3 import random_eagle3
from tests.support.models import VOCAB_SIZE, character_tokenizer, random_draft, tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def folders(tmp_path_factory, target):
    """A draft with a head of each kind, DFlash, one that fits another target, and a small model."""
    root = tmp_path_factory.mktemp("drafts")
    drafts = {
        "markov": {},
        "gated": {"markov_head_type": "gated"},
        "rnn": {"markov_head_type": "rnn"},
        "dflash": {"markov_rank": 0, "confidence_head_with_markov": False},
        "other": {"hidden_size": 64},
    }
    for name, overrides in drafts.items():
        random_draft(**overrides).save_pretrained(root / name)
    random_eagle3().save_pretrained(root / "eagle3")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    small = LlamaConfig(vocab_size=VOCAB_SIZE, num_hidden_layers=1, **sizes)
    LlamaForCausalLM(small).save_pretrained(root / "small")
    return root


def load(target, *texts):
    return load_drafters([parse_drafter(text) for text in texts], target, character_tokenizer())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", Drafter("plain", "plain")),
        ("prompt-lookup", Drafter("prompt-lookup", "prompt-lookup")),
        ("draft:folder/my-draft", Drafter("draft my-draft", "draft", "folder/my-draft")),
        ("a b=assistant:org/model", Drafter("a b", "assistant", "org/model")),
        (
            "draft,num_assistant_tokens=3,assistant_confidence_threshold=0.5",
            Drafter("draft", "draft", None, (("num_assistant_tokens", 3), ("assistant_confidence_threshold", 0.5))),
        ),
        (
            "all=draft:d,num_assistant_tokens_schedule=constant",
            Drafter("all", "draft", "d", (("num_assistant_tokens_schedule", "constant"),)),
        ),
        ("mtp", Drafter("mtp", "mtp")),
        ("theirs=dflash:d", Drafter("theirs", "dflash", "d")),
    ],
)
def test_drafters_of_the_command_line(text, expected):
    assert parse_drafter(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eagle", r"with a KIND of plain, prompt-lookup, .*, got 'eagle'"),
        ("", "with a KIND of"),
        ("assistant", "names no model. Write `assistant:FOLDER`"),
        ("dflash:", "names no model"),
        ("mtp:folder", "loads no model, got 'folder'"),
        ("=draft:d", "name must not be empty"),
        ("draft:d,temperature=1", r"of the kind draft are num_assistant_tokens, .*, got 'temperature=1'"),
        ("assistant:d,prompt_lookup_num_tokens=1", "of the kind assistant are num_assistant_tokens"),
        ("prompt-lookup,num_assistant_tokens=1", "are prompt_lookup_num_tokens, max_matching_ngram_size, got"),
        ("mtp,num_assistant_tokens=1", "of the kind mtp are none, got"),
        ("draft:d,num_assistant_tokens=many", "takes int, got 'many'"),
    ],
)
def test_drafters_that_cannot_be(text, message):
    with pytest.raises(ValueError, match=message):
        parse_drafter(text)


def test_defaults_are_each_draft_with_its_schedule_and_with_every_slot():
    names = ["prompt-lookup", "dspark", "dspark without copies", "dspark all slots"]
    assert [drafter.name for drafter in default_drafters([])] == names
    named = default_drafters(["x/one", "y/two"])
    ends = ("", " without copies", " all slots")
    assert [drafter.name for drafter in named[1:]] == [name + end for name in ("one", "two") for end in ends]
    assert (named[3].name, named[3].path) == ("one all slots", "x/one")


def test_all_slots_are_sent_whatever_was_saved_with_the_draft(target, tmp_path):
    draft = random_draft()
    draft.generation_config.assistant_confidence_threshold = 0.5
    draft.generation_config.num_assistant_tokens = 2
    draft.generation_config.prompt_lookup_num_tokens = 7
    draft.save_pretrained(tmp_path / "cut")
    rows = default_drafters([str(tmp_path / "cut")])[1:]
    own, without, every = load_drafters(rows, target, character_tokenizer())
    assert [loaded.knobs.prompt_lookup_num_tokens for loaded in (own, without, every)] == [7, 0, 0]
    assert without.knobs.assistant_confidence_threshold == 0.5
    assert (own.knobs.assistant_confidence_threshold, own.knobs.num_assistant_tokens) == (0.5, 2)
    assert (every.knobs.assistant_confidence_threshold, every.knobs.num_assistant_tokens) == (None, None)
    assert [own.sends_every_slot, every.sends_every_slot] == [False, True]


def test_plain_generation_comes_first_and_once():
    found = check_names([Drafter("a", "mtp"), Drafter("unaided", "plain"), Drafter("b", "mtp")])
    assert [drafter.name for drafter in found] == ["plain", "a", "b"]
    with pytest.raises(ValueError, match=r"\['a'\] more than once"):
        check_names([Drafter("a", "mtp"), Drafter("a", "draft")])
    with pytest.raises(ValueError, match="at least one drafter, got none"):
        check_names([Drafter("plain", "plain")])


def test_each_head_is_loaded(target, folders):
    names = ("markov", "gated", "rnn", "dflash")
    loaded = load(target, *(f"draft:{folders / name}" for name in names))
    assert [entry.refusal for entry in loaded] == [None] * 4
    assert all(isinstance(entry.arguments["assistant_model"], DSparkDraftModel) for entry in loaded)
    assert [entry.assistant.config.markov_head_type for entry in loaded[1:3]] == ["gated", "rnn"]
    assert [entry.num_slots for entry in loaded] == [4] * 4


def test_eagle3_drafts_are_told_by_their_config(target, folders):
    (entry,) = load(target, f"draft:{folders / 'eagle3'}")
    assert entry.refusal is None
    assert isinstance(entry.assistant, Eagle3DraftModel)
    assert isinstance(load_own_draft(folders / "markov", torch.float32), DSparkDraftModel)
    assert not entry.sends_every_slot  # it has no confidences to judge


def test_one_model_serves_several_drafters_with_their_own_knobs(target, folders):
    path = folders / "markov"
    own, every, few, cut = load(
        target,
        f"draft:{path}",
        f"a=draft:{path},num_assistant_tokens_schedule=constant",
        f"b=draft:{path},num_assistant_tokens_schedule=constant,num_assistant_tokens=2",
        f"c=draft:{path},num_assistant_tokens_schedule=constant,assistant_confidence_threshold=0.5",
    )
    assert own.assistant is every.assistant is few.assistant is cut.assistant
    assert every.knobs.num_assistant_tokens_schedule == "constant"
    assert own.knobs.num_assistant_tokens_schedule is None
    assert few.knobs.num_assistant_tokens == 2
    assert [entry.sends_every_slot for entry in (own, every, few, cut)] == [False, True, False, False]


def test_what_generate_is_given(target, folders):
    lookup, short, assistant = load(
        target,
        "prompt-lookup",
        "short=prompt-lookup,prompt_lookup_num_tokens=3",
        f"assistant:{folders / 'small'},num_assistant_tokens=4",
    )
    assert lookup.arguments == {"prompt_lookup_num_tokens": 10}
    assert short.arguments == {"prompt_lookup_num_tokens": 3}
    assert set(assistant.arguments) == {"assistant_model"}
    assert assistant.knobs.num_assistant_tokens == 4


# What does not apply says so


def test_a_draft_of_another_target(target, folders):
    (entry,) = load(target, f"draft:{folders / 'other'}")
    assert "hidden_size" in entry.refusal


def test_a_knob_that_the_draft_cannot_take(target, folders):
    (entry,) = load(target, f"draft:{folders / 'markov'},num_assistant_tokens=9")
    assert "`num_assistant_tokens` must lie in [1, 4]" in entry.refusal


def test_multi_token_prediction_needs_a_target_with_it(target):
    (entry,) = load(target, "mtp")
    assert "Qwen3ForCausalLM has no layers for multi-token prediction" in entry.refusal


def test_transformers_own_dflash_needs_a_model_of_its_own(target, folders):
    (entry,) = load(target, f"dflash:{folders / 'dflash'}")
    assert "got DSparkDraftModel" in entry.refusal
    assert f"write `draft:{folders / 'dflash'}`" in entry.refusal


def test_a_wrong_path_is_an_error(target, tmp_path):
    for text in (f"draft:{tmp_path / 'none'}", f"assistant:{tmp_path / 'none'}"):
        with pytest.raises(OSError, match="none"):
            load(target, text)
