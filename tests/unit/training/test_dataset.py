# SPDX-License-Identifier: Apache-2.0
"""Reading, encoding and batching of answered conversations."""

import json

import pytest
import torch

from dspark_hf.training.dataset import (
    SequenceDataset,
    TrainingSequence,
    choose_vocabulary,
    collate,
    encode_row,
    encode_rows,
    find_mask_token_id,
    read_rows,
    target_features,
)
from dspark_hf.training.left_out import LeftOut
from tests.support.closeness import assert_close
from tests.support.models import random_prompt, tiny_target
from tests.support.scripted import captured_log
from tests.support.training import ASSISTANT, EOS, NO_THINKING, TEMPLATE, USER, word_tokenizer, words


BOS = 1
QUESTION = {"role": "user", "content": words(10, 11)}
ANSWER = {"role": "assistant", "content": words(20, 21, 22)}
PROMPT_IDS = (BOS, USER, 10, 11, EOS, BOS, ASSISTANT)


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer()


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


# read_rows


def test_rows_come_with_file_and_line(tmp_path):
    first = write(tmp_path / "a.jsonl", {"x": 1}, "", {"x": 2})
    second = write(tmp_path / "b.jsonl", {"x": "ä"})
    assert list(read_rows([first, second])) == [
        (f"{first}:1", {"x": 1}),
        (f"{first}:3", {"x": 2}),
        (f"{second}:1", {"x": "ä"}),
    ]


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
def test_file_without_rows(tmp_path, content):
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"empty\.jsonl has no rows\. It must hold a JSON object per line"):
        list(read_rows([path]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"x": ', r"rows\.jsonl:2: each line must be one JSON object, got '{\"x\":' \(.+\)\. Correct the line\."),
        ("[1, 2]", r"rows\.jsonl:2: each row must be a JSON object, got a list\."),
        ('"text"', r"rows\.jsonl:2: each row must be a JSON object, got a string\."),
        ("null", r"rows\.jsonl:2: each row must be a JSON object, got null\."),
    ],
)
def test_malformed_line(tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        list(read_rows([write(tmp_path / "rows.jsonl", {"x": 1}, line)]))


def test_malformed_lines_can_be_left_out(tmp_path):
    path = write(tmp_path / "rows.jsonl", {"x": 1}, "{", {"x": 2}, "[]")
    left_out = LeftOut()
    assert [row for _, row in read_rows([path], left_out)] == [{"x": 1}, {"x": 2}]
    assert left_out.count == 2
    assert sorted(left_out.reasons.values()) == [f"{path}:2", f"{path}:4"]


def test_rows_of_an_array_are_numbered(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"x": 1}, {"x": 2}])
    assert list(read_rows([path])) == [(f"{path}, row 1", {"x": 1}), (f"{path}, row 2", {"x": 2})]


def test_no_such_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        list(read_rows([tmp_path / "nowhere.jsonl"]))


# encode_row


def test_tokens_that_the_target_wrote_are_kept(tokenizer):
    row = {"prompt_ids": [1, 2, 3], "answer_ids": [4, 5], "messages": "not read"}
    assert encode_row("f:1", row, tokenizer) == TrainingSequence((1, 2, 3, 4, 5), 3)


def test_messages_are_encoded_with_the_template(tokenizer):
    sequence = encode_row("f:1", {"messages": [QUESTION, ANSWER]}, tokenizer)
    assert sequence == TrainingSequence((*PROMPT_IDS, 20, 21, 22, EOS), len(PROMPT_IDS))


def test_thinking_switch_reaches_the_template(tokenizer):
    sequence = encode_row("f:1", {"messages": [QUESTION, ANSWER]}, tokenizer, enable_thinking=False)
    assert sequence == TrainingSequence((*PROMPT_IDS, NO_THINKING, 20, 21, 22, EOS), len(PROMPT_IDS) + 1)


def test_only_answers_that_ended_get_an_end_token(tokenizer):
    row = {"messages": [QUESTION, ANSWER], "finish_reason": "length"}
    assert encode_row("f:1", row, tokenizer).input_ids == (*PROMPT_IDS, 20, 21, 22)


def test_only_the_last_answer_is_an_answer(tokenizer):
    sequence = encode_row("f:1", {"messages": [QUESTION, ANSWER, QUESTION, ANSWER]}, tokenizer)
    assert sequence.input_ids[sequence.num_prompt_tokens :] == (20, 21, 22, EOS)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "The row has no answer: it needs `messages`"),
        ({"messages": []}, "The row has no answer"),
        ({"messages": [QUESTION]}, "The row has no answer"),
        ({"messages": [ANSWER, QUESTION]}, "The row has no answer"),
        ({"messages": "text"}, "The row has no answer"),
        ({"messages": ["text", "text"]}, "The row has no answer"),
        ({"prompt": "w1", "answer": "w2"}, r"got the fields \['answer', 'prompt'\]. Let the target answer with"),
        ({"prompt_ids": [1, 2]}, "The row has no answer"),
        ({"messages": [ANSWER]}, "The turns before the answer must have one of the user, got none"),
        (
            {"messages": [QUESTION, ANSWER, ANSWER]},
            "must be the user's or the result of a tool, got the role 'assistant'",
        ),
        ({"messages": [QUESTION, {"role": "assistant"}]}, "`content` of turn 2 must be a text, got null"),
        ({"messages": [QUESTION, {"role": "assistant", "content": None}]}, "`content` of turn 2 must be a text"),
        ({"messages": [QUESTION, {"role": "assistant", "content": " "}]}, "`content` of turn 2 must not be blank"),
        ({"messages": [{"role": "user"}, ANSWER]}, "`content` of turn 1 must be a text, got null"),
        ({"messages": [QUESTION, ANSWER], "tools": "f"}, "`tools` must be a list of JSON objects, got 'f'"),
        ({"messages": [QUESTION, ANSWER], "tools": [{"name": "f"}]}, "The chat template ignores `tools`"),
        ({"messages": [QUESTION, ANSWER | {"reasoning": "w9"}]}, "The chat template ignores `reasoning_content`"),
        ({"messages": [QUESTION, ANSWER | {"tool_calls": [{"name": "f"}]}]}, "The chat template ignores `tool_calls`"),
        ({"prompt_ids": [1], "answer_ids": []}, "`answer_ids` must be a list of at least one token id"),
        ({"prompt_ids": [], "answer_ids": [1]}, "`prompt_ids` must be a list of at least one token id"),
    ],
    ids=str,
)
def test_row_without_an_answer(tokenizer, row, reason):
    with pytest.raises(ValueError, match=rf"^data\.jsonl:7: .*{reason}"):
        encode_row("data.jsonl:7", row, tokenizer)


@pytest.mark.parametrize("ids", ["12", [1.5], ["3"], [-1], None, [True]], ids=str)
def test_row_whose_tokens_are_none(tokenizer, ids):
    with pytest.raises(ValueError, match=r"data\.jsonl:7: `answer_ids` must be a list of at least one token id, got"):
        encode_row("data.jsonl:7", {"prompt_ids": [1], "answer_ids": ids}, tokenizer)


def test_answer_without_tokens(tokenizer):
    bare = word_tokenizer()
    bare.eos_token = None
    bare.chat_template = "{% for m in messages %}w9 {{ m['content'] }} {% endfor %}w8"
    row = {"messages": [QUESTION, ANSWER | {"content": "\u200b"}], "finish_reason": "length"}
    with pytest.raises(ValueError, match=r"f:1: "):
        encode_row("f:1", row, bare)


# encode_rows


def test_rows_that_cannot_be_used_are_left_out(tmp_path, tokenizer):
    good = {"messages": [QUESTION, ANSWER]}
    path = write(tmp_path / "d.jsonl", good, "{", {"messages": [QUESTION]}, {"prompt_ids": [5], "answer_ids": [6, 7]})
    with captured_log() as messages:
        sequences = encode_rows([path], tokenizer)
    assert sequences == [TrainingSequence((*PROMPT_IDS, 20, 21, 22, EOS), 7), TrainingSequence((5, 6, 7), 1)]
    assert [message.split(": ")[0] for message in messages[:2]] == [f"{path}:2", f"{path}:3"]
    assert messages[2:] == ["2 of 4 rows were left out."]


def test_no_row_that_can_be_used(tmp_path, tokenizer):
    path = write(tmp_path / "d.jsonl", "{", {"messages": [QUESTION]}, {"messages": [ANSWER]}, {"x": 1}, "{")
    with pytest.raises(ValueError, match="None of 5 rows can be used") as caught:
        encode_rows([path], tokenizer)
    told = str(caught.value)
    assert [f"{path}:{number}: " in told for number in (1, 2, 3, 4, 5)] == [True, True, True, False, False]


def test_template_that_fails_for_a_row(tmp_path):
    """Roles that must alternate, a turn that has no such field, a system turn: each row is named."""
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('No system turn') }}{% endif %}"
        "{% if messages[0].content == 'w9' %}{{ messages[0].content + 1 }}{% endif %}"
    )
    system = {"role": "system", "content": "w8"}
    path = write(
        tmp_path / "d.jsonl",
        {"messages": [system, QUESTION, ANSWER]},
        {"messages": [QUESTION | {"content": "w9"}, ANSWER]},
        {"messages": [QUESTION, ANSWER]},
    )
    with captured_log() as messages:
        (sequence,) = encode_rows([path], word_tokenizer(template=template + TEMPLATE))
    assert sequence.num_prompt_tokens == len(PROMPT_IDS)
    assert "TemplateError: No system turn" in messages[0]
    assert "TypeError: " in messages[1]


# find_mask_token_id


def test_mask_is_a_row_beyond_the_tokenizer(tokenizer):
    assert len(tokenizer) == 96
    assert find_mask_token_id(tokenizer, 97) == 96
    assert find_mask_token_id(tokenizer, 128) == 96
    used = TrainingSequence((96, 97, 98), 1)
    assert find_mask_token_id(tokenizer, 128, [used]) == 99


def test_mask_is_a_reserved_token_where_no_row_is_left():
    tokenizer = word_tokenizer()
    tokenizer.add_tokens(["<used>", "<|reserved_0|>", "<|reserved_1|>"], special_tokens=True)  # 96, 97, 98
    tokenizer.chat_template = TEMPLATE + "<used>"
    assert find_mask_token_id(tokenizer, 99) == 97  # <used> is in the template
    assert find_mask_token_id(tokenizer, 99, [TrainingSequence((5, 97), 1)]) == 98


def test_no_row_for_a_mask(tokenizer):
    with pytest.raises(ValueError, match=r"no unused embedding row: 96 rows, 96 tokens.+Pass `mask_token_id`"):
        find_mask_token_id(tokenizer, 96)
    with pytest.raises(ValueError, match="no unused embedding row"):
        find_mask_token_id(tokenizer, 97, [TrainingSequence((96,), 0)])


def test_mask_is_in_none_of_several_templates():
    tokenizer = word_tokenizer()
    tokenizer.add_tokens(["<used>", "<also>", "<|reserved|>"], special_tokens=True)  # 96, 97, 98
    tokenizer.chat_template = {"default": TEMPLATE + "<used>", "tool_use": TEMPLATE + "<also>"}
    assert find_mask_token_id(tokenizer, 99) == 98


# choose_vocabulary


def test_vocabulary_is_the_most_frequent_answer_tokens():
    """Answers: 7 x3, 9 x2, 8 x1, 5 x1; the prompts' 1s do not count."""
    sequences = [TrainingSequence((1, 1, 1, 7, 9, 7), 3), TrainingSequence((1, 8, 9, 7, 5), 1)]
    assert choose_vocabulary(sequences, 1) == ([7], 3 / 7)
    assert choose_vocabulary(sequences, 2) == ([7, 9], 5 / 7)
    assert choose_vocabulary(sequences, 4) == ([5, 7, 8, 9], 1.0)


def test_tokens_kept_in_any_case():
    sequences = [TrainingSequence((7, 7, 9, 9, 9, 2), 0)]
    assert choose_vocabulary(sequences, 2, always=[2]) == ([2, 9], 4 / 6)
    assert choose_vocabulary(sequences, 4, always=[3]) == ([2, 3, 7, 9], 1.0)


def test_vocabulary_too_small_for_the_ends():
    with pytest.raises(ValueError, match="`draft_vocab_size` must hold the 3 tokens that end an answer, got 2. Raise"):
        choose_vocabulary([TrainingSequence((7, 7, 9, 2), 0)], 2, always=[2, 3, 4])


def test_vocabulary_larger_than_the_answers():
    with pytest.raises(ValueError, match="`draft_vocab_size` must not exceed the 2 different tokens .+ got 3"):
        choose_vocabulary([TrainingSequence((1, 7, 9), 1)], 3)


# SequenceDataset and collate


def test_sequences_are_cut_and_those_without_an_anchor_left_out():
    sequences = [
        TrainingSequence((1, 2, 3, 4, 5, 6), 2),
        TrainingSequence((1, 2, 3, 4, 5, 6), 4),  # one answer token is left within 5
        TrainingSequence((1, 2), 2),  # no answer
        TrainingSequence((1, 2, 3, 4), 2),
    ]
    data = SequenceDataset(sequences, 5)
    assert len(data) == 2
    assert data.num_dropped == 2
    assert data.lengths == [5, 4]
    assert data[0] == {"input_ids": [1, 2, 3, 4, 5], "num_prompt_tokens": 2, "row_id": 0, "length": 5}
    assert data[1]["row_id"] == 1


def test_no_sequence_left():
    with pytest.raises(ValueError, match="No sequence has an answer of at least 2 tokens within 3, of 1 read"):
        SequenceDataset([TrainingSequence((1, 2, 3, 4, 5), 2)], 3)


def test_batch_is_padded_on_the_right():
    data = SequenceDataset([TrainingSequence((5, 6, 7, 8, 9), 2), TrainingSequence((3, 4, 5), 1)], 8)
    batch = collate([data[1], data[0]])
    assert batch["input_ids"].tolist() == [[3, 4, 5, 0, 0], [5, 6, 7, 8, 9]]
    assert batch["loss_mask"].tolist() == [[False, True, True, False, False], [False, False, True, True, True]]
    assert batch["row_ids"].tolist() == [1, 0]


# target_features


@pytest.mark.parametrize("kind", ["qwen3", "llama", "mistral", "gemma3"])
def test_features_are_the_hidden_states_of_a_forward(kind):
    target, ids = tiny_target(kind), random_prompt(14)
    features = target_features(target, ids, [-1, 0, 2])
    with torch.no_grad():
        outputs = target(ids, output_hidden_states=True)
    expected = torch.cat([outputs.hidden_states[i] for i in (0, 1, 3)], dim=-1)
    assert_close(features.context_hidden_states, expected, factor=0)
    assert_close(features.last_hidden_states, outputs.hidden_states[-1], factor=0)
    assert not features.context_hidden_states.requires_grad


@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_padding_does_not_reach_the_features(kind):
    target, long, short = tiny_target(kind), random_prompt(20, seed=1), random_prompt(9, seed=2)
    batch = torch.zeros(2, 20, dtype=torch.long)
    batch[0], batch[1, :9] = long[0], short[0]
    together, alone = target_features(target, batch, [0, 2]), target_features(target, short, [0, 2])
    for name in ("context_hidden_states", "last_hidden_states"):
        assert_close(getattr(together, name)[1:, :9], getattr(alone, name))
