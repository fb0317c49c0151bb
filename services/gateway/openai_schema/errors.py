"""OpenAI's error shape, for every error that leaves the gateway."""

from __future__ import annotations

import msgspec

from shared.errors import ThermoclineError


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """An error. ``type`` and ``code`` are stable; ``param`` names the field at fault, if any."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every response with a status of 400 or more."""

    error: ErrorDetail


def error_detail(error: ThermoclineError) -> ErrorDetail:
    """Return ``error`` in OpenAI's shape, without the enclosing object."""
    return ErrorDetail(message=error.message, type=error.kind, param=error.param, code=error.code)


def error_body(error: ThermoclineError) -> bytes:
    """Return the JSON body for ``error``."""
    return msgspec.json.encode(ErrorResponse(error=error_detail(error)))
