"""Messages of the gateway whose sender does not wait."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from services.gateway.outbox import Outbox
from shared import subjects
from shared.bus.protocol import StreamLimits
from shared.codec import decode_input
from shared.errors import TransportError, Unavailable
from shared.messages.requests import CancelRequest
from tests.memory_bus import MemoryBroker


@pytest.mark.parametrize("fault", [Unavailable("no answer"), TransportError("resource limits exceeded (10002)")])
async def test_a_cancellation_outlives_faults_of_the_broker(fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropped, it would leave a request running that nobody reads."""
    bus = MemoryBroker().connect("gateway")
    await bus.ensure_streams(StreamLimits())
    append, faults = bus.append, [fault]

    async def append_at_last(subject: str, data: bytes, *, message_id: str = "", timeout_s: float = 5.0) -> int:
        if faults:
            raise faults.pop()
        return await append(subject, data, message_id=message_id, timeout_s=timeout_s)

    monkeypatch.setattr(bus, "append", append_at_last)
    monkeypatch.setattr("services.gateway.outbox.RETRY_FIRST_S", 0.01)
    outbox = Outbox(bus, subjects.request_input("g"))
    sending = asyncio.create_task(outbox.run())
    outbox.post(CancelRequest(request_id="r", gateway_id="g", reason="client_disconnected"))

    assert await outbox.drain(5.0)
    sending.cancel()
    stored = [decode_input(each.data) async for each in bus.follow(subjects.INPUTS_STREAM, live=False)]
    assert [type(each) for each in stored] == [CancelRequest]


async def test_what_is_always_refused_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it keeps no later message from being sent."""
    bus = MemoryBroker().connect("gateway")
    await bus.ensure_streams(StreamLimits())
    append = bus.append

    async def refusing(subject: str, data: bytes, *, message_id: str = "", timeout_s: float = 5.0) -> int:
        if message_id == "bad.cancel":
            raise TransportError("it is refused (1)")
        return await append(subject, data, message_id=message_id, timeout_s=timeout_s)

    monkeypatch.setattr(bus, "append", refusing)
    monkeypatch.setattr("services.gateway.outbox.RETRY_FIRST_S", 0.001)
    monkeypatch.setattr("services.gateway.outbox.RETRY_MOST_S", 0.001)
    outbox = Outbox(bus, subjects.request_input("g"))
    sending = asyncio.create_task(outbox.run())
    for request_id in ("bad", "good"):
        outbox.post(CancelRequest(request_id=request_id, gateway_id="g", reason="client_disconnected"))

    with capture_logs() as told:
        assert await outbox.drain(5.0)
    sending.cancel()
    assert [each["message_id"] for each in told if each["event"] == "input_refused"] == ["bad.cancel"]
    assert len([each async for each in bus.follow(subjects.INPUTS_STREAM, live=False)]) == 1
