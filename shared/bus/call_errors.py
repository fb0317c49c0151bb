"""Errors of call handlers on the wire: the caller gets them typed as they were raised."""

from __future__ import annotations

import msgspec

from shared.errors import InternalError, ThermoclineError, TransportError, error_for_code
from shared.undecodable import UNDECODABLE

ERROR_HEADER = "tc-error"
"""Header of a reply whose body is an error and not an answer."""


class CallError(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a reply that is an error."""

    code: str
    message: str
    param: str | None = None
    retry_after_ms: int = 0


def encode_error(error: ThermoclineError) -> bytes:
    """Return the reply body for ``error``."""
    return msgspec.msgpack.encode(
        CallError(code=error.code, message=error.message, param=error.param, retry_after_ms=error.retry_after_ms)
    )


def decode_error(body: bytes) -> ThermoclineError:
    """Return the error to raise at the caller; for an invalid body a TransportError."""
    try:
        told = msgspec.msgpack.decode(body, type=CallError)
    except UNDECODABLE:
        return TransportError("a call failed and its error cannot be decoded")
    error = error_for_code(told.code, told.message, retry_after_ms=told.retry_after_ms)
    error.param = told.param
    return error


def as_call_error(error: Exception) -> ThermoclineError:
    """Return the error that a caller sees: our own errors as they are, others without their details."""
    if isinstance(error, ThermoclineError):
        return error
    return InternalError(f"the call's handler failed with {type(error).__name__}")
