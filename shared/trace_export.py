"""Spans to a collector or a file, by OpenTelemetry's SDK: batched, sent by a thread of its own, bounded."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import requests
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from shared.errors import ConfigError
from shared.loopback import is_loopback
from shared.tracing import Attributes, ids_of

QUEUED_SPANS = 4096
"""Spans at most that wait to be sent; more are dropped."""

BATCH_SPANS = 512
SEND_EVERY_MS = 500
SEND_S = 3.0
CLOSE_S = 3.0
"""Longest wait at the end for queued spans to be sent."""

COLLECTOR_PATH = "/v1/traces"
"""Path of collectors that take spans over HTTP, where the URL has none."""


class FileExporter(SpanExporter):
    """An exporter that appends a line of JSON for each span.

    Processes may share a file: a batch is one write, and appends do not mix.
    """

    def __init__(self, path: Path) -> None:
        """Open the file. Raises ConfigError when that fails."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"--traces: {path} cannot be written: {error.strerror}") from error

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write a batch; FAILURE where the file did not take all of it."""
        lines = "".join(f"{span.to_json(indent=None)}\n" for span in spans).encode()
        try:
            written = os.write(self._file, lines)
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS if written == len(lines) else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        """Close the file."""
        os.close(self._file)


class _OtelSpan:
    """A ``tracing.OpenSpan`` over OpenTelemetry's span."""

    def __init__(self, span: Span) -> None:
        self._span = span

    @property
    def trace_id(self) -> str:
        return f"{self._span.get_span_context().trace_id:032x}"

    @property
    def traceparent(self) -> str:
        return _traceparent(self._span)

    def end(self, attributes: Attributes, *, error: str = "") -> None:
        self._span.set_attributes(dict(attributes))
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class OtelTracer:
    """A ``tracing.Tracer`` over OpenTelemetry's SDK, with its own provider and a bounded queue."""

    def __init__(self, exporter: SpanExporter, service: str, process_id: str) -> None:
        """Send spans by ``exporter``, from a thread; :meth:`close` shuts it down.

        ``service`` is the kind of process, such as ``gateway``, and ``process_id`` the name of this one.
        """
        resource = Resource.create({"service.name": f"thermocline-{service}", "service.instance.id": process_id})
        self._provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter,
                max_queue_size=QUEUED_SPANS,
                max_export_batch_size=BATCH_SPANS,
                schedule_delay_millis=SEND_EVERY_MS,
            )
        )
        self._tracer = self._provider.get_tracer("thermocline")

    def begin(self, name: str, parent: str, attributes: Attributes) -> _OtelSpan:
        """Begin a span of kind SERVER below ``parent``, or as a root where that is ""."""
        context = _context(parent)
        return _OtelSpan(self._tracer.start_span(name, context, SpanKind.SERVER, dict(attributes)))

    def record(self, name: str, parent: str, start_ns: int, end_ns: int, attributes: Attributes) -> str:
        """Record a finished span; an end before its start counts as the start. Returns its ``traceparent``."""
        span = self._tracer.start_span(name, _context(parent), attributes=dict(attributes), start_time=start_ns)
        span.end(max(start_ns, end_ns))
        return _traceparent(span)

    def close(self) -> None:
        """Send queued spans from a thread, and wait for it at most CLOSE_S."""
        # The SDK retries a collector that is away, and a process that ends must not wait for it.
        ending = threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
        ending.start()
        ending.join(CLOSE_S)


def make_tracer(target: str, service: str, process_id: str) -> OtelTracer:
    """Return a tracer to a file or, over HTTP, to a collector. Raises ConfigError for an unwritable file."""
    if target.startswith("/"):
        return OtelTracer(FileExporter(Path(target)), service, process_id)
    url = target if urlsplit(target).path.strip("/") else target.rstrip("/") + COLLECTOR_PATH
    session = requests.Session()
    # A proxy that the environment names would look for this address on its own machine.
    session.trust_env = not is_loopback(urlsplit(url).hostname or "")
    return OtelTracer(OTLPSpanExporter(endpoint=url, timeout=SEND_S, session=session), service, process_id)


def _context(parent: str) -> Context:
    """Return the context of a span below ``parent``; without one an empty context, not the current one."""
    if not parent:
        return Context()
    trace_id, span_id = ids_of(parent)
    above = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return set_span_in_context(NonRecordingSpan(above), Context())


def _traceparent(span: Span) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"
