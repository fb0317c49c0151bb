"""What every bus guarantees (``shared/bus/protocol.py``), checked over NATS and over its in-process twin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Protocol

import pytest

from shared import subjects
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.bus.nats_bus import connect
from shared.bus.protocol import Bus, Delivery, StreamLimits, StreamMessage
from shared.errors import InternalError, NotFound, PayloadTooLarge, QueueFull, TransportError, Unavailable
from tests.nats_server import NatsServer
from tests.waiting import until

MAX_PAYLOAD = 64 * 1024
LIMITS = StreamLimits(max_bytes=64 * 1024 * 1024, max_age_s=3600.0)


class World(Protocol):
    """A broker with clients, whose connections can be broken."""

    async def connect(self, name: str) -> Bus: ...

    async def break_connections(self) -> None: ...

    async def restore_connections(self) -> None: ...

    async def close(self) -> None: ...


class NatsWorld:
    """A nats-server of its own; connections break because it is killed."""

    def __init__(self, folder: Path) -> None:
        self._server = NatsServer(folder, max_payload=MAX_PAYLOAD)
        self._server.start()
        self._buses: list[Bus] = []

    async def connect(self, name: str) -> Bus:
        bus = await connect([self._server.url], name)
        self._buses.append(bus)
        return bus

    async def break_connections(self) -> None:
        self._server.kill()
        await until(lambda: not any(bus.is_connected for bus in self._buses))

    async def restore_connections(self) -> None:
        self._server.start()
        await until(lambda: all(bus.is_connected for bus in self._buses))

    async def close(self) -> None:
        for bus in self._buses:
            await bus.close()
        self._server.stop()


class MemoryWorld:
    """One broker object; connections break because the clients are cut off."""

    def __init__(self) -> None:
        self._broker = MemoryBroker(max_payload=MAX_PAYLOAD)
        self._buses: list[MemoryBus] = []

    async def connect(self, name: str) -> Bus:
        bus = self._broker.connect(name)
        self._buses.append(bus)
        return bus

    async def break_connections(self) -> None:
        for bus in self._buses:
            bus.disconnect()

    async def restore_connections(self) -> None:
        for bus in self._buses:
            bus.reconnect()

    async def close(self) -> None:
        for bus in self._buses:
            await bus.close()


@pytest.fixture(params=["nats", "memory"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    """Each kind of broker in turn, empty."""
    made: World = NatsWorld(tmp_path) if request.param == "nats" else MemoryWorld()
    yield made
    await made.close()


@pytest.fixture
async def bus(world: World) -> Bus:
    """A client of a broker whose streams and bucket exist."""
    connected = await world.connect("first")
    await connected.ensure_streams(LIMITS)
    return connected


async def retried(operation: Callable[[], Awaitable[int]]) -> int:
    """Repeat an append until the broker has recovered, as its callers do."""
    async with asyncio.timeout(20.0):
        while True:
            try:
                return await operation()
            except Unavailable:
                await asyncio.sleep(0.05)


class Collected:
    """A handler that keeps what it gets."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []

    async def __call__(self, delivery: Delivery) -> None:
        self.deliveries.append(delivery)

    @property
    def data(self) -> list[bytes]:
        return [delivery.data for delivery in self.deliveries]


async def read(bus: Bus, stream: str, **options: object) -> list[StreamMessage]:
    """All that a stream holds now."""
    return [message async for message in bus.follow(stream, live=False, **options)]  # type: ignore[arg-type]


# -- core messages --------------------------------------------------------------------------------------------


async def test_subscriber_gets_messages_of_a_publisher_in_order(world: World, bus: Bus) -> None:
    """Per publisher and subject, order is kept, and headers arrive with the message."""
    other = await world.connect("second")
    collected = Collected()
    await other.subscribe("tc.tokens.*", collected)

    for number in range(200):
        await bus.publish("tc.tokens.gw", str(number).encode(), {"tc-number": str(number)})
    await until(lambda: len(collected.deliveries) == 200)

    assert collected.data == [str(number).encode() for number in range(200)]
    assert collected.deliveries[7].subject == "tc.tokens.gw"
    assert collected.deliveries[7].headers["tc-number"] == "7"


async def test_publisher_hears_itself(bus: Bus) -> None:
    """A client that subscribes to what it publishes gets its own messages."""
    collected = Collected()
    await bus.subscribe("tc.status", collected)

    await bus.publish("tc.status", b"mine")
    await until(lambda: bool(collected.deliveries))

    assert collected.data == [b"mine"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("tc.tokens.a", [b"a"]),
        ("tc.tokens.*", [b"a", b"b"]),
        ("tc.>", [b"a", b"b", b"deep"]),
        ("tc.tokens", []),
    ],
)
async def test_wildcards_match_whole_tokens(bus: Bus, pattern: str, expected: list[bytes]) -> None:
    """``*`` is one token, ``>`` one or more at the end."""
    collected, everything = Collected(), Collected()
    await bus.subscribe(pattern, collected)
    await bus.subscribe(">", everything)

    await bus.publish("tc.tokens.a", b"a")
    await bus.publish("tc.tokens.b", b"b")
    await bus.publish("tc.tokens.b.c", b"deep")
    await until(lambda: b"deep" in everything.data)

    assert collected.data == expected


async def test_handler_runs_one_message_at_a_time(bus: Bus) -> None:
    """The next message waits until the handler has finished the one before."""
    running, most, handled = 0, 0, 0

    async def handler(delivery: Delivery) -> None:
        nonlocal running, most, handled
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        handled += 1

    await bus.subscribe("tc.tokens.gw", handler)

    for _ in range(20):
        await bus.publish("tc.tokens.gw", b"")
    await until(lambda: handled == 20)

    assert most == 1


async def test_failing_handler_keeps_its_subscription(bus: Bus) -> None:
    """An exception, even a stray cancellation, costs one message and no more."""
    seen: list[bytes] = []

    async def handler(delivery: Delivery) -> None:
        seen.append(delivery.data)
        if delivery.data == b"fail":
            raise ValueError("wrong")
        if delivery.data == b"cancel":
            raise asyncio.CancelledError

    await bus.subscribe("tc.tokens.gw", handler)

    for data in (b"fail", b"cancel", b"fine"):
        await bus.publish("tc.tokens.gw", data)
    await until(lambda: len(seen) == 3)

    assert seen == [b"fail", b"cancel", b"fine"]


async def test_messages_beyond_the_pending_limit_are_dropped_and_counted(bus: Bus) -> None:
    """A slow handler loses messages visibly; the publisher never waits for it."""
    release = asyncio.Event()
    seen: list[bytes] = []
    everything = Collected()

    async def slow(delivery: Delivery) -> None:
        seen.append(delivery.data)
        await release.wait()

    subscription = await bus.subscribe("tc.tokens.gw", slow, pending_limit=5)
    await bus.subscribe("tc.tokens.gw", everything)
    await bus.publish("tc.tokens.gw", b"0")
    await until(lambda: len(seen) == 1)
    for number in range(1, 21):
        await bus.publish("tc.tokens.gw", str(number).encode())
    await until(lambda: len(everything.deliveries) == 21)
    release.set()
    await until(lambda: len(seen) == 6)

    assert subscription.dropped == 15
    assert seen == [b"0", b"1", b"2", b"3", b"4", b"5"]


async def test_closed_subscription_lets_the_running_handler_finish(bus: Bus) -> None:
    """``close`` returns when the handler that runs is done; later messages are not handled."""
    started, release = asyncio.Event(), asyncio.Event()
    finished: list[bytes] = []

    async def handler(delivery: Delivery) -> None:
        started.set()
        await release.wait()
        finished.append(delivery.data)

    subscription = await bus.subscribe("tc.tokens.gw", handler)
    await bus.publish("tc.tokens.gw", b"first")
    await asyncio.wait_for(started.wait(), 10)
    closing = asyncio.create_task(subscription.close())
    await asyncio.sleep(0)
    release.set()
    await asyncio.wait_for(closing, 10)
    await bus.publish("tc.tokens.gw", b"second")
    await bus.flush()

    assert finished == [b"first"]


async def test_handler_may_close_its_own_subscription(bus: Bus) -> None:
    """Closing from within the handler does not wait for itself."""
    seen: list[bytes] = []
    everything = Collected()

    async def once(delivery: Delivery) -> None:
        await subscription.close()
        seen.append(delivery.data)

    subscription = await bus.subscribe("tc.tokens.gw", once)
    await bus.subscribe("tc.tokens.gw", everything)

    for data in (b"1", b"2", b"3"):
        await bus.publish("tc.tokens.gw", data)
    await until(lambda: len(everything.deliveries) == 3 and len(seen) == 1)

    assert seen == [b"1"]


async def test_payload_beyond_the_limit_is_refused(bus: Bus) -> None:
    """The broker's own limit is known and applies to publish, append and call."""
    largest, too_large = b"x" * MAX_PAYLOAD, b"x" * (MAX_PAYLOAD + 1)

    await bus.publish("tc.tokens.gw", largest)

    assert bus.max_payload == MAX_PAYLOAD
    with pytest.raises(PayloadTooLarge):
        await bus.publish("tc.tokens.gw", too_large)
    with pytest.raises(PayloadTooLarge):
        await bus.append("tc.in.cell", too_large)
    with pytest.raises(PayloadTooLarge):
        await bus.call("tc.rpc.scheduler.status", too_large)


# -- calls ----------------------------------------------------------------------------------------------------


async def test_call_is_answered(world: World, bus: Bus) -> None:
    """A call gets its own answer, also when several are under way."""
    other = await world.connect("second")

    async def double(data: bytes) -> bytes:
        return data + data

    await other.serve("tc.rpc.worker.w.inventory", double)

    answers = await asyncio.gather(*(bus.call("tc.rpc.worker.w.inventory", str(n).encode()) for n in range(10)))

    assert answers == [str(n).encode() * 2 for n in range(10)]


async def test_call_without_a_server_is_unavailable_at_once(bus: Bus) -> None:
    """Nobody listens: no waiting for the timeout."""
    with pytest.raises(Unavailable):
        await asyncio.wait_for(bus.call("tc.rpc.nobody", b"", timeout_s=60.0), 20.0)


async def test_call_times_out(bus: Bus) -> None:
    """A server that does not answer in time is Unavailable."""
    release = asyncio.Event()

    async def never(data: bytes) -> bytes:
        await release.wait()
        return b""

    await bus.serve("tc.rpc.slow", never)

    with pytest.raises(Unavailable):
        await bus.call("tc.rpc.slow", b"", timeout_s=0.05)
    release.set()


async def test_error_of_a_call_handler_is_raised_at_the_caller(bus: Bus) -> None:
    """A typed error crosses the bus with its message and its wait; others become InternalError."""

    async def full(data: bytes) -> bytes:
        raise QueueFull("four are waiting\nalready", retry_after_ms=1500)

    async def missing(data: bytes) -> bytes:
        raise NotFound("no such request", param="request_id")

    async def broken(data: bytes) -> bytes:
        raise ZeroDivisionError("secret")

    await bus.serve("tc.rpc.full", full)
    await bus.serve("tc.rpc.missing", missing)
    await bus.serve("tc.rpc.broken", broken)

    with pytest.raises(QueueFull, match="four are waiting\nalready") as full_info:
        await bus.call("tc.rpc.full", b"")
    with pytest.raises(NotFound) as missing_info:
        await bus.call("tc.rpc.missing", b"")
    with pytest.raises(InternalError) as broken_info:
        await bus.call("tc.rpc.broken", b"")
    assert full_info.value.retry_after_ms == 1500
    assert missing_info.value.param == "request_id"
    assert "secret" not in str(broken_info.value)


async def test_answer_beyond_the_limit_is_an_error_at_the_caller(bus: Bus) -> None:
    """Nothing above max_payload travels, and the caller learns of it without waiting for its timeout."""

    async def huge(data: bytes) -> bytes:
        return b"x" * (MAX_PAYLOAD + 1)

    await bus.serve("tc.rpc.huge", huge)

    with pytest.raises(PayloadTooLarge):
        await bus.call("tc.rpc.huge", b"", timeout_s=20.0)


# -- streams --------------------------------------------------------------------------------------------------


async def test_append_answers_consecutive_sequences(bus: Bus) -> None:
    """Stored is stored: sequences count from 1 and the stream tells of them."""
    before = await bus.stream_info(subjects.INPUTS_STREAM)

    sequences = [await bus.append("tc.in.cell", bytes([n])) for n in range(5)]

    after = await bus.stream_info(subjects.INPUTS_STREAM)
    assert sequences == [1, 2, 3, 4, 5]
    assert (before.first_seq, before.last_seq) == (1, 0)
    assert (after.first_seq, after.last_seq) == (1, 5)
    assert after.nbytes > 0


async def test_concurrent_appends_each_get_their_own_sequence(bus: Bus) -> None:
    """Acknowledgements are not mixed up."""
    sequences = await asyncio.gather(*(bus.append("tc.in.cell", str(n).encode()) for n in range(200)))
    stored = {message.seq: message.data for message in await read(bus, subjects.INPUTS_STREAM)}

    assert sorted(sequences) == list(range(1, 201))
    assert all(stored[seq] == str(n).encode() for n, seq in enumerate(sequences))


async def test_same_message_id_is_stored_once(bus: Bus) -> None:
    """A retry answers the first sequence; another id is another message."""
    first = await bus.append("tc.in.cell", b"a", message_id="one")
    again = await bus.append("tc.in.cell", b"a", message_id="one")
    second = await bus.append("tc.in.cell", b"b", message_id="two")

    assert (first, again, second) == (1, 1, 2)
    assert [message.data for message in await read(bus, subjects.INPUTS_STREAM)] == [b"a", b"b"]


async def test_append_that_no_stream_captures_is_unavailable(bus: Bus) -> None:
    """There is no storage under that subject."""
    with pytest.raises(Unavailable):
        await bus.append("tc.nowhere", b"")


async def test_published_outputs_are_captured(bus: Bus) -> None:
    """TC_OUTPUTS keeps copies of what is merely published below ``tc.out``, and nothing else."""
    await bus.publish("tc.out.worker.w1", b"plan 1", {subjects.SENT_NS_HEADER: "5"})
    await bus.publish("tc.tokens.g", b"token")
    await bus.publish("tc.out.gateway.g", b"notice 1")
    await bus.flush()
    await asyncio.sleep(0)

    stored = await read(bus, subjects.OUTPUTS_STREAM)
    assert [(message.subject, message.data) for message in stored] == [
        ("tc.out.worker.w1", b"plan 1"),
        ("tc.out.gateway.g", b"notice 1"),
    ]


async def test_ensure_streams_keeps_what_is_there(bus: Bus) -> None:
    """A second process, with other limits, finds the streams as they are."""
    await bus.append("tc.in.cell", b"kept")
    await bus.put_object("snapshot", b"kept")

    await bus.ensure_streams(StreamLimits(max_bytes=1024 * 1024, max_age_s=60.0))

    assert [message.data for message in await read(bus, subjects.INPUTS_STREAM)] == [b"kept"]
    assert await bus.list_objects() == ["snapshot"]


async def test_follow_reads_from_a_sequence_and_by_subject(bus: Bus) -> None:
    """A bounded read yields what is stored from ``from_seq`` on under ``subject``, with its true sequence."""
    for number in range(1, 11):
        await bus.append(f"tc.in.worker.w{number % 2}", str(number).encode())

    from_seven = await read(bus, subjects.INPUTS_STREAM, from_seq=7)
    odd = await read(bus, subjects.INPUTS_STREAM, from_seq=4, subject="tc.in.worker.w1")
    beyond = await read(bus, subjects.INPUTS_STREAM, from_seq=99)
    nothing = await read(bus, subjects.INPUTS_STREAM, subject="tc.in.storage.>")

    assert [message.seq for message in from_seven] == [7, 8, 9, 10]
    assert [(message.seq, message.data) for message in odd] == [(5, b"5"), (7, b"7"), (9, b"9")]
    assert beyond == []
    assert nothing == []


async def test_stream_time_never_runs_backwards(bus: Bus) -> None:
    """Timestamps are the broker's wall clock in nanoseconds and do not decrease."""
    for _ in range(20):
        await bus.append("tc.in.cell", b"")

    times = [message.time_ns for message in await read(bus, subjects.INPUTS_STREAM)]

    assert times == sorted(times)
    assert times[0] > 1_600_000_000 * 10**9


async def test_time_of_a_message_is_the_same_to_every_reader(world: World, bus: Bus) -> None:
    """The timestamp is stored with the message, to the nanosecond."""
    other = await world.connect("second")
    await bus.append("tc.in.cell", b"")

    (one,), (two,) = await read(bus, subjects.INPUTS_STREAM), await read(other, subjects.INPUTS_STREAM)

    assert one == two


async def test_live_follow_goes_on_with_new_messages(world: World, bus: Bus) -> None:
    """Stored messages first, then new ones as they come, without a seam."""
    other = await world.connect("second")
    for number in range(1, 6):
        await bus.append("tc.in.cell", str(number).encode())
    seen: list[int] = []

    async def follow() -> None:
        async for message in other.follow(subjects.INPUTS_STREAM, from_seq=3):
            seen.append(message.seq)

    following = asyncio.create_task(follow())
    await until(lambda: len(seen) == 3)
    for number in range(6, 106):
        await bus.append("tc.in.cell", str(number).encode())
    await until(lambda: len(seen) == 103)
    following.cancel()

    assert seen == list(range(3, 106))


async def test_slow_follower_loses_nothing(bus: Bus) -> None:
    """What the follower has not asked for yet waits for it, far beyond any buffer of the connection."""
    body = b"x" * 32_000
    for _ in range(40):
        await asyncio.gather(*(bus.append("tc.in.cell", body) for _ in range(20)))
    seen: list[int] = []

    async for message in bus.follow(subjects.INPUTS_STREAM):
        seen.append(message.seq)
        if len(seen) % 100 == 0:
            await asyncio.sleep(0.02)
        if len(seen) == 800:
            break

    assert seen == list(range(1, 801))


async def test_follow_of_an_unknown_stream_is_an_error(bus: Bus) -> None:
    """A misspelt stream is no empty stream."""
    with pytest.raises(TransportError):
        await read(bus, "TC_NOTHING")
    with pytest.raises(TransportError):
        await bus.stream_info("TC_NOTHING")


# -- the bucket -----------------------------------------------------------------------------------------------


async def test_objects_are_kept_replaced_and_deleted(world: World, bus: Bus) -> None:
    """The bucket holds whole objects beyond max_payload, by name, for every client."""
    other = await world.connect("second")
    large = bytes(range(256)) * 1024
    empty = await bus.list_objects()

    await bus.put_object("core-2", large)
    await bus.put_object("core-1", b"old")
    await bus.put_object("core-1", b"new")
    names = await other.list_objects()

    assert empty == []
    assert names == ["core-1", "core-2"]
    assert await other.get_object("core-1") == b"new"
    assert await other.get_object("core-2") == large
    assert await other.get_object("core-3") is None
    await other.delete_object("core-1")
    await other.delete_object("core-1")
    await other.delete_object("never-there")
    assert await bus.list_objects() == ["core-2"]
    assert await bus.get_object("core-1") is None


async def test_empty_object_is_an_object(bus: Bus) -> None:
    """Zero bytes are not the same as none."""
    await bus.put_object("nothing", b"")

    assert await bus.get_object("nothing") == b""


# -- lost connections -----------------------------------------------------------------------------------------


async def test_everything_is_unavailable_while_disconnected(world: World, bus: Bus) -> None:
    """No operation hangs or buffers while the broker is away; callbacks tell of both changes."""
    told: list[str] = []
    bus.on_disconnect(lambda: told.append("lost"))
    bus.on_reconnect(lambda: told.append("back"))

    await world.break_connections()
    with pytest.raises(Unavailable):
        await bus.publish("tc.tokens.gw", b"")
    with pytest.raises(Unavailable):
        await bus.append("tc.in.cell", b"")
    with pytest.raises(Unavailable):
        await bus.call("tc.rpc.scheduler.status", b"")
    with pytest.raises(Unavailable):
        await bus.get_object("core-1")
    with pytest.raises(Unavailable):
        await bus.flush()
    await until(lambda: told == ["lost"])
    await world.restore_connections()
    await until(lambda: told == ["lost", "back"])

    assert bus.is_connected


async def test_subscriptions_and_calls_survive_a_lost_connection(world: World, bus: Bus) -> None:
    """After the reconnect everything works as before."""
    other = await world.connect("second")
    collected = Collected()

    async def echo(data: bytes) -> bytes:
        return data

    await other.subscribe("tc.tokens.gw", collected)
    await other.serve("tc.rpc.echo", echo)

    await world.break_connections()
    await world.restore_connections()
    await bus.flush()
    await other.flush()
    await bus.publish("tc.tokens.gw", b"after")
    await until(lambda: bool(collected.deliveries))

    assert collected.data == [b"after"]
    assert await bus.call("tc.rpc.echo", b"hello", timeout_s=10.0) == b"hello"


async def test_follow_resumes_by_sequence_without_gap_or_repeat(world: World, bus: Bus) -> None:
    """Over three lost connections a follower sees each message once, in order."""
    other = await world.connect("second")
    seen: list[int] = []

    async def follow() -> None:
        async for message in other.follow(subjects.INPUTS_STREAM):
            seen.append(message.seq)

    following = asyncio.create_task(follow())
    total = 0
    for _ in range(3):
        for _ in range(30):
            total += 1
            number = str(total)
            await retried(lambda number=number: bus.append("tc.in.cell", number.encode(), message_id=number))
        await world.break_connections()
        await world.restore_connections()
    for _ in range(30):
        total += 1
        number = str(total)
        await retried(lambda number=number: bus.append("tc.in.cell", number.encode(), message_id=number))
    await until(lambda: len(seen) >= total, timeout_s=60.0)
    following.cancel()

    assert seen == list(range(1, total + 1))


async def test_retried_append_is_stored_once_across_a_lost_connection(world: World, bus: Bus) -> None:
    """The same message_id before and after the broker's death is one message."""
    first = await bus.append("tc.in.cell", b"a", message_id="one")

    await world.break_connections()
    await world.restore_connections()
    again = await retried(lambda: bus.append("tc.in.cell", b"a", message_id="one"))

    assert (first, again) == (1, 1)


async def test_handlers_of_what_has_arrived_finish_before_the_bus_closes(world: World, bus: Bus) -> None:
    """Closing drains: queued messages are handled, and their handlers may still publish."""
    other = await world.connect("second")
    release = asyncio.Event()
    collected, seen = Collected(), Collected()

    async def forward(delivery: Delivery) -> None:
        await release.wait()
        await other.publish("tc.status", delivery.data)

    await bus.subscribe("tc.status", collected)
    await other.subscribe("tc.tokens.gw", forward)
    await other.subscribe("tc.tokens.gw", seen)
    for data in (b"1", b"2", b"3"):
        await bus.publish("tc.tokens.gw", data)
    await until(lambda: len(seen.deliveries) == 3)
    closing = asyncio.create_task(other.close())
    await asyncio.sleep(0)
    release.set()
    await asyncio.wait_for(closing, 20)
    await until(lambda: len(collected.deliveries) == 3)

    assert collected.data == [b"1", b"2", b"3"]


async def test_close_is_idempotent_and_final(bus: Bus) -> None:
    """What arrived is still handled; afterwards the bus is Unavailable."""
    collected = Collected()
    await bus.subscribe("tc.tokens.gw", collected)

    await bus.close()
    await bus.close()

    assert not bus.is_connected
    with pytest.raises(Unavailable):
        await bus.publish("tc.tokens.gw", b"")
