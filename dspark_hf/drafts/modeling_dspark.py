# SPDX-License-Identifier: Apache-2.0
"""The parallel stage of a DSpark draft: a small transformer over one block, reading the target's hidden states.

Legend: b batch, c context tokens, q block tokens (g, or n * g in training), g block_size, d hidden, m captured target
layers, V target vocabulary, D draft vocabulary (= V unless reduced).
"""

from __future__ import annotations

import re

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding, rotate_half

from . import formats
from .attention import eager_attention, folded_attention, folded_mask
from .configuration_dspark import DSparkConfig
from .draft_cache import DraftCache, block_mask
from .formats.files import OLD_PREFIX
from .heads import ConfidenceHead, build_sequential_head
from .modeling_draft import DraftModel
from .target_binding import TargetBinding


class DSparkAttention(nn.Module):
    """Attention with KV injection (paper Eq 3): keys and values of context and block, queries of the block alone."""

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        is_gemma = config.layer_kind == "gemma4"
        self.scaling = 1.0 if is_gemma else config.head_dim**-0.5
        self.is_causal = False
        self.sliding_window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None

        q_width, kv_width = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.v_proj = None
        if not config.attention_k_eq_v:
            self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_width, config.hidden_size, bias=config.attention_bias)
        self.q_norm = rms_norm(config, config.head_dim)
        self.k_norm = rms_norm(config, config.head_dim)
        self.v_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps, elementwise_affine=False) if is_gemma else None

    def forward(
        self,
        hidden_states: torch.Tensor,  # [b, q, d]
        context: torch.Tensor,  # [b, c, d], with a cache [1, C, d]: that of all requests, one after the other
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # cos and sin, each [b, c + q, e]
        attention_mask: torch.Tensor | None = None,  # [b or 1, 1, q, keys], True = visible
        cache: DraftCache | None = None,
    ) -> torch.Tensor:  # [b, q, d]
        """Attend.

        `position_embeddings`: cos and sin, each [b, c + q, e]; with a cache [1, C + b * q, e].
        """
        b, q, d = hidden_states.shape
        inputs = torch.cat([context, hidden_states.reshape(context.shape[0], -1, d)], dim=1)  # [b, c + q, d]
        queries = self.q_norm(self.q_proj(hidden_states).view(b, q, -1, self.head_dim)).transpose(1, 2)
        keys, values = self._keys_and_values(inputs)
        queries, keys = apply_rope(queries, keys, *position_embeddings)
        if cache is not None:
            keys, values = cache.write(self.layer_idx, keys, values)
        if attention_mask is None:
            keys, values, attention_mask = self._as_in_decoding(keys, values, q, cache)
            if self.config._attn_implementation == "sdpa" and not self.training:
                outputs = self._folded_attention(queries, keys, values, attention_mask)
                return self.o_proj(outputs.reshape(b, q, -1))
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        dropout = self.config.attention_dropout if self.training else 0.0
        outputs, _ = attention(
            self, queries, keys, values, attention_mask, scaling=self.scaling, dropout=dropout, is_causal=False
        )
        return self.o_proj(outputs.reshape(b, q, -1))

    def _keys_and_values(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the inputs, each `(b, kv_heads, c + q, e)`, the keys not yet rotated."""
        shape = (inputs.shape[0], -1, self.config.num_key_value_heads, self.head_dim)
        projected = self.k_proj(inputs).view(shape)
        values = projected if self.v_proj is None else self.v_proj(inputs).view(shape)
        values = values if self.v_norm is None else self.v_norm(values)
        return self.k_norm(projected).transpose(1, 2), values.transpose(1, 2)

    def _folded_attention(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention of few queries over many keys, without repeated heads; `(b, q, heads, e)`."""
        if mask is not None:
            mask = folded_mask(mask, self.num_key_value_groups, queries.dtype)
        return folded_attention(queries, keys, values, mask, self.scaling)

    def _as_in_decoding(
        self, keys: torch.Tensor, values: torch.Tensor, q: int, cache: DraftCache | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The keys and values that any request sees, and the mask over them."""
        ends, window = cache.ends if cache is not None else [keys.shape[2]], self.sliding_window
        if window is not None:  # keys before every window are not read
            start = max(0, min(ends) - q - window)
            keys, values, ends = keys[:, :, start:], values[:, :, start:], [end - start for end in ends]
        # Sliding layers are causal inside the block unless the config says otherwise.
        is_causal = window is not None and not self.config.sliding_window_non_causal
        return keys, values, block_mask(ends, q, window, is_causal, keys.device)


def apply_rope(
    queries: torch.Tensor,  # [b, heads, q, e]
    keys: torch.Tensor,  # [b, kv_heads, c + q, e]
    cos: torch.Tensor,  # [b, c + q, e]
    sin: torch.Tensor,  # [b, c + q, e]
) -> tuple[torch.Tensor, torch.Tensor]:  # rotated queries and keys
    """Rotate queries and keys; the queries are the last ones of the positions.

    `keys`: [1, kv_heads, C + b * q, e] with requests concatenated.
    """
    b, _, q, e = queries.shape
    num_queries = b * q // cos.shape[0]  # per row of the positions
    query_cos, query_sin = (part[:, -num_queries:].reshape(b, 1, q, e) for part in (cos, sin))
    queries = queries * query_cos + rotate_half(queries) * query_sin
    return queries, keys * cos.unsqueeze(1) + rotate_half(keys) * sin.unsqueeze(1)


class DSparkMLP(nn.Module):
    """Gated MLP."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(
        self,
        hidden_states: torch.Tensor,  # [b, q, d]
    ) -> torch.Tensor:  # [b, q, d]
        """Map `(b, q, d)` to `(b, q, d)`."""
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class DSparkDecoderLayer(GradientCheckpointingLayer):
    """One draft layer: attention with KV injection, then the MLP, both pre-norm with residuals."""

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DSparkAttention(config, layer_idx)
        self.mlp = DSparkMLP(config)
        self.input_layernorm = rms_norm(config, config.hidden_size)
        self.post_attention_layernorm = rms_norm(config, config.hidden_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        context: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: DraftCache | None = None,
    ) -> torch.Tensor:
        """See [`DSparkAttention.forward`]; `hidden_states` are not yet normed."""
        normed = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + self.self_attn(normed, context, position_embeddings, attention_mask, cache)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DSparkGemma4DecoderLayer(DSparkDecoderLayer):
    """One draft layer of Gemma 4's kind: norms before and after attention and MLP, the output scaled by a number."""

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.pre_feedforward_layernorm = rms_norm(config, config.hidden_size)
        self.post_feedforward_layernorm = rms_norm(config, config.hidden_size)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(
        self,
        hidden_states: torch.Tensor,
        context: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: DraftCache | None = None,
    ) -> torch.Tensor:
        """See [`DSparkAttention.forward`]; `hidden_states` are not yet normed."""
        normed = self.input_layernorm(hidden_states)
        attended = self.self_attn(normed, context, position_embeddings, attention_mask, cache)
        hidden_states = hidden_states + self.post_attention_layernorm(attended)
        outputs = self.mlp(self.pre_feedforward_layernorm(hidden_states))
        return (hidden_states + self.post_feedforward_layernorm(outputs)) * self.layer_scalar


def rms_norm(config: DSparkConfig, width: int) -> nn.RMSNorm | Qwen3RMSNorm:
    """The RMS norm of a draft's layer kind; Qwen3's rounds before it multiplies by the weight, Gemma 4's after."""
    norm_class = nn.RMSNorm if config.layer_kind == "gemma4" else Qwen3RMSNorm
    return norm_class(width, eps=config.rms_norm_eps)


class DSparkPreTrainedModel(DraftModel):
    """Loading, saving and initialising of DSpark drafts."""

    config_class = DSparkConfig
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DSparkDecoderLayer", "DSparkGemma4DecoderLayer"]
    _open_fields = formats.OPEN_FIELDS
    _key_mapping = {f"^{re.escape(OLD_PREFIX)}": ""}


class DSparkDraftModel(DSparkPreTrainedModel):
    """A DSpark draft: context projection, parallel backbone, sequential head and confidence head.

    It cannot run alone: the embedding and, unless the draft vocabulary is reduced, the LM head are its target's.

    Args:
        config (`DSparkConfig`): The draft's configuration; `mask_token_id` and `target_layer_ids` must be set.

    Raises:
        ValueError: If the config lacks a field that cannot be guessed.

    Example:
        >>> draft = DSparkDraftModel.from_pretrained("deepseek-ai/dspark_qwen3_4b_block7")  # doctest: +SKIP
        >>> target.generate(**inputs, assistant_model=draft)  # doctest: +SKIP
    """

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.hidden_norm = rms_norm(config, config.hidden_size)
        layer_class = DSparkGemma4DecoderLayer if config.layer_kind == "gemma4" else DSparkDecoderLayer
        self.layers = nn.ModuleList([layer_class(config, i) for i in range(config.num_hidden_layers)])
        self.norm = rms_norm(config, config.hidden_size)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.markov_head = build_sequential_head(config)
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self._add_head()

    def bind_target(self, target: PreTrainedModel) -> TargetBinding:
        """See [`DraftModel.bind_target`]; the mask token must be a row of the target's embedding."""
        binding = super().bind_target(target)
        num_rows = getattr(binding.embed_tokens, "num_embeddings", self.config.vocab_size)
        if self.config.mask_token_id >= num_rows:
            raise ValueError(
                f"`mask_token_id` must be a row of the target's embedding, which has {num_rows}, got "
                f"{self.config.mask_token_id}. The draft was made for another target, or for one with added tokens."
            )
        return binding

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: dict[str, torch.Tensor] | None = None,
        cache: DraftCache | None = None,
    ) -> BaseModelOutput:
        """Run the parallel stage on one block (or, in training, on all blocks of a sequence at once).

        Args:
            noise_embeds (`torch.Tensor` of shape `(b, q, d)`): Target embeddings of the anchor and its masks.
            context_hidden_states (`torch.Tensor` of shape `(b, c, m * d)`):
                Target hidden states of the context that `cache` does not hold yet, concatenated in the order of
                `target_layer_ids`, strictly before the anchor; c may be 0. With a cache `(1, C, m * d)`: that of all
                requests, one after the other.
            position_ids (`torch.LongTensor` of shape `(b, c + q)`): Positions of the context, then of the block; with
                a cache `(1, C + b * q)`.
            attention_mask (`dict[str, torch.BoolTensor]`, *optional*):
                Per layer type, `(b or 1, 1, q, c + q)`, True = visible. `None`: the mask of decoding one block.
            cache (`DraftCache`, *optional*):
                Context of earlier rounds; takes this context in. [`DraftCache.begin`] says whose it is.

        Returns:
            `BaseModelOutput` with `last_hidden_state` of shape `(b, q, d)`, after the final norm (h_k).
        """
        context = self.hidden_norm(self.fc(context_hidden_states))  # Eq 2: [b, c, d]
        position_embeddings = self.rotary_emb(noise_embeds, position_ids)
        hidden_states = noise_embeds
        for layer, layer_type in zip(self.layers, self.config.layer_types, strict=True):
            mask = attention_mask[layer_type] if attention_mask is not None else None
            hidden_states = layer(hidden_states, context, position_embeddings, mask, cache)
        if cache is not None:
            cache.commit()
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))
