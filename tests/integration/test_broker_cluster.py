"""A cluster of three real servers loses the one that matters most, and nobody loses a message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shared import subjects
from shared.bus.nats_bus import NatsBus, connect
from shared.bus.protocol import Bus, StreamLimits
from shared.errors import ConfigError, Unavailable
from tests.conformance.brokers import read, retried
from tests.nats_server import NatsCluster, NatsServer
from tests.waiting import until

pytestmark = pytest.mark.integration

LIMITS = StreamLimits(max_bytes=64 * 2**20, replicas=3)
PATIENCE_S = 60.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[NatsCluster]:
    made = NatsCluster(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
async def bus(cluster: NatsCluster) -> AsyncIterator[Bus]:
    """A client of the cluster, in which every stream has three copies."""
    connected = await connect(cluster.urls, "first")
    await ensured(connected, LIMITS)
    yield connected
    await connected.close()


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
        await retried(lambda text=text: bus.append("tc.in.cell", text.encode(), message_id=text, timeout_s=2.0))


@pytest.mark.parametrize("victim", ["leader", "metadata's leader", "ours", "follower's"])
async def test_what_is_appended_and_followed_survives_the_loss_of_a_server(
    cluster: NatsCluster, bus: Bus, victim: str
) -> None:
    """A leader, the publisher's server or the follower's: each message once, in order, to everybody."""
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
    servers = {
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


async def test_outputs_are_stored_when_the_leader_of_their_stream_dies(cluster: NatsCluster, bus: Bus) -> None:
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


async def test_objects_and_calls_survive_the_loss_of_a_server(cluster: NatsCluster, bus: Bus) -> None:
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
