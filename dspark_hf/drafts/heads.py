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
    """Low-rank bigram bias, B(x_{k-1}, .) = W_1[x_{k-1}] W_2 (paper Eq 5).

    Args:
        config (`DSparkConfig`): Uses `vocab_size`, `draft_vocab_size`, `markov_rank`.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size or config.vocab_size, bias=False)

    def initial_state(self, hidden: torch.Tensor) -> torch.Tensor | None:  # noqa: ARG002
        """State before slot 0.

        Args:
            hidden (`torch.Tensor` of shape `(*b, d)`): Any slot's hidden states, for shape, device and dtype.

        Returns:
            `torch.Tensor` of shape `(*b, r)`, or `None` for a head without state.
        """
        return None

    def features(
        self,
        embedding: torch.Tensor,
        hidden: torch.Tensor,  # noqa: ARG002
        state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What W_2 maps to the transition bias.

        Args:
            embedding (`torch.Tensor` of shape `(*b, r)`): W_1[x_{k-1}].
            hidden (`torch.Tensor` of shape `(*b, d)`): h_k, the slot's hidden states after the final norm.
            state (`torch.Tensor` of shape `(*b, r)`, *optional*): s_{k-1}.

        Returns:
            `tuple`: features `(*b, r)` and the new state.
        """
        return embedding, state

    def forward(
        self, embedding: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Transition bias B_k of one slot.

        Args:
            embedding (`torch.Tensor` of shape `(*b, r)`): `markov_w1(previous_ids)`.
            hidden (`torch.Tensor` of shape `(*b, d)`): h_k.
            state (`torch.Tensor` of shape `(*b, r)`, *optional*): From `initial_state` or the slot before.

        Returns:
            `tuple`: `transition_bias` of shape `(*b, D)` and the new state.
        """
        features, state = self.features(embedding, hidden, state)
        return self.markov_w2(features), state


class GatedMarkovHead(MarkovHead):
    """Markov head whose embedding is gated by the slot: W_2 (sigmoid(W_g [h_k; e] + b) * e), e = W_1[x_{k-1}].

    Args:
        config (`DSparkConfig`): As for [`MarkovHead`], and `hidden_size`.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def features(
        self, embedding: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See [`MarkovHead.features`]."""
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedding], dim=-1))) * embedding, state


class RNNHead(MarkovHead):
    """Recurrent head (paper Eq 6): one linear map of [s_{k-1}; W_1[x_{k-1}]; h_k] gives gate, candidate and output.

    Args:
        config (`DSparkConfig`): As for [`GatedMarkovHead`].
    """

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
        gate, candidate, output = self.joint_proj(torch.cat([state, embedding, hidden], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        state = gate * state + (1 - gate) * torch.tanh(candidate)
        return torch.tanh(output), state


class ConfidenceHead(nn.Module):
    """c_k = sigmoid(w^T [h_k; W_1[x_{k-1}]] + b): chance that slot k is accepted if all before it are (paper Eq 7).

    It is known before x_k is sampled, which is what lets it decide losslessly whether slot k is verified.

    Args:
        config (`DSparkConfig`): Uses `hidden_size`, `markov_rank`, `confidence_head_with_markov`.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        width = config.hidden_size + (config.markov_rank if self.with_markov else 0)
        self.proj = nn.Linear(width, 1)

    def forward(self, hidden: torch.Tensor, embedding: torch.Tensor | None = None) -> torch.Tensor:
        """Confidence before the sigmoid.

        Args:
            hidden (`torch.Tensor` of shape `(*b, d)`): h_k.
            embedding (`torch.Tensor` of shape `(*b, r)`, *optional*): W_1[x_{k-1}]; read only `with_markov`.

        Returns:
            `torch.Tensor` of shape `(*b,)`: `confidence_logits`.
        """
        features = torch.cat([hidden, embedding], dim=-1) if self.with_markov else hidden
        return self.proj(features).squeeze(-1)


def build_sequential_head(config: DSparkConfig) -> MarkovHead | None:
    """The sequential head that a config asks for.

    Args:
        config (`DSparkConfig`): Uses `markov_rank` and `markov_head_type`.

    Returns:
        [`MarkovHead`], [`GatedMarkovHead`], [`RNNHead`], or `None` where `markov_rank` is 0.
    """
    if config.markov_rank == 0:
        return None
    return {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RNNHead}[config.markov_head_type](config)
