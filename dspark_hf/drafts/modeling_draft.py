# SPDX-License-Identifier: Apache-2.0
"""What drafts of every kind share: loading and saving, the binding to a target, and a reduced vocabulary.

Legend: d hidden, V target vocabulary, D draft vocabulary (= V unless reduced).
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from . import formats
from .configuration_draft import DraftConfig
from .pretrained import load_checked, save_with_knobs
from .target_binding import TargetBinding, bind


Draft = TypeVar("Draft", bound="DraftModel")


class DraftModel(PreTrainedModel):
    """A draft that cannot run alone: the embedding and, unless the draft vocabulary is reduced, the LM head are its
    target's. [`DSparkDraftModel`] and [`Eagle3DraftModel`] are drafts.

    Args:
        config (`DraftConfig`): The draft's configuration; `target_layer_ids` must be set.

    Raises:
        ValueError: If the config lacks a field that cannot be guessed.
    """

    base_model_prefix = ""
    input_modalities = ("text",)
    _supports_sdpa = True
    _supports_attention_backend = True
    # Frozen copies of the target's tensors in published drafts; the target's own are used.
    _keys_to_ignore_on_load_unexpected = [r"^embed_tokens\.", r"^lm_head\.", r"^verifier_", r"^t2d$"]
    # Config fields that a caller may state, because files leave them open.
    _open_fields: tuple[str, ...] = ("target_layer_ids",)
    _key_mapping: dict[str, str] | None = None  # of tensor names in older files

    def __init__(self, config: DraftConfig):
        super().__init__(config)
        config.require_target_fields()
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.lm_head: nn.Linear | None = None
        # `None` means "not set by the user": transformers' merged defaults never reach this object.
        self.generation_config = GenerationConfig()
        # Rows of a target embedding from the checkpoint, to recognise a wrong target; not saved.
        self.embedding_sample: dict[int, torch.Tensor] = {}

    def _add_head(self) -> None:
        """The LM head of a reduced vocabulary, the last module: optimizer states are saved in the order of modules."""
        size = self.config.draft_vocab_size
        if size is not None:
            self.lm_head = nn.Linear(self.config.hidden_size, size, bias=False)
            self.register_buffer("d2t", torch.zeros(size, dtype=torch.long))
        self.post_init()

    @property
    def own_head(self) -> nn.Linear:
        """The LM head of a reduced vocabulary."""
        if self.lm_head is None:
            raise ValueError("A draft over its target's whole vocabulary has no LM head of its own.")
        return self.lm_head

    def get_input_embeddings(self) -> None:
        """None: the embedding is the target's."""
        return None

    def bind_target(self, target: PreTrainedModel) -> TargetBinding:
        """Check that this draft fits `target`, and bind the modules they share. Stores nothing on the draft.

        Args:
            target (`PreTrainedModel`): The model to speed up.

        Returns:
            [`TargetBinding`]

        Raises:
            NotImplementedError: If the target is no decoder-only language model.
            ValueError: If the two do not fit (hidden size, vocabulary, layers, mask token).
        """
        return bind(target, self.config, self.embedding_sample)

    def base_logits(self, hidden: torch.Tensor, binding: TargetBinding) -> torch.Tensor:
        """Logits of normed hidden states over the draft vocabulary; of a DSpark draft U_k, before the transition bias.

        Args:
            hidden (`torch.Tensor` of shape `(..., d)`): Hidden states after the final norm.
            binding (`TargetBinding`): From [`bind_target`].

        Returns:
            `torch.Tensor` of shape `(..., D)`.
        """
        if self.lm_head is None:
            return binding.logits(hidden)
        return binding.scale(self.lm_head(binding.before_head(hidden)))

    def draft_token_ids(self) -> torch.Tensor | None:
        """Target ids of a reduced draft vocabulary.

        Returns:
            `torch.LongTensor` of shape `(D,)`, or `None` where the draft vocabulary is the target's.
        """
        if self.lm_head is None:
            return None
        return self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)

    @classmethod
    def from_pretrained(
        cls: type[Draft],
        pretrained_model_name_or_path: str | os.PathLike,
        *model_args: Any,
        config: Any = None,
        **kwargs: Any,
    ) -> Draft:
        """Load a draft, from the Hub or a folder: our own layout, or a published one of its kind.

        Arguments are those of `PreTrainedModel.from_pretrained` (`dtype`, `device_map`, `revision`, `token`, ...), and
        fields of the config that published files leave open; the error of a file that does so names the one.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`): Hub id or folder.
            config (`DraftConfig`, *optional*): Overrides the configuration in the checkpoint.
            kwargs (`Any`):
                As above. The fields are `target_layer_ids`, and of DSpark drafts `sample_from_anchor`,
                `sliding_window_non_causal`, `mask_token_id`, `block_size`, `markov_rank`, `markov_head_type`,
                `enable_confidence_head` and `confidence_head_with_markov`.

        Returns:
            The draft, in eval mode, with every tensor loaded.

        Raises:
            ValueError: If the folder holds no draft of this kind, or its weights are unreadable, incomplete or do not
                fit the config, or the config leaves a field open or contradicts an argument.
            NotImplementedError: If the format is known but cannot be used here; the message says what serves it.
        """
        pretrained_model_name_or_path = os.path.expanduser(pretrained_model_name_or_path)
        stated = {name: kwargs.pop(name) for name in cls._open_fields if name in kwargs}
        if not isinstance(config, cls.config_class):
            config = formats.read_config(pretrained_model_name_or_path, kwargs, stated, cls.config_class)
        elif stated:
            raise ValueError(f"`config` says everything, so {sorted(stated)} cannot be given as well.")
        if cls._key_mapping is not None:
            kwargs.setdefault("key_mapping", dict(cls._key_mapping))
        load = super().from_pretrained
        return load_checked(load, pretrained_model_name_or_path, model_args, config, kwargs)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        *,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Save weights, config and the generation knobs in our own layout. The target's tensors are not among them.

        Args:
            save_directory (`str` or `os.PathLike`): Folder to write to; other arguments as in `PreTrainedModel`.
            push_to_hub (`bool`, *optional*, defaults to `False`): Upload the folder afterwards.
            repo_id (`str`, *optional*): Hub id to upload to; the folder's name by default.
        """
        save_with_knobs(self, super().save_pretrained, save_directory, push_to_hub, repo_id, kwargs)
