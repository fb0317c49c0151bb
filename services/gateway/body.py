"""Reading a request body within its bound, and decoding it to a schema."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from services.gateway.failures import error_of_body
from shared.errors import InvalidRequest, PayloadTooLarge, RequestCancelled

T = TypeVar("T")

_DECODERS: dict[type, msgspec.json.Decoder[object]] = {}


MOST_VALUES = 2**21
"""Values of JSON in a body, an object or array counted four times: what the decoder makes of more of them would keep
the event loop for longer than a twentieth of a second. A prompt of two million token ids has no more.
"""
_COUNTED_BYTES = 2**18
"""A shorter body cannot have so many that it matters."""


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body. The bound holds while reading, so a body without content-length cannot exceed it either.

    Raises PayloadTooLarge, InvalidRequest (encoded body, or too slow), RequestCancelled.
    """
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise InvalidRequest(f"content-encoding {encoding!r} is not supported")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    received = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                received += part
                if len(received) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError as error:
        slow = InvalidRequest(f"the body was not complete within {timeout_s:g} s", code="body_timeout")
        slow.status = 408
        raise slow from error
    except ClientDisconnect as error:
        raise RequestCancelled("the client went away", code="client_disconnected") from error
    return bytes(received)


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
