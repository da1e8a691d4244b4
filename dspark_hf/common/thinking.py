# SPDX-License-Identifier: Apache-2.0
"""The thinking switch of a chat template, `enable_thinking`: whether there is one, and its setting."""

from __future__ import annotations

import copy

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging


logger = logging.get_logger("transformers.dspark_hf.common.thinking")


def has_thinking_switch(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template renders different prompts with thinking on and off."""
    return bool(tokenizer.chat_template) and _prompt(tokenizer, True) != _prompt(tokenizer, False)


def thinks_by_default(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a chat template with the switch has it on by default."""
    return _prompt(tokenizer, None) == _prompt(tokenizer, True)


def with_thinking(tokenizer: PreTrainedTokenizerBase, enable_thinking: bool | None) -> PreTrainedTokenizerBase:
    """A tokenizer whose chat template has its thinking switch set."""
    if enable_thinking is None or not tokenizer.chat_template:
        return tokenizer
    switched = copy.copy(tokenizer)
    word = "true" if enable_thinking else "false"
    switched.chat_template = "{%- set enable_thinking = " + word + " -%}" + tokenizer.get_chat_template()
    return switched


def choose_thinking(
    tokenizer: PreTrainedTokenizerBase, asked: bool | None, training_info: dict | None = None
) -> bool | None:  # or None: for `with_thinking`
    """The setting of the switch: as requested, else as the draft was trained, else the template's default."""
    check_thinking(tokenizer, asked)
    return asked if asked is not None else (training_info or {}).get("enable_thinking")


def check_thinking(tokenizer: PreTrainedTokenizerBase, asked: bool | None) -> None:
    """Warn where the user sets a switch that the chat template does not have."""
    if asked is not None and not has_thinking_switch(tokenizer):
        logger.warning(
            f"`enable_thinking={asked}` changes nothing: the chat template of this target has no thinking switch."
        )


def _prompt(tokenizer: PreTrainedTokenizerBase, enable_thinking: bool | None) -> str:
    switch = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    messages = [{"role": "user", "content": "Hello"}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **switch)
