# SPDX-License-Identifier: Apache-2.0
"""The target's passes over one request, prepared by the target's own methods: any cache and any input.

Legend: s text, k drafts, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.generation import GenerationMixin, GenerationMode
from transformers.utils import logging

from .._compat import CACHE_KEY, QuantizedLayer
from ..drafts.target_probe import check_filled_cache, position_kwargs
from .drafter import CommittedContext, DraftProposal
from .drafter_inputs import context_of_one, num_prompt_tokens
from .request import Request, TargetPass, Verdict


logger = logging.get_logger("transformers.dspark_hf.decoding.single_runner")


class SingleRunner:
    """Runs the target for one request."""

    def __init__(
        self,
        target: PreTrainedModel,
        request: Request,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],  # keyword arguments of the target's forward, as `generate` prepared them
        reads: dict[str, Any],  # keyword arguments that ask for what the draft reads
    ):
        _check_cache(target, generation_config, model_kwargs)
        self.target, self.request, self.config = target, request, generation_config
        self.model_kwargs, self.reads = model_kwargs, reads
        self._num_read = 0  # tokens that the draft was handed

    @property
    def cache_for_user(self) -> Any:
        """The target's, as plain generation would leave it."""
        return self.model_kwargs[CACHE_KEY]

    def running(self) -> contextlib.AbstractContextManager[None]:
        """No-op."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def decoding(self) -> Iterator[None]:
        """Active from the first round on."""
        with self.target._optimize_model_for_decode():
            self._record_past(self.model_kwargs[CACHE_KEY])
            try:
                yield
            finally:
                self._stop_recording()

    def _record_past(self, cache: Any) -> None:
        """Let windowed layers keep what a rollback needs."""
        self._recording = [(layer, layer.record_past) for layer in cache.layers if hasattr(layer, "record_past")]
        cache.activate_past_recording()

    def _stop_recording(self) -> None:
        """Leave the cache as it was."""
        for layer, record_past in self._recording:
            layer.record_past = record_past

    @contextlib.contextmanager
    def rollback_on_error(self) -> Iterator[None]:
        """If a criterion or processor raises, remove the interrupted round from the user's cache."""
        cache = self.model_kwargs[CACHE_KEY]
        length = int(cache.get_seq_length())
        try:
            yield
        except BaseException:
            cache.crop(min(0, length - int(cache.get_seq_length())))
            raise

    def prefill(self, requests: Sequence[Request]) -> TargetPass:  # logits [1, 1, V], those after the prompt
        """Run the target over the prompt; tokens that a user's cache already holds are not run again."""
        if self.config.prefill_chunk_size is not None:
            logger.warning_once(
                "With `prefill_chunk_size` the draft sees the last chunk of the prompt only, and is accepted less."
            )
        (request,), kwargs = requests, dict(self.model_kwargs)
        if type(self.target)._prefill is GenerationMixin._prefill:
            outputs = GenerationMixin._prefill(
                _Asking(self.target, self.reads), request.input_ids, self.config, kwargs
            )
        else:
            outputs = self.target._prefill(request.input_ids, self.config, kwargs | self.reads)
        check_filled_cache(self.target, outputs.get(CACHE_KEY))
        return TargetPass(outputs.logits[:, -1:], outputs.hidden_states or (), outputs, starts_over=True)

    def forward(self, proposals: Sequence[DraftProposal]) -> TargetPass:  # logits [1, 1 + k, V]
        """Run the target over the anchor and the drafts."""
        drafts = proposals[0].token_ids
        count = drafts.shape[1]
        kwargs = grow(self.target, {}, dict(self.model_kwargs), count) if count else self.model_kwargs
        ids = torch.cat([self.request.input_ids, drafts], dim=1)
        inputs = self.target.prepare_inputs_for_generation(
            ids, next_sequence_length=1 + count, is_first_iteration=False, **kwargs
        )
        if inputs["input_ids"].shape[1] < 1 + count:  # an older rule: of a cached text the last token alone
            inputs["input_ids"] = ids[:, -1 - count :]
            inputs["position_ids"] = kwargs["position_ids"][..., -1 - count :] if "position_ids" in inputs else None
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = 1 + count
        outputs = self.target(**(inputs | self.reads), return_dict=True)
        _check_pass(self.target, outputs, 1 + count)
        if outputs.logits.device.type != "cpu":  # verification waits for the device anyway; here the wait is timed
            torch.accelerator.synchronize(outputs.logits.device)
        starts_over = outputs[CACHE_KEY] is not self.model_kwargs[CACHE_KEY]
        states = outputs.hidden_states or ()
        if starts_over:  # Phi does, where its frequencies change: these are the states of the whole text
            self._stop_recording()
            self._record_past(outputs[CACHE_KEY])
            states = tuple(layer if layer is None else layer[:, -1 - count :] for layer in states)
        return TargetPass(outputs.logits[:, -1 - count :], states, outputs, starts_over)

    def commit(self, target_pass: TargetPass, verdicts: Sequence[Verdict]) -> CommittedContext:
        """Update cache, mask and positions with the committed tokens."""
        (verdict,), outputs, states = verdicts, target_pass.outputs, target_pass.hidden_states
        is_prompt, num_new = self._num_read == 0, verdict.new_ids.shape[1]
        cache = outputs[CACHE_KEY]
        self.request.log.add_layers(outputs, cache, num_new, target_pass.starts_over)
        # The last committed token is the next anchor: it is not in the cache yet, as after plain generation.
        if not is_prompt:  # also with nothing to take back: windowed layers drop what left the window
            cache.crop(num_new - target_pass.logits.shape[1])
        self.model_kwargs = grow(self.target, outputs, self.model_kwargs, num_new)
        num_tokens = num_prompt_tokens(states) if is_prompt else num_new
        context = context_of_one(states, num_tokens, self.model_kwargs, self._num_read, is_prompt)
        keep = context.spans[0].keep
        self._num_read += num_tokens if keep is None else int(keep.sum())
        return CommittedContext(states, ()) if self.request.finished else context

    def keep(self, requests: Sequence[int]) -> None:
        """No-op: the call ends with its one request."""


def model_kwargs_for(
    target: PreTrainedModel,
    ids: torch.Tensor,  # [1, s], prompt
) -> dict[str, Any]:  # with an empty cache
    """The keyword arguments that `generate` prepares for a prompt without padding."""
    kwargs: dict[str, Any] = {"attention_mask": None, "use_cache": True}
    kwargs |= position_kwargs(target, ids.shape[1], ids.device)
    if target._supports_logits_to_keep():
        kwargs["logits_to_keep"] = 1
    target._prepare_cache_for_generation(GenerationConfig(), kwargs, GenerationMode.GREEDY_SEARCH, 1, 2**31)
    return kwargs


class _Asking:
    """Asks a target for hidden states after it prepared its inputs: some preparations drop unknown arguments."""

    def __init__(self, target: PreTrainedModel, overrides: dict[str, Any]):
        self._target, self._overrides = target, overrides

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def __call__(self, **inputs: Any) -> Any:
        return self._target(**inputs)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The target's own preparation, with the overrides."""
        return self._target.prepare_inputs_for_generation(*args, **kwargs) | self._overrides


def grow(target: PreTrainedModel, outputs: Any, model_kwargs: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """Mask, positions and token types for more tokens, by the target's own rule."""
    token_types = model_kwargs.get("token_type_ids")
    model_kwargs = target._update_model_kwargs_for_generation(
        outputs, model_kwargs, is_encoder_decoder=False, num_new_tokens=num_tokens
    )
    if token_types is not None:  # the library repeats the last n types instead of the last one n times
        grown = token_types[:, -1:].expand(-1, num_tokens)
        model_kwargs["token_type_ids"] = torch.cat([token_types, grown], dim=-1)
    return model_kwargs


def _check_cache(target: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Before the prefill, reject caches that are known not to support cropping."""
    cache = model_kwargs.get(CACHE_KEY)
    if cache is None:
        raise NotImplementedError(
            f"DSpark takes rejected tokens back out of the cache, and {type(target).__name__} has a cache of its own "
            "kind. Use plain generation for this target."
        )
    # Recurrent layers know only after the prefill whether they can be cropped, all others know now.
    is_recurrent = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)
    is_quantised = any(isinstance(layer, QuantizedLayer) for layer in cache.layers)
    if is_quantised or not (cache.is_croppable or is_recurrent):
        kind = generation_config.cache_implementation or type(cache).__name__
        raise ValueError(
            f"DSpark takes rejected tokens back out of the cache, which a cache of type {kind!r} does not allow. Use "
            "a dynamic cache (the default)."
        )


def _check_pass(target: PreTrainedModel, outputs: Any, num_tokens: int) -> None:
    """Reject a pass that returned less than requested."""
    num_rows = outputs.logits.shape[1]
    if num_rows < num_tokens:
        raise NotImplementedError(
            f"DSpark verifies several tokens in one pass: {type(target).__name__} was given {num_tokens} and returned "
            f"logits for {num_rows}. Its forward must return all of them. Use plain generation for this target."
        )
    if outputs.get(CACHE_KEY) is None:
        check_filled_cache(target, None)
