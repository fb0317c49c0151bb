"""One request through the HTTP API, checked while it is answered."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from thermocline.chaos.answer_check import AnswerCheck, WrongAnswer
from thermocline.chaos.verdicts import SILENCE, TRANSPORT, ClientError
from thermocline.chaos.workload import Known

Ending = Literal["answered", "left", "error", "wrong"]

GAP_S = 0.25
"""Shorter pauses between two events of a stream are not recorded."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How a client behaves: it streams, disconnects after ``leaves_after`` tokens, or sets a deadline."""

    is_stream: bool
    leaves_after: int | None = None
    deadline_ms: int | None = None


@dataclass(slots=True)
class Reply:
    """The result of one attempt. Times are seconds of ``time.monotonic``; a gap is (start, length)."""

    ending: Ending
    started_s: float
    ended_s: float = 0.0
    ttft_s: float = 0.0
    tokens: int = 0
    gaps: list[tuple[float, float]] = field(default_factory=list)
    error: ClientError | None = None
    wrong: str = ""


async def ask(client: httpx.AsyncClient, known: Known, manner: Manner) -> Reply:
    """Send one request and check its answer. Faults of the server or network are in the reply and never raised."""
    reply = Reply("answered", time.monotonic())
    check = AnswerCheck(known)
    body = dict(known.body)
    if manner.deadline_ms is not None:
        body["deadline_ms"] = manner.deadline_ms
    try:
        if manner.is_stream:
            await _stream(client, known, body, manner, check, reply)
        else:
            await _whole(client, known, body, check, reply)
    except WrongAnswer as wrong:
        reply.ending, reply.wrong = "wrong", str(wrong)
    except httpx.ReadTimeout:
        reply.ending, reply.error = "error", ClientError(SILENCE, 0, None, "nothing came for a long time")
    except (httpx.HTTPError, httpx.StreamError) as error:
        reply.ending = "error"
        reply.error = ClientError(TRANSPORT, 0, None, f"{type(error).__name__}: {error}")
    reply.ended_s, reply.tokens = time.monotonic(), check.received
    return reply


async def _whole(
    client: httpx.AsyncClient, known: Known, body: dict[str, Any], check: AnswerCheck, reply: Reply
) -> None:
    response = await client.post(known.endpoint, json=body)
    if response.status_code != httpx.codes.OK:
        reply.ending, reply.error = "error", error_of(response)
        return
    check.event(_parsed(response.text))
    check.done()


async def _stream(
    client: httpx.AsyncClient, known: Known, body: dict[str, Any], manner: Manner, check: AnswerCheck, reply: Reply
) -> None:
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", known.endpoint, json=body) as response:
        if response.status_code != httpx.codes.OK:
            await response.aread()
            reply.ending, reply.error = "error", error_of(response)
            return
        last_s = 0.0
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                check.done()
                continue
            event = _parsed(data)
            if "error" in event:
                reply.ending, reply.error = "error", _error_in(event, 0, None)
                return
            if not check.event(event):
                continue
            now_s = time.monotonic()
            reply.ttft_s = reply.ttft_s or now_s - reply.started_s
            if last_s and now_s - last_s > GAP_S:
                reply.gaps.append((last_s, now_s - last_s))
            last_s = now_s
            if manner.leaves_after is not None and check.received >= manner.leaves_after:
                reply.ending = "left"
                return
        if not check.is_done:
            reply.ending = "error"
            reply.error = ClientError(TRANSPORT, 0, None, "the stream ended before the answer did")


def _parsed(text: str) -> dict[str, Any]:
    try:
        event = json.loads(text)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise WrongAnswer(f"no JSON object: {text[:200]!r}")
    return event


def error_of(response: httpx.Response) -> ClientError:
    """Return the API's error in a response whose status is not 200."""
    try:
        body = response.json()
    except ValueError:
        body = {}
    retry_after = response.headers.get("retry-after", "")
    return _error_in(body, response.status_code, int(retry_after) if retry_after.isdigit() else None)


def _error_in(body: Any, status: int, retry_after_s: int | None) -> ClientError:
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return ClientError(f"http_{status}", status, retry_after_s, str(body)[:200])
    return ClientError(str(error.get("code")), status, retry_after_s, str(error.get("message")))
