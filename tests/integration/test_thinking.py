# SPDX-License-Identifier: Apache-2.0
"""The thinking switch on the command line and in the demo: as asked for, else as the draft was trained."""

import json

import pytest
import torch

from dspark_hf.cli import calibrate, compare
from dspark_hf.common.thinking import choose_thinking, has_thinking_switch, thinks_by_default, with_thinking
from dspark_hf.demo.session import Pair, Session
from dspark_hf.demo.settings import Limits, RunSettings
from tests.support.commands import run
from tests.support.models import oracle_draft, random_draft, tiny_target
from tests.support.scripted import captured_log
from tests.support.training import word_tokenizer, words


TEXT = words(10, 11)
# <bos> user w10 w11 <eos> <bos> assistant, and "nothink" with thinking off
ON = [1, 3, 10, 11, 2, 1, 4]
OFF = [*ON, 6]
WITHOUT_SWITCH = (
    "{% for m in messages %}<bos> user {{ m['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<bos> assistant{% endif %}"
)
OFF_BY_DEFAULT = WITHOUT_SWITCH + "{% if not enable_thinking %} nothink{% endif %}"
# The word alone is no switch.
MENTIONED = "{# enable_thinking is not supported #}" + WITHOUT_SWITCH


def ids(tokenizer):
    messages = [{"role": "user", "content": TEXT}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


@pytest.mark.parametrize(
    ("template", "has_switch"), [(None, False), (WITHOUT_SWITCH, False), (MENTIONED, False), (OFF_BY_DEFAULT, True)]
)
def test_a_switch_is_what_changes_the_prompt(template, has_switch):
    assert has_thinking_switch(word_tokenizer(template=template)) is has_switch


def test_the_default_is_the_templates():
    assert thinks_by_default(word_tokenizer())
    assert not thinks_by_default(word_tokenizer(template=OFF_BY_DEFAULT))


def test_the_switch_is_set_on_a_copy():
    tokenizer = word_tokenizer()
    assert [ids(with_thinking(tokenizer, value)) for value in (None, True, False)] == [ON, ON, OFF]
    assert ids(tokenizer) == ON


@pytest.mark.parametrize(
    ("asked", "recorded", "chosen"),
    [(None, None, None), (None, False, False), (None, True, True), (True, False, True), (False, True, False)],
)
def test_what_is_asked_for_goes_before_what_was_recorded(asked, recorded, chosen):
    with captured_log() as log:
        assert choose_thinking(word_tokenizer(), asked, {"enable_thinking": recorded}) is chosen
    assert log == []
    assert choose_thinking(word_tokenizer(), asked, None) is asked


@pytest.mark.parametrize("template", [None, WITHOUT_SWITCH])
def test_a_switch_that_is_not_there_is_ignored_aloud(template):
    tokenizer = word_tokenizer(template=template)
    with captured_log() as log:
        choose_thinking(tokenizer, None, {"enable_thinking": False})  # nobody asked
    assert log == []
    with captured_log() as log:
        choose_thinking(tokenizer, False)
    assert len(log) == 1
    assert "`enable_thinking=False` changes nothing" in log[0]


# The command line


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, the same one without a switch, and drafts that were trained either way, or by others."""
    root, target = tmp_path_factory.mktemp("thinking"), tiny_target()
    for name, template in (("target", word_tokenizer().chat_template), ("plain", WITHOUT_SWITCH)):
        target.save_pretrained(root / name)
        word_tokenizer(template=template).save_pretrained(root / name)
    for name, info in (("off", {"enable_thinking": False}), ("on", {"enable_thinking": True}), ("others", None)):
        random_draft(training_info=info).save_pretrained(root / name)
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": words(10 + i, 11)}) + "\n" for i in range(4)))
    return root


def pair_of(folders, draft, target="target"):
    return ["--target", folders / target, "--draft", folders / draft, "--dtype", "float32"]


CASES = [
    ("others", [], ON),
    ("on", [], ON),
    ("off", [], OFF),
    ("off", ["--enable-thinking"], ON),
    ("others", ["--no-thinking"], OFF),
]


@pytest.mark.parametrize(("draft", "options", "expected"), CASES)
def test_generate(draft, options, expected, folders):
    target, tokenizer = tiny_target(), word_tokenizer()
    texts = {}
    for prompt in (ON, OFF):
        output = target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)[0, len(prompt) :]
        texts[tuple(prompt)] = tokenizer.decode(output, skip_special_tokens=True).strip()
    assert texts[tuple(ON)] != texts[tuple(OFF)]
    result = run("generate", TEXT, *pair_of(folders, draft), "--max-new-tokens", "12", *options)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == texts[tuple(expected)]
    said = "Prompts have thinking off, as the draft was trained." in result.stderr
    assert said is (draft == "off" and not options)


@pytest.mark.parametrize(("draft", "options", "expected"), CASES)
@pytest.mark.parametrize("command", ["compare", "calibrate"])
def test_compare_and_calibrate(command, draft, options, expected, folders, tmp_path, monkeypatch):
    seen, module = [], {"compare": compare, "calibrate": calibrate}[command]
    original = getattr(module, command)

    def spy(target, draft, tokenizer, *arguments, **named):
        seen.append(ids(tokenizer))
        return original(target, draft, tokenizer, *arguments, **named)

    monkeypatch.setattr(module, command, spy)
    arguments = {
        "compare": [TEXT, "--max-new-tokens", "4"],
        "calibrate": ["--prompts", folders / "prompts.jsonl", "--max-new-tokens", "48", "-o", tmp_path / "out"],
    }[command]
    result = run(command, *arguments, *pair_of(folders, draft), *options)
    assert result.exit_code == 0, result.output
    assert seen == [expected]


@pytest.mark.parametrize("command", ["compare", "generate", "calibrate", "doctor", "eval"])
def test_raw_prompts_have_no_switch(command, folders, tmp_path):
    arguments = {
        "compare": [TEXT, *pair_of(folders, "off")],
        "generate": [TEXT, *pair_of(folders, "off")],
        "calibrate": ["--prompts", folders / "prompts.jsonl", *pair_of(folders, "off"), "-o", tmp_path / "out"],
        "doctor": [folders / "target", folders / "off"],
        "eval": [folders / "prompts.jsonl", *pair_of(folders, "off"), "-o", tmp_path / "out"],
    }[command]
    result = run(command, *arguments, "--raw", "--no-thinking")
    assert result.exit_code == 2
    assert "`--no-thinking` is a switch of the chat template, which `--raw` leaves out, got both" in result.stderr
    assert not (tmp_path / "out").exists()


def test_raw_prompts_do_not_heed_what_was_recorded(folders):
    target, tokenizer = tiny_target(), word_tokenizer()
    prompt = torch.tensor([[10, 11]])
    output = target.generate(prompt, do_sample=False, max_new_tokens=12)[0, 2:]
    result = run("generate", TEXT, *pair_of(folders, "off"), "--max-new-tokens", "12", "--raw")
    assert result.stdout.strip() == tokenizer.decode(output, skip_special_tokens=True).strip()
    assert "thinking" not in result.stderr


@pytest.mark.parametrize("command", ["compare", "generate", "doctor", "eval", "prepare"])
def test_every_command_ignores_a_switch_that_is_not_there_aloud(command, folders, tmp_path):
    few = ["--max-new-tokens", "6", "--no-thinking"]
    pair = pair_of(folders, "others", "plain")
    arguments = {
        "compare": [TEXT, *pair],
        "generate": [TEXT, *pair],
        "doctor": [folders / "plain", folders / "others", "--no-speed"],
        "eval": [folders / "prompts.jsonl", *pair, "--limit", "1", "--temperatures", "0", "-o", tmp_path / "out"],
        "prepare": ["--target", folders / "plain", "--prompts", folders / "prompts.jsonl", "-o", tmp_path / "out"],
    }[command]
    with captured_log() as log:
        result = run(command, *arguments, *few)
    assert result.exit_code in ((0, 1) if command == "doctor" else (0,)), result.output
    assert [message for message in log if "changes nothing" in message] == [
        "`enable_thinking=False` changes nothing: the chat template of this target has no thinking switch."
    ]


# The demo


@pytest.fixture(scope="module")
def models():
    target = tiny_target()
    return target, oracle_draft(target)


@pytest.mark.parametrize(
    ("started_with", "asked", "expected"),
    [(None, None, ON), (False, None, OFF), (True, None, ON), (False, True, ON), (None, False, OFF)],
)
def test_a_visitor_sets_the_switch(models, started_with, asked, expected):
    session = Session(Pair(*models, word_tokenizer(), started_with), Limits())
    assert session.check(RunSettings(TEXT, enable_thinking=asked))["input_ids"].tolist() == [expected]


@pytest.mark.parametrize(
    ("template", "started_with", "thinks"),
    [("own", None, True), ("own", False, False), (OFF_BY_DEFAULT, None, False), (WITHOUT_SWITCH, False, None)],
)
def test_the_switch_is_shown_where_the_template_has_one(models, template, started_with, thinks):
    tokenizer = word_tokenizer() if template == "own" else word_tokenizer(template=template)
    assert Pair(*models, tokenizer, started_with).thinks is thinks


def test_a_visitor_is_told_where_there_is_no_switch(models):
    session = Session(Pair(*models, word_tokenizer(template=WITHOUT_SWITCH)), Limits())
    with pytest.raises(ValueError, match="no thinking switch"):
        session.check(RunSettings(TEXT, enable_thinking=False))
    session = Session(Pair(*models, word_tokenizer()), Limits())
    with pytest.raises(ValueError, match="thinking cannot be switched"):
        session.check(RunSettings(TEXT, raw=True, enable_thinking=False))
    with pytest.raises(ValueError, match="Thinking must be true or false, got 'yes'"):
        session.check(RunSettings(TEXT, enable_thinking="yes"))


def test_the_page_has_the_switch_only_where_the_template_has_one(models):
    from dspark_hf.demo.app import build_demo

    for template, is_visible in ((word_tokenizer().chat_template, True), (WITHOUT_SWITCH, False)):
        demo = build_demo(*models, word_tokenizer(template=template), enable_thinking=False)
        switches = [block for block in demo.blocks.values() if getattr(block, "elem_id", None) == "thinking"]
        assert [(block.visible, block.value) for block in switches] == [(is_visible, False)]
