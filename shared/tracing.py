"""Traces: one per request, from HTTP to its last token, over all processes (W3C Trace Context, OpenTelemetry).

The gateway decides whether a request is traced. If so, its ``SubmitRequest`` carries the ``traceparent`` of the HTTP
request's span, and the core copies it to the resulting orders, like any other field. An empty one is no trace:
processes then do nothing at all, and without ``--traces`` not even OpenTelemetry is imported.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Protocol

from msgspec import Meta

TRACEPARENT = "traceparent"
"""Name of the header in HTTP."""

Traces = Annotated[
    str,
    Meta(
        description="where spans go: http(s):// of an OTLP collector, or the absolute path of a file of JSON lines; "
        "empty traces nothing",
        pattern=r"^$|^/|^https?://[^/]",
    ),
]
"""Type of the setting ``traces``, the same in every process."""

Attributes = Mapping[str, str | int | float | bool]

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


class OpenSpan(Protocol):
    """A span that has begun."""

    @property
    def trace_id(self) -> str:
        """Id of its trace, 32 hex digits."""

    @property
    def traceparent(self) -> str:
        """Value by which another span becomes its child."""

    def end(self, attributes: Attributes, *, error: str = "") -> None:
        """End the span now, with further attributes; ``error`` marks it as failed."""


class Tracer(Protocol):
    """A receiver of spans that never waits, and drops those beyond its bound. ``shared.trace_export`` provides it."""

    def begin(self, name: str, parent: str, attributes: Attributes) -> OpenSpan:
        """Begin a span now, below ``parent`` or, where that is empty, as the root of a trace."""

    def record(self, name: str, parent: str, start_ns: int, end_ns: int, attributes: Attributes) -> str:
        """Record a finished span, in wall-clock nanoseconds; return its ``traceparent``."""

    def close(self) -> None:
        """Send queued spans, for three seconds at most. Blocks."""


@asynccontextmanager
async def running(target: str, service: str, process_id: str) -> AsyncIterator[Tracer | None]:
    """Collect this process's spans while the block runs; yields None where ``target`` is empty.

    Raises ConfigError for a file that cannot be written.
    """
    if not target:
        yield None
        return
    # Imported here, because it takes long and is not needed where nothing is traced.
    from shared.trace_export import make_tracer

    tracer = await asyncio.to_thread(make_tracer, target, service, process_id)
    try:
        yield tracer
    finally:
        await asyncio.to_thread(tracer.close)


def is_traceparent(text: str) -> bool:
    """Return whether ``text`` is a valid W3C ``traceparent``."""
    found = _FORM.fullmatch(text)
    if found is None:
        return False
    version, trace_id, span_id, _, further = found.groups()
    return version != "ff" and bool(int(trace_id, 16) and int(span_id, 16)) and not (version == "00" and further)


def is_sampled(traceparent: str) -> bool:
    """Return whether the caller that sent this traceparent records its part of the trace."""
    found = _FORM.fullmatch(traceparent)
    return found is not None and bool(int(found[4], 16) & _SAMPLED)


def ids_of(traceparent: str) -> tuple[int, int]:
    """Return trace and span id of a valid traceparent."""
    _, trace_id, span_id, *_ = traceparent.split("-")
    return int(trace_id, 16), int(span_id, 16)
