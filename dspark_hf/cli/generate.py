# SPDX-License-Identifier: Apache-2.0
"""`dspark-hf generate`."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from transformers import TextStreamer

from ..common.chat_tokens import encode_prompt
from ..common.decoding_options import sampling_arguments
from ..common.records import collect_rounds
from .loading import check_prompting, load_pair, prompting_tokenizer
from .options import (
    Device,
    Draft,
    Dtype,
    MaxNewTokens,
    NumAssistantTokens,
    PromptLookup,
    Raw,
    Schedule,
    Seed,
    Target,
    Temperature,
    Thinking,
    Threshold,
    TopP,
    TrustRemoteCode,
    check_prompt,
    errors,
    exit_on_error,
    set_knobs,
)


def generate_command(
    text: Annotated[str, typer.Argument(help="The user's turn, or the text to continue with --raw.")],
    target: Target = None,
    draft: Draft = None,
    dtype: Dtype = "bfloat16",
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    max_new_tokens: MaxNewTokens = 256,
    num_assistant_tokens: NumAssistantTokens = None,
    assistant_confidence_threshold: Threshold = None,
    num_assistant_tokens_schedule: Schedule = None,
    prompt_lookup_num_tokens: PromptLookup = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    raw: Raw = False,
    enable_thinking: Thinking = None,
    plain: Annotated[bool, typer.Option("--plain", help="Do not use the draft.")] = False,
) -> None:
    """Stream one answer to the terminal; the figures go to standard error."""
    with exit_on_error():
        check_prompting(raw, enable_thinking)
        check_prompt(text)
        sampling = sampling_arguments(temperature, top_p)
        knobs = (
            num_assistant_tokens,
            assistant_confidence_threshold,
            num_assistant_tokens_schedule,
            prompt_lookup_num_tokens,
        )
        if plain and any(knob is not None for knob in knobs):
            raise ValueError("`--plain` does without the draft, so its knobs mean nothing, got both. Leave out one.")
        with errors.status("Loading the models..."):
            model, draft_model, tokenizer = load_pair(target, draft, dtype, device, trust_remote_code)
        tokenizer = prompting_tokenizer(tokenizer, draft_model, enable_thinking, raw)
        set_knobs(draft_model, *knobs)
        torch.manual_seed(seed)
        inputs = {name: value.to(model.device) for name, value in encode_prompt(tokenizer, text, raw).items()}
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        assistant = {} if plain else {"assistant_model": draft_model}
        with collect_rounds() as stats:
            model.generate(
                **inputs,
                **assistant,
                **sampling,
                max_new_tokens=max_new_tokens,
                streamer=streamer,
            )
    if stats.num_rounds:
        rate, verified = stats.num_committed / stats.round_s, stats.verified_per_token
        errors.print(
            f"[dim]{rate:.1f} tokens/s after the prefill, accepted length {stats.accepted_length:.2f}, {verified:.2f} "
            "tokens verified per token[/]",
            highlight=False,
        )
