# SPDX-License-Identifier: Apache-2.0
"""What the tests of `generate(assistant_model=draft)` share: a draft that proposes a known text, and spies.

`scripted_draft` proposes the given text by position, every `spoil`-th token wrong, whatever the target is. So the rounds
are known in advance (`expected_accepted`), and a position that is off by one shows as an acceptance that is not.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from dspark_hf import AcceptanceStats, DSparkConfig, DSparkDraftModel
from dspark_hf._compat import CACHE_KEY


class ScriptedDraft(DSparkDraftModel):
    """A real draft, run in full, whose base logits are then replaced by the script's tokens."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.script: list[int] = []
        self.spoil = 3
        self.contexts: list[torch.Tensor] = []  # what each round handed over, and where it lies
        self.positions: list[torch.Tensor] = []

    def forward(self, noise_embeds, context_hidden_states, position_ids, attention_mask=None, cache=None):
        self.contexts.append(context_hidden_states)
        self.positions.append(position_ids)
        return super().forward(noise_embeds, context_hidden_states, position_ids, attention_mask, cache)

    def base_logits(self, hidden, binding):
        logits = super().base_logits(hidden, binding)
        first = int(self.positions[-1][0, -self.config.block_size]) + 1
        ids = [
            (self.script[p] + (p % self.spoil == 0)) % self.config.vocab_size if p < len(self.script) else 0
            for p in range(first, first + hidden.shape[1])
        ]
        return torch.nn.functional.one_hot(torch.tensor([ids]), logits.shape[-1]).to(logits) * 20.0


def draft_config_for(target: PreTrainedModel, **overrides: Any) -> DSparkConfig:
    """A 2-layer draft's configuration for any target."""
    text = target.config.get_text_config(decoder=True)
    sizes = {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "block_size": 4,
        "mask_token_id": text.vocab_size - 1,
        "target_layer_ids": [0, text.num_hidden_layers - 2],
        "num_target_layers": text.num_hidden_layers,
        "markov_rank": 0,
        "confidence_head_with_markov": False,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return DSparkConfig(**(sizes | overrides))


def scripted_draft(target: PreTrainedModel, text: torch.Tensor, spoil: int = 3, **overrides: Any) -> ScriptedDraft:
    """A draft that proposes `text` (one row, no padding) by position, wrong where the position is a multiple of `spoil`."""
    torch.manual_seed(1)
    draft = ScriptedDraft(draft_config_for(target, **overrides)).eval()
    draft.script, draft.spoil = text.flatten().tolist(), spoil
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    return draft


def expected_accepted(num_prompt: int, num_new: int, block_size: int = 4, spoil: int = 3) -> list[int]:
    """Accepted drafts of each round with `scripted_draft`, greedy, by the rules of decoding alone."""
    rounds, length, end = [], num_prompt + 1, num_prompt + num_new
    while length < end:
        limit = min(block_size, end - length - 1)
        accepted = next((k for k in range(limit) if (length + k) % spoil == 0), limit)
        rounds.append(accepted)
        length += accepted + 1
    return rounds


def accepted(stats: AcceptanceStats) -> list[int]:
    """Accepted drafts of each round."""
    return [record.num_accepted for record in stats.rounds]


def cache_of(output: Any) -> Any:
    """The cache in an output of `generate`, under this release's name."""
    return output[CACHE_KEY]


def as_cache(cache: Any) -> dict[str, Any]:
    """`cache` as a keyword argument of `generate`, under this release's name."""
    return {CACHE_KEY: cache}


class StreamerSpy(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self):
        self.puts: list[list[int]] = []
        self.ended = 0

    def put(self, value):
        self.puts.append(value.flatten().tolist())

    def end(self):
        self.ended += 1


class ForwardCounter:
    """Counts the forward passes of a target inside a `with` block."""

    def __init__(self, target: PreTrainedModel):
        self._target = target
        self.count = 0

    def __enter__(self):
        self._handle = self._target.register_forward_pre_hook(self._count, with_kwargs=True)
        return self

    def __exit__(self, *error):
        self._handle.remove()

    def _count(self, module, args, kwargs):
        self.count += 1
