# SPDX-License-Identifier: Apache-2.0
"""`dspark-hf demo`."""

from __future__ import annotations

import os
import socket
from typing import Annotated

import typer

from ..common.thinking import choose_thinking
from .loading import load_pair
from .options import Device, Draft, Dtype, Target, Thinking, TrustRemoteCode, console, exit_on_error


def demo_command(
    target: Target = None,
    draft: Draft = None,
    dtype: Dtype = "bfloat16",
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    enable_thinking: Thinking = None,
    host: Annotated[
        str | None,
        typer.Option("--host", help="Address to listen at. Default: $GRADIO_SERVER_NAME, or this machine only."),
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=1, max=65535, help="Default: a free one from 7860.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, help="Longest answer a visitor may ask for.")
    ] = 256,
    max_queue: Annotated[int, typer.Option("--max-queue", min=1, help="Requests that may wait for their turn.")] = 64,
) -> None:
    """Serve a page that shows a prompt without and with DSpark, side by side."""
    # Read when gradio is imported. Nothing is reported to anyone.
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    with exit_on_error():
        if host is not None:
            _check_host(host)
        try:
            from ..demo.app import build_demo, serve
            from ..demo.session import Pair, Session
            from ..demo.settings import Limits
        except ImportError as error:
            raise RuntimeError(
                f'The demo needs gradio (6.27 or newer, below 7) and pandas ({error}): pip install "dspark-hf[demo]".'
            ) from error
        with console.status("Loading the models (the default target is fetched and converted once)..."):
            model, draft_model, tokenizer = load_pair(target, draft, dtype, device, trust_remote_code)
            thinking = choose_thinking(tokenizer, enable_thinking, draft_model.config.training_info)
            limits = Limits(max_new_tokens=max_new_tokens, max_queue=max_queue)
            Session(Pair(model, draft_model, tokenizer, thinking), limits).warm_up()
            demo = build_demo(model, draft_model, tokenizer, limits, thinking)
        serve(demo, host, port)


def _check_host(host: str) -> None:
    """Refuse an address that is not this machine's, which the server would try again and again."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
    except OSError as error:
        raise ValueError(
            f"`--host` must be an address of this machine, got {host!r} ({error}). 127.0.0.1 serves this machine "
            "only, 0.0.0.0 every machine that reaches it."
        ) from error
