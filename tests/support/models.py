# SPDX-License-Identifier: Apache-2.0
"""Tiny real targets and drafts for the tests: random weights, fp32, CPU, no network.

A random draft is accepted almost never, which hides most bugs of a decoding loop. `oracle_draft` is accepted often but
not always: the targets here lean on the last token (`context_scale` says how little else counts), and the oracle's
Markov head is the target's own bigram table.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dspark_hf import DSparkConfig, DSparkDraftModel


VOCAB_SIZE = 97
HIDDEN_SIZE = 32
MASK_TOKEN_ID = 96

_TARGETS = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8, "tie_word_embeddings": False}),
    "qwen3_sliding": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama_tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 8}),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            "head_dim": 8,
            "tie_word_embeddings": False,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
}
TARGET_KINDS = tuple(_TARGETS)


def tiny_target(
    kind: str = "qwen3", seed: int = 0, context_scale: float | None = None, vocab_size: int = VOCAB_SIZE
) -> PreTrainedModel:
    """A 4-layer target without EOS; its residual branches are scaled by `context_scale`: nearly a bigram model."""
    torch.manual_seed(seed)
    if context_scale is None:  # a tied bigram model repeats its token forever: let more of the context in
        context_scale = 0.08 if kind == "llama_tied" else 0.015
    model_class, config_class, extra = _TARGETS[kind]
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.3,
    }
    target = model_class(config_class(**sizes, **extra)).eval()
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if kind == "gemma3" and ("post_attention_layernorm" in name or "post_feedforward_layernorm" in name):
                parameter.fill_(context_scale - 1)  # Gemma norms scale by 1 + weight
            elif "o_proj" in name or "down_proj" in name:
                parameter.mul_(context_scale)
    target.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
    return target


def tiny_config(**overrides) -> DSparkConfig:
    """Configuration of a 2-layer draft for `tiny_target`."""
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "block_size": 4,
        "target_layer_ids": [0, 2],
        "num_target_layers": 4,
        "mask_token_id": MASK_TOKEN_ID,
        "markov_rank": 8,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return DSparkConfig(**(sizes | overrides))


def random_draft(seed: int = 1, **overrides) -> DSparkDraftModel:
    """A draft with random weights: lossless, hardly ever accepted."""
    torch.manual_seed(seed)
    draft = DSparkDraftModel(tiny_config(**overrides)).eval()
    fill_vocabulary_map(draft)
    return draft


@torch.no_grad()
def oracle_draft(target: PreTrainedModel, seed: int = 1, noise: float = 0.05, **overrides) -> DSparkDraftModel:
    """A draft whose Markov head is the target's bigram table, plus `noise` from its backbone; needs a Markov head."""
    vocab_size = target.config.vocab_size
    draft = random_draft(seed, **({"vocab_size": vocab_size, "markov_rank": vocab_size} | overrides))
    table = target(torch.arange(vocab_size)[:, None]).logits[:, -1].float()  # [previous, next]
    ids = draft.draft_token_ids()
    draft.markov_head.markov_w1.weight.copy_(torch.eye(vocab_size))
    draft.markov_head.markov_w2.weight.copy_((table if ids is None else table[:, ids]).T)
    if hasattr(draft.markov_head, "gate_proj"):  # an open gate passes the embedding through
        draft.markov_head.gate_proj.weight.zero_()
        draft.markov_head.gate_proj.bias.fill_(20.0)
    if hasattr(draft.markov_head, "joint_proj"):  # output = 10 * embedding, tanh of which is 1 at the token
        rank = vocab_size
        draft.markov_head.joint_proj.weight.zero_()
        draft.markov_head.joint_proj.bias.zero_()
        draft.markov_head.joint_proj.weight[2 * rank :, rank : 2 * rank] = 10 * torch.eye(rank)
    draft.norm.weight.mul_(noise)
    return draft


def random_prompt(length: int, seed: int = 3, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    """Random ids of shape (1, length), special ids left out."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size - 2, (1, length), generator=generator)


@torch.no_grad()
def echo_draft(target: PreTrainedModel, seed: int = 1, **overrides) -> DSparkDraftModel:
    """A DFlash draft (no sequential head) whose slot 0 is the target's bigram guess; the others are rarely right."""
    draft = random_draft(seed, **({"markov_rank": 0, "confidence_head_with_markov": False} | overrides))
    for layer in draft.layers:  # nothing but the residual stream: the slot's embedding
        layer.self_attn.o_proj.weight.mul_(0.01)
        layer.mlp.down_proj.weight.mul_(0.01)
    target_norm = target.model.norm.weight
    draft.norm.weight.copy_(1 + target_norm if target.config.model_type.startswith("gemma") else target_norm)
    return draft


@torch.no_grad()
def spread_confidence(draft: DSparkDraftModel, scale: float = 8.0) -> DSparkDraftModel:
    """Make the confidences of a draft differ: a random head says about 0.5 everywhere."""
    if draft.confidence_head is not None:
        draft.confidence_head.proj.weight.mul_(scale)
    return draft


@dataclass(frozen=True)
class Block:
    """One block computed in one piece, without any cache; `D` is the draft vocabulary."""

    hidden: torch.Tensor  # [1, slots, d]
    base_logits: torch.Tensor  # [1, slots, D]
    draft_logits: torch.Tensor  # [1, slots, D], after the transition bias
    token_ids: torch.Tensor  # [1, slots], target ids
    confidence_logits: torch.Tensor | None  # [1, slots]


@torch.no_grad()
def uncached_block(
    target: PreTrainedModel, draft: DSparkDraftModel, text: torch.Tensor, token_ids: torch.Tensor | None = None
) -> Block:
    """The block after `text` (anchor last), from nothing; the chain follows `token_ids`, or else its own argmax."""
    config, binding = draft.config, draft.bind_target(target)
    states = target(text, output_hidden_states=True, use_cache=False).hidden_states
    context = torch.cat([states[i + 1] for i in config.target_layer_ids], dim=-1)[:, :-1]
    masks = text.new_full((1, config.block_size - 1), config.mask_token_id)
    hidden = draft(
        noise_embeds=binding.embed_tokens(torch.cat([text[:, -1:], masks], dim=1)),
        context_hidden_states=context,
        position_ids=torch.arange(text.shape[1] - 1 + config.block_size)[None],
    ).last_hidden_state
    hidden = hidden if config.sample_from_anchor else hidden[:, 1:]
    base_logits, head = draft.base_logits(hidden, binding), draft.markov_head
    ids, previous, rows, embeddings, chain = draft.draft_token_ids(), text[:, -1], [], [], []
    state = head.initial_state(hidden[:, 0]) if head is not None else None
    for slot in range(hidden.shape[1]):
        row = base_logits[:, slot]
        if head is not None:
            embeddings.append(head.markov_w1(previous))
            bias, state = head(embeddings[-1], hidden[:, slot], state)
            row = row + bias
        greedy = row.argmax(dim=-1) if ids is None else ids[row.argmax(dim=-1)]
        previous = greedy if token_ids is None or slot >= token_ids.shape[1] else token_ids[:, slot]
        rows.append(row)
        chain.append(previous)
    confidence_logits = None
    if draft.confidence_head is not None:
        confidence_logits = draft.confidence_head(hidden, torch.stack(embeddings, dim=1) if embeddings else None)
    return Block(hidden, base_logits, torch.stack(rows, dim=1), torch.stack(chain, dim=1), confidence_logits)


def character_tokenizer(vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """A tokenizer whose ids 0, 1, 2, ... are letters and digits, then pairs of them; text is joined without spaces."""
    letters = string.ascii_letters + string.digits
    names = list(letters) + [first + second for first, second in zip(letters, letters[7:], strict=False)]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names[:vocab_size])}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a checkpoint in place."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def fill_vocabulary_map(draft: PreTrainedModel) -> None:
    """Give a draft with a reduced vocabulary every second id or so, ascending."""
    if draft.lm_head is not None:
        ids = torch.randperm(draft.config.vocab_size)[: draft.config.draft_vocab_size].sort().values
        draft.d2t.copy_(ids - torch.arange(ids.shape[0]))
