# SPDX-License-Identifier: Apache-2.0
"""Answers many prompts in one process: a batch of limited size, refilled as soon as a place becomes free."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..drafts.modeling_dspark import DSparkDraftModel
from .waiting_requests import QueueStreamer, WaitingRequests


def generate_many(
    target: PreTrainedModel,
    draft: DSparkDraftModel,
    prompts: Sequence[Sequence[int] | torch.Tensor],
    max_batch: int = 8,
    generation_config: GenerationConfig | None = None,
    on_tokens: Callable[[int, torch.Tensor], None] | None = None,
    on_finished: Callable[[int, torch.Tensor], None] | None = None,
    **generate_arguments: Any,
) -> list[torch.Tensor]:
    """Answer any number of prompts, at most `max_batch` at a time; every answer is that of its prompt alone.

    When a text ends, a waiting prompt takes its place, so the batch stays full until the last few texts. Prompts
    begin in their order; `max_time` is one clock for all of them. For many users use a server; the exported draft
    runs in vLLM and SGLang.

    Args:
        target (`PreTrainedModel`): The model that generates.
        draft (`DSparkDraftModel`): Its draft.
        prompts (`Sequence`): Token ids of each prompt, at least one, without padding.
        max_batch (`int`, *optional*, defaults to 8): Most texts at a time.
        generation_config (`GenerationConfig`, *optional*): As for `generate`.
        on_tokens (`Callable`, *optional*):
            Called after each round with the number of a prompt and its new tokens, `(n,)`.
        on_finished (`Callable`, *optional*): Called with the number of a prompt and its whole answer, `(n,)`.
        generate_arguments (`Any`): Further arguments of `generate`: `max_new_tokens`, `do_sample`, ...

    Returns:
        `list[torch.LongTensor]`: the answers, each `(n,)`, in the order of the prompts.

    Raises:
        ValueError: If there is no prompt, one is empty, or `max_batch` is below 1.

    Example:
        >>> prompts = [tokenizer(text).input_ids for text in texts]  # doctest: +SKIP
        >>> answers = generate_many(target, draft, prompts, max_batch=8, max_new_tokens=64)  # doctest: +SKIP
    """
    _check_arguments(prompts, max_batch, generate_arguments)
    one_each = {"num_return_sequences": 1, "return_dict_in_generate": False}  # whatever the configs say
    generation_config = copy.deepcopy(generation_config)
    (generate_arguments if generation_config is None else generation_config).update(**one_each)
    rows = _as_rows(prompts, target.device)
    answers: dict[int, torch.Tensor] = {}

    def finish(number: int, answer: torch.Tensor) -> None:
        answers[number] = answer
        if on_finished is not None:
            on_finished(number, answer)

    first, rest = rows[:max_batch], rows[max_batch:]
    queue = WaitingRequests(enumerate(rest, len(first)), max_batch, [row.shape[1] for row in rest])
    target.generate(
        **_left_padded(first),
        assistant_model=draft,
        generation_config=generation_config,
        streamer=QueueStreamer(queue, on_tokens or (lambda number, ids: None), finish),  # noqa: ARG005
        **generate_arguments,
    )
    return [answers[number] for number in range(len(rows))]


def _check_arguments(prompts: Sequence[Any], max_batch: int, generate_arguments: dict[str, Any]) -> None:
    """Reject what many prompts cannot have, before any token."""
    if max_batch < 1:
        raise ValueError(f"`max_batch` must be >= 1, got {max_batch}.")
    if not len(prompts):
        raise ValueError("`prompts` must hold at least one prompt, got none.")
    for name in ("num_return_sequences", "streamer", "assistant_model", "return_dict_in_generate"):
        if generate_arguments.get(name):
            raise ValueError(f"`generate_many` takes no `{name}`, got {generate_arguments[name]!r}. Remove it.")
    for name in ("max_length", "min_length"):  # they count the padding of the prompts that begin together
        if generate_arguments.get(name):
            other = name.replace("length", "new_tokens")
            raise ValueError(f"`generate_many` takes no `{name}`, got {generate_arguments[name]}. Use `{other}`.")


def _as_rows(prompts: Sequence[Sequence[int] | torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Each prompt as (1, s)."""
    rows = [torch.as_tensor(prompt, dtype=torch.long, device=device).reshape(1, -1) for prompt in prompts]
    empty = next((number for number, row in enumerate(rows) if row.shape[1] == 0), None)
    if empty is not None:
        raise ValueError(f"Every prompt must hold at least one token, got none in prompt {empty}. Remove it.")
    return rows


def _left_padded(rows: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Prompts `(1, s)` as one tensor, and its mask; padding values are never read."""
    longest = max(row.shape[1] for row in rows)
    input_ids = rows[0].new_zeros(len(rows), longest)
    attention_mask = torch.zeros_like(input_ids)
    for index, row in enumerate(rows):
        input_ids[index, longest - row.shape[1] :] = row
        attention_mask[index, longest - row.shape[1] :] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}
