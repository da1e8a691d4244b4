# SPDX-License-Identifier: Apache-2.0
"""From answered conversations to training batches, and what the frozen target says about them.

Legend: b batch, s sequence, m captured layers, d hidden.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ._compat import CACHE_KEY, hidden_states_of
from .prepare import encode_messages, is_conversation
from .target_structure import backbone_of


MIN_ANSWER_TOKENS = 2


@dataclass(frozen=True)
class TrainingSequence:
    """One answered conversation.

    Args:
        input_ids (`tuple[int, ...]`): Prompt and answer.
        num_prompt_tokens (`int`): Leading tokens that are no answer.
    """

    input_ids: tuple[int, ...]
    num_prompt_tokens: int


def read_rows(paths: Iterable[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of JSON Lines files.

    Args:
        paths (`Iterable[Path]`): Files.

    Returns:
        `Iterator` of `(place, row)`, the place being `file:line` for messages.

    Raises:
        ValueError: If a file has no rows, or a line is not a JSON object; file and line are named.
    """
    for path in paths:
        count = 0
        with Path(path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                place = f"{path}:{number}"
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(
                        f"{place} is not valid JSON ({error.msg}). Each line must be one object."
                    ) from error
                if not isinstance(row, dict):
                    raise ValueError(f"{place} must be a JSON object, got {type(row).__name__}.")
                count += 1
                yield place, row
        if count == 0:
            raise ValueError(
                f"{path} has no rows. It must hold a JSON object per line, as `dspark-hf prepare` writes."
            )


def encode_row(
    place: str, row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, enable_thinking: bool | None = None
) -> TrainingSequence:
    """Tokens of an answered row; the ones that the target wrote where the row has them.

    Args:
        place (`str`): Where the row stands, for messages.
        row (`dict[str, Any]`): With `prompt_ids` and `answer_ids`, or `messages` whose last is the assistant's.
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        enable_thinking (`bool`, *optional*): The chat template's thinking switch.

    Returns:
        [`TrainingSequence`]

    Raises:
        ValueError: If the row holds no answer.
    """
    if "prompt_ids" in row and "answer_ids" in row:
        for name in ("prompt_ids", "answer_ids"):
            if not isinstance(row[name], list) or not all(type(i) is int and i >= 0 for i in row[name]):
                raise ValueError(f"{place}: `{name}` must be a list of token ids, got {str(row[name])[:80]!r}.")
        return TrainingSequence((*row["prompt_ids"], *row["answer_ids"]), len(row["prompt_ids"]))
    messages = row.get("messages")
    if not is_conversation(messages) or len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ValueError(
            f"{place} has no answer: it needs `messages` (`role` and `content`) that end with the assistant's, or "
            f"`prompt_ids` and `answer_ids`; got the fields {sorted(row)}. Let the target answer with `dspark-hf "
            "prepare`."
        )
    prompt = encode_messages(tokenizer, messages[:-1], enable_thinking)
    answer = tokenizer(messages[-1]["content"], add_special_tokens=False)["input_ids"]
    ended = row.get("finish_reason", "stop") == "stop" and tokenizer.eos_token_id is not None
    return TrainingSequence((*prompt, *answer, *([tokenizer.eos_token_id] if ended else [])), len(prompt))


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
    template = tokenizer.chat_template or ""
    reserved = [i for i, token in tokenizer.added_tokens_decoder.items() if token.content not in template]
    for candidate in (*range(len(tokenizer), vocab_size), *sorted(reserved)):
        if candidate not in used:
            return candidate
    raise ValueError(
        f"The target has no unused embedding row: {vocab_size} rows, {len(tokenizer)} tokens, no reserved token left. "
        "Pass `mask_token_id` of a token that your text never holds."
    )


def choose_vocabulary(
    sequences: Sequence[TrainingSequence], size: int, always: Iterable[int] = ()
) -> tuple[list[int], float]:
    """The most frequent answer tokens, for a reduced draft vocabulary.

    Args:
        sequences (`Sequence[TrainingSequence]`): Training data.
        size (`int`): Tokens to keep.
        always (`Iterable[int]`, *optional*): Tokens kept in any case, the end token for example.

    Returns:
        `tuple`: ascending token ids, and the share of answer tokens they cover, in [0, 1].

    Raises:
        ValueError: If the answers have fewer different tokens than `size`.
    """
    counts = Counter(token for sequence in sequences for token in sequence.input_ids[sequence.num_prompt_tokens :])
    kept = list(dict.fromkeys([*always, *(token for token, _ in counts.most_common())]))[:size]
    if len(kept) < size:
        raise ValueError(
            f"`draft_vocab_size` must not exceed the {len(kept)} different tokens in the answers, got {size}. Lower "
            "it, or add data."
        )
    covered = sum(counts[token] for token in kept)
    return sorted(kept), covered / max(1, sum(counts.values()))


class SequenceDataset(Dataset):
    """Sequences, cut to a length; those whose answer is too short to hold an anchor are left out.

    Args:
        sequences (`Sequence[TrainingSequence]`): The data.
        max_length (`int`): Longest sequence, in tokens; the end is cut off.

    Raises:
        ValueError: If no sequence is left.
    """

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
        """`list[int]`: Tokens of each sequence."""
        return [len(sequence.input_ids) for sequence in self.sequences]

    def __getitem__(self, index: int) -> dict[str, Any]:
        sequence = self.sequences[index]
        return {
            "input_ids": list(sequence.input_ids),
            "num_prompt_tokens": sequence.num_prompt_tokens,
            "row_id": index,
            "length": len(sequence.input_ids),
        }


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Right-pad rows to a batch. Padding lies behind every anchor, so no mask is needed to hide it.

    Args:
        rows (`Sequence[dict[str, Any]]`): From [`SequenceDataset`].

    Returns:
        `dict[str, torch.Tensor]`: `input_ids` `(b, s)`, `loss_mask` `(b, s)` (True at answer tokens), `row_ids`
        `(b,)`.
    """
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
    """What the frozen target says about a batch; O(d) per token, never O(V).

    Args:
        context_hidden_states (`torch.Tensor` of shape `(b, s, m * d)`): Outputs of the captured layers, concatenated.
        last_hidden_states (`torch.Tensor` of shape `(b, s, d)`): After the final norm, input of the LM head.
    """

    context_hidden_states: torch.Tensor
    last_hidden_states: torch.Tensor


@torch.no_grad()
def target_features(
    target: PreTrainedModel, input_ids: torch.Tensor, target_layer_ids: Sequence[int]
) -> TargetFeatures:
    """Run the target, without its LM head, over a right-padded batch.

    Args:
        target (`PreTrainedModel`): The target.
        input_ids (`torch.LongTensor` of shape `(b, s)`): The batch.
        target_layer_ids (`Sequence[int]`): Layers to capture, as in [`DSparkConfig`].

    Returns:
        [`TargetFeatures`]
    """
    outputs = backbone_of(target)(
        input_ids=input_ids.to(target.device),
        output_hidden_states=hidden_states_of(target_layer_ids),
        use_cache=False,
        return_dict=True,
        **{CACHE_KEY: None},
    )
    context = torch.cat([outputs.hidden_states[i + 1] for i in target_layer_ids], dim=-1)
    return TargetFeatures(context, outputs.last_hidden_state)
