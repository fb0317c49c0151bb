"""The gateway's part of traces: the span of an HTTP request, and below it those of the gateway's own work."""

from __future__ import annotations

import random
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.pending import Choice, Generation
from shared import logs
from shared.messages.tokens import Timing
from shared.tracing import TRACEPARENT, OpenSpan, Tracer, is_sampled, is_traceparent

TRACED_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


class TracedApp:
    """ASGI middleware that begins a span for each traced request, and binds its trace id to the log."""

    def __init__(self, app: ASGIApp, tracer: Tracer, share: float) -> None:
        """Wrap ``app``; ``share``, from 0 to 1, of requests without a ``traceparent`` are traced."""
        self._app = app
        self._tracer = tracer
        self._share = share

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on within its span, if it is traced; the span ends with the status, 499 without an answer."""
        span = None
        if scope["type"] == "http":
            # A binding outlives a request where the next one on the same connection runs in the same context.
            logs.unbind("trace_id")
            span = begin_http(self._tracer, self._share, scope["method"], scope["path"], Headers(scope=scope))
        if span is None:
            await self._app(scope, receive, send)
            return
        status = 499  # The client went away before there was an answer.

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        scope.setdefault("state", {})["trace"] = span.traceparent
        logs.bind(trace_id=span.trace_id)
        try:
            await self._app(scope, receive, send_noted)
        finally:
            about = {"http.response.status_code": status, "http_id": scope["state"].get("request_id", "")}
            span.end(about, error=f"HTTP {status}" if status >= 500 else "")


def trace_of(http: Request) -> str:
    """Return the ``traceparent`` of this request's span, "" where it is not traced."""
    trace: str = http.scope.get("state", {}).get("trace", "")
    return trace


def begin_http(tracer: Tracer, share: float, method: str, path: str, headers: Mapping[str, str]) -> OpenSpan | None:
    """Begin the span of an HTTP request, or return None where it is not traced.

    A caller's ``traceparent`` decides for its own request; otherwise ``share`` of requests are traced.
    """
    if method != "POST" or path not in TRACED_PATHS:
        return None
    parent = headers.get(TRACEPARENT, "").strip()
    if not is_traceparent(parent):
        parent = ""
    if not (is_sampled(parent) if parent else random.random() < share):
        return None
    return tracer.begin("http", parent, {"http.request.method": method, "url.path": path})


def record_generation(tracer: Tracer, generation: Generation) -> None:
    """Record the gateway's spans of each choice of an answer that is over."""
    for choice in generation.choices:
        if choice.request.trace and choice.submitted_ns:
            _record_choice(tracer, choice)


def _record_choice(tracer: Tracer, choice: Choice) -> None:
    request, trace = choice.request, choice.request.trace
    about = {"request_id": choice.request_id}
    tracer.record(
        "accept", trace, request.received_ns, choice.submitted_ns, about | {"prompt_tokens": request.prompt_tokens}
    )
    timing = choice.assembly.timing or Timing()
    if timing.accepted_ns:
        tracer.record("broker", trace, choice.submitted_ns, timing.accepted_ns, about)
    if timing.first_token_ns and choice.first_token_s:
        delivered_ns = choice.submitted_ns + round((choice.first_token_s - choice.started_s) * 1e9)
        tracer.record("deliver", trace, timing.first_token_ns, delivered_ns, about)
