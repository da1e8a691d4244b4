# SPDX-License-Identifier: Apache-2.0
"""Configuration of an Eagle3 draft: its one layer, what it reads from its target, and its trained draft length."""

from __future__ import annotations

from .configuration_draft import DraftConfig


class Eagle3Config(DraftConfig):
    """Configuration of an [`Eagle3DraftModel`].

    Hidden size and vocabulary are those of the target, whose embedding and LM head the draft shares.

    Args:
        vocab_size (`int`, *optional*, defaults to 151936): Rows of the target's embedding.
        hidden_size (`int`, *optional*, defaults to 2560): Width d of the draft and of the target.
        intermediate_size (`int`, *optional*, defaults to 9728): Width of the MLP.
        num_hidden_layers (`int`, *optional*, defaults to 1): Draft layers; always 1.
        num_attention_heads (`int`, *optional*, defaults to 32): Query heads.
        num_key_value_heads (`int`, *optional*): Key and value heads; `None` means as many as query heads.
        head_dim (`int`, *optional*): Width of a head; `None` means `hidden_size // num_attention_heads`.
        hidden_act (`str`, *optional*, defaults to `"silu"`): Activation of the MLP.
        max_position_embeddings (`int`, *optional*, defaults to 40960): Longest position, in tokens.
        initializer_range (`float`, *optional*, defaults to 0.02): Standard deviation of fresh weights.
        rms_norm_eps (`float`, *optional*, defaults to 1e-6): Epsilon of the RMS norms.
        rope_parameters (`dict`, *optional*): RoPE in transformers' schema (`rope_theta`, `rope_type`, ...).
        attention_bias (`bool`, *optional*, defaults to `False`): Biases in the attention projections.
        attention_dropout (`float`, *optional*, defaults to 0.0): Dropout of attention weights in training.
        ttt_length (`int`, *optional*, defaults to 7):
            Drafts in a row that the draft was trained to make (training-time test), and makes unless
            `num_assistant_tokens` says otherwise.
        target_layer_ids (`list[int]`):
            Target layers whose outputs are read, 0-based, in concatenation order: id l is `hidden_states[l + 1]`. The
            target's last layer is not allowed (transformers returns it after the final norm).
        num_target_layers (`int`, *optional*): Depth of the target, to check the ids early.
        draft_vocab_size (`int`, *optional*):
            Size of a reduced draft vocabulary. The draft then has an LM head of its own with that many rows, and a map
            `d2t` from draft ids to target ids, stored as offsets. `None`: the target's whole LM head is used.
        target_name_or_path (`str`, *optional*): The target the draft was trained for, for messages.
        training_info (`dict`, *optional*): What the draft was trained on.

    Raises:
        ValueError: On any contradiction above, with the field, the value received and the remedy.

    Example:
        >>> Eagle3Config(target_layer_ids=[1, 9, 17, 25, 33], num_target_layers=36).num_draft_slots
        7
    """

    model_type = "eagle3_draft"

    ttt_length: int = 7

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.num_hidden_layers != 1:
            raise ValueError(
                f"`num_hidden_layers` must be 1, got {self.num_hidden_layers}: an Eagle3 draft is one layer, whose "
                "output is the input of the next step."
            )
        if type(self.ttt_length) is not int or self.ttt_length < 1:
            raise ValueError(
                f"`ttt_length` must be an integer >= 1, got {self.ttt_length!r}. Set it in the draft's config.json to "
                "the number of steps the draft was trained with."
            )

    @property
    def num_draft_slots(self) -> int:
        """`int`: Drafts of a round, unless `num_assistant_tokens` says otherwise."""
        return self.ttt_length
