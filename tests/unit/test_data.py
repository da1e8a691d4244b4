# SPDX-License-Identifier: Apache-2.0
"""Reading, encoding and batching of answered conversations."""

import json

import pytest
import torch

from dspark_hf.data import (
    SequenceDataset,
    TrainingSequence,
    choose_vocabulary,
    collate,
    encode_row,
    find_mask_token_id,
    read_rows,
    target_features,
)
from tests.closeness import assert_close
from tests.helpers import random_prompt, tiny_target
from tests.training_support import ASSISTANT, EOS, NO_THINKING, TEMPLATE, USER, word_tokenizer, words


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
        ('{"x": ', r"rows\.jsonl:2 is not valid JSON \(.+\)\. Each line must be one object\."),
        ("[1, 2]", r"rows\.jsonl:2 must be a JSON object, got list\."),
        ('"text"', r"rows\.jsonl:2 must be a JSON object, got str\."),
        ("null", r"rows\.jsonl:2 must be a JSON object, got NoneType\."),
    ],
)
def test_malformed_line(tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        list(read_rows([write(tmp_path / "rows.jsonl", {"x": 1}, line)]))


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
    "row",
    [
        {},
        {"messages": []},
        {"messages": [ANSWER]},
        {"messages": [QUESTION]},
        {"messages": [ANSWER, QUESTION]},
        {"messages": "text"},
        {"messages": ["text", "text"]},
        {"messages": [QUESTION, {"role": "assistant"}]},
        {"messages": [QUESTION, {"role": "assistant", "content": None}]},
        {"prompt": "w1", "answer": "w2"},
        {"prompt_ids": [1, 2]},
    ],
    ids=str,
)
def test_row_without_an_answer(tokenizer, row):
    with pytest.raises(
        ValueError, match=r"data\.jsonl:7 has no answer: .+ Let the target answer with `dspark-hf"
    ) as e:
        encode_row("data.jsonl:7", row, tokenizer)
    assert f"got the fields {sorted(row)}" in str(e.value)


@pytest.mark.parametrize("ids", ["12", [1.5], ["3"], [-1], None, [True]], ids=str)
def test_row_whose_tokens_are_none(tokenizer, ids):
    with pytest.raises(ValueError, match=r"data\.jsonl:7: `answer_ids` must be a list of token ids, got"):
        encode_row("data.jsonl:7", {"prompt_ids": [1], "answer_ids": ids}, tokenizer)


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
