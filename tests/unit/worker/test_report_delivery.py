"""Reports on their ways: tokens first, since somebody waits for them."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Gauge

from services.worker.ending import Ending
from services.worker.identity import WorkerIdentity
from services.worker.report_delivery import ReportDelivery
from services.worker.reports import Report
from services.worker.request_spans import RequestSpans
from services.worker.retained import RetainedOutputs
from services.worker.token_sender import TokenSender
from shared import subjects
from shared.bus.protocol import Delivery
from shared.codec import decode
from shared.errors import InternalError
from shared.event_outbox import EventOutbox
from shared.messages.requests import SamplingParams
from shared.messages.tokens import Timing, TokenBatch, TokenItem
from shared.messages.worker_events import BatchDone, DeviceFacts
from shared.messages.worker_plans import AdmitRequest
from tests.memory_bus import MemoryBroker
from tests.recorded_spans import RecordedSpans

WHO = WorkerIdentity(worker_id="w", incarnation="inc", node="n", model="m", device=DeviceFacts(kind="cpu"))


def report() -> Report:
    item = TokenItem(request_id="r", attempt=1, index=0, tokens=(7,), text="seven")
    event = BatchDone(worker_id="w", incarnation="inc", plan=1, failed=(), load_failures=())
    return Report(step=3, events=[event], items={"gw": [item]})


def admission() -> AdmitRequest:
    return AdmitRequest(
        request_id="r",
        attempt=1,
        gateway_id="gw",
        tokens=b"\0\0\0\0",
        prompt_tokens=1,
        sampling=SamplingParams(max_tokens=1),
        pages=b"\0\0\0\0",
        trace=f"00-{1:032x}-{2:016x}-01",
    )


def ended() -> Report:
    timing = Timing(started_ns=100, first_token_ns=400)
    item = TokenItem(request_id="r", attempt=1, index=0, tokens=(7,), text="seven", timing=timing, finish="length")
    return Report(step=3, items={"gw": [item]})


@pytest.mark.parametrize("capacity", [1, 0])
async def test_tokens_leave_before_events_are_queued(capacity: int) -> None:
    """Also where there is no room for an event, which ends the worker: what was said stays true."""
    broker = MemoryBroker()
    bus, gateway = broker.connect("worker"), broker.connect("gateway")
    waiting = Gauge("waiting", "Events", registry=CollectorRegistry())
    outbox = EventOutbox(bus, subjects.worker_input("w"), "inc", capacity=capacity, waiting=waiting)
    heard: list[tuple[TokenBatch, int]] = []

    def hear(delivery: Delivery) -> None:
        heard.append((decode(delivery.data, TokenBatch), len(outbox)))

    await gateway.hear(subjects.tokens("gw"), hear)
    ending, retained = Ending(), RetainedOutputs(8)
    tokens = TokenSender(bus, on_too_large=lambda item: None)
    delivery = ReportDelivery(WHO, outbox, tokens, retained, ending, None)

    delivery.take(report())

    assert [(batch.step, batch.items[0].tokens, queued) for batch, queued in heard] == [(3, (7,), 0)]
    assert retained.find("r", 0, max_bytes=1000) is not None
    assert len(outbox) == capacity
    if not capacity:
        with pytest.raises(InternalError):
            await ending.wait()


async def test_a_traced_answer_ends_before_its_last_token_leaves() -> None:
    """The gateway may end its own span, which contains the worker's, as soon as it has that token."""
    broker = MemoryBroker()
    bus, gateway = broker.connect("worker"), broker.connect("gateway")
    waiting = Gauge("waiting", "Events", registry=CollectorRegistry())
    outbox = EventOutbox(bus, subjects.worker_input("w"), "inc", capacity=1, waiting=waiting)
    order: list[str] = []
    await gateway.hear(subjects.tokens("gw"), lambda delivery: order.append("token"))

    def clock_ns() -> int:
        order.append("end")
        return 900

    spans = RequestSpans(RecordedSpans(), clock_ns)
    spans.admitted(admission())
    delivery = ReportDelivery(
        WHO, outbox, TokenSender(bus, on_too_large=lambda item: None), RetainedOutputs(8), Ending(), spans
    )

    delivery.take(ended())

    assert order == ["end", "token"]
