# SPDX-License-Identifier: Apache-2.0
"""How answers are sampled, and the answers of a target to many prompts: plain generation by the decoding loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..decoding.batch import RequestFactory
from ..decoding.call import Call
from ..decoding.loop import Loop
from ..decoding.no_draft import NoDraft
from ..decoding.packed_runner import PackedRunner
from ..decoding.waiting_requests import WaitingRequests


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling options of answers. All but the length may be `None` for a server, which then uses its own values.

    Args:
        max_new_tokens (`int`, *optional*, defaults to 256): Longest answer.
        temperature (`float`, *optional*, defaults to 0.7): 0 decodes greedily.
        top_k (`int`, *optional*, defaults to 20): Tokens to choose from; at least 1.
        top_p (`float`, *optional*, defaults to 0.8): Nucleus inside the top k, in (0, 1].
        seed (`int`, *optional*, defaults to 0): Random seed.

    Raises:
        ValueError: If a value is out of range.
    """

    max_new_tokens: int = 256
    temperature: float | None = 0.7
    top_k: int | None = 20
    top_p: float | None = 0.8
    seed: int | None = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"`max_new_tokens` must be >= 1, got {self.max_new_tokens}.")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"`temperature` must be >= 0, got {self.temperature}.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"`top_k` must be >= 1, got {self.top_k}.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` must lie in (0, 1], got {self.top_p}.")

    @property
    def processors(self) -> LogitsProcessorList:
        """`LogitsProcessorList`: What `generate` would prepare for these options, and nothing else."""
        found = LogitsProcessorList()
        if self.temperature:
            found += [TemperatureLogitsWarper(float(self.temperature)), TopKLogitsWarper(self.top_k)]
            if self.top_p is not None and self.top_p < 1:
                found.append(TopPLogitsWarper(self.top_p))
        return found


@dataclass(frozen=True)
class SampledAnswer:
    """An answer."""

    key: Any  # of its prompt
    token_ids: tuple[int, ...]  # new tokens, the end token included where there is one
    finish_reason: str  # `"stop"` or `"length"`


@torch.inference_mode()
def sample_answers(
    target: PreTrainedModel,  # a decoder-only target
    prompts: Iterable[tuple[Any, Sequence[int]]],  # keys, and token ids, at least one; taken as rows become free
    settings: SamplingSettings,
    end_token_ids: frozenset[int],  # tokens that end an answer
    num_rows: int = 64,  # answers written at once
) -> Iterator[SampledAnswer]:
    """Answer prompts by plain generation; answers come in the order in which they end.

    The same prompts, settings and rows give the same answers in one process. With other rows, sampled answers differ.
    """
    unset = [name for name, value in asdict(settings).items() if value is None]
    if unset:
        raise ValueError(f"Answers written here need all sampling settings, got None for {unset}. Set them.")
    keys: dict[int, Any] = {}

    def waiting() -> Iterator[tuple[int, torch.Tensor]]:
        for number, (key, prompt_ids) in enumerate(prompts):
            keys[number] = key
            yield number, torch.tensor([prompt_ids], device=target.device)

    criteria = StoppingCriteriaList([MaxLengthCriteria(settings.max_new_tokens)])
    if end_token_ids:
        criteria.append(EosTokenCriteria(sorted(end_token_ids)))
    config = GenerationConfig(do_sample=bool(settings.temperature), max_length=settings.max_new_tokens)
    factory = RequestFactory(settings.processors, criteria, config, padded_length=0)  # lengths are those of answers
    queue = WaitingRequests(waiting(), num_rows)
    requests = tuple(factory.one(*numbered) for numbered in queue.take(0))
    generator = torch.Generator(target.device).manual_seed(settings.seed or 0)
    call = Call(requests, NoDraft(), PackedRunner(target, requests, {}), factory, queue, generator)
    with call.runner.running(), contextlib.closing(Loop(call).run()) as rounds:
        for request, _ in rounds:
            if request.finished:
                token_ids = tuple(request.new_ids.tolist())
                reason = "stop" if token_ids[-1] in end_token_ids else "length"
                yield SampledAnswer(keys.pop(request.index), token_ids, reason)
