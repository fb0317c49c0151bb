"""A cluster of three real servers loses the one that matters most, and nobody loses a message.

What a server shows that stands still, or is alone, is here too.
"""

from __future__ import annotations

import asyncio
import functools
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import nats.errors
import pytest
from structlog.testing import capture_logs

from shared import subjects
from shared.bus.jetstream import BUCKET_STREAM
from shared.bus.nats_bus import NatsBus, connect
from shared.bus.protocol import Bus, StreamLimits
from shared.errors import ConfigError, Unavailable
from tests.conformance.brokers import read, retried
from tests.nats_server import NatsCluster, NatsServer
from tests.waiting import until

pytestmark = pytest.mark.integration

LIMITS = StreamLimits(max_bytes=64 * 2**20, replicas=3)
PATIENCE_S = 60.0


Loss = Callable[[NatsCluster, Bus], Awaitable[None]]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[NatsCluster]:
    made = NatsCluster(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.stop()


@asynccontextmanager
async def joined(folder: Path) -> AsyncIterator[tuple[NatsCluster, Bus]]:
    """A cluster, and a client of it in which every stream has three copies."""
    cluster = NatsCluster(folder)
    try:
        await asyncio.to_thread(cluster.start)
        bus = await connect(cluster.urls, "first")
        await ensured(bus, LIMITS)
        yield cluster, bus
        await bus.close()
    finally:
        cluster.stop()


async def ensured(bus: Bus, limits: StreamLimits) -> None:
    """Make the streams; a cluster that has just started may have to be asked again."""

    async def attempt() -> int:
        await bus.ensure_streams(limits)
        return 0

    await retried(attempt)


def server_of(cluster: NatsCluster, bus: Bus) -> NatsServer:
    """The server that a client is connected to."""
    assert isinstance(bus, NatsBus)
    return cluster.server_of(bus._client.connected_url.port)


async def append_numbers(bus: Bus, first: int, last: int) -> None:
    for number in range(first, last + 1):
        text = str(number)
        await retried(partial(bus.append, "tc.in.cell", text.encode(), message_id=text, timeout_s=2.0))


async def whatever_is_lost(victim: str, cluster: NatsCluster, bus: Bus) -> None:
    """Appended and followed while a server dies: each message once, in order, to everybody."""
    other = await connect(cluster.urls, "second")
    seen: list[bytes] = []

    async def follow() -> None:
        async for message in other.follow(subjects.INPUTS_STREAM):
            seen.append(message.data)

    following = asyncio.create_task(follow())
    await append_numbers(bus, 1, 50)
    await until(lambda: len(seen) == 50)
    appending = asyncio.create_task(append_numbers(bus, 51, 200))
    await until(lambda: len(seen) > 60)
    servers: dict[str, Callable[[], Any]] = {
        "leader": lambda: cluster.leader_of(subjects.INPUTS_STREAM),
        "metadata's leader": cluster.metadata_leader,
        "ours": lambda: server_of(cluster, bus),
        "follower's": lambda: server_of(cluster, other),
    }
    servers[victim]().kill()
    async with asyncio.timeout(PATIENCE_S):
        await appending
    await until(lambda: len(seen) >= 200, timeout_s=PATIENCE_S)
    stored = [message.data for message in await read(bus, subjects.INPUTS_STREAM)]
    following.cancel()
    await other.close()

    expected = [str(number).encode() for number in range(1, 201)]
    assert seen == expected
    assert stored == expected


async def outputs_are_stored(cluster: NatsCluster, bus: Bus) -> None:
    """``flush`` says so when copies are not stored, and tells publishers to send again, though connected."""
    again: list[int] = []
    published = 0

    async def publish_until_stored(count: int) -> None:
        """As the scheduler's outbox does it: what is not proven is sent again, in order."""
        nonlocal published
        start, published = published, published + count
        sent = start
        async with asyncio.timeout(PATIENCE_S):
            while True:
                lost = len(again)
                try:
                    while sent < published:
                        await bus.publish("tc.out.worker.w1", str(sent).encode())
                        sent += 1
                    await bus.flush()
                except Unavailable:
                    await asyncio.sleep(0.05)
                else:
                    return
                if len(again) > lost:
                    sent = start

    bus.on_disconnect(lambda: again.append(1))
    await publish_until_stored(50)
    leader = cluster.leader_of(subjects.OUTPUTS_STREAM)
    leader.kill()
    for _ in range(10):
        await publish_until_stored(20)
    stored = [int(message.data) for message in await read(bus, subjects.OUTPUTS_STREAM)]

    assert set(stored) == set(range(published))


async def objects_and_calls_survive(cluster: NatsCluster, bus: Bus) -> None:
    """A snapshot is read back, and a call is answered, after the server that we were connected to has died."""
    other = await connect(cluster.urls, "second")

    async def echo(data: bytes) -> bytes:
        return data

    await other.serve("tc.rpc.echo", echo)
    await bus.put_object("core-1", b"x" * 500_000)
    server_of(cluster, bus).kill()
    await until(lambda: bus.is_connected and other.is_connected, timeout_s=PATIENCE_S)

    async def back() -> int:
        found = await bus.get_object("core-1")
        assert found == b"x" * 500_000
        return 0

    async def answered() -> int:
        assert await bus.call("tc.rpc.echo", b"hello") == b"hello"
        return 0

    await retried(back)
    await retried(answered)
    await other.close()


async def reads_are_whole_while_a_server_catches_up(cluster: NatsCluster, bus: Bus) -> None:
    """A server comes back with an empty disk. What it has of a stream at that moment is not the stream's end, nor are
    the snapshots that it has all that there are: a scheduler that starts would begin anew.
    """
    names = [f"core-{number:020d}" for number in range(1, 4)]
    for name in names:
        await bus.put_object(name, bytes(6 * 2**20))
    await append_numbers(bus, 1, 20)
    leaders = {cluster.metadata_leader().name, cluster.leader_of(BUCKET_STREAM).name}
    lost = next(server for server in cluster.servers if server.name not in leaders)
    await asyncio.to_thread(lost.kill)
    shutil.rmtree(lost.store)
    await asyncio.to_thread(lost.start)

    reads, found = 0, set[tuple[int, int]]()
    while reads < 20 or not await asyncio.to_thread(_is_current, cluster, lost.name):
        objects = await retried(bus.list_objects)
        inputs = await retried(functools.partial(read, bus, subjects.INPUTS_STREAM))
        found.add((len(objects), len(inputs)))
        reads += 1

    assert found == {(3, 20)}


def _is_current(cluster: NatsCluster, name: str) -> bool:
    """Whether the leader of the snapshots' stream says that a server has all of it."""
    told = next((stream for _, stream in cluster.led_streams() if stream["name"] == BUCKET_STREAM), None)
    replicas = told["cluster"].get("replicas", []) if told else []
    return any(each["name"] == name and each["current"] and not each.get("lag") for each in replicas)


LOSSES: dict[str, Loss] = {
    **{
        f"the server lost is {victim}": functools.partial(whatever_is_lost, victim)
        for victim in ("leader", "metadata's leader", "ours", "follower's")
    },
    "outputs, whose leader is lost": outputs_are_stored,
    "objects and calls": objects_and_calls_survive,
    "reads, while a server catches up": reads_are_whole_while_a_server_catches_up,
}


async def test_the_loss_of_a_server_loses_nothing(tmp_path: Path) -> None:
    """Messages, outputs, objects and calls, whichever server dies. Each loss is of a cluster of its own: servers take
    their time to elect another leader, and all of them take it at once.
    """

    async def suffer(number: int, loss: Loss) -> None:
        async with joined(tmp_path / str(number)) as (cluster, bus):
            await loss(cluster, bus)

    ends = await asyncio.gather(*(suffer(*each) for each in enumerate(LOSSES.values())), return_exceptions=True)
    failed = []
    for name, end in zip(LOSSES, ends, strict=True):
        if end is not None:
            end.add_note(name)
            failed.append(end)
    if failed:
        raise BaseExceptionGroup("some losses were noticed", failed)


async def test_streams_get_the_copies_that_are_asked_for(cluster: NatsCluster) -> None:
    """A cell that began with one copy, which is warned of, is given three and keeps what it had."""
    bus = await connect(cluster.urls[:1], "first")
    with capture_logs() as warned:
        await ensured(bus, StreamLimits(max_bytes=2**20))
    await retried(lambda: bus.append("tc.in.cell", b"kept"))
    with capture_logs() as logged:
        await ensured(bus, StreamLimits(max_bytes=2**21, replicas=3))
    updated = {entry["stream"]: entry for entry in logged if entry["event"] == "stream_updated"}
    assert isinstance(bus, NatsBus)
    details = await bus._client.jetstream().stream_info(subjects.INPUTS_STREAM)
    stored = [message.data for message in await read(bus, subjects.INPUTS_STREAM)]
    await bus.close()

    assert "streams_have_one_copy" in [entry["event"] for entry in warned]
    assert "streams_have_one_copy" not in [entry["event"] for entry in logged]
    assert {subjects.INPUTS_STREAM, subjects.OUTPUTS_STREAM} <= set(updated)
    assert updated[subjects.INPUTS_STREAM]["num_replicas"] == 3
    assert (details.config.num_replicas, details.config.max_bytes) == (3, 2**21)
    assert stored == [b"kept"]


async def test_copies_need_servers(nats_server: NatsServer) -> None:
    """A server that is alone cannot hold three: the operator is told, whether the stream exists or not."""
    bus = await connect([nats_server.url], "first")
    with pytest.raises(ConfigError, match="--stream-replicas"):
        await bus.ensure_streams(LIMITS)
    with capture_logs() as logged:
        await bus.ensure_streams(StreamLimits(max_bytes=2**20))
    assert logged == []
    with pytest.raises(ConfigError, match="--stream-replicas"):
        await bus.ensure_streams(LIMITS)
    await bus.close()


async def unanswered(bus: NatsBus) -> None:
    """Wait until a round trip was given up; the server may still answer the first."""
    while True:
        try:
            await bus._client.flush(timeout=0.2)
        except nats.errors.TimeoutError:
            return


async def test_an_answer_that_comes_too_late_does_not_make_us_deaf(nats_server: NatsServer) -> None:
    """The server stands still for longer than a round trip may take, then answers it; the connection goes on."""
    bus = await connect([nats_server.url], "first")
    await bus.ensure_streams(StreamLimits(max_bytes=2**20))
    lost: list[int] = []
    bus.on_disconnect(lambda: lost.append(1))
    assert isinstance(bus, NatsBus)
    assert nats_server._process is not None
    nats_server._process.send_signal(signal.SIGSTOP)
    try:
        await unanswered(bus)
    finally:
        nats_server._process.send_signal(signal.SIGCONT)
    seq = await bus.append("tc.in.cell", b"heard", timeout_s=60.0)
    await bus.close()

    assert (seq, lost) == (1, [])
