# SPDX-License-Identifier: Apache-2.0
"""Ends a streamer exactly once, also if the call fails before the decoding loop gets it."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass
class _Duty:
    """The streamer of the running call, and whether it must be ended if the call fails."""

    streamer: Any
    is_open: bool = True


_duty: contextvars.ContextVar[_Duty | None] = contextvars.ContextVar("streamer_to_end", default=None)


@contextlib.contextmanager
def ended_on_failure(streamer: Any) -> Iterator[None]:
    """End a streamer when the block fails, unless the decoding loop claimed it; the block's error is re-raised."""
    outer = _duty.get()
    if streamer is None or (outer is not None and outer.streamer is streamer):  # a recipe's call within the call
        yield
        return
    duty = _Duty(streamer)
    token = _duty.set(duty)
    try:
        yield
    except BaseException:
        if duty.is_open:
            end_quietly(streamer)
        raise
    finally:
        _duty.reset(token)


def claim(streamer: Any) -> None:
    """Take responsibility for ending the streamer of the call."""
    duty = _duty.get()
    if duty is not None and duty.streamer is streamer:
        duty.is_open = False


def end_quietly(streamer: Any) -> None:
    """End a streamer while an error is being raised; an error of the streamer must not hide it."""
    with contextlib.suppress(Exception):
        streamer.end()
