"""Errors in Anthropic's shape, for the paths of its API."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from shared.errors import (
    CapacityError,
    DeadlineExceeded,
    NotAuthenticated,
    NotFound,
    PayloadTooLarge,
    RateLimited,
    ThermoclineError,
)

ErrorType = Literal[
    "invalid_request_error", "authentication_error", "permission_error", "not_found_error", "request_too_large",
    "rate_limit_error", "timeout_error", "overloaded_error", "api_error",
]  # fmt: skip

OVERLOADED = 529

_TYPES: tuple[tuple[type[ThermoclineError], ErrorType], ...] = (
    (NotAuthenticated, "authentication_error"),
    (NotFound, "not_found_error"),
    (PayloadTooLarge, "request_too_large"),
    (RateLimited, "rate_limit_error"),
    (CapacityError, "overloaded_error"),
    (DeadlineExceeded, "timeout_error"),
)


PUBLISHED_CODES = (
    "thread_not_found", "thread_unsupported_request", "request_body_encoding_invalid",
    "request_body_encoding_unsupported", "request_body_too_large_after_decoding",
)  # fmt: skip
"""Codes of ours that are Anthropic's own, by which its clients decide what to do next."""


class MessagesErrorDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Anthropic's place for a code."""

    error_code: str


class MessagesErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """An error. ``code`` and ``param`` are extensions, with the same values as in OpenAI's shape.

    ``details`` repeats a code that is Anthropic's own.
    """

    type: ErrorType
    message: str
    code: str | None = None
    param: str | None = None
    details: MessagesErrorDetails | UnsetType = UNSET


class MessagesError(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer with a status of 400 or more."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail
    request_id: str | None = None


def error_type(error: ThermoclineError) -> ErrorType:
    """Return Anthropic's name for the kind of ``error``."""
    for kind, name in _TYPES:
        if isinstance(error, kind):
            return name
    if error.status == 403:
        return "permission_error"
    return "invalid_request_error" if 400 <= error.status < 500 else "api_error"


def error_status(error: ThermoclineError) -> int:
    """Return the status of ``error``: 529 for a lack of capacity; 429 only for the caller's own limit."""
    return OVERLOADED if error_type(error) == "overloaded_error" else error.status


def messages_error_body(error: ThermoclineError, request_id: str | None = None) -> bytes:
    """Return the JSON body for ``error``; also the data of the event ``error`` in a stream."""
    details = MessagesErrorDetails(error_code=error.code) if error.code in PUBLISHED_CODES else UNSET
    detail = MessagesErrorDetail(
        type=error_type(error), message=error.message, code=error.code, param=error.param, details=details
    )
    return msgspec.json.encode(MessagesError(error=detail, request_id=request_id))
