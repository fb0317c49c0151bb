"""Conversion of failures to the typed errors that clients see. Pure."""

from __future__ import annotations

import re

import msgspec

from shared.errors import (
    ContextTooLong,
    InternalError,
    InvalidRequest,
    NotFound,
    QueueFull,
    RateLimited,
    ThermoclineError,
    Unavailable,
    error_for_code,
)
from shared.messages.gateway_notices import CELLS_BOUND_OF_TENANTS, TENANTS_BOUND, RequestFailed

_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_FIELD = re.compile(r"^Object (?:missing required|contains unknown) field `([^`]*)`")

NOTICE_CODES: dict[str, type[ThermoclineError]] = {"context_too_long": ContextTooLong, "no_capacity": Unavailable}
"""Codes of notices that are not codes of ``shared.errors``."""

MODEL_NOT_FOUND = "model_not_found"
"""Code of a notice for an adapter that was unloaded while its request was in transit."""

TENANT_QUEUE_FULL = "tenant_queue_full"
"""Code for clients of a refusal because of their tenant's own bound in the queue: another cell is no way around it."""

DEFAULT_RETRY_AFTER_MS = 1_000


def error_of_notice(notice: RequestFailed) -> ThermoclineError:
    """Return the typed error for a scheduler's refusal."""
    if notice.code == MODEL_NOT_FOUND:
        return NotFound(notice.message, param="model", code=notice.code)
    if notice.code == QueueFull.code and notice.message.startswith((TENANTS_BOUND, CELLS_BOUND_OF_TENANTS)):
        return RateLimited(notice.message, code=TENANT_QUEUE_FULL, retry_after_ms=notice.retry_after_ms)
    special = NOTICE_CODES.get(notice.code)
    if special is not None:
        return special(notice.message, retry_after_ms=notice.retry_after_ms)
    return error_for_code(notice.code, notice.message, retry_after_ms=notice.retry_after_ms)


def error_of_body(error: Exception) -> InvalidRequest:
    """Return the refusal of a body that is not JSON or does not match its schema; ``param`` names the field."""
    if isinstance(error, msgspec.ValidationError):
        text = str(error)
        steps = [found[1] for found in (_PATH.search(text), _FIELD.search(text)) if found]
        return InvalidRequest(_PATH.sub("", text), param=".".join(filter(None, steps)) or None)
    if isinstance(error, RecursionError):
        return InvalidRequest("the JSON body is nested too deeply", code="invalid_json")
    if isinstance(error, UnicodeDecodeError):
        return InvalidRequest(f"the body is not UTF-8: {error.reason} at byte {error.start}", code="invalid_json")
    return InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json")


def error_of_status(status: int, detail: str, method: str, path: str) -> ThermoclineError:
    """Return the typed error for a status that the web framework chose."""
    if status == 404:
        return unknown_route(method, path)
    if status == 405:
        return InvalidRequest(f"{method} is not allowed for {path}", code="method_not_allowed", status=status)
    return (InvalidRequest if status < 500 else InternalError)(detail, status=status)


_ENDPOINTS = ("/chat/completions", "/completions", "/messages", "/messages/count_tokens", "/responses", "/models")
"""Ends of paths that clients add to a base URL, which should end in /v1, or for Anthropic's before it."""

_ELSEWHERE = {
    **dict.fromkeys(("/generate", "/completion", "/infer", "/api/generate"), "/v1/completions"),
    **dict.fromkeys(("/invocations", "/api/chat"), "/v1/chat/completions"),
    **dict.fromkeys(("/get_model_info", "/model_info", "/api/tags", "/api/show"), "/v1/models"),
    **dict.fromkeys(("/server_info", "/get_server_info", "/props"), "/health/ready and, with the admin key, /v1/cell"),
    **dict.fromkeys(("/get_load", "/get_loads", "/v1/loads", "/slots"), "/load or /metrics"),
    "/health_generate": "/health/ready",
    **dict.fromkeys(("/start_profile", "/stop_profile"), "/v1/requests/{name}/explain"),
}
"""Paths of vLLM, SGLang, llama.cpp, Ollama and SageMaker that are not served, and what tells or does the same here."""


def unknown_route(method: str, path: str) -> NotFound:
    """Return the error for a path without a route, with the path that its caller may have meant."""
    told = next((f"; the API is below /v1: /v1{end}" for end in _ENDPOINTS if _is_misplaced(path, end)), "")
    if path in _ELSEWHERE:
        told = f"; not served; use {_ELSEWHERE[path]}"
    return NotFound(f"Unknown route: {method} {path}{told}", code="unknown_route")


def _is_misplaced(path: str, end: str) -> bool:
    return path == end or path.endswith("/v1" + end)


def retry_after_s(error: ThermoclineError) -> int | None:
    """Return the seconds for the ``Retry-After`` header, at least 1; None where a retry would not help."""
    if error.status not in (429, 503):
        return None
    return max(1, -(-(error.retry_after_ms or DEFAULT_RETRY_AFTER_MS) // 1000))
