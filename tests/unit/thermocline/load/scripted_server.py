"""Servers that tests script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.unit.thermocline.load.virtual_time import VirtualTime
from thermocline.client import RequestError
from thermocline.load.http_client import OK, OnData, Response

CARDS = {"data": [{"id": "m", "max_model_len": 100, "vocab_size": 300}, {"id": "other"}]}

TOKEN = {"choices": [{"index": 0, "text": "a", "token_ids": [5], "finish_reason": None}]}
LAST = {"choices": [{"index": 0, "text": "b", "token_ids": [6], "finish_reason": "length"}]}


def usage(prompt: int, completion: int, **more: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **more}}


def sse(*events: dict[str, Any] | str) -> bytes:
    """The bytes of a stream, with a comment before them as a keep-alive has it."""
    lines = [f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events]
    return b": waiting\n\n" + "".join(lines).encode()


WHOLE = sse(TOKEN, LAST, usage(10, 2), "[DONE]")


@dataclass(frozen=True)
class Answer:
    """``body`` comes in these pieces; ``hangs`` says nothing more after them, and never ends."""

    body: tuple[bytes, ...] = (WHOLE,)
    status: int = OK
    headers: dict[str, str] = field(default_factory=dict)
    hangs: bool = False


def stream(*events: dict[str, Any] | str) -> Answer:
    return Answer((sse(*events),))


def refusal(status: int, code: str | None = None, **headers: str) -> Answer:
    body = json.dumps({"error": {"message": "no", "code": code}}).encode()
    return Answer((body,), status, {name.replace("_", "-"): value for name, value in headers.items()})


Script = Callable[[str, dict[str, Any]], Answer | RequestError]


class ScriptedHttp:
    """Implements ``thermocline.load.http_client.Http``: a script answers a path and a body; models are known."""

    def __init__(self, script: Script, clock: VirtualTime, models: Answer | RequestError | None = None) -> None:
        self._script = script
        self._clock = clock
        self._models = models or Answer((json.dumps(CARDS).encode(),))

    async def send(self, method: str, path: str, body: bytes, on_data: OnData | None) -> Response:
        answer = self._models if method == "GET" else self._script(path, json.loads(body))
        if isinstance(answer, RequestError):
            raise answer
        if answer.status != OK or on_data is None:
            return Response(answer.status, answer.headers, b"".join(answer.body))
        for piece in answer.body:
            on_data(piece, self._clock.now_s())
        if answer.hangs:
            await asyncio.Event().wait()
        return Response(OK, answer.headers)
