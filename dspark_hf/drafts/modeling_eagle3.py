# SPDX-License-Identifier: Apache-2.0
"""An Eagle3 draft: one layer that reads the embedding of a token beside the hidden state before it.

The hidden state is the target's if it is known (`fc` over the captured layers), else the draft's own output of the
previous step. The state of token i is paired with token i + 1 and takes position i; the output, after `norm` and the
LM head, predicts token i + 2.

Legend: b batch, q tokens of this pass, k keys, d hidden, m captured target layers, V target vocabulary, D draft
vocabulary (= V unless reduced).
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import Cache
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

from .attention import eager_attention
from .configuration_eagle3 import Eagle3Config
from .modeling_draft import DraftModel
from .modeling_dspark import DSparkMLP, apply_rope
from .target_binding import TargetBinding


class Eagle3Attention(nn.Module):
    """Causal attention whose projections read twice the hidden size: embedding and hidden state, both normed."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.is_causal = True

        width, bias = 2 * config.hidden_size, config.attention_bias
        q_width, kv_width = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, q_width, bias=bias)
        self.k_proj = nn.Linear(width, kv_width, bias=bias)
        self.v_proj = nn.Linear(width, kv_width, bias=bias)
        self.o_proj = nn.Linear(q_width, config.hidden_size, bias=bias)
        self.q_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        inputs: torch.Tensor,  # [b, q, 2 * d]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # cos and sin, each [b, q, e]
        attention_mask: torch.Tensor | None = None,  # [b or 1, 1, q, k], True = visible; None: causal
        cache: Cache | None = None,
    ) -> torch.Tensor:  # [b, q, d]
        """Attend."""
        b, q, _ = inputs.shape
        shape = (b, q, -1, self.head_dim)
        queries = self.q_norm(self.q_proj(inputs).view(shape)).transpose(1, 2)
        keys = self.k_norm(self.k_proj(inputs).view(shape)).transpose(1, 2)
        values = self.v_proj(inputs).view(shape).transpose(1, 2)
        queries, keys = apply_rope(queries, keys, *position_embeddings)
        if cache is not None:
            keys, values = cache.update(keys, values, 0)
        is_causal = attention_mask is None and q > 1
        # A kernel masks a whole prompt itself; it would align a shorter query to the first keys.
        if is_causal and (keys.shape[2] > q or self.config._attn_implementation == "eager"):
            attention_mask, is_causal = _causal_mask(q, keys), False
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        dropout = self.config.attention_dropout if self.training else 0.0
        outputs, _ = attention(
            self, queries, keys, values, attention_mask, scaling=self.scaling, dropout=dropout, is_causal=is_causal
        )
        return self.o_proj(outputs.reshape(b, q, -1))


def _causal_mask(q: int, keys: torch.Tensor) -> torch.Tensor:
    """The queries are the last ones of the keys; `(1, 1, q, k)`, True = visible."""
    num_keys = keys.shape[2]
    mask = torch.ones(q, num_keys, dtype=torch.bool, device=keys.device)
    return mask.tril(diagonal=num_keys - q)[None, None]


class Eagle3DecoderLayer(nn.Module):
    """The draft's layer; its residual is the hidden state alone, not normed."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.self_attn = Eagle3Attention(config)
        self.mlp = DSparkMLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        inputs_embeds: torch.Tensor,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """See [`Eagle3Attention.forward`]; `inputs_embeds` and `hidden_states` are not yet normed."""
        inputs = torch.cat([self.input_layernorm(inputs_embeds), self.hidden_norm(hidden_states)], dim=-1)
        hidden_states = hidden_states + self.self_attn(inputs, position_embeddings, attention_mask, cache)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Eagle3DraftModel(DraftModel):
    """An Eagle3 draft: projection of the target's hidden states, one layer, norm.

    It cannot run alone: the embedding and, unless the draft vocabulary is reduced, the LM head are its target's.

    Args:
        config (`Eagle3Config`): The draft's configuration; `target_layer_ids` must be set.

    Raises:
        ValueError: If the config lacks a field that cannot be guessed.

    Example:
        >>> draft = Eagle3DraftModel.from_pretrained("deepseek-ai/eagle3_qwen3_4b_ttt7")  # doctest: +SKIP
        >>> target.generate(**inputs, assistant_model=draft)  # doctest: +SKIP
    """

    config_class = Eagle3Config
    main_input_name = "inputs_embeds"
    _no_split_modules = ["Eagle3DecoderLayer"]

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        self.layers = nn.ModuleList([Eagle3DecoderLayer(config)])
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self._add_head()

    def project(self, context_hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states as the layer reads them, from those of the target.

        Args:
            context_hidden_states (`torch.Tensor` of shape `(b, q, m * d)`):
                Target hidden states, concatenated in the order of `target_layer_ids`.

        Returns:
            `torch.Tensor` of shape `(b, q, d)`.
        """
        return self.fc(context_hidden_states)

    def forward(
        self,
        inputs_embeds: torch.Tensor,
        hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
    ) -> BaseModelOutput:
        """Run the layer over tokens whose hidden states before them are known.

        Args:
            inputs_embeds (`torch.Tensor` of shape `(b, q, d)`): Target embeddings of tokens 1 to q.
            hidden_states (`torch.Tensor` of shape `(b, q, d)`):
                The states of tokens 0 to q - 1: from [`project`], or this method's own outputs.
            position_ids (`torch.LongTensor` of shape `(b, q)`): Positions of tokens 0 to q - 1.
            attention_mask (`torch.BoolTensor`, *optional*):
                `(b or 1, 1, q, k)`, True = visible, k with those in the cache. `None`: causal.
            cache (`Cache`, *optional*): Keys and values of earlier passes; takes these in.

        Returns:
            `BaseModelOutput` with `last_hidden_state` of shape `(b, q, d)`, before the norm: the states that the next
            step reads.
        """
        position_embeddings = self.rotary_emb(inputs_embeds, position_ids)
        for layer in self.layers:
            hidden_states = layer(inputs_embeds, hidden_states, position_embeddings, attention_mask, cache)
        return BaseModelOutput(last_hidden_state=hidden_states)

    def draft_logits(self, hidden_states: torch.Tensor, binding: TargetBinding) -> torch.Tensor:
        """Logits of the next token, over the draft vocabulary.

        Args:
            hidden_states (`torch.Tensor` of shape `(..., d)`): Outputs of [`forward`].
            binding (`TargetBinding`): From [`bind_target`].

        Returns:
            `torch.Tensor` of shape `(..., D)`.
        """
        return self.base_logits(self.norm(hidden_states), binding)
