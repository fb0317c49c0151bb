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
    """The body as ``schema``. Raises InvalidRequest that names the field at fault."""
    decoder = _DECODERS.get(schema)
    if decoder is None:
        decoder = _DECODERS[schema] = msgspec.json.Decoder(schema)
    try:
        body.decode()  # Fields that the schema ignores must be UTF-8 as well.
        decoded: T = decoder.decode(body)  # type: ignore[assignment]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise error_of_body(error) from error
    return decoded


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is larger than {max_bytes} bytes")
