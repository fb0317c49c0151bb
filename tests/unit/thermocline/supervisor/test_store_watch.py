"""The watch over the embedded broker's store: its decisions, and a real server on a disk that fills up."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import nats
import pytest
from nats.js.api import StreamConfig

from tests.nats_server import NatsServer
from tests.small_disk import fill, small_disk
from thermocline.supervisor.nats_config import health_user_text
from thermocline.supervisor.nats_server import health_fault_at
from thermocline.supervisor.store_watch import APART_S, FAULTY_S, StoreWatch, has_room

FAULT = "JetStream stream 'A' write error: no space left on device"


def steps(watch: StoreWatch, *told: tuple[float, str | None, bool]) -> list[str]:
    """What the watch does at each of these times, with what the broker says and whether there is room."""
    return [watch.step(fault, has_room, now) for now, fault, has_room in told]


def test_a_broker_that_is_well_is_left_alone() -> None:
    """As is one that does not answer: it starts, or the supervisor restarts it."""
    assert steps(StoreWatch(), (0, None, False), (2, "", False), (99, None, False), (200, "", False)) == ["none"] * 4


def test_a_passing_fault_is_passed_over() -> None:
    """A restart is for those that last."""
    watch = StoreWatch()

    assert steps(watch, (0, FAULT, True), (FAULTY_S - 1, FAULT, True), (FAULTY_S, "", True)) == ["none"] * 3
    assert steps(watch, (20, FAULT, True), (20 + FAULTY_S, FAULT, True)) == ["none", "restart"]


def test_a_full_disk_is_told_once_and_no_restart_is_tried() -> None:
    """The server could not even start there. It is restarted as soon as there is room."""
    told = steps(
        StoreWatch(), (0, FAULT, False), (60, FAULT, False), (62, FAULT, True), (64, None, False), (66, "", False)
    )

    assert told == ["full", "none", "restart", "none", "recovered"]


def test_restarts_that_do_not_help_are_apart() -> None:
    """A broken disk must not keep the broker from ever running."""
    watch = StoreWatch()
    steps(watch, (0, FAULT, True))

    told = steps(
        watch, (10, FAULT, True), (20, FAULT, True), (10 + APART_S - 1, FAULT, True), (10 + APART_S, FAULT, True)
    )

    assert told == ["restart", "none", "none", "restart"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 3 MiB of the test's own."""
    with small_disk(tmp_path) as made:
        yield made


def test_room_is_found_by_writing(disk: Path) -> None:
    """A quota shows in no figure of the disk; and nothing is left behind."""
    assert has_room(disk)
    filler = fill(disk)
    assert not has_room(disk)
    filler.unlink()
    assert has_room(disk)
    assert os.listdir(disk) == []
    assert not has_room(disk / "none")


async def test_the_server_says_when_a_stream_cannot_be_written_until_it_is_restarted(disk: Path) -> None:
    """Also after there is room again; a restart keeps what was confirmed."""
    users = "authorization { users: [{user: all, password: tcpass}] }\n"
    server = NatsServer(disk / "nats", config=health_user_text("supervisor", "tcword") + users)

    async def fault() -> str | None:
        return await health_fault_at(server.host, server.port, "supervisor", "tcword", timeout_s=20.0)

    async def stores(text: bytes, within_s: float = 20.0) -> bool:
        try:
            await bus.publish("a", text, timeout=within_s)
        except (TimeoutError, nats.errors.Error):
            return False
        return True

    is_back = asyncio.Event()

    async def note_that_it_is_back() -> None:
        is_back.set()

    assert await fault() is None
    with server:
        client = await nats.connect(server.url, user="all", password="tcpass", reconnected_cb=note_that_it_is_back)
        bus = client.jetstream()
        await bus.add_stream(StreamConfig(name="A", subjects=["a"]))
        assert await stores(b"first")
        assert await fault() == ""
        assert await health_fault_at(server.host, server.port, "all", "tcpass", timeout_s=0.5) is None

        filler = fill(disk)
        assert not await stores(bytes(10_000), within_s=1.0)
        assert "no space left" in (await fault() or "")
        filler.unlink()
        assert not await stores(b"second", within_s=1.0)
        assert "no space left" in (await fault() or "")

        server.stop()
        server.start()
        await asyncio.wait_for(is_back.wait(), 20.0)
        assert await fault() == ""
        assert await stores(b"third")
        info = await bus.stream_info("A")
        assert info.state.messages == 2
        await client.close()
