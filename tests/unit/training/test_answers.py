# SPDX-License-Identifier: Apache-2.0
"""Prompts, the target's own answers to them, and prompts of its own."""

import pytest
import torch

from dspark_hf.common.chat_tokens import encode_messages
from dspark_hf.training.answers import PrepareSettings, PromptRow, write_answers, write_self_prompts
from dspark_hf.training.dataset import encode_row
from dspark_hf.training.left_out import LeftOut
from dspark_hf.training.sampling import SamplingSettings
from tests.support.chat import CALL, TOOL, TOOLS, assistant, byte_tokenizer, tool_result, user
from tests.support.commands import read
from tests.support.models import tiny_target
from tests.support.scripted import captured_log
from tests.support.training import ASSISTANT, EOS, NO_THINKING, TEMPLATE, USER, word_tokenizer, words


BOS = 1
GREEDY = SamplingSettings(max_new_tokens=6, temperature=0)
SETTINGS = PrepareSettings("tiny", GREEDY)


def turn(*ids, role="user"):
    return {"role": role, "content": words(*ids)}


def prompt(*ids) -> PromptRow:
    return PromptRow((turn(*ids),), "test")


PROMPTS = [prompt(*range(10 + i, 12 + 2 * i)) for i in range(7)]


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer()


@pytest.fixture(scope="module")
def target():
    return tiny_target(context_scale=0.2)


# Prompts


def test_key_is_that_of_the_conversation():
    assert prompt(7, 8).key == PromptRow((turn(7, 8),), "elsewhere").key
    assert len({prompt(7, 8).key, prompt(8, 7).key, PromptRow((turn(7, 8, role="system"),)).key}) == 3
    reordered = PromptRow(({"content": words(7, 8), "role": "user"},))
    assert reordered.key == prompt(7, 8).key
    # So are the tools that it offers, and what its turns say beside their text.
    assert len({PromptRow((turn(7),), tools=tools).key for tools in ((), (TOOL,), (TOOL, TOOL))}) == 3
    assert PromptRow((turn(7) | {"tool_calls": [CALL]},)).key != prompt(7).key
    # SHA-256 of [{"content": "w7 w8", "role": "user"}]: a file of another version can be continued.
    assert prompt(7, 8).key == "586307e3ed91440e"


def test_prompt_ends_where_the_answer_begins(tokenizer):
    assert encode_messages(tokenizer, [turn(7, 8)]) == (BOS, USER, 7, 8, EOS, BOS, ASSISTANT)
    assert encode_messages(tokenizer, [turn(7)], enable_thinking=False)[-2:] == (ASSISTANT, NO_THINKING)
    assert encode_messages(tokenizer, [turn(7)], enable_thinking=True)[-1] == ASSISTANT


# Answers written here


def test_answers_are_the_targets_own(tmp_path, target, tokenizer):
    path, seen = tmp_path / "answers.jsonl", []
    assert write_answers(target, tokenizer, PROMPTS, path, SETTINGS, num_rows=3, on_row=seen.append) == 7
    rows = {row["key"]: row for row in read(path)}
    assert seen == list(rows.values())
    for asked in PROMPTS:
        row = rows[asked.key]
        ids = encode_messages(tokenizer, asked.messages)
        output = target.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=6, eos_token_id=EOS)
        assert row["prompt_ids"] == list(ids)
        assert row["answer_ids"] == output[0, len(ids) :].tolist()
        assert row["messages"][:-1] == list(asked.messages)
        assert row["messages"][-1]["role"] == "assistant"
        assert row["finish_reason"] == ("stop" if row["answer_ids"][-1] == EOS else "length")
        assert row["source"] == "test"
        sequence = encode_row("f:1", row, tokenizer)
        assert sequence.input_ids == (*ids, *row["answer_ids"])


def test_same_prompt_is_answered_once(tmp_path, target, tokenizer):
    path = tmp_path / "answers.jsonl"
    assert write_answers(target, tokenizer, [*PROMPTS[:2], *PROMPTS[:3]], path, SETTINGS, 2) == 3
    assert write_answers(target, tokenizer, PROMPTS[:3], path, SETTINGS, 2) == 0
    assert len(read(path)) == 3


@pytest.mark.parametrize("half_a_line", [b"", b'{"key": "0123", "mess'])
@pytest.mark.parametrize("killed_after", [1, 3, 6])
def test_killed_run_repeats_and_loses_nothing(tmp_path, target, tokenizer, killed_after, half_a_line):
    path, written = tmp_path / "answers.jsonl", []

    def kill(row):
        written.append(row)
        if len(written) == killed_after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_answers(target, tokenizer, PROMPTS, path, SETTINGS, 3, on_row=kill)
    assert read(path) == written
    with path.open("ab") as file:
        file.write(half_a_line)
    assert write_answers(target, tokenizer, PROMPTS, path, SETTINGS, 3) == 7 - killed_after
    rows = read(path)
    assert rows[:killed_after] == written
    assert sorted(row["key"] for row in rows) == sorted(asked.key for asked in PROMPTS)
    whole = tmp_path / "whole.jsonl"
    write_answers(target, tokenizer, PROMPTS, whole, SETTINGS, 3)
    by_key = {row["key"]: row for row in read(whole)}
    assert all(by_key[row["key"]] == row for row in rows)  # greedy: whatever shared the batch


def test_long_prompts_are_left_out_with_a_warning(tmp_path, target, tokenizer):
    path = tmp_path / "answers.jsonl"
    with captured_log() as messages:
        assert write_answers(target, tokenizer, PROMPTS, path, SETTINGS, 3, max_prompt_tokens=9) == 3
    reason = "A prompt must have at most 9 tokens, got 10. Raise `max_prompt_tokens`. The row is left out."
    assert messages[0] == f"The prompt {PROMPTS[3].messages[0]['content']!r}: {reason}"
    assert (len(messages), messages[-1]) == (5, "4 of 7 rows were left out.")
    assert {row["key"] for row in read(path)} == {asked.key for asked in PROMPTS[:3]}  # 7, 8 and 9 tokens


def test_no_prompt_that_can_be_answered(tmp_path, target, tokenizer):
    path = tmp_path / "answers.jsonl"
    with pytest.raises(ValueError, match=r"None of 7 rows can be used. The prompt 'w10 w11': .+at most 2 tokens"):
        write_answers(target, tokenizer, PROMPTS, path, SETTINGS, 3, max_prompt_tokens=2)
    assert not path.exists()
    write_answers(target, tokenizer, PROMPTS[:1], path, SETTINGS, 3)
    assert write_answers(target, tokenizer, PROMPTS, path, SETTINGS, 3, max_prompt_tokens=2) == 0  # one has an answer


def test_rows_that_the_template_refuses_are_named_and_the_others_answered(tmp_path, target):
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('No system turn') }}{% endif %}"
    tokenizer = word_tokenizer(template=template + TEMPLATE)
    system = turn(9, role="system")
    prompts = [PROMPTS[0], PromptRow((system, turn(10)), place="p.jsonl:2"), PROMPTS[1], PromptRow((system, turn(11)))]
    path, skipped = tmp_path / "answers.jsonl", []
    with captured_log() as messages:
        added = write_answers(
            target, tokenizer, prompts, path, SETTINGS, 3, on_skip=lambda: skipped.append(1), left_out=LeftOut()
        )
    assert added == len(skipped) == 2
    assert {row["key"] for row in read(path)} == {asked.key for asked in PROMPTS[:2]}
    reason = "The chat template refuses the conversation (TemplateError: No system turn). The row is left out."
    assert messages == [f"p.jsonl:2: {reason}", f"The prompt 'w11': {reason}", "2 of 4 rows were left out."]


def test_tools_and_results_of_tools_are_asked(tmp_path):
    target, tokenizer = tiny_target(context_scale=0.2, vocab_size=272), byte_tokenizer(TOOLS)
    called = (user(), assistant("", tool_calls=[CALL]), tool_result())
    prompts = [PromptRow((user(),), tools=(TOOL,)), PromptRow(called), PromptRow((user(),))]
    path = tmp_path / "answers.jsonl"
    assert write_answers(target, tokenizer, prompts, path, SETTINGS, 3) == 3
    rows = {row["key"]: row for row in read(path)}
    first, second, third = (rows[asked.key] for asked in prompts)
    assert first["tools"] == [TOOL]
    assert "tools" not in second
    assert second["messages"][:-1] == list(called)
    assert tokenizer.decode(first["prompt_ids"]).startswith("<|head|>tools\n[{")
    assert tokenizer.decode(second["prompt_ids"]).endswith("<|head|>tool\nsunny<|end|>\n<|head|>assistant\n")
    assert first["prompt_ids"] != third["prompt_ids"]


def test_answers_end_where_the_template_ends_a_turn(tmp_path):
    """Neither `generate` nor the tokenizer name that token. The target's third token is made to be it."""
    target, tokenizer = tiny_target(context_scale=0.2, vocab_size=272), byte_tokenizer()
    settings = PrepareSettings("tiny", SamplingSettings(max_new_tokens=12, temperature=0))
    write_answers(target, tokenizer, [PromptRow((user(),))], tmp_path / "plain.jsonl", settings)
    third = read(tmp_path / "plain.jsonl")[0]["answer_ids"][2]
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    weight = target.get_output_embeddings().weight.data
    weight[end] = weight[third] * 1.5
    write_answers(target, tokenizer, [PromptRow((user(),))], tmp_path / "ended.jsonl", settings)
    (row,) = read(tmp_path / "ended.jsonl")
    assert row["answer_ids"][-1] == end
    assert len(row["answer_ids"]) <= 3
    assert row["finish_reason"] == "stop"


def test_end_tokens_of_target_and_tokenizer_count(tmp_path, tokenizer):
    target = tiny_target(context_scale=0.2)
    plain = tmp_path / "plain.jsonl"
    write_answers(target, tokenizer, PROMPTS[:1], plain, SETTINGS, 1)
    third = read(plain)[0]["answer_ids"][2]
    target.generation_config.eos_token_id = [third, 95]
    ended = tmp_path / "ended.jsonl"
    write_answers(target, tokenizer, PROMPTS[:1], ended, SETTINGS, 1)
    assert read(ended)[0]["answer_ids"][-1] == third
    assert len(read(ended)[0]["answer_ids"]) <= 3
    assert read(ended)[0]["finish_reason"] == "stop"


# Prompts of the target's own


@pytest.fixture
def talkative():
    """Ends a turn at one token in eight or so."""
    target = tiny_target(context_scale=0.2)
    target.generation_config.eos_token_id = list(range(80, 92))
    return target


SELF = PrepareSettings("tiny", SamplingSettings(24, 1.0, 50, 0.95))


def test_target_writes_prompts(tmp_path, talkative, tokenizer):
    path, seen = tmp_path / "prompts.jsonl", []
    assert write_self_prompts(talkative, tokenizer, 12, path, SELF, num_rows=4, on_row=seen.append) == 12
    rows = read(path)
    assert seen == rows
    assert len({row["key"] for row in rows}) == 12
    for row in rows:
        (message,) = row["messages"]
        assert message["role"] == "user"
        assert len(message["content"].split()) >= 3
        assert message["content"] == message["content"].strip()
        assert "<" not in message["content"]  # neither the header nor the end token
        assert row["key"] == PromptRow((message,)).key
        assert row["source"] == "self"


def test_own_prompts_are_continued(tmp_path, talkative, tokenizer):
    path = tmp_path / "prompts.jsonl"
    write_self_prompts(talkative, tokenizer, 5, path, SELF, num_rows=4)
    first = read(path)
    assert write_self_prompts(talkative, tokenizer, 9, path, SELF, num_rows=4) == 4
    assert read(path)[:5] == first
    assert len({row["key"] for row in read(path)}) == 9
    assert write_self_prompts(talkative, tokenizer, 9, path, SELF, num_rows=4) == 0


def test_own_prompts_begin_as_asked(tmp_path, talkative, tokenizer):
    path = tmp_path / "prompts.jsonl"
    starts = (words(30, 31) + " ", words(40) + " ")
    write_self_prompts(talkative, tokenizer, 8, path, SELF, starts, num_rows=2)
    begins = [row["messages"][0]["content"].split()[0] for row in read(path)]
    assert set(begins) == {"w30", "w40"}


def test_target_that_repeats_itself_ends(tmp_path, talkative, tokenizer):
    """Greedy turns from one start are all alike: one prompt, or none where it is too short."""
    settings = PrepareSettings("tiny", SamplingSettings(24, 0.0))
    added = write_self_prompts(talkative, tokenizer, 5, tmp_path / "p.jsonl", settings, (words(30) + " ",), 2)
    assert added <= 1


def test_turns_without_an_end_are_no_prompts(tmp_path, target, tokenizer):
    settings = PrepareSettings("tiny", SamplingSettings(2, 1.0, 5))
    assert write_self_prompts(target, tokenizer, 3, tmp_path / "p.jsonl", settings, num_rows=2) == 0


def test_turn_that_the_template_ends_otherwise_is_a_prompt(tmp_path):
    """The end of a user's turn is neither the tokenizer's end token nor one that `generate` stops at."""
    target, tokenizer = tiny_target(context_scale=0.2, vocab_size=272), byte_tokenizer()
    settings = PrepareSettings("tiny", SamplingSettings(64, 1.0, 272, 1.0))
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    target.lm_head.weight.data[end] = target.lm_head.weight.data[60:70].mean(dim=0) * 3
    starts = ("Tell me a story ",)
    assert write_self_prompts(target, tokenizer, 2, tmp_path / "p.jsonl", settings, starts, num_rows=8) == 2
