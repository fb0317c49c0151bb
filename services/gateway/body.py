"""Reading a request body within its bound, and decoding it to a schema."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TypeVar

import msgspec
import numpy as np
from starlette.requests import ClientDisconnect, Request

from services.gateway.failures import error_of_body
from services.gateway.listening_metrics import BODY_BYTES
from shared.errors import InvalidRequest, PayloadTooLarge, RequestCancelled, TooManyConnections

T = TypeVar("T")

Body = bytes | bytearray
"""Not copied: that takes as long as reading it."""

_DECODERS: dict[type, msgspec.json.Decoder[object]] = {}


MOST_VALUES = 2**20
"""Values of JSON in a body, an object or array counted six times, and escaped characters: what the decoder makes of
more of them would keep the event loop for too long. A prompt of a million token ids has no more.
"""
SMALL_BYTES = 64 * 1024
"""A body of so many bytes is held whatever the others take: long ones that come slowly must not shut out ordinary
ones. The number of connections bounds what they take all together.
"""
RETRY_AFTER_MS = 1_000
_COMMA, _BRACE, _BACKSLASH = b",{\\"
_COUNTED_BYTES = 2**18
"""A shorter body cannot have so many that it matters."""
_APART_BYTES = 2**20
"""The values of a longer body are counted in a thread, which costs a third of a millisecond."""
_TURNS_BETWEEN = 8
"""Turns of the event loop between two long bodies. With one turn, whatever takes several, as a token on its way from
the broker to its client does, waited for a decoding in each of them.
"""


class Bodies:
    """Reads bodies, each within ``max_bytes`` and ``timeout_s`` seconds, all that are held within ``most_bytes``."""

    def __init__(self, max_bytes: int, timeout_s: float, most_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._most_bytes = most_bytes
        self._decoding = asyncio.Lock()
        self.held_bytes = 0  # Of all bodies that have more than SMALL_BYTES.

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[Body]:
        """Read the whole body, held for as long as the block. Bounds hold while reading, so a body without
        content-length cannot exceed them either.

        Raises PayloadTooLarge, InvalidRequest (another type than JSON, encoded, or too slow), RequestCancelled,
        TooManyConnections.
        """
        _check_type(request)
        encoding = request.headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            raise InvalidRequest(f"content-encoding {encoding!r} is not supported")
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._max_bytes:
            raise _too_large(self._max_bytes)
        received = bytearray()
        try:
            await self._receive(request, received)
            yield received
        finally:
            self._note(-_counted(len(received)))

    async def decode(self, body: Body, schema: type[T]) -> T:
        """:func:`decode_body`; of long ones, one at a time, between which the event loop does what else there is.

        Raises PayloadTooLarge for too many values.
        """
        if len(body) <= _COUNTED_BYTES:
            return decode_body(body, schema)
        await self._decoding.acquire()
        try:
            if len(body) > _APART_BYTES:
                # Counting lets go of the interpreter's lock again and again, and the event loop would wait each time
                # until other threads let go of it.
                await asyncio.to_thread(_check_values, body)
            else:
                _check_values(body)
            return decode_body(body, schema)
        finally:
            self._end_decoding(_TURNS_BETWEEN)

    def _end_decoding(self, turns: int) -> None:
        """Let the next long body be decoded after so many turns. This one's request goes on at once."""
        if turns:
            asyncio.get_running_loop().call_soon(self._end_decoding, turns - 1)
        else:
            self._decoding.release()

    async def _receive(self, request: Request, received: bytearray) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                async for part in request.stream():
                    self._hold(_counted(len(received) + len(part)) - _counted(len(received)))
                    received += part
                    if len(received) > self._max_bytes:
                        raise _too_large(self._max_bytes)
        except TimeoutError as error:
            slow = InvalidRequest(f"the body was not complete within {self._timeout_s:g} s", code="body_timeout")
            slow.status = 408
            raise slow from error
        except ClientDisconnect as error:
            raise RequestCancelled("the client went away", code="client_disconnected") from error

    def _hold(self, more: int) -> None:
        if self.held_bytes + more > self._most_bytes:
            raise TooManyConnections(
                f"bodies of requests take {self.held_bytes} of {self._most_bytes} bytes here; try again shortly",
                retry_after_ms=RETRY_AFTER_MS,
            )
        self._note(more)

    def _note(self, more: int) -> None:
        self.held_bytes += more
        BODY_BYTES.set(self.held_bytes)


def _check_type(request: Request) -> None:
    """Other types of content can be sent by any page that a browser shows, without asking whether it may."""
    told = request.headers.get("content-type", "")
    has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
    media_type = told.partition(";")[0].strip().lower()
    if media_type in ("application/json", "") and (media_type or not has_body):
        return
    if media_type.startswith("application/") and media_type.endswith("+json"):
        return
    wrong = InvalidRequest(
        f"content-type must be application/json, not {told[:64] or 'left out'}", code="unsupported_content_type"
    )
    wrong.status = 415
    raise wrong


def _counted(nbytes: int) -> int:
    """Return the bytes that a body of this size counts for."""
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
    # Commas and brackets within texts count as well: a text that has a million of them fits no model either. A part of
    # the body after the other, since counting takes a while where there are many.
    found = 0
    for start in range(0, len(body), _COUNTED_BYTES):
        part = np.frombuffer(body, np.uint8, min(_COUNTED_BYTES, len(body) - start), start)
        # With bit 5 set "[" is "{", and nothing else is.
        found += int(np.count_nonzero(part == _COMMA)) + 6 * int(np.count_nonzero(part | 0x20 == _BRACE))
        found += int(np.count_nonzero(part == _BACKSLASH))
        if found > MOST_VALUES:
            raise PayloadTooLarge(f"the request body has more than {MOST_VALUES} values and escaped characters")


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is larger than {max_bytes} bytes")
