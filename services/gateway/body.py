"""Reading a request body within its bound, and decoding it to a schema."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import msgspec
import numpy as np
from starlette.requests import ClientDisconnect, Request

from services.gateway.body_encoding import BodyDecoder, decoder_of
from services.gateway.failures import error_of_body
from services.gateway.listening_metrics import BODY_BYTES
from shared.errors import InvalidRequest, PayloadTooLarge, RequestCancelled, TooManyConnections

T = TypeVar("T")

Body = bytes | bytearray
"""A bytearray is not copied to bytes: that takes as long as reading it."""

_DECODERS: dict[type, msgspec.json.Decoder[object]] = {}


MOST_VALUES = 2**20
"""Limit on the values of JSON in a body (an object or array counts six times) plus escaped characters. Decoding more
would block the event loop for too long. A prompt of a million token ids stays below it.
"""
SMALL_BYTES = 64 * 1024
"""A body up to this size is always accepted: long bodies that arrive slowly must not shut out ordinary ones. The number
of connections bounds the memory of all small bodies together.
"""
RETRY_AFTER_MS = 1_000
_COMMA, _BRACE, _BACKSLASH = b",{\\"
_COUNTED_BYTES = 2**18
"""The values of a shorter body are not counted: it cannot have too many."""
_APART_BYTES = 2**20
"""The values of a longer body are counted in a thread, which costs a third of a millisecond."""
_TURNS_BETWEEN = 8
"""Turns of the event loop between two long bodies. With one turn, work that takes several, such as a token from the
broker to its client, waited for a decoding in each of them.
"""


class Bodies:
    """A reader of request bodies, with bounds on each and on the memory of all that are held."""

    def __init__(self, max_bytes: int, timeout_s: float, most_bytes: int) -> None:
        """Accept bodies of up to ``max_bytes`` that arrive within ``timeout_s`` seconds.

        ``most_bytes`` bounds all held bodies together; those of up to SMALL_BYTES are not counted. One tenant holds at
        most half of it, or one body where that is more.
        """
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._most_bytes = most_bytes
        self._decoding = asyncio.Lock()
        self.held_bytes = 0  # Total of the bodies above SMALL_BYTES.
        self._held_by: Counter[str] = Counter()  # The same by tenant, where callers have keys.

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[Body]:
        """Read the whole body, decoded, and count it as held within the block.

        Bounds hold while reading, so neither a body without content-length nor a compressed one can exceed them.

        Raises PayloadTooLarge, InvalidRequest (not JSON, wrongly encoded, or too slow), RequestCancelled,
        TooManyConnections.
        """
        _check_type(request)
        decoder = decoder_of(request.headers.get("content-encoding", ""))
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._max_bytes:
            raise _too_large(self._max_bytes)
        received, tenant = bytearray(), request.scope.get("state", {}).get("tenant", "")
        try:
            await self._receive(request, decoder, received, tenant)
            yield received
        finally:
            self._note(-_counted(len(received)), tenant)

    async def decode(self, body: Body, schema: type[T]) -> T:
        """Decode as :func:`decode_body` does, within the bounds of :meth:`parsed`."""
        return await self.parsed(body, lambda: decode_body(body, schema))

    async def parsed(self, body: Body, parse: Callable[[], T]) -> T:
        """Return what ``parse`` makes of a body; long ones one at a time, with turns of the event loop between them.

        Raises PayloadTooLarge for too many values.
        """
        if len(body) <= _COUNTED_BYTES:
            return parse()
        await self._decoding.acquire()
        try:
            if len(body) > _APART_BYTES:
                # Counting releases the interpreter's lock again and again, and the event loop would wait each time
                # until other threads release it.
                await asyncio.to_thread(_check_values, body)
            else:
                _check_values(body)
            return parse()
        finally:
            self._end_decoding(_TURNS_BETWEEN)

    def _end_decoding(self, turns: int) -> None:
        """Let the next long body be decoded after so many turns; this body's request continues at once."""
        if turns:
            asyncio.get_running_loop().call_soon(self._end_decoding, turns - 1)
        else:
            self._decoding.release()

    async def _receive(self, request: Request, decoder: BodyDecoder | None, received: bytearray, tenant: str) -> None:
        arrived = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                async for part in request.stream():
                    arrived += len(part)
                    if arrived > self._max_bytes:  # What is compressed may have much that decodes to nothing.
                        raise _too_large(self._max_bytes)
                    for piece in (part,) if decoder is None else decoder.pieces(part):
                        self._hold(_counted(len(received) + len(piece)) - _counted(len(received)), tenant)
                        received += piece
                        if len(received) > self._max_bytes:
                            raise _too_large(self._max_bytes, code="request_body_too_large_after_decoding")
                        if decoder is not None:
                            await asyncio.sleep(0)  # A small part may have many pieces.
                if decoder is not None:
                    decoder.end()
        except TimeoutError as error:
            raise InvalidRequest(
                f"the body was not complete within {self._timeout_s:g} s", code="body_timeout", status=408
            ) from error
        except ClientDisconnect as error:
            raise RequestCancelled("the client went away", code="client_disconnected") from error

    def _hold(self, more: int, tenant: str) -> None:
        held, most, whose = self.held_bytes, self._most_bytes, "request bodies"
        own_most = max(most // 2, self._max_bytes)
        if tenant and self._held_by[tenant] + more > own_most:
            held, most, whose = self._held_by[tenant], own_most, "request bodies of your key's tenant"
        if held + more > most:
            raise TooManyConnections(
                f"{whose} take {held} of {most} bytes here; try again shortly", retry_after_ms=RETRY_AFTER_MS
            )
        self._note(more, tenant)

    def _note(self, more: int, tenant: str) -> None:
        if not more:
            return
        self.held_bytes += more
        BODY_BYTES.set(self.held_bytes)
        if tenant:
            self._held_by[tenant] += more
            if not self._held_by[tenant]:
                del self._held_by[tenant]


def _check_type(request: Request) -> None:
    """Raise InvalidRequest (415) unless the body is JSON: a browser lets any page send other types without asking."""
    told = request.headers.get("content-type", "")
    has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
    media_type = told.partition(";")[0].strip().lower()
    if media_type in ("application/json", "") and (media_type or not has_body):
        return
    if media_type.startswith("application/") and media_type.endswith("+json"):
        return
    raise InvalidRequest(
        f"content-type must be application/json, not {told[:64] or 'left out'}",
        code="unsupported_content_type",
        status=415,
    )


def _counted(nbytes: int) -> int:
    """Return the bytes that a body of this size counts towards the total: 0 up to SMALL_BYTES."""
    return nbytes if nbytes > SMALL_BYTES else 0


def decode_body(body: Body, schema: type[T]) -> T:
    """Decode the body as ``schema``. Raises InvalidRequest, which names the field at fault."""
    decoder = _DECODERS.get(schema)
    if decoder is None:
        decoder = _DECODERS[schema] = msgspec.json.Decoder(schema)
    try:
        if not body.isascii():
            body.decode()  # Fields that the schema ignores must be UTF-8 as well.
        decoded: T = decoder.decode(body)  # type: ignore[assignment]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise error_of_body(error) from error
    return decoded


def _check_values(body: Body) -> None:
    # Commas and brackets within texts count as well: a text that has a million of them fits no model either. The body
    # is counted in parts, so that counting ends early where there are too many.
    found = 0
    for start in range(0, len(body), _COUNTED_BYTES):
        part = np.frombuffer(body, np.uint8, min(_COUNTED_BYTES, len(body) - start), start)
        # With bit 5 set "[" is "{", and nothing else is.
        found += int(np.count_nonzero(part == _COMMA)) + 6 * int(np.count_nonzero(part | 0x20 == _BRACE))
        found += int(np.count_nonzero(part == _BACKSLASH))
        if found > MOST_VALUES:
            raise PayloadTooLarge(f"the request body has more than {MOST_VALUES} values and escaped characters")


def _too_large(max_bytes: int, code: str | None = None) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is larger than {max_bytes} bytes", code=code)
