# SPDX-License-Identifier: Apache-2.0
"""Starting values for a new draft that beat random ones; each is an option, none changes what is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..drafts.modeling_dspark import DSparkDraftModel
from ..drafts.target_structure import decoder_of
from .dataset import TrainingSequence


NUM_PROBES = 64


@torch.no_grad()
def copy_target_head(draft: DSparkDraftModel, target: PreTrainedModel, kept_ids: Sequence[int]) -> None:
    """Give a draft with a reduced vocabulary its map, and the target's LM-head rows of it."""
    ids = torch.tensor(kept_ids, device=draft.d2t.device)
    draft.d2t.copy_(ids - torch.arange(len(kept_ids), device=ids.device))
    weight = draft.own_head.weight
    weight.copy_(target.get_output_embeddings().weight[ids.to(target.device)].to(weight))


@torch.no_grad()
def reduce_vocabulary(draft: DSparkDraftModel, target: PreTrainedModel, kept_ids: Sequence[int]) -> DSparkDraftModel:
    """A draft over some of the tokens, equal to another one over all of them otherwise.

    Its logits are those of the other draft at the kept tokens, so q is what is left there, normalised.
    """
    if draft.config.draft_vocab_size is not None:
        raise ValueError(
            f"Only a draft over its target's whole vocabulary can be reduced, got one over "
            f"{draft.config.draft_vocab_size} tokens."
        )
    config = type(draft.config).from_dict(draft.config.to_dict() | {"draft_vocab_size": len(kept_ids)})
    reduced = type(draft)(config).to(draft.device, draft.dtype)
    copy_target_head(reduced, target, kept_ids)
    tensors = draft.state_dict()
    if draft.markov_head is not None:
        tensors["markov_head.markov_w2.weight"] = draft.markov_head.markov_w2.weight[list(kept_ids)]
    own = {name: reduced.state_dict()[name] for name in ("d2t", "lm_head.weight")}
    reduced.load_state_dict(tensors | own)
    reduced.name_or_path = draft.name_or_path
    return reduced.train(draft.training)


@torch.no_grad()
def start_from_bigrams(
    draft: DSparkDraftModel, sequences: Sequence[TrainingSequence], smoothing: float = 1.0, scale: float = 1.0
) -> float:  # share of the table's squared norm that the rank keeps, in [0, 1]
    """Set the sequential head to the low-rank part of how a token changes the odds of the next.

    The table log p(next | previous) / p(next), counted over the answers and smoothed towards 0, is factored by a
    truncated SVD into W_1 and W_2 (Eq 5).
    """
    head = draft.markov_head
    if head is None:
        raise ValueError("`start_from_bigrams` needs a sequential head, but `markov_rank` is 0.")
    kept = draft.draft_token_ids()
    size = kept.shape[0] if kept is not None else draft.config.vocab_size
    position = torch.full((draft.config.vocab_size,), -1, dtype=torch.long)
    position[kept.cpu() if kept is not None else torch.arange(size)] = torch.arange(size)
    pairs = _bigrams(sequences, position)
    indices, counts = pairs.unique(dim=1, return_counts=True)
    counts = counts.float()
    next_counts = torch.zeros(size).index_add_(0, indices[1], counts)
    next_probs = (next_counts + 0.1) / (next_counts.sum() + 0.1 * size)
    totals = torch.zeros(size).index_add_(0, indices[0], counts)
    # A pair that was not seen keeps 0: with smoothing towards the unigram, its log-ratio is a constant of the row.
    smoothed = (counts + smoothing * next_probs[indices[1]]) / (totals[indices[0]] + smoothing)
    unseen = smoothing / (totals[indices[0]] + smoothing)
    values = scale * (smoothed / next_probs[indices[1]] / unseen).log()
    table = torch.sparse_coo_tensor(indices, values, (size, size), check_invariants=True).coalesce()
    rank = head.markov_w1.embedding_dim
    u, s, v = torch.svd_lowrank(table, q=min(rank, size), niter=4)
    rows = (kept if kept is not None else torch.arange(size)).to(head.markov_w1.weight.device)
    head.markov_w1.weight.zero_()
    head.markov_w1.weight[rows, : s.shape[0]] = (u * s.sqrt()).to(head.markov_w1.weight)
    head.markov_w2.weight.zero_()
    head.markov_w2.weight[:, : s.shape[0]] = (v * s.sqrt()).to(head.markov_w2.weight)
    return float(s.pow(2).sum() / values.pow(2).sum())


@torch.no_grad()
def scale_final_norm(draft: DSparkDraftModel, target: PreTrainedModel) -> float:
    """Set the weights of the draft's final norm to the constant that gives base logits of standard deviation 1.

    At 1, hidden states have norm sqrt(d): far too long for an LM head that is made for another norm's weights, and a
    fresh draft is confidently wrong. The deviation is over the vocabulary, for hidden states of random direction.
    """
    probes = torch.randn(NUM_PROBES, draft.config.hidden_size, generator=torch.Generator().manual_seed(0))
    probes = probes / probes.square().mean(dim=-1, keepdim=True).sqrt()
    logits = draft.base_logits(probes.to(draft.norm.weight), draft.bind_target(target))
    constant = 1 / logits.float().var(dim=-1).mean().sqrt().item()
    draft.norm.weight.fill_(constant)
    return constant


@torch.no_grad()
def start_from_target_layers(draft: DSparkDraftModel, target: PreTrainedModel) -> None:
    """Copy the target's last layers and its final norm into the draft, and let the context projection average the
    taps.

    Only tensors of equal shape are copied (Llama and Qwen3 style targets share names with the draft).
    """
    layers, norm = _layers_of_the_drafts_kind(draft, target)
    for layer, source in zip(draft.layers, layers, strict=True):
        tensors = dict(source.named_parameters())
        for name, parameter in layer.named_parameters():
            if name in tensors and tensors[name].shape == parameter.shape:
                parameter.copy_(tensors[name].to(parameter))
    draft.norm.weight.copy_(norm.weight.to(draft.norm.weight))
    hidden, taps = draft.config.hidden_size, len(draft.config.target_layer_ids)
    draft.fc.weight.copy_(torch.eye(hidden).repeat(1, taps).to(draft.fc.weight) / taps)


def _layers_of_the_drafts_kind(draft: DSparkDraftModel, target: PreTrainedModel) -> tuple[list[torch.nn.Module], Any]:
    """As many of the target's last layers as the draft has, and its final norm, if what is copied means the same."""
    decoder, count = decoder_of(target), len(draft.layers)
    layers, norm = getattr(decoder, "layers", None), getattr(decoder, "norm", None)
    if layers is not None and count > len(layers):
        raise ValueError(
            f"A draft that starts from its target's layers must not have more of them, got {count} and {len(layers)}. "
            "Lower `draft_num_layers`, or start from random ones."
        )
    if layers is not None and _scales_by_its_weight(norm):
        last = list(layers)[len(layers) - count :]
        if all(_is_of_kind(source, layer) for source, layer in zip(last, draft.layers, strict=True)):
            return last, norm
    raise NotImplementedError(
        f"A draft starts from layers of Llama's or Qwen3's kind only, got those of {type(target).__name__}. Leave "
        "`target_layer_start` off."
    )


def _is_of_kind(source: torch.nn.Module, layer: torch.nn.Module) -> bool:
    """Whether a target's layer norms where the draft's does, and projects for attention under the same names."""
    theirs, ours = ({name for name, _ in module.named_parameters()} for module in (source, layer))
    other_norms = [name for name in theirs - ours if "norm" in name]
    missing = [name for name in ours - theirs if "self_attn" in name and name.endswith("proj.weight")]
    return not other_norms and not missing


def _scales_by_its_weight(norm: Any) -> bool:
    """Whether a norm is an RMS norm whose weights are factors."""
    weight = getattr(norm, "weight", None)
    return weight is not None and torch.allclose(norm(torch.ones_like(weight)[None])[0], weight, rtol=1e-2, atol=1e-3)


def _bigrams(sequences: Sequence[TrainingSequence], position: torch.Tensor) -> torch.Tensor:
    """Pairs of neighbours in the answers, as draft ids, [2, count]; pairs outside the vocabulary left out."""
    pairs = []
    for sequence in sequences:
        answer = position[torch.tensor(sequence.input_ids[max(0, sequence.num_prompt_tokens - 1) :])]
        pairs.append(torch.stack([answer[:-1], answer[1:]]))
    joined = torch.cat(pairs, dim=1)
    return joined[:, (joined >= 0).all(dim=0)]
