# SPDX-License-Identifier: Apache-2.0
"""Turns answered conversations into training batches, with the hidden states of the frozen target.

Legend: b batch, s sequence, m captured layers, d hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .._compat import CACHE_KEY, hidden_states_of
from ..common.chat import template_text
from ..common.chat_tokens import encode_conversation
from ..common.conversations import check_prompt, is_answer, read_messages, read_tools
from ..common.jsonl import read_json_lines, shortened
from ..drafts.target_structure import backbone_of
from .left_out import LeftOut


MIN_ANSWER_TOKENS = 2


@dataclass(frozen=True)
class TrainingSequence:
    """One answered conversation."""

    input_ids: tuple[int, ...]  # prompt and answer
    num_prompt_tokens: int  # leading tokens that are no answer


def read_rows(paths: Iterable[Path], left_out: LeftOut | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of JSON Lines files."""
    for path in paths:
        count = 0
        for row in read_json_lines(path):
            count += 1
            place = f"{path}:{row.number}" if row.unit == "line" else f"{path}, {row.unit} {row.number}"
            if row.value is not None:
                yield place, row.value
            elif left_out is not None:
                left_out.add(place, row.problem)
            else:
                raise ValueError(f"{place}: {row.problem}")
        if count == 0:
            raise ValueError(
                f"{path} has no rows. It must hold a JSON object per line, as `dspark-hf prepare` writes."
            )


def encode_row(
    place: str,
    row: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    enable_thinking: bool | None = None,
    end_ids: Collection[int] = (),
) -> TrainingSequence:
    """Tokens of an answered row; the ones that the target wrote where the row has them."""
    try:
        return _encoded(row, tokenizer, enable_thinking, end_ids)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def encode_rows(
    paths: Iterable[Path],
    tokenizer: PreTrainedTokenizerBase,
    enable_thinking: bool | None = None,
    end_ids: Collection[int] = (),
) -> list[TrainingSequence]:  # at least one
    """Sequences of files of answered rows; rows that cannot be used are left out, and named in the log."""
    left_out, sequences = LeftOut(), []
    for place, row in read_rows(paths, left_out):
        try:
            sequences.append(_encoded(row, tokenizer, enable_thinking, end_ids))
        except ValueError as error:
            left_out.add(place, str(error))
    left_out.finish(len(sequences))
    return sequences


def _encoded(
    row: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    enable_thinking: bool | None,
    end_ids: Collection[int],
) -> TrainingSequence:
    if "prompt_ids" in row and "answer_ids" in row:
        prompt_ids, answer_ids = _token_ids(row, "prompt_ids"), _token_ids(row, "answer_ids")
        return TrainingSequence((*prompt_ids, *answer_ids), len(prompt_ids))
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages or not is_answer(messages[-1]):
        raise ValueError(
            "The row has no answer: it needs `messages` that end with the assistant's, or `prompt_ids` and "
            f"`answer_ids`; got the fields {sorted(row)}. Let the target answer with `dspark-hf prepare`."
        )
    turns = read_messages(messages)
    check_prompt(turns[:-1])
    reason, tools = row.get("finish_reason") or "stop", read_tools(row.get("tools"))
    prompt, answer = encode_conversation(tokenizer, turns, reason, enable_thinking, tools, end_ids)
    if not answer:
        raise ValueError("The answer must have at least one token, got none.")
    return TrainingSequence((*prompt, *answer), len(prompt))


def _token_ids(row: dict[str, Any], name: str) -> list[int]:
    ids = row[name]
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f"`{name}` must be a list of at least one token id, got {shortened(ids)}.")
    return ids


def find_mask_token_id(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, sequences: Sequence[TrainingSequence] = ()
) -> int:
    """An embedding row that no text uses, to stand for "to be drafted".

    Rows beyond the tokenizer come first (padding of the embedding), then added tokens that are neither special to
    generation nor in the chat template. A row must exist already: a new one would be untrained and unknown to the
    target.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        vocab_size (`int`): Rows of the target's embedding.
        sequences (`Sequence[TrainingSequence]`, *optional*): Data in which the token must not occur.

    Returns:
        `int`

    Raises:
        ValueError: If there is no such row.
    """
    used = {token for sequence in sequences for token in sequence.input_ids} | set(tokenizer.all_special_ids)
    template = template_text(tokenizer)
    reserved = [i for i, token in tokenizer.added_tokens_decoder.items() if token.content not in template]
    for candidate in (*range(len(tokenizer), vocab_size), *sorted(reserved)):
        if candidate not in used:
            return candidate
    raise ValueError(
        f"The target has no unused embedding row: {vocab_size} rows, {len(tokenizer)} tokens, no reserved token left. "
        "Pass `mask_token_id` of a token that your text never holds."
    )


def choose_vocabulary(
    sequences: Sequence[TrainingSequence], size: int, always: Collection[int] = ()
) -> tuple[list[int], float]:  # ascending token ids, and the share of answer tokens they cover, in [0, 1]
    """The most frequent answer tokens, for a reduced draft vocabulary."""
    counts = Counter(token for sequence in sequences for token in sequence.input_ids[sequence.num_prompt_tokens :])
    kept = list(dict.fromkeys([*always, *(token for token, _ in counts.most_common())]))[:size]
    if not set(always) <= set(kept):
        raise ValueError(
            f"`draft_vocab_size` must hold the {len(set(always))} tokens that end an answer, got {size}. Raise it."
        )
    if len(kept) < size:
        raise ValueError(
            f"`draft_vocab_size` must not exceed the {len(kept)} different tokens in the answers, got {size}. Lower "
            "it, or add data."
        )
    covered = sum(counts[token] for token in kept)
    return sorted(kept), covered / max(1, sum(counts.values()))


class SequenceDataset(Dataset):
    """Sequences, cut to a length; those whose answer is too short to hold an anchor are left out."""

    def __init__(self, sequences: Sequence[TrainingSequence], max_length: int):
        cut = [TrainingSequence(q.input_ids[:max_length], q.num_prompt_tokens) for q in sequences]
        self.sequences = [q for q in cut if len(q.input_ids) - q.num_prompt_tokens >= MIN_ANSWER_TOKENS]
        self.num_dropped = len(sequences) - len(self.sequences)
        if not self.sequences:
            raise ValueError(
                f"No sequence has an answer of at least {MIN_ANSWER_TOKENS} tokens within {max_length}, of "
                f"{len(sequences)} read. Raise `max_length`, or check the data."
            )

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [len(sequence.input_ids) for sequence in self.sequences]

    def __getitem__(self, index: int) -> dict[str, Any]:
        sequence = self.sequences[index]
        return {
            "input_ids": list(sequence.input_ids),
            "num_prompt_tokens": sequence.num_prompt_tokens,
            "row_id": index,
            "length": len(sequence.input_ids),
        }


def collate(
    rows: Sequence[dict[str, Any]],
) -> dict[str, torch.Tensor]:  # `input_ids` [b, s], `loss_mask` [b, s] (True at answer tokens), `row_ids` [b]
    """Right-pad rows to a batch. Padding lies behind every anchor, so no mask is needed to hide it."""
    s = max(len(row["input_ids"]) for row in rows)
    input_ids = torch.zeros(len(rows), s, dtype=torch.long)
    loss_mask = torch.zeros(len(rows), s, dtype=torch.bool)
    for index, row in enumerate(rows):
        length = len(row["input_ids"])
        input_ids[index, :length] = torch.tensor(row["input_ids"])
        loss_mask[index, row["num_prompt_tokens"] : length] = True
    return {"input_ids": input_ids, "loss_mask": loss_mask, "row_ids": torch.tensor([row["row_id"] for row in rows])}


@dataclass(frozen=True)
class TargetFeatures:
    """Hidden states of the frozen target for a batch; O(d) per token, never O(V)."""

    context_hidden_states: torch.Tensor  # [b, s, m * d], outputs of the captured layers, concatenated
    last_hidden_states: torch.Tensor  # [b, s, d], after the final norm, input of the LM head


@torch.no_grad()
def target_features(
    target: PreTrainedModel,
    input_ids: torch.Tensor,  # [b, s]
    target_layer_ids: Sequence[int],
) -> TargetFeatures:
    """Run the target, without its LM head, over a right-padded batch."""
    outputs = backbone_of(target)(
        input_ids=input_ids.to(target.device),
        output_hidden_states=hidden_states_of(target_layer_ids),
        use_cache=False,
        return_dict=True,
        **{CACHE_KEY: None},
    )
    context = torch.cat([outputs.hidden_states[i + 1] for i in target_layer_ids], dim=-1)
    return TargetFeatures(context, outputs.last_hidden_state)
