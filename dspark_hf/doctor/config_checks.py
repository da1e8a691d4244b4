# SPDX-License-Identifier: Apache-2.0
"""Checks a pair by two configs, a tokenizer and a training record, without running it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch

from ..common.chat import template_hash
from ..common.chat_tokens import encode_prompt
from ..common.thinking import with_thinking
from ..decoding.criterion import resolve_options
from ..drafts.configuration_dspark import DSparkConfig
from .finding import ADVICE, FAULT, Finding
from .pair import Pair


# Words that a name gets when a model is stored in another precision or format.
_STORAGE_WORDS = re.compile(
    r"(?i)(?:bf16|fp16|fp32|float16|bfloat16|fp8|nvfp4|mxfp4|int[48]|[48]bit|w\d+a\d+|awq|gptq|bnb|gguf|mlx|hf)$"
)


def check_config(pair: Pair) -> list[Finding]:
    """Run every check that needs no weights."""
    return [finding for check in _CHECKS for finding in check(pair)]


def _hidden_size(pair: Pair) -> Iterator[Finding]:
    ours, theirs = pair.config.hidden_size, pair.text_config.hidden_size
    if ours != theirs:
        yield Finding(
            "hidden_size",
            FAULT,
            f"The draft reads hidden states of width {ours}, and those of the target have width {theirs}.",
            f"The draft belongs to another target{_recorded_target(pair)}. Use that one, or train a draft for this "
            "one.",
        )


def _vocabulary(pair: Pair) -> Iterator[Finding]:
    ours, theirs = pair.config.vocab_size, pair.text_config.vocab_size
    if ours == theirs:
        return
    if min(ours, theirs) >= len(pair.tokenizer):
        yield Finding(
            "vocabulary_padded",
            FAULT,
            f"The embedding was padded: it has {theirs} rows in the target and had {ours} when the draft was made; "
            f"the tokenizer has {len(pair.tokenizer)} tokens, so none of the rows in between is in use.",
            f"Use the target as it was published, or give it {ours} rows: `target.resize_token_embeddings({ours})`"
            + (" (the rows it gains are untrained)." if ours > theirs else "."),
        )
    else:
        yield Finding(
            "vocabulary_size",
            FAULT,
            f"The target has a vocabulary of {theirs}, and the draft was made for one of {ours}.",
            f"The draft belongs to another target{_recorded_target(pair)}, or tokens were added to this one. Use the "
            "target it was made for.",
        )


def _layer_ids(pair: Pair) -> Iterator[Finding]:
    ids, depth = list(pair.config.target_layer_ids), pair.text_config.num_hidden_layers
    recorded = pair.config.num_target_layers
    if recorded is not None and recorded != depth:
        yield Finding(
            "target_depth",
            FAULT,
            f"The draft was made for a target of {recorded} layers, and this one has {depth}.",
            f"The draft belongs to another target{_recorded_target(pair)}.",
        )
    if max(ids) >= depth - 1:
        yield Finding(
            "layer_ids",
            FAULT,
            f"The draft reads the target layers {ids}, but the target's last layer is number {depth - 1}, and what "
            "transformers returns for that one is already normed.",
            "If the ids count from 1 or name the inputs of layers, take 1 from each; otherwise the draft belongs to "
            "a deeper target.",
        )


def _mask_token(pair: Pair) -> Iterator[Finding]:
    mask, embedding = int(pair.config.mask_token_id or 0), pair.target.get_input_embeddings()  # the draft has one
    num_rows = getattr(embedding, "num_embeddings", pair.text_config.vocab_size)
    if mask >= num_rows:
        yield Finding(
            "mask_token_missing",
            FAULT,
            f"The mask token of the draft is row {mask}, and the target's embedding has {num_rows} rows.",
            "The row was added to the target in training and not saved with it, or the draft belongs to another "
            "target. Use the target with the added row.",
        )
        return
    weight = getattr(embedding, "weight", None)
    is_readable = weight is not None and weight.device.type != "meta" and weight.is_floating_point()
    if weight is not None and is_readable and not weight[mask].any():
        yield Finding(
            "mask_row_zero",
            ADVICE,
            f"The embedding row {mask} of the mask token is all zeros, as no trained row is.",
            "Check `mask_token_id` against the config that the draft was trained with.",
        )
    if mask < len(pair.tokenizer) and _is_written(pair, mask):
        token = pair.tokenizer.convert_ids_to_tokens(mask)
        yield Finding(
            "mask_token_written",
            ADVICE,
            f"The mask token {mask} is {token!r}, which texts or the chat template contain.",
            "A mask token should be one that no text holds. Check `mask_token_id` against the config that the draft "
            "was trained with.",
        )


def _is_written(pair: Pair, token_id: int) -> bool:
    tokenizer = pair.tokenizer
    if token_id == tokenizer.mask_token_id:
        return False
    added = tokenizer.added_tokens_decoder.get(token_id)
    template = str(tokenizer.chat_template or "")
    return added is None or token_id in tokenizer.all_special_ids or added.content in template


def _rope(pair: Pair) -> Iterator[Finding]:
    reference = expected_config(pair)
    if reference is None or reference.head_dim != pair.config.head_dim:
        return  # not made from this target's config, so its RoPE may be another
    ours, theirs = pair.config.rope_parameters or {}, reference.rope_parameters or {}
    for name, meaning in (("rope_theta", "base"), ("rope_type", "type")):
        if ours.get(name) != theirs.get(name):
            yield Finding(
                name,
                ADVICE,
                f"The RoPE {meaning} is {ours.get(name)!r} in the draft and {theirs.get(name)!r} in the target.",
                f"That is right only if the draft was trained so. If not, set `{name}` in the draft's config.json to "
                f"{theirs.get(name)!r}.",
            )


def _norm_epsilon(pair: Pair) -> Iterator[Finding]:
    reference = expected_config(pair)
    if reference is not None and reference.rms_norm_eps != pair.config.rms_norm_eps:
        yield Finding(
            "rms_norm_eps",
            ADVICE,
            f"`rms_norm_eps` is {pair.config.rms_norm_eps:g} in the draft and {reference.rms_norm_eps:g} in the "
            "target.",
            "It matters little, and is right if the draft was trained so. Check the config it was trained with.",
        )


def _block_size(pair: Pair) -> Iterator[Finding]:
    trained = pair.training_info.get("block_size")
    if isinstance(trained, int) and pair.config.block_size > trained:
        yield Finding(
            "block_larger_than_trained",
            FAULT,
            f"`block_size` is {pair.config.block_size}, and the draft was trained with blocks of {trained}.",
            f"Set `block_size` to {trained} in the draft's config.json: no slot beyond was ever trained.",
        )


def _knobs(pair: Pair) -> Iterator[Finding]:
    try:
        resolve_options(pair.config, pair.draft.generation_config)
    except ValueError as error:
        yield Finding(
            "knobs",
            FAULT,
            f"The draft's own generation config cannot be used: {error}",
            "Change it on `draft.generation_config`, or in the draft's generation_config.json.",
        )


def _template(pair: Pair) -> Iterator[Finding]:
    recorded = pair.training_info.get("chat_template_sha256")
    if recorded is None:
        return
    if recorded != template_hash(pair.tokenizer):
        yield Finding(
            "template_differs",
            FAULT,
            "The draft was trained with another chat template than the one of this tokenizer (their SHA-256 differ: "
            f"{str(recorded)[:12]}... and {template_hash(pair.tokenizer)[:12]}...).",
            "Prompt with the tokenizer that the training data was made with, or train the draft again with this one.",
        )
    elif pair.raw and pair.tokenizer.chat_template:
        yield Finding(
            "template_unused",
            FAULT,
            "The draft was trained on prompts in the chat template, and here prompts go without it.",
            "Build prompts with `tokenizer.apply_chat_template(..., add_generation_prompt=True)`.",
        )


def _thinking(pair: Pair) -> Iterator[Finding]:
    if "enable_thinking" not in pair.training_info or pair.raw or not pair.tokenizer.chat_template:
        return
    recorded = pair.training_info["enable_thinking"]
    ours, theirs = (
        encode_prompt(tokenizer, "Hello")["input_ids"].tolist()
        for tokenizer in (pair.prompting_tokenizer, with_thinking(pair.tokenizer, recorded))
    )
    if ours != theirs:
        yield Finding(
            "thinking_switch",
            FAULT,
            f"The draft was trained on prompts with {_switch(recorded)}, and here they are built with "
            f"{_switch(pair.enable_thinking)}.",
            "Omit `enable_thinking` in `apply_chat_template` (here: as well)."
            if recorded is None
            else f"Pass `enable_thinking={recorded}` to `apply_chat_template` (here: "
            f"`--{'enable' if recorded else 'no'}-thinking`).",
        )


def _target_name(pair: Pair) -> Iterator[Finding]:
    ours, theirs = pair.config.target_name_or_path, pair.target.config.name_or_path
    if ours and theirs and plain_name(ours) != plain_name(theirs):
        yield Finding(
            "target_name",
            ADVICE,
            f"The draft was trained for {ours}, and the target here is {theirs}.",
            f"If it is only another folder of the same weights, nothing is wrong. Otherwise use {ours}.",
        )


def _end_of_text(pair: Pair) -> Iterator[Finding]:
    config, tokenizer_end = pair.target.generation_config, pair.tokenizer.eos_token_id
    found = config.eos_token_id if config is not None else None
    ends = {found} if isinstance(found, int) else set(found or ())
    if not ends:
        yield Finding(
            "eos_missing",
            ADVICE,
            "The target's generation config names no end-of-text token, so answers run to the length limit, with and "
            "without a draft.",
            "Set `target.generation_config.eos_token_id`"
            + (f", to {tokenizer_end} for example." if tokenizer_end is not None else "."),
        )
    elif tokenizer_end is not None and tokenizer_end not in ends:
        yield Finding(
            "eos_differs",
            ADVICE,
            f"The tokenizer ends texts with {tokenizer_end}, the target's generation config with {sorted(ends)}.",
            "Check which of them the target writes at the end of an answer.",
        )


def _dtype(pair: Pair) -> Iterator[Finding]:
    ours, theirs = pair.draft.dtype, pair.target.dtype
    if ours != theirs:
        yield Finding(
            "dtype",
            ADVICE,
            f"The draft computes in {_word(ours)} and the target in {_word(theirs)}.",
            f"Load the draft with `dtype=torch.{_word(theirs)}`, unless you measured that another is faster.",
        )


def _device(pair: Pair) -> Iterator[Finding]:
    ours, theirs = pair.draft.device, pair.target.device
    if ours.type != theirs.type and "meta" not in (ours.type, theirs.type):
        yield Finding(
            "device",
            ADVICE,
            f"The draft is on {ours} and the target on {theirs}, so hidden states are moved in every round.",
            f'Move the draft: `draft.to("{theirs}")`.',
        )


def _attention(pair: Pair) -> Iterator[Finding]:
    for name, model in (("target", pair.target), ("draft", pair.draft)):
        if model.config._attn_implementation == "eager" and getattr(model, "_supports_sdpa", False):
            yield Finding(
                "attention_eager",
                ADVICE,
                f"The {name} computes attention with the plain implementation (eager).",
                'Load it with `attn_implementation="sdpa"`, which is faster on long texts.',
            )


def expected_config(pair: Pair) -> DSparkConfig | None:  # None where the target's config is of an unusual kind
    """The config that a draft made from this target would have."""
    try:
        return DSparkConfig.from_target(pair.target.config, mask_token_id=0, num_taps=1)
    except ValueError:
        return None


def plain_name(name: str) -> str:  # in lower case
    """A model's name without owner, folders, and the words for its storage format."""
    words = re.split(r"[-_.]", name.rstrip("/").replace("\\", "/").rpartition("/")[2].lower())
    return "-".join(word for word in words if not _STORAGE_WORDS.fullmatch(word))


def _switch(value: bool | None) -> str:
    return "the template's default" if value is None else f"`enable_thinking={value}`"


def _recorded_target(pair: Pair) -> str:
    return f" ({pair.config.target_name_or_path})" if pair.config.target_name_or_path else ""


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_CHECKS: tuple[Callable[[Pair], Iterator[Finding]], ...] = (
    _hidden_size,
    _vocabulary,
    _layer_ids,
    _mask_token,
    _block_size,
    _knobs,
    _template,
    _thinking,
    _target_name,
    _rope,
    _norm_epsilon,
    _end_of_text,
    _dtype,
    _device,
    _attention,
)
