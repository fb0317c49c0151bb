"""Fields of a chat in the newer two APIs: which of them the chat gets, and which are refused. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.gateway.admission import asks, refuse, unsupported
from services.gateway.openai_schema.chat import ChatFields

UNANSWERED = ("prompt_logprobs", "return_token_ids", "timing", "explain")
"""Fields whose outcome only answers of chats and completions have a place for."""


def check_shared(request: ChatFields, instead: Mapping[str, str]) -> None:
    """Raise InvalidRequest for fields of a chat whose outcome an answer of the newer APIs has no place for.

    Those in ``instead`` are refused with the API's own name for each.
    """
    for name, own in instead.items():
        if asks(request, name):
            raise unsupported(name, f"in this API it is {own}")
    refuse(request, UNANSWERED)
    if request.n not in (None, 1):
        raise unsupported("n", "this API has one answer to a request")
    if request.stream_options is not None and request.stream_options.continuous_usage_stats:
        raise unsupported("stream_options.continuous_usage_stats", "usage is in the last event")


def shared_fields(request: ChatFields) -> dict[str, Any]:
    """Return the fields that the chat made of a request has, too. Usage is in every answer, without its option."""
    return {name: getattr(request, name) for name in ChatFields.__struct_fields__} | {"stream_options": None}
