"""What every response of the API has to be, whatever was asked."""

from __future__ import annotations

import json
from typing import Literal

import msgspec

from services.gateway.messages_api.errors import OVERLOADED, MessagesErrorDetail
from services.gateway.openai_schema.errors import ErrorDetail, ErrorResponse
from tests.fuzz.api_exchange import Response

_WAITING = ("service_unavailable", "deadline_exceeded", "request_timeout")
"""What a server may say with a status from 500 on: try later, or your own time is over."""


_FULL = ("queue_full", "too_many_requests")
"""The same in Anthropic's API, where others' requests are the reason."""


class _StrictError(msgspec.Struct, forbid_unknown_fields=True):
    error: dict[str, str | None]


class _StrictMessagesError(msgspec.Struct, forbid_unknown_fields=True):
    """Anthropic's shape, on the paths of its API."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str


class _StreamError(msgspec.Struct):
    """The data of an event ``error`` of either API that has one."""

    code: str | None = None
    error: MessagesErrorDetail | None = None


def fault_of(response: Response, *, is_head: bool = False) -> str:
    """What is wrong with ``response``, or ""."""
    if not 200 <= response.status < 600:
        return f"has status {response.status}"
    kind = response.headers.get("content-type", "")
    if response.status >= 400:
        return "" if is_head else _fault_of_error(response, kind)
    if kind.startswith("text/event-stream"):
        return _fault_of_stream(bytes(response.body))
    if kind.startswith("application/json") and not is_head:
        try:
            json.loads(response.body)
        except ValueError:
            return "is no JSON"
    return ""


def _fault_of_error(response: Response, kind: str) -> str:
    error: ErrorDetail | MessagesErrorDetail
    try:
        if response.body.startswith(b'{"type":"error"'):
            error = msgspec.json.decode(response.body, type=_StrictMessagesError).error
        else:
            error = msgspec.json.decode(response.body, type=ErrorResponse).error
            msgspec.json.decode(response.body, type=_StrictError)
    except msgspec.DecodeError as broken:
        if _is_not_ready(response):
            return ""
        return f"is status {response.status} without an error in its API's shape ({broken})"
    if not kind.startswith("application/json") or not error.message or not error.type:
        return f"is status {response.status} with an error that says too little"
    is_overloaded = response.status == OVERLOADED and error.code in _FULL
    if response.status >= 500 and error.code not in _WAITING and not is_overloaded:
        return f"is an error of the server: {response.status} {error.code}"
    return ""


def _is_not_ready(response: Response) -> bool:
    """The health endpoint says more than an error."""
    return response.status == 503 and b'"not_ready"' in response.body


def _fault_of_stream(body: bytes) -> str:
    for event in body.split(b"\n\n"):
        name, _, data = event.partition(b"\ndata: ")
        if name == b"event: error":
            broken = msgspec.json.decode(data, type=_StreamError)
            code = broken.code or (broken.error.code if broken.error else None)
            if code not in (*_WAITING, *_FULL):
                return f"is a stream that ends with {code}"
        if name == b"event: response.failed" and b'"code":"server_error"' in data and b"deadline" not in data:
            return "is a stream that fails"
        if event.startswith(b'data: {"error"'):
            error = msgspec.json.decode(event[6:], type=ErrorResponse).error
            if error.type == "server_error" and error.code not in _WAITING:
                return f"is a stream that ends with {error.code}"
    return ""
