"""Which HTTP requests are traced, and what the gateway records of them."""

from __future__ import annotations

from typing import Any

import pytest
import structlog
from msgspec.structs import replace

from services.gateway.boundary import Boundary
from services.gateway.callers import Callers
from services.gateway.pending import Choice, Generation
from services.gateway.request_spans import TracedApp, begin_http, record_generation
from shared.messages.tokens import Timing, TokenItem
from tests.recorded_spans import TRACE, RecordedSpans
from tests.scripted_cell import submit

CALLER = f"00-{5:032x}-{6:016x}"

NOBODY: Any = None
"""No application here receives; nor does it send once it was cut off."""


def choice(trace: str) -> Choice:
    """Submitted at 2 s of the wall clock and 10 s of the loop's."""
    made = Choice(replace(submit("r", [0]), received_ns=1_900_000_000, trace=trace), 0, 0, 10.0)
    made.submitted_ns = 2_000_000_000
    return made


@pytest.mark.parametrize(
    ("header", "share", "is_traced"),
    [
        (f"{CALLER}-01", 0.0, True),
        (f"{CALLER}-00", 1.0, False),
        ("", 1.0, True),
        ("", 0.0, False),
        ("nonsense", 1.0, True),
        ("nonsense", 0.0, False),
    ],
)
def test_the_caller_decides_and_then_the_share(header: str, share: float, is_traced: bool) -> None:
    """A header that is no traceparent counts as none."""
    span = begin_http(RecordedSpans(), share, "POST", "/v1/completions", {"traceparent": header})

    assert (span is not None) is is_traced


def test_other_requests_are_not_traced() -> None:
    """Only those that make a choice."""
    for method, path in (("GET", "/v1/completions"), ("POST", "/tokenize"), ("GET", "/metrics")):
        assert begin_http(RecordedSpans(), 1.0, method, path, {"traceparent": f"{CALLER}-01"}) is None


def test_a_choice_is_accepted_stored_and_delivered() -> None:
    """Times of the worker and of the stream come with the first token; the loop's clock tells when that came."""
    tracer, made = RecordedSpans(), choice(f"{CALLER}-01")
    timing = Timing(accepted_ns=2_010_000_000, first_token_ns=2_400_000_000)
    item = TokenItem(request_id="r", attempt=1, index=0, tokens=(1,), timing=timing, finish="length")
    made.accept("w", item, 10.5)

    record_generation(tracer, Generation([made]))

    assert tracer.times == {
        "accept": (1_900_000_000, 2_000_000_000),
        "broker": (2_000_000_000, 2_010_000_000),
        "deliver": (2_400_000_000, 2_500_000_000),
    }
    assert {span.parent for span in tracer.spans} == {f"{CALLER}-01"}


def test_what_never_got_a_token_was_accepted_at_least() -> None:
    """And one that is not traced leaves nothing."""
    tracer = RecordedSpans()

    record_generation(tracer, Generation([choice(f"{CALLER}-01"), choice("")]))

    assert [span.name for span in tracer.spans] == ["accept"]


async def test_the_span_of_a_request_ends_with_its_answer() -> None:
    """It carries the status; the application finds its traceparent in the scope, and its logs have the trace's id."""
    tracer, seen, bound = RecordedSpans(), [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["state"]["trace"])
        bound.append(structlog.contextvars.get_contextvars()["trace_id"])
        await send({"type": "http.response.start", "status": 503, "headers": []})
        scope["state"]["request_id"] = "http-1"

    async def send(message: Any) -> None:
        assert tracer.spans[0].end_ns == 0

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    await TracedApp(app, tracer, 1.0)(scope, NOBODY, send)

    (span,) = tracer.spans
    assert seen == [span.traceparent]
    assert bound == [TRACE]
    assert (span.trace_id, span.error, span.end_ns) == (TRACE, "HTTP 503", 1)
    assert span.attributes["http.response.status_code"] == 503
    assert span.attributes["http_id"] == "http-1"


async def test_logs_carry_the_id_that_the_response_has() -> None:
    """Traced or not; and a trace's id does not stay behind for the next request of the connection."""
    bound, ids = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        bound.append(structlog.contextvars.get_contextvars())
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        ids.append(dict(message["headers"])[b"x-request-id"].decode())

    boundary = TracedApp(Boundary(app, Callers()), RecordedSpans(), 1.0)
    for method, path in (("POST", "/v1/completions"), ("GET", "/health/live")):
        await boundary({"type": "http", "method": method, "path": path, "headers": []}, NOBODY, send)

    assert [values["request_id"] for values in bound] == ids
    assert [values.get("trace_id") for values in bound] == [TRACE, None]


async def test_a_client_that_goes_away_early_is_a_499() -> None:
    """The span ends all the same when the application is cut off."""
    tracer = RecordedSpans()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ConnectionError

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    with pytest.raises(ConnectionError):
        await TracedApp(app, tracer, 1.0)(scope, NOBODY, NOBODY)

    assert tracer.spans[0].attributes["http.response.status_code"] == 499
