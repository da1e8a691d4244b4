# SPDX-License-Identifier: Apache-2.0
"""Tiny Eagle3 drafts for the tests, and what they draft computed from nothing, without any cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from dspark_hf.drafts.configuration_eagle3 import Eagle3Config
from dspark_hf.drafts.modeling_eagle3 import Eagle3DraftModel
from tests.support.models import HIDDEN_SIZE, VOCAB_SIZE, fill_vocabulary_map


HEAD_DIM = 8


def tiny_eagle3_config(**overrides) -> Eagle3Config:
    """Configuration of a draft for `tiny_target`."""
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "ttt_length": 4,
        "target_layer_ids": [0, 2],
        "num_target_layers": 4,
        "initializer_range": 0.3,
    }
    return Eagle3Config(**(sizes | overrides))


def random_eagle3(seed: int = 1, **overrides) -> Eagle3DraftModel:
    """A draft with random weights: lossless, hardly ever accepted."""
    torch.manual_seed(seed)
    draft = Eagle3DraftModel(tiny_eagle3_config(**overrides)).eval()
    fill_vocabulary_map(draft)
    return draft


@torch.no_grad()
def oracle_eagle3(target: PreTrainedModel, seed: int = 1, noise: float = 0.01, **overrides) -> Eagle3DraftModel:
    """A draft that is the target's bigram table, more or less: the last embedding, then the target's norm and head.

    The layer puts the normed embedding in the place of the state before it. The `noise` of its values, which read both
    and earlier ones, is why not every draft is accepted. The target's states are not read.
    """
    width = target.config.hidden_size
    heads = {"num_attention_heads": width // HEAD_DIM, "num_key_value_heads": width // HEAD_DIM}
    sizes = {"vocab_size": target.config.vocab_size, "hidden_size": width, "attention_bias": True}
    draft = random_eagle3(seed, **(heads | sizes | overrides))
    attention, identity = draft.layers[0].self_attn, torch.eye(width)
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        projection.weight.zero_()
        projection.bias.zero_()
    for projection, norm in ((attention.q_proj, attention.q_norm), (attention.k_proj, attention.k_norm)):
        projection.bias.fill_(1.0)  # equal but for the rotation: every token sees itself
        norm.weight.fill_(8.0)
    attention.v_proj.weight.copy_(torch.cat([identity, -identity], dim=1) + noise * torch.randn(width, 2 * width))
    attention.o_proj.weight.copy_(identity)
    draft.layers[0].mlp.down_proj.weight.zero_()
    draft.fc.weight.zero_()
    norm = target.model.norm.weight
    draft.norm.weight.copy_(1 + norm if target.config.model_type.startswith("gemma") else norm)
    if draft.lm_head is not None:
        draft.lm_head.weight.copy_(target.lm_head.weight[draft.draft_token_ids()])
    return draft


@dataclass(frozen=True)
class Chain:
    """Drafts computed without any cache; `D` is the draft vocabulary."""

    draft_logits: torch.Tensor  # [1, k, D]
    token_ids: torch.Tensor  # [1, k], target ids


@torch.no_grad()
def uncached_chain(
    target: PreTrainedModel,
    draft: Eagle3DraftModel,
    text: torch.Tensor,
    num_drafts: int,
    token_ids: torch.Tensor | None = None,
) -> Chain:
    """The drafts after `text` (anchor last); the chain follows `token_ids`, or else its own argmax."""
    binding, ids = draft.bind_target(target), draft.draft_token_ids()
    states = target(text, output_hidden_states=True, use_cache=False).hidden_states
    hidden = draft.project(torch.cat([states[i + 1] for i in draft.config.target_layer_ids], dim=-1)[:, :-1])
    following, rows, chain = text[:, 1:], [], []
    for slot in range(num_drafts):
        positions = torch.arange(following.shape[1])[None]
        outputs = draft(binding.embed(following), hidden, positions).last_hidden_state
        rows.append(draft.draft_logits(outputs[:, -1], binding))
        own = rows[-1].argmax(-1) if ids is None else ids[rows[-1].argmax(-1)]
        chain.append(own if token_ids is None or slot >= token_ids.shape[1] else token_ids[:, slot])
        following = torch.cat([following, chain[-1][:, None]], dim=1)
        hidden = torch.cat([hidden, outputs[:, -1:]], dim=1)
    return Chain(torch.stack(rows, dim=1), torch.stack(chain, dim=1))
