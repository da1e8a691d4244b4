# SPDX-License-Identifier: Apache-2.0
"""Prepares a call: its requests, its drafter and its target runner. Unsupported calls are rejected here.

Legend: R requests, s prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from ..drafts.modeling_dspark import DSparkDraftModel
from ..drafts.modeling_eagle3 import Eagle3DraftModel
from ..drafts.position_limits import position_limits
from .batch import RequestFactory
from .drafter import Drafter
from .dspark_drafter import DSparkCandidateGenerator
from .eagle3_drafter import Eagle3CandidateGenerator, check_single_row
from .packed_runner import PackedRunner, check_batch
from .request import Request
from .round_check import check_packed_rounds, check_rounds
from .single_runner import SingleRunner
from .waiting_requests import WaitingRequests


@dataclass(frozen=True)
class Call:
    """The objects that the rounds of a call use."""

    requests: tuple[Request, ...]  # R, those that begin
    drafter: Drafter
    runner: SingleRunner | PackedRunner
    factory: RequestFactory  # makes the requests of prompts that wait
    queue: WaitingRequests | None = None
    generator: torch.Generator | None = None  # draws the tokens of rounds without drafts; None: torch's own


def prepare_call(
    target: PreTrainedModel,
    draft: DSparkDraftModel | Eagle3DraftModel,
    input_ids: torch.Tensor,  # [R, s], left-padded
    factory: RequestFactory,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    queue: WaitingRequests | None,
) -> Call:
    """Prepare one request alone, or a batch if there are several or others wait."""
    if len(input_ids) == 1 and queue is None:  # with any cache and any input that plain generation supports
        request = factory.only(input_ids)
        drafter = generator_for(target, draft, generation_config)
        drafter.add_requests([request])
        runner = SingleRunner(target, request, generation_config, model_kwargs, drafter.model_kwargs_overrides)
        check_rounds(target, drafter, request.max_length)
        return Call((request,), drafter, runner, factory)
    if isinstance(draft, Eagle3DraftModel):
        check_single_row(len(input_ids), is_queued=queue is not None)
    check_batch(target, generation_config, model_kwargs)
    requests = factory.all(input_ids, model_kwargs.get("attention_mask"))
    lengths = [(request.num_prompt_tokens, request.max_length) for request in requests]
    waiting = queue.prompt_lengths if queue is not None else []
    lengths += [(length, length + requests[0].num_left) for length in waiting]
    position_limits(target).check_batch(lengths)
    drafter = generator_for(target, draft, generation_config)
    drafter.add_requests(requests)
    packed_runner = PackedRunner(target, requests, drafter.model_kwargs_overrides)
    check_packed_rounds(target, drafter, max(longest for _, longest in lengths))
    return Call(tuple(requests), drafter, packed_runner, factory, queue)


def generator_for(
    target: PreTrainedModel,
    draft: DSparkDraftModel | Eagle3DraftModel,
    generation_config: GenerationConfig,
    logits_processor: LogitsProcessorList | None = None,  # for the stock loop; requests bring their own
) -> DSparkCandidateGenerator | Eagle3CandidateGenerator:
    """Create the drafter for the kind of the draft."""
    kind = Eagle3CandidateGenerator if isinstance(draft, Eagle3DraftModel) else DSparkCandidateGenerator
    return kind(target, draft, generation_config, logits_processor)
