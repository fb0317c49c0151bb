"""One trace per request, from HTTP to the last token, across the processes of a running cell."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.waiting import holds
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig

pytestmark = pytest.mark.integration

SPANS_OF_A_REQUEST = {"http", "accept", "broker", "queue", "compute", "deliver", "decode"}
ADMIN_KEY = "an-admin-key-of-some-length"
PROMPT = "a text that is longer than a few chunks, so that it is saved to disk and fetched again; " * 24


@dataclass(frozen=True)
class Span:
    """A line of the file."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    start_s: float
    end_s: float
    attributes: dict[str, Any]


@dataclass
class TracedCell:
    """A running cell, and the file that its spans go to."""

    cell: RunningCell
    file: Path
    seen: list[str] = field(default_factory=list)

    def ask(self, **headers: str) -> httpx.Response:
        """One greedy answer, streamed if that."""
        with httpx.Client(base_url=self.cell.base_url, timeout=60, trust_env=False) as client:
            model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            return client.post("/v1/completions", json=body, headers=headers).raise_for_status()

    def spans(self, trace_id: str = "") -> list[Span]:
        """What was written so far, of one trace or of all."""
        if not self.file.exists():
            return []
        lines = self.file.read_text(encoding="utf-8").splitlines()
        return [span for span in map(parse, lines) if span.trace_id == (trace_id or span.trace_id)]

    def whole(self, trace_id: str, is_whole: Callable[[list[Span]], bool]) -> list[Span]:
        """The spans of a trace once ``is_whole`` holds: each process writes for itself, twice a second."""
        assert holds(lambda: is_whole(self.spans(trace_id))), [span.name for span in self.spans(trace_id)]
        return self.spans(trace_id)


def parse(line: str) -> Span:
    """A span in OpenTelemetry's JSON."""
    found = json.loads(line)
    return Span(
        name=found["name"],
        service=found["resource"]["attributes"]["service.name"].removeprefix("thermocline-"),
        trace_id=found["context"]["trace_id"].removeprefix("0x"),
        span_id=found["context"]["span_id"].removeprefix("0x"),
        parent_id=(found["parent_id"] or "").removeprefix("0x"),
        start_s=seconds(found["start_time"]),
        end_s=seconds(found["end_time"]),
        attributes=found["attributes"],
    )


def seconds(text: str) -> float:
    """A time of OpenTelemetry's JSON, ``2026-01-01T00:00:00.000000Z``, since 1970."""
    return datetime.fromisoformat(text).timestamp()


def named(*names: str) -> Callable[[list[Span]], bool]:
    """Whether spans of all these names are there."""
    return lambda spans: {span.name for span in spans} >= set(names)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TracedCell]:
    """A cell with a disk tier whose device and host pools are too small for much more than the prompt."""
    folder = tmp_path_factory.mktemp("traces")
    config = SupervisorConfig(
        port=0,
        threads=1,
        device_kv_bytes=16 * 2**20,
        host_kv_bytes=32 * 2**20,
        disk_dir=(str(folder / "disk"),),
        disk_kv_bytes=64 * 2**20,
        traces=str(folder / "spans.jsonl"),
        trace_share=0.0,
    )
    # However long a busy machine takes to fetch, what is traced waits for it.
    environ = {"THERMOCLINE_ADMIN_KEY": ADMIN_KEY, "THERMOCLINE_PREFETCH_WAIT": "full"}
    with running(config, environ=environ) as cell:
        yield TracedCell(cell, folder / "spans.jsonl")


def traceparent(trace_id: str, flags: str = "01") -> str:
    """The header of a caller whose own span is 00..07."""
    return f"00-{trace_id}-{7:016x}-{flags}"


def test_a_request_is_one_trace(traced: TracedCell) -> None:
    """Every process adds its spans to the caller's trace, all below the span of the HTTP request, which is the caller's
    child; and they follow one another.
    """
    trace_id = f"{0xA1:032x}"

    response = traced.ask(traceparent=traceparent(trace_id))

    spans = traced.whole(trace_id, named(*SPANS_OF_A_REQUEST))
    by_name = {span.name: span for span in spans}
    http = by_name["http"]
    assert http.parent_id == f"{7:016x}"
    assert {span.parent_id for span in spans if span is not http} == {http.span_id}
    assert {span.name: span.service for span in spans if span.name != "http"} == {
        "accept": "gateway",
        "broker": "gateway",
        "queue": "scheduler",
        "compute": "worker",
        "decode": "worker",
        "deliver": "gateway",
    }
    order = [by_name[name] for name in ("accept", "broker", "queue", "compute", "decode")]
    slack_s = 0.002  # Gateway, broker and worker read the same clock here, but not at the same moment.
    for before, after in itertools.pairwise(order):
        assert before.end_s <= after.start_s + slack_s, (before.name, after.name)
    assert all(http.start_s - slack_s <= span.start_s <= span.end_s <= http.end_s + slack_s for span in order)
    assert http.attributes["http.response.status_code"] == 200
    assert http.attributes["http_id"] == response.headers["x-request-id"]
    assert by_name["decode"].attributes["completion_tokens"] == 8
    assert by_name["compute"].attributes["computed_tokens"] > 0


def test_a_fetch_from_disk_is_part_of_the_trace(traced: TracedCell) -> None:
    """What a storage fetches for a traced request shows below it, and so does the wait for it."""
    trace_id = f"{0xA2:032x}"
    traced.ask()
    flush(traced.cell)

    traced.ask(traceparent=traceparent(trace_id))

    spans = traced.whole(trace_id, named(*SPANS_OF_A_REQUEST, "fetch", "prefetch", "load"))
    by_name = {span.name: span for span in spans}
    assert by_name["fetch"].service == "storage"
    assert by_name["fetch"].attributes["disk_chunks"] > 0
    assert by_name["fetch"].parent_id == by_name["http"].span_id
    assert by_name["prefetch"].parent_id == by_name["queue"].span_id
    assert by_name["compute"].attributes["disk_tokens"] > 0


def test_who_is_not_sampled_leaves_no_trace(traced: TracedCell) -> None:
    """A caller that does not record its trace, one that has none at a share of 0, and one that sends nonsense are not
    traced; the traced request behind them says that their spans would be there by then.
    """
    before = len({span.trace_id for span in traced.spans()})
    trace_id = f"{0xA3:032x}"
    traced.ask(traceparent=traceparent(f"{0xA4:032x}", "00"))
    traced.ask()
    traced.ask(traceparent="00-nonsense-01")

    traced.ask(traceparent=traceparent(trace_id))

    traced.whole(trace_id, named(*SPANS_OF_A_REQUEST))
    assert len({span.trace_id for span in traced.spans()}) == before + 1


def flush(cell: RunningCell) -> None:
    """Drop device and host memory once what was computed is on disk."""
    with httpx.Client(
        base_url=cell.base_url, headers={"authorization": f"Bearer {ADMIN_KEY}"}, timeout=30, trust_env=False
    ) as client:

        def is_at_rest() -> bool:
            report = client.get("/v1/cell").raise_for_status().json()
            return bool(report["chunks"] and not report["saves"] and not report["running"])

        assert holds(is_at_rest)
        client.post("/v1/cache/flush", json={"tiers": ["device", "host"]}).raise_for_status()
