# SPDX-License-Identifier: Apache-2.0
"""Exact distributions of short texts, and the test that observed counts came from one."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from dspark_hf import DSparkDraftModel
from tests.support.models import oracle_draft


VOCAB_SIZE = 12
# Counts less likely than this are those of a wrong rule. It is small because a seed draws other tokens on another CPU
# (PyTorch leaves some draws to MKL on Intel's), and the suite computes about a hundred of these chances.
ALPHA = 1e-6
MIN_EXPECTED = 5.0  # counts below are pooled: the chi-square limit needs that many


def chi_square_p_value(observed: Mapping[Hashable, int], expected: Mapping[Hashable, float]) -> float:
    """Chance of counts as far from `expected` (probabilities) as `observed`; 0 if something impossible was seen."""
    if any(count and expected.get(key, 0.0) <= 0.0 for key, count in observed.items()):
        return 0.0
    total = sum(observed.values())
    counts, means, pooled_count, pooled_mean = [], [], 0, 0.0
    for key, probability in sorted(expected.items(), key=lambda item: -item[1]):
        pooled_count, pooled_mean = pooled_count + observed.get(key, 0), pooled_mean + total * probability
        if pooled_mean >= MIN_EXPECTED:
            counts.append(pooled_count)
            means.append(pooled_mean)
            pooled_count, pooled_mean = 0, 0.0
    if pooled_mean:  # the rest joins the rarest cell
        counts[-1] += pooled_count
        means[-1] += pooled_mean
    if len(counts) < 2:
        raise ValueError(f"Too few cells to test: {len(counts)}.")
    statistic = sum((count - mean) ** 2 / mean for count, mean in zip(counts, means, strict=True))
    return float(stats.chi2.sf(statistic, len(counts) - 1))


def transition_p_value(tokens: list[int], transitions: torch.Tensor) -> float:
    """The same for a Markov chain: one multinomial per predecessor, statistics added up."""
    statistic, freedom = 0.0, 0
    pairs = torch.zeros_like(transitions)
    for previous, token in zip(tokens, tokens[1:], strict=False):
        pairs[previous, token] += 1
    if (pairs[transitions == 0] > 0).any():
        return 0.0
    for row, probabilities in zip(pairs, transitions, strict=True):
        means = row.sum() * probabilities
        large = means >= MIN_EXPECTED
        cells = [(row[i].item(), means[i].item()) for i in large.nonzero().flatten().tolist()]
        rest = (row[~large].sum().item(), means[~large].sum().item())
        if rest[1] >= MIN_EXPECTED:
            cells.append(rest)
        elif cells:
            cells[-1] = (cells[-1][0] + rest[0], cells[-1][1] + rest[1])
        if len(cells) > 1:
            statistic += sum((count - mean) ** 2 / mean for count, mean in cells)
            freedom += len(cells) - 1
    if not freedom:
        raise ValueError("Too few transitions to test.")
    return float(stats.chi2.sf(statistic, freedom))


@torch.no_grad()
def exact_texts(
    target: PreTrainedModel,
    prompt: torch.Tensor,
    num_tokens: int,
    processors: LogitsProcessorList,
    eos_token_id: int | None = None,
) -> dict[tuple[int, ...], float]:
    """Probability of every text of `num_tokens` tokens (or up to EOS) after the prompt, by plain forward passes."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        open_texts = [text for text in texts if not text or text[-1] != eos_token_id]
        ids = torch.cat([prompt.expand(len(open_texts), -1), torch.tensor(open_texts, dtype=torch.long)], dim=1)
        scores = processors(ids, target(ids).logits[:, -1].float())
        grown = {text: p for text, p in texts.items() if text and text[-1] == eos_token_id}
        for text, row in zip(open_texts, scores.double().softmax(dim=-1).tolist(), strict=True):
            grown |= {(*text, token): texts[text] * p for token, p in enumerate(row) if p > 0}
        texts = grown
    return texts


def sampling_pair(
    context_scale: float, seed: int = 0, noise: float = 0.4, **overrides: Any
) -> tuple[PreTrainedModel, DSparkDraftModel]:
    """A one-layer target over 12 tokens and a draft that differs from it; a pure bigram if `context_scale` is 0."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(
        **sizes, vocab_size=VOCAB_SIZE, num_hidden_layers=1, max_position_embeddings=4096, initializer_range=0.3
    )
    target = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        target.model.layers[0].self_attn.o_proj.weight.mul_(context_scale)
        target.model.layers[0].mlp.down_proj.weight.mul_(context_scale)
    target.generation_config.update(pad_token_id=0, bos_token_id=None, eos_token_id=None, top_k=0)
    shape = {"num_hidden_layers": 1, "target_layer_ids": [-1], "num_target_layers": 1, "mask_token_id": VOCAB_SIZE - 1}
    return target, oracle_draft(target, noise=noise, **(sizes | shape | overrides))


def transitions(target: PreTrainedModel, processors: Sequence[LogitsProcessor] = ()) -> torch.Tensor:
    """The distribution after each token of a target that is a Markov chain, after its processors, `(V, V)`."""
    ids = torch.arange(VOCAB_SIZE)[:, None]
    return LogitsProcessorList(processors)(ids, target(ids).logits[:, -1].float()).softmax(-1)
