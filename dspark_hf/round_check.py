# SPDX-License-Identifier: Apache-2.0
"""A round over fixed tokens, once per target: several tokens in one pass must give what single steps give.

Legend: R requests, k drafts, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import CandidateGenerator, GenerationMode

from .decoding_rows import Row, Verdict
from .packed_target import PackedTarget
from .single_target import SingleTarget
from .target_probe import can_run, closeness_for, once, probe_ids


class _Unread:
    """Asks for what a drafting half asks for, and reads nothing of it."""

    def __init__(self, generator: CandidateGenerator):
        self.model_kwargs_overrides = generator.model_kwargs_overrides
        self.check_hidden_states = generator.check_hidden_states

    def add_context(self, hidden_states: Any, num_tokens: int, model_kwargs: dict[str, Any]) -> None:
        pass

    def add_packed_context(self, hidden_states: Any, spans: Any, starts: Any) -> None:
        pass


def check_rounds(target: PreTrainedModel, generator: CandidateGenerator) -> None:
    """Check that a target verifies drafts of one request as it would write them.

    Args:
        target (`PreTrainedModel`): The model that generates.
        generator (`CandidateGenerator`): The call's drafting half, which says what it reads of the target.

    Raises:
        NotImplementedError: If it cannot run a round, or gets other logits in one.
        ValueError: If it does not return the hidden states that the draft reads.
    """
    if can_run(target):
        key = ("rounds", target.dtype, target.config._attn_implementation, str(generator.model_kwargs_overrides))
        once(target, key, lambda: _check_rounds(target, _Unread(generator)))


def check_packed_rounds(target: PreTrainedModel, generator: CandidateGenerator) -> None:
    """[`check_rounds`], and the same for a batch of two.

    Args:
        target (`PreTrainedModel`): The model that generates.
        generator (`CandidateGenerator`): The call's drafting half, which says what it reads of the target.

    Raises:
        NotImplementedError: If it cannot run a round, or gets other logits in one.
        ValueError: If it does not return the hidden states that the draft reads.
    """
    check_rounds(target, generator)
    if can_run(target):
        key = ("packed rounds", target.dtype, str(generator.model_kwargs_overrides))
        once(target, key, lambda: _check_packed_rounds(target, _Unread(generator)))


@torch.no_grad()
def _check_rounds(target: PreTrainedModel, reader: _Unread) -> None:
    """Two tokens, then three of which two are taken back, then these one by one."""
    ids = probe_ids(target)
    row = _row(0, ids[:, :2])
    runner = SingleTarget(target, row, GenerationConfig(), _model_kwargs(target, ids[:, :2]))
    runner.use_generator(reader)
    _commit(runner, [row], runner.prefill([row]), [ids[:, 2:3]])
    with runner.decoding():
        (together,) = runner.verify([ids[:, 3:]])  # [1, 3, V]
        _commit(runner, [row], [together], [ids[:, 3:4]])
        (fourth,) = runner.verify([ids[:, :0]])  # [1, 1, V]
        _commit(runner, [row], [fourth], [ids[:, 4:5]])
        (fifth,) = runner.verify([ids[:, :0]])
    _compare(target, together[0, 1:], torch.cat([fourth[0], fifth[0]]))


@torch.no_grad()
def _check_packed_rounds(target: PreTrainedModel, reader: _Unread) -> None:
    """Prompts of two tokens and of one, then three tokens and two."""
    ids = probe_ids(target)
    expected = target(input_ids=ids, use_cache=False, return_dict=True).logits[0]  # [5, V]
    rows = [_row(0, ids[:, :2]), _row(1, ids[:, :1])]
    runner = PackedTarget(target, rows)
    runner.use_generator(reader)
    with runner.session():
        _commit(runner, rows, runner.prefill(rows), [ids[:, 2:3], ids[:, 1:2]])
        first, second = runner.verify([ids[:, 3:], ids[:, 2:3]])
    _compare(target, torch.cat([first[0], second[0]]), torch.cat([expected[2:], expected[1:3]]))


def _compare(target: PreTrainedModel, logits: torch.Tensor, expected: torch.Tensor) -> None:
    if not closeness_for(target).accepts(logits, expected):
        raise NotImplementedError(
            f"DSpark verifies several tokens in one pass, in which {type(target).__name__} gets other logits than one "
            "token at a time. Use plain generation for this target."
        )


def _row(index: int, prompt: torch.Tensor) -> Row:
    return Row(index, prompt, LogitsProcessorList(), StoppingCriteriaList(), 2**31, GenerationConfig())


def _commit(
    runner: SingleTarget | PackedTarget,
    rows: Sequence[Row],
    logits: Sequence[torch.Tensor],
    new_ids: Sequence[torch.Tensor],
) -> None:
    """Go on with the given tokens, whatever the logits say."""
    verdicts = [
        Verdict(ids, scores, scores, ids.shape[1] - 1, int(ids[0, -1]))
        for ids, scores in zip(new_ids, logits, strict=True)
    ]
    runner.commit(verdicts)
    for row, verdict in zip(rows, verdicts, strict=True):
        row.commit(verdict)


def _model_kwargs(target: PreTrainedModel, ids: torch.Tensor) -> dict[str, Any]:
    """The keyword arguments that `generate` would prepare for a prompt."""
    kwargs: dict[str, Any] = {"attention_mask": None, "use_cache": True}
    if "position_ids" in inspect.signature(target.forward).parameters:
        kwargs["position_ids"] = target._prepare_position_ids_for_generation(ids, {})
    if target._supports_logits_to_keep():
        kwargs["logits_to_keep"] = 1
    target._prepare_cache_for_generation(GenerationConfig(), kwargs, GenerationMode.GREEDY_SEARCH, 1, 2**31)
    return kwargs
