"""The cell over HTTP, against a scripted scheduler."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import msgspec
import pytest

from services.gateway.cell import FRESH_S
from services.gateway.cell_events import CellEvents, cell_event
from services.gateway.openai_schema.cell import CellReport, CellSavings
from services.gateway.pending import Slots
from services.gateway.views.cell_view import cell_view
from shared.errors import TooManyConnections
from shared.messages.status import CellStatus, PoolStatus, RestorationStatus, WorkerStatus
from tests.unit.gateway.running_gateway import Harness, running_gateway, says
from tests.unit.gateway.scripted_cache import ScriptedCache
from tests.unit.gateway.scripted_cell import cell_status
from tests.waiting import until

KEY = "an-admin-key-of-some-length"
ADMIN = {"x-admin-key": KEY}


def status() -> CellStatus:
    """One with something in every list."""
    return cell_status(
        epoch=3, seq=99, model="m", queued=2, running=1, max_context=512, storages=("storage-0",),
        storage_incarnations={"storage-0": "one"}, counters={"evictions": 4},
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


def test_flows_and_savings_are_told_in_tokens() -> None:
    """Pages and chunks are converted; of what was fetched, each place has its own share."""
    counters = {
        "prefill_tokens_planned": 700, "backed_up_pages": 4, "loaded_tokens": 96, "promoted_pages": 1,
        "saved_chunks": 2, "saved_hidden_chunks": 1, "fetched_tokens": 512, "hidden_fetched_tokens": 64,
        "fetched_tokens_remote": 128, "fetched_tokens_lent": 64, "hit_tokens_device": 1000, "hit_tokens_host": 24,
        "prefill_saved_us": 2_500_000, "load_us": 250_000,
    }  # fmt: skip

    report = cell_view(msgspec.structs.replace(status(), counters=counters), {}, models=["base", "adapter"])

    assert {(flow.source, flow.target): flow.tokens for flow in report.flows} == {
        ("computed", "device"): 700, ("device", "host"): 64, ("host", "device"): 112, ("host", "disk"): 192,
        ("disk", "host"): 384, ("remote", "host"): 128, ("lent", "host"): 64,
    }  # fmt: skip
    assert report.savings == CellSavings(tokens=1024, computed_tokens=700, prefill_seconds=2.5, load_seconds=0.25)
    assert (report.models, report.chunk_tokens) == (["base", "adapter"], 64)


async def test_the_status_is_asked_of_the_scheduler() -> None:
    """So it is as new as can be. The model has the name by which callers ask for it."""
    async with administered() as harness, ScriptedCache(harness.cell.bus, storages=("storage-0",)):
        report = (await harness.client.get("/v1/cell", headers=ADMIN)).json()

    assert (report["object"], report["storages"], report["counters"], report["models"]) == (
        "cell", ["storage-0"], {"hit_tokens_device": 96}, ["test-model"],
    )  # fmt: skip


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


async def test_events_have_the_time_by_the_gateways_clock() -> None:
    """By which it dates requests: a browser's clock may differ."""
    async with running_gateway() as harness:
        gateway = replace(harness.gateway, wall_ns=lambda: 1_763_000_000_123_456_789)

        event = msgspec.json.decode(cell_event(gateway).removeprefix(b"data: "))

    assert event["now_ms"] == 1_763_000_000_123


async def test_a_silent_scheduler_is_told_as_an_error() -> None:
    """The stream goes on meanwhile: the scheduler may come back."""
    async with running_gateway() as harness:
        harness.gateway.cell.heard_s -= FRESH_S + 1

        event = msgspec.json.decode(cell_event(harness.gateway).removeprefix(b"data: "))

    assert event["error"]["code"] == "scheduler_away"
    assert event["error"]["message"] == "scheduler scheduler-0 was last heard of more than 3 s ago"


async def test_silence_is_told_in_few_words_that_stay() -> None:
    """Each other message is read out by the screen readers of all who watch."""
    async with running_gateway() as harness:
        told = []
        for _ in range(100):
            harness.gateway.cell.heard_s -= 1
            told.append(msgspec.json.decode(cell_event(harness.gateway).removeprefix(b"data: ")))

    messages = [event["error"]["message"].rpartition("more than ")[2] for event in told if "error" in event]
    assert list(dict.fromkeys(messages)) == ["3 s ago", "10 s ago", "30 s ago", "60 s ago"]


async def test_a_broker_that_is_away_is_named_at_once() -> None:
    """Though the last status is new: the gateway will hear nothing else until it has a connection again."""
    async with running_gateway() as harness:
        harness.bus.disconnect()

        event = msgspec.json.decode(cell_event(harness.gateway).removeprefix(b"data: "))

    assert event["error"]["code"] == "broker_away"
    assert event["error"]["message"] == "gateway gw-beef0001 has no connection to the message broker"


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
