# SPDX-License-Identifier: Apache-2.0
"""Client of an OpenAI-compatible server: requests, answers, and the refusals that end a run."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..common.conversations import answer_fields
from ..common.jsonl import parse_json
from .sampling import SamplingSettings


TIMEOUT_S = 600
LONGEST_PAUSE_S = 30
# Statuses that say nothing about the prompt: of the key and the address, and of a server that may answer later.
REMEDIES = {
    401: "Pass the server's key with `--api-key`.",
    403: "Pass a key that may use the model with `--api-key`.",
    404: "Check `--server` (it often ends in /v1) and that `--target` is the model's name at the server.",
}
KEPT = "Rows so far are kept."
PASSING = (408, 409, 425, 429)
LONGEST_SENTENCE = 400
SENTENCE_FIELDS = ("error", "message", "detail", "msg", "errors", "error_description")


@dataclass(frozen=True)
class Refusal:
    """A request that a server rejects as wrong."""

    status: int  # the HTTP status, 4xx
    reason: str  # the server's own words


@dataclass(frozen=True)
class ServerAnswer:
    """An answer."""

    message: dict[str, Any]  # the assistant's turn, with `reasoning_content` and `tool_calls` where it has any
    finish_reason: str  # why it ended


@dataclass(frozen=True)
class AnswerServer:
    """An OpenAI-compatible server, and how it is asked."""

    url: str  # base URL
    model: str  # name of the target there
    sampling: SamplingSettings  # how answers are sampled; what is None is left to the server
    enable_thinking: bool | None = None  # the chat template's thinking switch
    retries: int = 5  # further tries after a failure that may pass, with growing pauses
    api_key: str | None = None  # sent as a bearer token

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ValueError(f"`retries` must be >= 0, got {self.retries}.")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"A server's address must begin with http:// or https://, got {self.url!r}.")

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of every request besides its conversation."""
        sampling = asdict(self.sampling)
        body = {"model": self.model, "max_tokens": sampling.pop("max_new_tokens")}
        body |= {name: value for name, value in sampling.items() if value is not None}
        if self.enable_thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.enable_thinking}
        return body

    def ask(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> ServerAnswer | Refusal:
        """One answer."""
        body = self.arguments | {"messages": [_for_server(turn) for turn in messages]}
        if tools:
            body["tools"] = list(tools)
        failure = ""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(min(2 ** (attempt - 1), LONGEST_PAUSE_S))
            status, text = self._post(json.dumps(body).encode())
            if status in REMEDIES:
                raise RuntimeError(
                    f"The server at {self.url} said {status} ({_sentence(text)}). {REMEDIES[status]} {KEPT}"
                )
            if status is not None and 400 <= status < 500 and status not in PASSING:
                return Refusal(status, _sentence(text))
            answer = _answer(text) if status == 200 else None
            if answer is not None:
                return answer
            failure = _sentence(text) if status is None else f"{status}: {_sentence(text)}"
        raise RuntimeError(
            f"The server at {self.url} did not answer after {self.retries + 1} tries ({failure}). {KEPT} Run "
            "the same command again once it is up."
        )

    def _post(self, data: bytes) -> tuple[int | None, str]:
        """Status and text of a reply; no status, and what happened, where there was none."""
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(f"{self.url.rstrip('/')}/chat/completions", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                return response.status, response.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace") or str(error.reason)
        except (OSError, http.client.HTTPException) as error:
            return None, str(error) or type(error).__name__


def _answer(text: str) -> ServerAnswer | None:
    """The answer in a reply, `None` if it holds none."""
    try:
        choice = parse_json(text)["choices"][0]
        message, reason = choice["message"], choice.get("finish_reason") or "stop"
        content, said = message.get("content") or "", answer_fields(message)
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    texts = (content, reason, said.get("reasoning_content", ""))
    if not all(isinstance(value, str) for value in texts) or not isinstance(said.get("tool_calls", []), list):
        return None
    return ServerAnswer({"role": "assistant", "content": content} | said, reason)


def _sentence(text: str) -> str:
    """The error text of a reply, wherever the server puts it."""
    try:
        said = json.loads(text)
    except ValueError:
        said = text
    while not isinstance(said, str):
        if isinstance(said, list) and said:
            said = said[0]
        elif isinstance(said, dict) and said.keys() & set(SENTENCE_FIELDS):
            said = next(said[name] for name in SENTENCE_FIELDS if name in said)
        else:
            said = json.dumps(said)
    words = " ".join(said.split())
    return words if len(words) <= LONGEST_SENTENCE else words[: LONGEST_SENTENCE - 3] + "..."


def _for_server(turn: dict[str, Any]) -> dict[str, Any]:
    """A turn as the protocol has it: the arguments of calls as text."""
    if not turn.get("tool_calls"):
        return turn
    calls = [dict(call) for call in turn["tool_calls"]]
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict) and not isinstance(function.get("arguments", ""), str):
            call["function"] = function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return turn | {"tool_calls": calls}
