# SPDX-License-Identifier: Apache-2.0
"""Binds a draft to its target: checks that the two fit, and shares the target's embedding and LM head.

Nothing of the target is copied, and nothing is stored on the draft: a [`TargetBinding`] lives in the call that made
it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from .configuration_draft import DraftConfig
from .target_probe import probe_head


logger = logging.get_logger("transformers.dspark_hf.drafts.target_binding")


@dataclass(frozen=True)
class TargetBinding:
    """The modules of a target that a draft calls, and how that target turns LM-head outputs into logits.

    The modules are called, never read, so quantised, offloaded, tied and scaled ones work.
    """

    embed_tokens: nn.Module  # the target's input embedding
    lm_head: nn.Module  # the target's output embedding
    logit_scale: float = 1.0  # factor on the logits (Cohere, Granite)
    logit_softcap: float | None = None  # c in c * tanh(logits / c) (Gemma)
    head_layers: tuple[nn.Module, ...] = ()  # what hidden states pass before the LM head (ModernBERT)

    def embed(
        self,
        ids: torch.Tensor,  # [...]
    ) -> torch.Tensor:  # [..., d]
        """Embeddings as the target's layers see them."""
        return self.embed_tokens(_to_module(ids, self.embed_tokens))

    def logits(
        self,
        hidden: torch.Tensor,  # [..., d], hidden states after the final norm
    ) -> torch.Tensor:  # [..., V], on `hidden`'s device, in the LM head's dtype
        """Logits over the whole vocabulary, as the target computes them from its final hidden states."""
        return self.scale(_through(self.lm_head, self.before_head(hidden)).to(hidden.device))

    def before_head(
        self,
        hidden: torch.Tensor,  # [..., d], hidden states after the final norm
    ) -> torch.Tensor:  # [..., d]
        """The inputs of the LM head; most targets have no layers before it."""
        for layer in self.head_layers:
            hidden = _through(layer, hidden).to(hidden.device, hidden.dtype)
        return hidden

    def scale(
        self,
        logits: torch.Tensor,  # [..., V], raw outputs of an LM head
    ) -> torch.Tensor:
        """Apply the target's logit scale and soft cap."""
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_softcap is not None:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits


def _through(module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Outputs of a module of the target, in its dtype and on its device."""
    weight = next((parameter for parameter in module.parameters() if parameter.is_floating_point()), None)
    return module(_to_module(hidden if weight is None else hidden.to(weight.dtype), module))


def _to_module(inputs: torch.Tensor, module: nn.Module) -> torch.Tensor:
    weight = next(module.parameters(), None)
    if weight is None or weight.device.type == "meta":  # on meta: offloaded, and its hook moves the input
        return inputs
    return inputs.to(weight.device)


def bind(
    target: PreTrainedModel, config: DraftConfig, embedding_sample: dict[int, torch.Tensor] | None = None
) -> TargetBinding:
    """Check that a draft of this configuration fits the target, and bind the shared modules."""
    config.require_target_fields()
    name = type(target).__name__
    if target.config.is_encoder_decoder:
        raise NotImplementedError(
            f"DSpark drafts need a decoder-only target, got the encoder-decoder model {name}. Use a plain assistant "
            "model."
        )
    text_config = target.config.get_text_config(decoder=True)
    _check_fit(config, text_config, name)
    embed_tokens, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
    if embed_tokens is None or lm_head is None:
        raise ValueError(
            f"The target must have an embedding and an LM head, but {name} lacks one. Load it as a ...ForCausalLM."
        )
    _compare_embedding(embed_tokens, embedding_sample or {}, name)
    softcap = getattr(text_config, "final_logit_softcapping", None)

    def outputs_of(hidden: torch.Tensor, modules: tuple[nn.Module, ...]) -> torch.Tensor:
        return TargetBinding(embed_tokens, modules[-1], head_layers=modules[:-1]).logits(hidden)

    head = probe_head(target, outputs_of, softcap, expected=_logit_factor(text_config))
    return TargetBinding(embed_tokens, head.modules[-1], head.factor, softcap, head.modules[:-1])


def _logit_factor(text_config: PreTrainedConfig) -> float:
    """The factor on the LM head's outputs; every model family has its own field for it."""
    factor = 1.0
    for field in ("logit_scale", "output_multiplier", "lm_head_multiplier"):  # Cohere, Muse, Falcon-H1
        value = getattr(text_config, field, None)
        if isinstance(value, (int, float)):  # MPT keeps a word in a field of that name, and does not read it
            factor *= value
    scaling = getattr(text_config, "logits_scaling", None)  # Granite; a family that multiplies by it is measured
    return float(factor / scaling if scaling else factor)


def _compare_embedding(embed_tokens: nn.Module, sample: dict[int, torch.Tensor], name: str) -> None:
    """Warn if the target's embedding, which is always used, differs from that in training."""
    weight = getattr(embed_tokens, "weight", None)
    if not sample or weight is None or weight.device.type == "meta" or not weight.is_floating_point():
        return
    ids = [i for i in sample if i < weight.shape[0]]
    ours = weight[ids].float().cpu()
    theirs = torch.stack([sample[i] for i in ids]).float()
    # Generous: the same weights in another precision pass, those of a fine-tuned target do not.
    if not torch.allclose(ours, theirs, rtol=2e-2, atol=1e-3):
        logger.warning_once(
            f"The draft was trained with another embedding than that of {name}. Outputs stay right, but it may be "
            "accepted less: is it the target the draft was made for, or a fine-tuned one?"
        )


def _check_fit(config: DraftConfig, text_config, name: str) -> None:
    for field in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(config, field), getattr(text_config, field)
        if ours != theirs:
            raise ValueError(
                f"Target and draft must have the same `{field}`, got {theirs} in {name} and {ours} in the draft. The "
                f"draft{' for ' + config.target_name_or_path if config.target_name_or_path else ''} belongs to "
                "another target."
            )
    last_layer = text_config.num_hidden_layers - 1
    if max(config.target_layer_ids) >= last_layer:
        raise ValueError(
            f"`target_layer_ids` must lie below the target's last layer {last_layer}, got {config.target_layer_ids}: "
            "transformers returns the last layer's output after the final norm. The draft belongs to another target."
        )
    if config.num_target_layers is not None and config.num_target_layers != text_config.num_hidden_layers:
        raise ValueError(
            f"The draft was made for a target of {config.num_target_layers} layers, got "
            f"{text_config.num_hidden_layers} in {name}. The draft belongs to another target."
        )
