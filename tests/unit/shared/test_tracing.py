"""Trace contexts as W3C has them, and spans as they are written to a file."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from services.worker.config import WorkerConfig
from shared import trace_export
from shared.errors import ConfigError
from shared.trace_export import QUEUED_SPANS, OtelTracer, make_tracer
from shared.tracing import ids_of, is_sampled, is_traceparent, running

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", True),
        (f"cc-{TRACE}-{SPAN}-01-what-comes-later", True),
        (f"00-{TRACE}-{SPAN}-01-further", False),
        (f"ff-{TRACE}-{SPAN}-01", False),
        (f"00-{'0' * 32}-{SPAN}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE.upper()}-{SPAN}-01", False),
        (f"00-{TRACE}-{SPAN}", False),
        ("", False),
    ],
)
def test_traceparents_are_told_from_others(text: str, is_one: bool) -> None:
    """Version, ids and flags in lower-case hex digits; no id is all zeros, and version 00 ends with the flags."""
    assert is_traceparent(text) is is_one


def test_the_last_bit_of_the_flags_says_sampled() -> None:
    """Other flags mean nothing yet."""
    sampled = [is_sampled(f"00-{TRACE}-{SPAN}-{flags}") for flags in ("00", "01", "02", "03")]

    assert sampled == [False, True, False, True]


def test_ids_are_the_second_and_third_part() -> None:
    """As numbers."""
    assert ids_of(f"00-{TRACE}-{SPAN}-01") == (int(TRACE, 16), int(SPAN, 16))


async def test_spans_are_lines_of_a_file(tmp_path: Path) -> None:
    """A span that is begun below a caller's has its trace; one that is recorded below it is its child. All are in the
    file once the tracer is closed, though nobody waited for them.
    """
    file = tmp_path / "new folder" / "spans.jsonl"
    async with running(str(file), "gateway", "gateway-0") as tracer:
        assert tracer is not None
        span = tracer.begin("http", f"00-{TRACE}-{SPAN}-01", {"a": 1})
        below = tracer.record("queue", span.traceparent, 2_000_000_000, 3_000_000_000, {"request_id": "r"})
        span.end({"b": 2}, error="HTTP 500")

    queue, http = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert http["context"]["trace_id"] == queue["context"]["trace_id"] == f"0x{TRACE}"
    assert http["parent_id"] == f"0x{SPAN}"
    assert queue["parent_id"] == http["context"]["span_id"]
    assert below.split("-")[2] == queue["context"]["span_id"].removeprefix("0x")
    assert http["attributes"] == {"a": 1, "b": 2}
    assert http["status"] == {"status_code": "ERROR", "description": "HTTP 500"}
    assert (queue["start_time"], queue["end_time"]) == ("1970-01-01T00:00:02.000000Z", "1970-01-01T00:00:03.000000Z")
    assert http["resource"]["attributes"]["service.name"] == "thermocline-gateway"
    assert http["resource"]["attributes"]["service.instance.id"] == "gateway-0"


def test_a_collector_gets_spans_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the path where collectors take them, as OTLP has it, and without the proxy of the environment on this machine;
    what is left is sent when the tracer is closed.
    """
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    taken: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            taken.append((self.path, gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Tests do not talk."""

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tracer = make_tracer(f"http://127.0.0.1:{server.server_port}", "scheduler", "scheduler-0")
        tracer.record("queue", f"00-{TRACE}-{SPAN}-01", 1, 2, {})
        tracer.close()
        server.shutdown()

    ((path, body),) = taken
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    (span,) = resource.scope_spans[0].spans
    assert path == "/v1/traces"
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("queue", TRACE, SPAN)


def test_a_collector_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """More spans than may wait are recorded, and the tracer is closed, before it answers for the first time."""
    monkeypatch.setattr(trace_export, "CLOSE_S", 0.01)
    may_answer, has_answered = threading.Event(), threading.Event()

    class Hanging(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            may_answer.wait()
            has_answered.set()
            return SpanExportResult.FAILURE

    tracer = OtelTracer(Hanging(), "scheduler", "scheduler-0")
    for number in range(2 * QUEUED_SPANS):
        tracer.record("queue", f"00-{TRACE}-{SPAN}-01", number, number, {})
    tracer.close()
    is_held_up = has_answered.is_set()
    may_answer.set()

    assert not is_held_up
    assert has_answered.wait(30.0)


def test_a_span_without_a_parent_begins_a_trace(tmp_path: Path) -> None:
    """Two of them have two traces."""
    tracer = make_tracer(str(tmp_path / "spans"), "gateway", "g")

    spans = [tracer.begin("http", "", {}), tracer.begin("http", "", {})]

    assert len({span.trace_id for span in spans}) == 2
    assert all(is_traceparent(span.traceparent) and is_sampled(span.traceparent) for span in spans)
    tracer.close()


def test_times_that_run_backwards_make_an_empty_span(tmp_path: Path) -> None:
    """Clocks of several machines may differ; a span never ends before it begins."""
    tracer = make_tracer(str(tmp_path / "spans"), "worker", "w")
    tracer.record("load", f"00-{TRACE}-{SPAN}-01", 5_000_000_000, 4_000_000_000, {})
    tracer.close()

    span = json.loads((tmp_path / "spans").read_text(encoding="utf-8"))
    assert span["start_time"] == span["end_time"]


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """At the start, not at the first span."""
    with pytest.raises(ConfigError, match="cannot be written"):
        make_tracer(str(tmp_path), "worker", "w")


@pytest.mark.parametrize("target", ["spans.jsonl", "ftp://collector", "http://", "collector:4318"])
def test_targets_that_are_neither_a_url_nor_a_path_are_refused(target: str) -> None:
    """A relative path would mean another file in every process."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"model": "m", "traces": target}, WorkerConfig)


async def test_nothing_is_traced_without_a_target() -> None:
    """There is no tracer then."""
    async with running("", "worker", "w") as tracer:
        assert tracer is None


def test_the_sdk_is_not_imported_without_a_target() -> None:
    """A process that traces nothing does not pay for it; the bare interface comes with the HTTP framework."""
    program = "import sys, services.gateway.app, services.scheduler.bootstrap, services.storage.bootstrap; "
    program += "print([name for name in ('opentelemetry.sdk', 'opentelemetry.exporter', 'shared.trace_export')"
    program += " if name in sys.modules])"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)

    assert done.stdout.strip() == "[]"
