"""One case over one connection, and what came back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import httptools

from tests.fuzz.api_cases import Case

PATIENCE_S = 30.0
"""Without an answer for so long, a request that has to be answered hangs."""

GARBAGE_S = 0.25
"""Whoever sends what has no end is not owed an answer; after this the client goes."""


@dataclass
class Response:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    is_complete: bool = False


class _Responses:
    """Callbacks of httptools' parser."""

    def __init__(self) -> None:
        self.all: list[Response] = []
        self.parser = httptools.HttpResponseParser(self)

    def on_message_begin(self) -> None:
        self.all.append(Response())

    def on_header(self, name: bytes, value: bytes) -> None:
        self.all[-1].headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.all[-1].status = self.parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self.all[-1].body += data

    def on_message_complete(self) -> None:
        self.all[-1].is_complete = self.all[-1].status >= 200
        if self.all[-1].status < 200:
            self.all.pop()  # 100 Continue.


@dataclass(frozen=True)
class Outcome:
    """``fault`` is "" where the connection went as it should."""

    responses: list[Response]
    fault: str = ""


async def exchange(host: str, port: int, case: Case) -> Outcome:
    """Send ``case`` over a new connection and read what it is owed."""
    reader, writer = await asyncio.open_connection(host, port)
    got = _Responses()
    try:
        try:
            for piece in case.pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if case.ending == "half_closed":
                writer.write_eof()
        except (ConnectionError, RuntimeError):
            pass  # The server has said what it had to, which may still be there to read.
        if case.ending == "aborted":
            return Outcome([])
        fault = await _read(reader, case, got)
        return Outcome([one for one in got.all if one.is_complete or case.is_head or case.is_endless], fault)
    finally:
        writer.transport.abort()


async def _read(reader: asyncio.StreamReader, case: Case, got: _Responses) -> str:
    """Read until the case has what it is owed; what is wrong, or ""."""
    patience_s = GARBAGE_S if case.ending == "garbage" else PATIENCE_S
    try:
        async with asyncio.timeout(patience_s):
            while not _is_answered(case, got.all):
                data = await reader.read(2**16)
                if not data:
                    break
                got.parser.feed_data(data)
    except TimeoutError:
        return "" if case.ending == "garbage" else "is not answered"
    except ConnectionError:
        pass
    except httptools.HttpParserError as error:
        return "" if case.is_head else f"is answered with what is no HTTP: {error}"
    if case.ending != "answered" or _is_answered(case, got.all):
        return ""
    # The server may end a connection that it could not make sense of; it says so in its last answer.
    closed = got.all and got.all[-1].is_complete and got.all[-1].headers.get("connection") == "close"
    return "" if closed else "loses its connection before it is answered"


def _is_answered(case: Case, responses: list[Response]) -> bool:
    if case.is_head:
        return bool(responses and responses[-1].status)
    if case.is_endless and responses and (responses[0].body or responses[0].status >= 400):
        return True
    return sum(one.is_complete for one in responses) >= case.answers
