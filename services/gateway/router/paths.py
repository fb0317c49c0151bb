"""Which paths a router forwards to cells, and the form of its own errors within streams. Pure."""

from __future__ import annotations

from urllib.parse import quote

from starlette.types import Scope

from services.gateway import sse
from services.gateway.error_answers import MESSAGES, is_messages_path
from services.gateway.messages_api.errors import messages_error_body
from services.gateway.responses.events import StreamError
from services.gateway.responses.view import named
from shared.errors import ThermoclineError

RESPONSES = "/v1/responses"

PROMPTS = ("/v1/chat/completions", "/v1/completions", MESSAGES, RESPONSES)
"""Paths whose prompts are cached; requests to others go to the least loaded cell."""

TOKENIZER_INFO = "/tokenizer_info"

_POSTED = (
    *PROMPTS,
    f"{MESSAGES}/count_tokens",
    f"{RESPONSES}/input_tokens",
    f"{RESPONSES}/compact",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
)


def forwarded_methods(path: str) -> tuple[str, ...]:
    """Return the methods with which a path is forwarded; empty for a path that is not."""
    if path in _POSTED:
        return ("POST",)
    if path == TOKENIZER_INFO:
        return ("GET",)
    if not response_id_of(path):
        return ()
    return {"": ("GET", "DELETE"), "input_items": ("GET",), "cancel": ("POST",)}.get(_below_response(path), ())


def target_of(scope: Scope) -> bytes:
    """Return a request's path and query as its client sent them: what is encoded in a path stays encoded."""
    target: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    query: bytes = scope.get("query_string", b"")
    return target + b"?" + query if query else target


def response_id_of(path: str) -> str:
    """Return the id of the response that a path refers to, or ""."""
    if path in _POSTED or not path.startswith(RESPONSES + "/"):
        return ""
    return path[len(RESPONSES) + 1 :].partition("/")[0]


def _below_response(path: str) -> str:
    return path[len(RESPONSES) + 1 :].partition("/")[2]


def last_event(path: str, error: ThermoclineError, events_passed: int) -> bytes:
    """Return the end of a stream whose cell was lost after so many events, in the shape of the path's API."""
    if is_messages_path(path):
        return sse.named_event("error", messages_error_body(error))
    if path == RESPONSES:
        return named(StreamError(sequence_number=events_passed, code=error.code, message=error.message))
    return sse.error_event(error) + sse.DONE
