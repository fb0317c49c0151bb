"""The cell over HTTP, against a scripted scheduler."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest

from services.gateway.cell import FRESH_S
from services.gateway.cell_events import CellEvents, cell_event
from services.gateway.openai_schema.cell import CellReport
from services.gateway.pending import Slots
from services.gateway.views.cell_view import cell_view
from shared.errors import TooManyConnections
from shared.messages.status import CellStatus, PoolStatus, RestorationStatus, WorkerStatus
from tests.unit.gateway.running_gateway import Harness, running_gateway, says
from tests.unit.gateway.scripted_cache import ScriptedCache
from tests.waiting import until

KEY = "an-admin-key-of-some-length"
ADMIN = {"x-admin-key": KEY}


def status() -> CellStatus:
    """One with something in every list."""
    return CellStatus(
        scheduler_id="scheduler-0", epoch=3, seq=99, model="m", page_size=16, queued=2, running=1, max_queued=10,
        max_context=512, storages=("storage-0",), storage_incarnations={"storage-0": "one"}, counters={"evictions": 4},
        workers=(WorkerStatus(worker_id="worker-0", incarnation="one", running=1, waiting=2),),
        pools=(PoolStatus(owner="worker-0", tier="device", total=64, free=50, cached=10, leased=4),),
        restorations=(
            RestorationStatus(kind="kv", count=1, predicted_seconds=0.5, observed_seconds=0.4, bias=0.1, error=0.2),
        ),
    )  # fmt: skip


@contextlib.asynccontextmanager
async def administered() -> AsyncIterator[Harness]:
    """A gateway over real HTTP that has an admin key."""
    async with running_gateway(says("yes"), over_http=True, admin_key=KEY) as harness:
        yield harness


def test_nothing_that_the_scheduler_says_is_left_out() -> None:
    """Every field of the status is in the report, under its own name and with its own value, or told by tenant."""
    report = msgspec.json.decode(msgspec.json.encode(cell_view(status(), {}, 0.25)))
    apart = {"tenant_loads", "owner_bytes", "takes_bases", "takes_compact"}  # The last are between the two processes.

    assert set(CellStatus.__struct_fields__) - apart <= set(CellReport.__struct_fields__)
    assert (report["object"], report["age_ms"], report["seq"], report["counters"]) == (
        "cell",
        250.0,
        99,
        {"evictions": 4},
    )
    assert report["workers"] == [
        {"worker_id": "worker-0", "incarnation": "one", "running": 1, "waiting": 2, "draining": False, "device": None}
    ]
    assert report["pools"][0]["leased"] == 4
    assert report["restorations"][0]["observed_seconds"] == 0.4


async def test_the_status_is_asked_of_the_scheduler() -> None:
    """So it is as new as can be."""
    async with administered() as harness, ScriptedCache(harness.cell.bus, storages=("storage-0",)):
        report = (await harness.client.get("/v1/cell", headers=ADMIN)).json()

    assert (report["object"], report["storages"], report["counters"]) == (
        "cell", ["storage-0"], {"hit_tokens_device": 96},
    )  # fmt: skip


async def test_a_scheduler_that_does_not_answer_is_an_error() -> None:
    """503 with Retry-After, in OpenAI's shape."""
    async with administered() as harness:
        response = await harness.client.get("/v1/cell", headers=ADMIN)

    assert (response.status_code, response.json()["error"]["type"]) == (503, "server_error")
    assert response.headers["retry-after"]


@pytest.mark.parametrize("path", ["/v1/cell", "/v1/cell/events"])
async def test_only_the_admin_key_opens(path: str) -> None:
    """The status names every tenant's load."""
    async with administered() as harness:
        refused = await harness.client.get(path)

    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_admin_key")


async def test_events_are_statuses_until_the_client_goes() -> None:
    """The stream is text/event-stream, and its slot is free again when the client has gone."""
    async with (
        administered() as harness,
        harness.client.stream("GET", "/v1/cell/events", headers=ADMIN) as response,
    ):
        line = await anext(line async for line in response.aiter_lines() if line)

    assert response.headers["content-type"].startswith("text/event-stream")
    assert msgspec.json.decode(line.removeprefix("data: "))["workers"][0]["worker_id"] == "worker-0"


async def test_a_silent_scheduler_is_told_as_an_error() -> None:
    """The stream goes on meanwhile: the scheduler may come back."""
    async with running_gateway() as harness:
        harness.gateway.cell.heard_s -= FRESH_S + 1

        event = msgspec.json.decode(cell_event(harness.gateway).removeprefix(b"data: "))

    assert event["error"]["code"] == "service_unavailable"


async def test_watchers_are_bounded_and_give_their_place_back() -> None:
    """A gone client's stream ends at once, not at its next event."""
    sent: list[bytes] = []
    gone = asyncio.Event()

    async def receive() -> dict[str, object]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        assert isinstance(message, dict)
        sent.append(message.get("body", b""))

    async with running_gateway() as harness:
        slots = Slots(1)
        events = CellEvents(harness.gateway, slots, period_s=3600)
        with pytest.raises(TooManyConnections):
            CellEvents(harness.gateway, slots)
        serving = asyncio.create_task(events({"type": "http"}, receive, send))
        await until(lambda: len(sent) == 2)
        gone.set()
        await serving

    assert slots.used == 0
    assert sent[1].startswith(b"data: {")


async def test_the_stream_ends_when_the_gateway_shuts_down() -> None:
    """So that nobody holds up its end."""
    async with (
        administered() as harness,
        harness.client.stream("GET", "/v1/cell/events", headers=ADMIN) as response,
    ):
        harness.gateway.cell.is_draining = True
        with contextlib.suppress(httpx.RemoteProtocolError):
            text = "".join([part async for part in response.aiter_text()])

    assert text.count("data: ") <= 2
