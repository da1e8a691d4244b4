# SPDX-License-Identifier: Apache-2.0
"""The demo's endpoints for programs: the same comparison as on the screen, as plain values.

Annotations are not postponed here: gradio reads those of the endpoints as they are.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import gradio as gr

from ..common.files import shown_name
from .records import Progress, Side
from .session import Session
from .settings import RunSettings


logger = logging.getLogger("transformers.dspark_hf.demo")

# Whatever runs a model shares this queue, in which one request at a time is served.
MODELS = {"concurrency_id": "models", "concurrency_limit": 1}
DEFAULT_NEW_TOKENS = 64  # where a program names no other, and the bound allows it
# What an unexpected error is told as; the log has the rest.
UNEXPECTED = "The server failed on this request, which is a fault of the demo. Its log says more."


def add_endpoints(session: Session) -> None:
    """Add `/compare` and `/pair` to the app that is being built."""

    def compare(
        prompt: str,
        raw: bool = False,
        temperature: float = 0.0,
        top_p: float = 1.0,
        max_new_tokens: int | None = None,
        num_assistant_tokens: int | None = None,
        schedule: str | None = None,
        seed: int = 0,
        enable_thinking: bool | None = None,
    ) -> Iterator[dict[str, Any]]:
        if max_new_tokens is None:
            max_new_tokens = min(DEFAULT_NEW_TOKENS, session.limits.max_new_tokens)
        settings = RunSettings(
            prompt, raw, temperature, top_p, max_new_tokens, num_assistant_tokens, schedule, seed, enable_thinking
        )
        try:
            with contextlib.closing(session.compare(settings)) as steps:
                for progress in steps:
                    yield as_values(progress)
        except ValueError as error:
            raise gr.Error(str(error), print_exception=False) from error
        except Exception as error:
            logger.exception("A comparison failed.")
            raise gr.Error(UNEXPECTED, print_exception=False) from error

    def pair() -> dict[str, Any]:
        return {
            "target": shown_name(session.pair.target.config.name_or_path),
            "draft": shown_name(session.pair.draft.config.name_or_path),
            "dtype": session.pair.dtype_name,
            "num_draft_slots": session.pair.num_slots,
            "thinking": session.pair.thinks,
            "limits": dict(vars(session.limits)),
        }

    gr.api(
        compare,
        api_name="compare",
        api_description="Generate without and with DSpark. Streams snapshots; the last one has the phase done.",
        **MODELS,
    )
    gr.api(pair, api_name="pair", api_description="The models and the bounds of a request.", queue=False)


def as_values(progress: Progress) -> dict[str, Any]:
    """A comparison as JSON values."""
    return {
        "phase": progress.phase,
        "identical": progress.identical,
        "first_difference": progress.first_difference,
        "speedup": progress.speedup,
        "plain": _side_values(progress.plain),
        "dspark": _side_values(progress.dspark),
    }


def _side_values(side: Side | None) -> dict[str, Any] | None:
    if side is None:
        return None
    values: dict[str, Any] = {
        "text": side.text,
        "num_tokens": len(side.tokens),
        "seconds": side.seconds,
        "tokens_per_s": side.tokens_per_s,
        "finished": side.finished,
    }
    if side.rounds:
        stats = side.stats
        values |= {
            "num_rounds": stats.num_rounds,
            "accepted_length": stats.accepted_length,
            "num_verified": stats.num_verified,
            "num_drafted": stats.num_drafted,
            "num_accepted": sum(record.num_accepted for record in side.rounds),
            "num_copied": stats.num_copied,
            "num_copied_accepted": stats.num_copied_accepted,
            "origins": [token.origin for token in side.tokens],
        }
    return values
