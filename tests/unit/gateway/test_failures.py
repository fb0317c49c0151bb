"""Errors keep their meaning on the way to a client."""

from __future__ import annotations

import msgspec
import pytest

from services.gateway.error_answers import error_answer
from services.gateway.failures import error_of_body, error_of_notice, error_of_status, retry_after_s
from services.gateway.messages_api.errors import error_status
from services.gateway.openai_schema.chat import ChatRequest
from services.gateway.openai_schema.completions import CompletionRequest
from services.gateway.openai_schema.errors import error_body
from shared.errors import (
    AttemptsExhausted,
    ContextTooLong,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotAuthenticated,
    NotFound,
    PayloadTooLarge,
    QueueFull,
    RateLimited,
    ThermoclineError,
    TooManyConnections,
    Unavailable,
)
from shared.messages.gateway_notices import RequestFailed
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders
from tests.unit.scheduler.core.conftest import make_cell

__all__ = ["make_cell"]


@pytest.mark.parametrize(
    ("code", "kind", "status"),
    [
        ("queue_full", QueueFull, 429),
        ("deadline_exceeded", DeadlineExceeded, 504),
        ("context_too_long", ContextTooLong, 400),
        ("context_length_exceeded", ContextTooLong, 400),
        ("no_capacity", Unavailable, 503),
        ("attempts_exhausted", AttemptsExhausted, 500),
        ("service_unavailable", Unavailable, 503),
    ],
)
def test_codes_of_notices_are_typed_errors(code: str, kind: type, status: int) -> None:
    """Message and retry time travel along."""
    error = error_of_notice(RequestFailed(request_id="r", code=code, message="why", retry_after_ms=2500))

    assert type(error) is kind
    assert (error.status, error.message, error.retry_after_ms) == (status, "why", 2500)


@pytest.mark.parametrize(
    ("bounds", "asked", "code"),
    [
        ({"max_queued": 1}, 0, "queue_full"),
        ({"max_queued_tokens": 3}, 0, "queue_full"),
        ({"max_queued_per_tenant": 1}, 0, "tenant_queue_full"),
        ({}, 1, "tenant_queue_full"),
    ],
)
def test_a_tenants_bound_in_the_queue_has_a_code_of_its_own(
    make_cell: MakeCell, bounds: dict[str, int], asked: int, code: str
) -> None:
    """The scheduler refuses both as ``queue_full``, which recordings hold; a router must not ask the next cell."""
    cell = make_cell(workers=0, **bounds)
    for _ in range(2):
        cell.submit([1, 2, 3], tenant="a", max_queued=asked)
    (notice,) = orders(cell.outputs[-1], RequestFailed)
    error = error_of_notice(notice)

    assert notice.code == "queue_full"
    assert (error.status, error.code, error.retry_after_ms) == (429, code, notice.retry_after_ms)
    assert error_status(error) == (429 if code == "tenant_queue_full" else 529)


def test_an_unknown_code_is_our_fault_and_is_kept() -> None:
    """A newer scheduler may know codes that this gateway does not."""
    error = error_of_notice(RequestFailed(request_id="r", code="new_thing", message="why"))

    assert (error.status, error.code) == (500, "new_thing")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt": "x", "n": "1"}', "n"),
        (b'{"prompt": [1.5]}', "prompt[0]"),
        (b'{"prompt": "x", "logit_bias": {"1": 1000}}', "logit_bias[...]"),
        (b'{"prompt": "x", "cache": {"read": 1}}', "cache.read"),
        (b"{}", "prompt"),
        (b"[]", None),
    ],
)
def test_a_wrong_type_names_its_field(body: bytes, param: str | None) -> None:
    """The path goes into param and out of the message."""
    with pytest.raises(msgspec.ValidationError) as found:
        msgspec.json.decode(body, type=CompletionRequest)
    error = error_of_body(found.value)

    assert error.param == param
    assert "$" not in error.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"messages": [{"role": "user"}, {"content": "x"}]}', "messages[1].role"),
        (b'{"messages": [{"role": "user", "content": [{"text": "x"}]}]}', "messages[0].content[0].type"),
    ],
)
def test_a_field_that_is_left_out_is_named(body: bytes, param: str) -> None:
    """With the place where it belongs."""
    with pytest.raises(msgspec.ValidationError) as found:
        msgspec.json.decode(body, type=ChatRequest)
    error = error_of_body(found.value)

    assert (error.param, error.message) == (param, f"Object missing required field `{param.rpartition('.')[2]}`")


def test_the_body_of_an_error_has_openais_shape() -> None:
    """message, type, param, code."""
    decoded = msgspec.json.decode(error_body(QueueFull("full")))

    assert decoded == {"error": {"message": "full", "type": "rate_limit_error", "param": None, "code": "queue_full"}}


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequest("x"), 400, "invalid_request_error"),
        (NotAuthenticated("x"), 401, "authentication_error"),
        (NotFound("x"), 404, "not_found_error"),
        (PayloadTooLarge("x"), 413, "request_too_large"),
        (RateLimited("x"), 429, "rate_limit_error"),
        (QueueFull("x"), 529, "overloaded_error"),
        (TooManyConnections("x"), 529, "overloaded_error"),
        (Unavailable("x"), 529, "overloaded_error"),
        (DeadlineExceeded("x"), 504, "timeout_error"),
        (InternalError("x"), 500, "api_error"),
    ],
)
def test_errors_of_the_messages_api_are_anthropics(error: ThermoclineError, status: int, kind: str) -> None:
    """429 is the caller's own limit; where others are the reason it is 529. Other paths have OpenAI's."""
    found = error_answer(error, "/v1/messages/count_tokens", "http-1")
    other = error_answer(error, "/v1/messages-of-others", "http-1")

    detail = {"type": kind, "message": "x", "code": error.code, "param": None}
    assert found[0] == status
    assert msgspec.json.decode(found[1]) == {"type": "error", "error": detail, "request_id": "http-1"}
    assert other == (error.status, error_body(error))


def test_retry_after_is_said_where_retrying_helps() -> None:
    """In whole seconds, rounded up, at least one."""
    assert retry_after_s(QueueFull("x", retry_after_ms=1500)) == 2
    assert retry_after_s(Unavailable("x")) == 1
    assert retry_after_s(ContextTooLong("x")) is None


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/chat/completions", "the API is below /v1: /v1/chat/completions"),
        ("/v1/v1/chat/completions", "the API is below /v1: /v1/chat/completions"),
        ("/openai/v1/completions", "the API is below /v1: /v1/completions"),
        ("/v1/v1/messages", "the API is below /v1: /v1/messages"),
        ("/v1/models/models", ""),
        ("/messages/count_tokens", "the API is below /v1: /v1/messages/count_tokens"),
        ("/generate", "not served; use /v1/completions"),
        ("/get_server_info", "not served; use /health/ready and, with the admin key, /v1/cell"),
        ("/api/chat", "not served; use /v1/chat/completions"),
        ("/nope", ""),
    ],
)
def test_a_path_of_another_server_is_told_ours(path: str, told: str) -> None:
    """A client whose base URL has a part too many or too few reads what to change."""
    error = error_of_status(404, "detail", "POST", path)

    assert error.message == f"Unknown route: POST {path}" + (f"; {told}" if told else "")


@pytest.mark.parametrize(
    ("status", "code"),
    [(404, "unknown_route"), (405, "method_not_allowed"), (400, "invalid_request"), (500, "internal_error")],
)
def test_the_frameworks_errors_are_typed_too(status: int, code: str) -> None:
    """Their status stays."""
    error = error_of_status(status, "detail", "GET", "/x")

    assert (error.status, error.code) == (status, code)
