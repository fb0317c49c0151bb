"""Reading a request body within its bound, and decoding it to a schema."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from services.gateway.failures import error_of_body
from services.gateway.listening_metrics import BODY_BYTES
from shared.errors import InvalidRequest, PayloadTooLarge, RequestCancelled, TooManyConnections

T = TypeVar("T")

_DECODERS: dict[type, msgspec.json.Decoder[object]] = {}


MOST_VALUES = 2**21
"""Values of JSON in a body, an object or array counted four times: what the decoder makes of more of them would keep
the event loop for longer than a twentieth of a second. A prompt of two million token ids has no more.
"""
SMALL_BYTES = 64 * 1024
"""A body of so many bytes is held whatever the others take: long ones that come slowly must not shut out ordinary
ones. The number of connections bounds what they take all together.
"""
RETRY_AFTER_MS = 1_000
_COUNTED_BYTES = 2**18
"""A shorter body cannot have so many that it matters."""


class Bodies:
    """Reads bodies, each within ``max_bytes`` and ``timeout_s`` seconds, all that are held within ``most_bytes``."""

    def __init__(self, max_bytes: int, timeout_s: float, most_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._most_bytes = most_bytes
        self.held_bytes = 0  # Of all bodies that have more than SMALL_BYTES.

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body, held for as long as the block. Bounds hold while reading, so a body without content-length
        cannot exceed them either.

        Raises PayloadTooLarge, InvalidRequest (encoded body, or too slow), RequestCancelled, TooManyConnections.
        """
        encoding = request.headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            raise InvalidRequest(f"content-encoding {encoding!r} is not supported")
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._max_bytes:
            raise _too_large(self._max_bytes)
        received = bytearray()
        try:
            await self._receive(request, received)
            yield bytes(received)
        finally:
            self._note(-_counted(len(received)))

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


def _counted(nbytes: int) -> int:
    """What a body of so many bytes counts for."""
    return nbytes if nbytes > SMALL_BYTES else 0


def decode_body(body: bytes, schema: type[T]) -> T:
    """The body as ``schema``. Raises InvalidRequest, which names the field at fault, or PayloadTooLarge for too many
    values.
    """
    if len(body) > _COUNTED_BYTES:
        _check_values(body)
    decoder = _DECODERS.get(schema)
    if decoder is None:
        decoder = _DECODERS[schema] = msgspec.json.Decoder(schema)
    try:
        body.decode()  # Fields that the schema ignores must be UTF-8 as well.
        decoded: T = decoder.decode(body)  # type: ignore[assignment]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise error_of_body(error) from error
    return decoded


def _check_values(body: bytes) -> None:
    # Commas and brackets within texts count as well: a text that has two million of them fits no model either.
    if body.count(b",") + 4 * (body.count(b"{") + body.count(b"[")) > MOST_VALUES:
        raise PayloadTooLarge(f"the request body has more than {MOST_VALUES} values")


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is larger than {max_bytes} bytes")
