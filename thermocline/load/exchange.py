"""One streaming request over HTTP, with the time of every message.

``thermocline.client`` reads the same streams more comfortably; this code is fast, because time that the client spends
on one message makes another look late.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from shared.undecodable import UNDECODABLE
from thermocline.client import RequestError
from thermocline.load.clock import Clock
from thermocline.load.http_client import OK, Http, Response
from thermocline.load.prompts import Said
from thermocline.load.reply import Reply

_MAX_EVENT_BYTES = 16 * 2**20


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Event)


class Refused(RequestError):
    """An answer with an error status."""

    def __init__(self, code: str, message: str, status: int, retry_after_s: float | None) -> None:
        """Keep the HTTP ``status``, and ``retry_after_s``, which is None where the server does not say.

        ``code`` is the API's, or ``http_`` and the status where the API has none.
        """
        super().__init__(code, message)
        self.status = status
        self.retry_after_s = retry_after_s


class EventSplitter:
    """A parser of server-sent events whose data is on one line, as all these servers send them."""

    def __init__(self) -> None:
        """Begin at the start of a stream."""
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of all events that are now complete. Raises RequestError for one of more than 16 MiB."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise RequestError("bad_stream", f"an event of more than {_MAX_EVENT_BYTES} bytes")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class AnswerFold:
    """A fold of events into a reply. Pure: times are arguments."""

    def __init__(self, reply: Reply) -> None:
        """Fill ``reply`` as events arrive; the answer itself is set at the end of the stream."""
        self._reply = reply
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._messages = 0
        self._has_usage = False
        self.is_finished = False
        self.is_over = False

    def event(self, data: bytes, now_s: float) -> None:
        """Fold one event's data. Raises RequestError for an error in the stream, or for invalid data."""
        try:
            event = _DECODER.decode(data)
        except UNDECODABLE as error:
            raise RequestError("bad_stream", f"{error}: {data[:200]!r}") from error
        if event.error is not None:
            raise RequestError(*_error_of(event.error, "error_in_stream"))
        has_tokens = False
        for choice in event.choices:
            text = choice.text or ""
            thought = ""
            if choice.delta is not None:
                text = choice.delta.content or ""
                thought = choice.delta.reasoning_content or ""
            if text:
                self._texts.append(text)
            if choice.token_ids:
                self._ids += choice.token_ids
            has_tokens |= bool(text or thought or choice.token_ids)
            self.is_finished |= choice.finish_reason is not None
        if has_tokens:
            self._tokens_came(now_s)
        if event.usage is not None:
            self._has_usage = True
            details = event.usage.prompt_tokens_details or {}
            cached = details.get("cached_tokens")
            self._reply.prompt_tokens = event.usage.prompt_tokens
            self._reply.output_tokens = event.usage.completion_tokens
            self._reply.cached_tokens = cached if isinstance(cached, int) else None

    def end(self, now_s: float) -> None:
        """End the stream. Raises RequestError where no finish reason has come."""
        reply, self.is_over = self._reply, True
        reply.ended_s = now_s
        reply.said = Said(self._ids, "".join(self._texts))
        if not self.is_finished:
            raise RequestError("stream_ended_early", "the stream ended before the answer did")
        if not reply.first_s:
            # Tokens without text, such as an end-of-text token alone: only the end of the stream shows them.
            reply.first_s = reply.last_s = now_s
        if not self._has_usage:
            reply.output_tokens = len(self._ids) or self._messages

    def _tokens_came(self, now_s: float) -> None:
        reply = self._reply
        self._messages += 1
        if reply.first_s:
            reply.gaps_s.append(now_s - reply.last_s)
        else:
            reply.first_s = now_s
        reply.last_s = now_s


async def exchange(http: Http, path: str, body: bytes, reply: Reply, clock: Clock, timeout_s: float) -> None:
    """POST ``body`` and fold the answer into ``reply``.

    Raises Refused for an error status, RequestError for other failures, with the code ``timeout`` where no whole answer
    came within ``timeout_s``.
    """
    fold, splitter = AnswerFold(reply), EventSplitter()

    def read(data: bytes, now_s: float) -> None:
        for event in splitter.feed(data):
            if event == b"[DONE]":
                fold.end(now_s)
            elif not fold.is_over:
                fold.event(event, now_s)

    try:
        async with asyncio.timeout(timeout_s):
            response = await http.send("POST", path, body, read)
    except TimeoutError as error:
        if not fold.is_finished:
            raise RequestError("timeout", f"no whole answer within {timeout_s:g} s") from error
    except RequestError:
        # A server that answered and then fails to hang up has answered.
        if not fold.is_over or not fold.is_finished:
            raise
    else:
        if response.status != OK:
            raise _refusal(response)
    if not fold.is_over:
        # Some servers just close when they are done.
        fold.end(clock.now_s())


def _refusal(response: Response) -> Refused:
    try:
        body = msgspec.json.decode(response.body)
    except UNDECODABLE:
        body = None
    # Some servers put the error's fields at the top, others below "error".
    error = body.get("error", body) if isinstance(body, dict) else response.body[:200].decode("utf-8", "replace")
    code, message = _error_of(error, f"http_{response.status}")
    wait = response.headers.get("retry-after", "")
    retry_after_s = float(wait) if wait.isascii() and wait.isdigit() else None
    return Refused(code, message, response.status, retry_after_s)


def _error_of(error: Any, fallback: str) -> tuple[str, str]:
    """Return code and message of an error object; ``fallback`` replaces a code that is only a number."""
    if not isinstance(error, dict):
        return fallback, str(error)
    code = error.get("code")
    if not isinstance(code, str) or not code or code.isdigit():
        code = fallback
    return code, str(error.get("message"))
