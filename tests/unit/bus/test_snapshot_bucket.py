"""What the snapshot bucket leaves behind in its stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from shared import subjects
from shared.bus.jetstream import BUCKET_STREAM
from shared.bus.nats_bus import NatsBus, connect
from shared.bus.protocol import StreamLimits
from shared.bus.snapshot_bucket import DIGESTED_BYTES
from shared.errors import TransportError
from tests.nats_server import NatsServer

CHUNKS = f"$O.{subjects.SNAPSHOT_BUCKET}.C."
META = f"$O.{subjects.SNAPSHOT_BUCKET}.M."


@pytest.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[NatsBus]:
    made = await connect([nats_server.url], "test")
    assert isinstance(made, NatsBus)
    await made.ensure_streams(StreamLimits())
    yield made
    await made.close()


async def stored(bus: NatsBus) -> list[str]:
    """Subjects of all messages in the bucket's stream, in order."""
    return [message.subject async for message in bus.follow(BUCKET_STREAM, live=False)]


async def test_nothing_stays_of_an_object_that_was_deleted(bus: NatsBus) -> None:
    """Not even its name: a cell takes a snapshot twice a minute, each under a new one."""
    for number in range(6):
        await bus.put_object(f"core-{number}", b"state")
    before = await stored(bus)

    for number in range(5):
        await bus.delete_object(f"core-{number}")

    assert len(before) == 12  # Each object is one chunk and its meta message.
    assert await stored(bus) == before[-2:]
    assert (await bus.stream_info(BUCKET_STREAM)).first_seq == 11
    assert await bus.get_object("core-5") == b"state"


async def test_the_mark_of_an_object_that_was_deleted_is_taken_away_with_its_name(bus: NatsBus) -> None:
    """Other programs delete as object stores do, and leave a mark."""
    await bus.put_object("core-1", b"state")
    store = await bus._client.jetstream().object_store(subjects.SNAPSHOT_BUCKET)
    await store.delete("core-1")
    marks = await stored(bus)

    await bus.delete_object("core-1")

    assert len(marks) == 1
    assert await stored(bus) == []


async def test_chunks_of_a_put_that_was_cut_off_are_dropped(bus: NatsBus) -> None:
    """A scheduler may be killed between an object's chunks and its name. Later chunks may be of a put that goes on."""
    await bus._client.jetstream().publish(f"{CHUNKS}cutoff", b"half")
    for number in range(3):
        await bus.put_object(f"core-{number}", b"state")
    await bus._client.jetstream().publish(f"{CHUNKS}underway", b"half")

    await bus.delete_object("core-0")

    left = await stored(bus)
    assert f"{CHUNKS}cutoff" not in left
    assert left[-1] == f"{CHUNKS}underway"
    assert len(left) == 5
    assert await bus.get_object("core-1") == await bus.get_object("core-2") == b"state"


@pytest.mark.parametrize("length", [0, 1, 300_000, 2 * DIGESTED_BYTES + 7])
async def test_an_object_is_read_as_it_was_put(bus: NatsBus, length: int) -> None:
    """Whatever its length, in chunks and in pieces whose digests are taken beside the reading."""
    data = (bytes(range(251)) * (length // 251 + 1))[:length]
    await bus.put_object("core-1", data)

    found = await bus.get_object("core-1")

    assert found is not None
    assert bytes(found) == data


@pytest.mark.parametrize("change", [{"size": 4}, {"size": 6}, {"size": 2**62}, {"digest": "SHA-256=AAAA"}])
async def test_chunks_that_are_not_what_was_put_are_no_object(bus: NatsBus, change: dict[str, object]) -> None:
    """A length or a digest that the chunks do not have, and one that no memory holds, are a TransportError."""
    await bus.put_object("core-1", b"state")
    (meta,) = [message async for message in bus.follow(BUCKET_STREAM, subject=f"{META}*", live=False)]
    told = msgspec.json.decode(meta.data) | change
    await bus._client.jetstream().publish(meta.subject, msgspec.json.encode(told), headers={"Nats-Rollup": "sub"})

    with pytest.raises(TransportError, match="core-1"):
        await bus.get_object("core-1")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="the kernel has no large pages")
async def test_an_object_is_read_into_memory_that_may_have_large_pages(bus: NatsBus) -> None:
    """Private memory, too: the system's setting for large pages leaves shared memory out."""
    await bus.put_object("core-1", bytes(1 << 20))

    data = await bus.get_object("core-1")

    assert data is not None
    permissions, flags = mapping(np.frombuffer(data, np.uint8).ctypes.data)
    assert permissions == "rw-p"
    assert "hg" in flags


def mapping(address: int) -> tuple[str, list[str]]:
    """Permissions and flags of the memory at an address, as the kernel tells them."""
    permissions, is_here = "", False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            start, end = (int(bound, 16) for bound in first.split("-"))
            permissions, is_here = rest.split()[0], start <= address < end
        elif is_here and first == "VmFlags:":
            return permissions, rest.split()
    raise AssertionError("the address is in no mapping")
