# SPDX-License-Identifier: Apache-2.0
"""Plain sampling for many prompts at once, to generate training answers: a finished row gets the next prompt.

Throughput matters here, not latency, so no draft is used. Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .._compat import CACHE_KEY
from ..decoding.packed_attention import attention_packed, check_layers, packed_pass
from ..decoding.packed_cache import RowCache
from ..drafts.target_structure import backbone_of


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


@dataclass(frozen=True)
class RowRequest:
    """A prompt to answer."""

    key: Any  # comes back with the answer
    prompt_ids: tuple[int, ...]  # tokens, at least one


@dataclass(frozen=True)
class RowAnswer:
    """An answer."""

    key: Any  # of the request
    token_ids: tuple[int, ...]  # new tokens, the end token included where there was one
    finish_reason: str  # `"stop"` or `"length"`


def sample_rows(
    logits: torch.Tensor,  # [R, V], raw logits
    settings: SamplingSettings,
    generator: torch.Generator | None = None,
) -> torch.Tensor:  # [R]
    """One token per row, by temperature, top-k, then top-p inside the top k."""
    best = logits.topk(1 if settings.temperature == 0 else min(settings.top_k, logits.shape[-1]), dim=-1)
    if settings.temperature == 0:
        return best.indices[:, 0]
    probs = torch.softmax(best.values.float() / settings.temperature, dim=-1)  # descending
    before = probs.cumsum(dim=-1) - probs
    probs = probs.masked_fill(before >= settings.top_p, 0.0)  # the first token always stays
    return best.indices.gather(1, torch.multinomial(probs, 1, generator=generator)).squeeze(1)


class RowGenerator:
    """Answers requests in R rows that are refilled as they end."""

    def __init__(
        self,
        target: PreTrainedModel,  # a decoder-only target; while `run` runs, it attends by `packed_attention`
        settings: SamplingSettings,  # how answers are sampled
        eos_token_ids: frozenset[int],  # tokens that end an answer
        num_rows: int = 64,  # R
    ):
        unset = [name for name, value in asdict(settings).items() if value is None]
        if unset:
            raise ValueError(f"Answers written here need all sampling settings, got None for {unset}. Set them.")
        config = target.config.get_text_config(decoder=True)
        check_layers(target)
        self.target, self.settings, self.eos_token_ids = target, settings, eos_token_ids
        self.backbone = backbone_of(target)  # prompts need no logits
        self.generator = torch.Generator(device=target.device).manual_seed(settings.seed)
        self.cache = RowCache(config.num_hidden_layers, num_rows)
        self.rows: list[RowRequest | None] = [None] * num_rows
        self.answers: list[list[int]] = [[] for _ in range(num_rows)]
        self.current = [0] * num_rows  # the last token of each row

    @torch.inference_mode()
    def run(self, requests: Iterable[RowRequest]) -> Iterator[RowAnswer]:  # in the order in which answers end
        """Answer all requests."""
        waiting = iter(requests)
        exhausted = False
        with attention_packed(self.target):
            while True:
                free = [row for row, request in enumerate(self.rows) if request is None]
                if not exhausted and len(free) >= max(1, len(self.rows) // 12):
                    exhausted = not self._admit(free, waiting)
                active = [row for row, request in enumerate(self.rows) if request is not None]
                if not active:
                    return
                if exhausted and len(active) <= 0.75 * len(self.rows):
                    self._shrink(active)
                yield from self._step()

    def _admit(self, free: list[int], waiting: Iterator[RowRequest]) -> bool:
        """Prefill new prompts, all but their last token; False once there are none left."""
        taken = [request for _, request in zip(free, waiting, strict=False)]
        if not taken:
            return False
        rows = free[: len(taken)]
        for row, request in zip(rows, taken, strict=True):
            self.rows[row], self.answers[row] = request, []
            self.current[row], self.cache.lengths[row] = request.prompt_ids[-1], 0
        longer = [row for row in rows if len(self.rows[row].prompt_ids) > 1]
        if longer:
            self._forward(self.backbone, longer, [self.rows[row].prompt_ids[:-1] for row in longer])
        return len(taken) == len(free)

    def _forward(self, module: nn.Module, rows: Sequence[int], new_ids: Sequence[Sequence[int]]) -> Any:
        """One pass over new tokens of rows, packed."""
        current = self.cache.begin(rows, [len(ids) for ids in new_ids], self.target.device)
        with packed_pass(current):
            outputs = module(
                input_ids=torch.tensor([[i for ids in new_ids for i in ids]], device=self.target.device),
                position_ids=current.positions[None],
                attention_mask=current.stand_in_mask,
                use_cache=True,
                **{CACHE_KEY: self.cache},
            )
        self.cache.commit(rows, current.counts)
        return outputs

    def _step(self) -> Iterator[RowAnswer]:
        outputs = self._forward(self.target, range(len(self.rows)), [[token] for token in self.current])
        self.current = sample_rows(outputs.logits[0], self.settings, self.generator).tolist()
        for row, token in enumerate(self.current):
            request = self.rows[row]
            if request is None:
                self.cache.lengths[row] = 0  # an idle row costs its slot, but does not grow
                continue
            self.answers[row].append(token)
            stopped = token in self.eos_token_ids
            if stopped or len(self.answers[row]) == self.settings.max_new_tokens:
                self.rows[row] = None
                yield RowAnswer(request.key, tuple(self.answers[row]), "stop" if stopped else "length")

    def _shrink(self, active: list[int]) -> None:
        """If no prompt is waiting, drop rows that ended."""
        self.cache.keep(active)
        self.rows = [self.rows[row] for row in active]
        self.answers = [self.answers[row] for row in active]
        self.current = [self.current[row] for row in active]
