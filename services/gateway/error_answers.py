"""Errors as whole answers, in the shape of the API that was called."""

from __future__ import annotations

from services.gateway.failures import retry_after_s
from services.gateway.messages_api.errors import error_status, messages_error_body
from services.gateway.openai_schema.errors import error_body
from shared.errors import NotAuthenticated, ThermoclineError

MESSAGES = "/v1/messages"


def is_messages_path(path: str) -> bool:
    """Return whether a path belongs to Anthropic's API."""
    return path == MESSAGES or path.startswith(MESSAGES + "/")


def error_answer(error: ThermoclineError, path: str, request_id: str = "") -> tuple[int, bytes]:
    """Return the status and JSON body for an error, in the shape of the API that ``path`` belongs to."""
    if is_messages_path(path):
        return error_status(error), messages_error_body(error, request_id or None)
    return error.status, error_body(error)


def error_headers(error: ThermoclineError) -> dict[str, str]:
    """Return the headers that belong to an error: ``retry-after``, ``www-authenticate``."""
    wait_s = retry_after_s(error)
    headers = {"retry-after": str(wait_s)} if wait_s is not None else {}
    if isinstance(error, NotAuthenticated):
        headers["www-authenticate"] = "Bearer"
    return headers
