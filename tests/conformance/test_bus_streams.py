"""Streams: appending, and following from a sequence."""

from __future__ import annotations

import asyncio

import pytest

from shared import subjects
from shared.bus.protocol import Bus, StreamLimits
from shared.errors import TransportError, Unavailable
from tests.conformance.brokers import World, read
from tests.waiting import until


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

    # Nobody confirms what is merely published: the broker stores it a moment after it has come.
    async with asyncio.timeout(20.0):
        while (await bus.stream_info(subjects.OUTPUTS_STREAM)).last_seq < 2:
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
