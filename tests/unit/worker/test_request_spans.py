"""A worker's spans follow from its orders and reports."""

from __future__ import annotations

import pytest

from services.worker import request_spans
from services.worker.reports import Report
from services.worker.request_spans import RequestSpans
from shared.messages.requests import SamplingParams
from shared.messages.tokens import Timing, TokenItem, Usage
from shared.messages.worker_plans import AdmitRequest
from tests.recorded_spans import RecordedSpans

PARENT = f"00-{1:032x}-{2:016x}-01"
NOW_NS = 900


def order(request_id: str = "r", attempt: int = 1, trace: str = PARENT) -> AdmitRequest:
    """An order to admit a request of one token."""
    return AdmitRequest(
        request_id=request_id,
        attempt=attempt,
        gateway_id="g",
        tokens=b"\0\0\0\0",
        prompt_tokens=1,
        sampling=SamplingParams(max_tokens=4),
        pages=b"\0\0\0\0",
        trace=trace,
    )


def report(*items: TokenItem, preempted: tuple[str, ...] = ()) -> Report:
    """A report with items for one gateway."""
    return Report(step=1, items={"g": list(items)}, preempted=list(preempted))


def first(attempt: int = 1, **times: int) -> TokenItem:
    """A first token with its times."""
    timing = Timing(started_ns=100, first_token_ns=400, **times)
    return TokenItem(request_id="r", attempt=attempt, index=0, tokens=(7,), timing=timing)


def last(attempt: int = 1) -> TokenItem:
    """The end of an answer of four tokens."""
    usage = Usage(device_tokens=32, computed_tokens=8)
    return TokenItem(request_id="r", attempt=attempt, index=3, tokens=(9,), finish="length", usage=usage)


def traced() -> tuple[RecordedSpans, RequestSpans]:
    """Spans at a clock that stands still."""
    tracer = RecordedSpans()
    return tracer, RequestSpans(tracer, lambda: NOW_NS)


def test_a_request_has_spans_when_it_ends() -> None:
    """Not before: computing from the start of its first step to its first token, and decoding from there on."""
    tracer, spans = traced()
    spans.admitted(order())
    spans.reported(report(first()))
    before = list(tracer.spans)

    spans.reported(report(last()))

    assert before == []
    assert tracer.times == {"compute": (100, 400), "decode": (400, NOW_NS)}
    assert {span.parent for span in tracer.spans} == {PARENT}
    compute, decode = tracer.spans
    assert (compute.attributes["device_tokens"], compute.attributes["computed_tokens"]) == (32, 8)
    assert (decode.attributes["completion_tokens"], decode.attributes["finish_reason"]) == (4, "length")


def test_loads_and_restorations_come_before_computing() -> None:
    """One ends where the next begins."""
    tracer, spans = traced()
    spans.admitted(order())

    spans.reported(report(first(loaded_ns=200, restored_ns=300), last()))

    assert tracer.times == {
        "load": (100, 200),
        "restore": (200, 300),
        "compute": (300, 400),
        "decode": (400, NOW_NS),
    }


def test_who_is_not_traced_leaves_nothing() -> None:
    """An order without a trace is as if it had not been seen."""
    tracer, spans = traced()
    spans.admitted(order(trace=""))

    spans.reported(report(first(), last()))

    assert tracer.spans == []


def test_a_preempted_request_ends_here() -> None:
    """What it did is told, and its next attempt begins anew."""
    tracer, spans = traced()
    spans.admitted(order())
    spans.reported(report(first()))
    spans.reported(report(preempted=("r",)))
    spans.admitted(order(attempt=2))

    spans.reported(report(first(attempt=2), last(attempt=2)))

    endings = [span.attributes["finish_reason"] for span in tracer.spans if span.name == "decode"]
    assert endings == ["preempted", "length"]
    assert [span.attributes["attempt"] for span in tracer.spans] == [1, 1, 2, 2]


def test_items_of_an_older_attempt_end_nothing() -> None:
    """The request runs here again under a newer one."""
    tracer, spans = traced()
    spans.admitted(order(attempt=2))

    spans.reported(report(last(attempt=1)))

    assert tracer.spans == []


def test_requests_whose_end_is_never_told_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many are remembered and no more, the newest of them."""
    monkeypatch.setattr(request_spans, "MOST_TRACED", 2)
    tracer, spans = traced()
    for name in ("r", "s", "t"):
        spans.admitted(order(name))

    spans.reported(report(first(), last()))

    assert tracer.spans == []
