# SPDX-License-Identifier: Apache-2.0
"""The sequential heads (paper Eq 5 and 6) and the confidence head (Eq 7).

Legend: b any leading dimensions, g block_size, d hidden, r Markov rank, V target vocabulary, D draft vocabulary (= V
unless reduced). `previous_ids` are target ids: the anchor for slot 0, then the drafts (or, in training, the text).
Parameter names are the released checkpoint format.
"""

from __future__ import annotations

import torch
from torch import nn

from .configuration_dspark import DSparkConfig


class MarkovHead(nn.Module):
    """Low-rank bigram bias, B(x_{k-1}, .) = W_1[x_{k-1}] W_2 (paper Eq 5)."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size or config.vocab_size, bias=False)

    def initial_state(
        self,
        hidden: torch.Tensor,  # [*b, d]  # noqa: ARG002
    ) -> torch.Tensor | None:  # [*b, r], or None for a head without state
        """State before slot 0."""
        return None

    def features(
        self,
        embedding: torch.Tensor,  # [*b, r], W_1[x_{k-1}]
        hidden: torch.Tensor,  # [*b, d], h_k, the slot's hidden states after the final norm  # noqa: ARG002
        state: torch.Tensor | None,  # [*b, r], s_{k-1}
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # features [*b, r] and the new state
        """The features that W_2 maps to the transition bias."""
        return embedding, state

    def forward(
        self,
        embedding: torch.Tensor,  # [*b, r]
        hidden: torch.Tensor,  # [*b, d]
        state: torch.Tensor | None = None,  # [*b, r], from `initial_state` or the slot before
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # `transition_bias` [*b, D] and the new state
        """Transition bias B_k of one slot."""
        features, state = self.features(embedding, hidden, state)
        return self.markov_w2(features), state


class GatedMarkovHead(MarkovHead):
    """Markov head whose embedding is gated by the slot: W_2 (sigmoid(W_g [h_k; e] + b) * e), e = W_1[x_{k-1}]."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def features(
        self, embedding: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See [`MarkovHead.features`]."""
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedding], dim=-1))) * embedding, state


class RNNHead(MarkovHead):
    """Recurrent head (paper Eq 6): one linear map of [s_{k-1}; W_1[x_{k-1}]; h_k] gives gate, candidate and output."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * config.markov_rank + config.hidden_size, 3 * config.markov_rank)

    def initial_state(self, hidden: torch.Tensor) -> torch.Tensor:
        """See [`MarkovHead.initial_state`]; s_0 = 0."""
        return hidden.new_zeros(*hidden.shape[:-1], self.markov_w1.embedding_dim)

    def features(
        self, embedding: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See [`MarkovHead.features`]."""
        state = self.initial_state(hidden) if state is None else state
        gate, candidate, output = self.joint_proj(torch.cat([state, embedding, hidden], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        state = gate * state + (1 - gate) * torch.tanh(candidate)
        return torch.tanh(output), state


class ConfidenceHead(nn.Module):
    """c_k = sigmoid(w^T [h_k; W_1[x_{k-1}]] + b): chance that slot k is accepted if all before it are (paper Eq 7).

    It is known before x_k is sampled, so it can decide losslessly whether slot k is verified.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        width = config.hidden_size + (config.markov_rank if self.with_markov else 0)
        self.proj = nn.Linear(width, 1)

    def forward(
        self,
        hidden: torch.Tensor,  # [*b, d]
        embedding: torch.Tensor | None = None,  # [*b, r], W_1[x_{k-1}]; read only `with_markov`
    ) -> torch.Tensor:  # [*b], `confidence_logits`
        """Confidence before the sigmoid."""
        inputs = [hidden, embedding] if self.with_markov and embedding is not None else [hidden]
        return self.proj(torch.cat(inputs, dim=-1)).squeeze(-1)


def build_sequential_head(config: DSparkConfig) -> MarkovHead | None:  # None where `markov_rank` is 0
    """Create the sequential head of a config."""
    if config.markov_rank == 0:
        return None
    return {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RNNHead}[config.markov_head_type](config)
