"""Sockets: numbered batches, batches that are sent again, and clients that ask too late."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from services.scheduler.kv_events import publisher as publisher_module
from services.scheduler.kv_events.publisher import END, Publisher
from services.scheduler.kv_events.wire import AllBlocksCleared, Batch
from shared.errors import ConfigError

zmq = pytest.importorskip("zmq")
zmq_asyncio = pytest.importorskip("zmq.asyncio")

FREE = "tcp://127.0.0.1:*"


def _batch(ts: float) -> Batch:
    return Batch(ts=ts, events=[AllBlocksCleared()])


async def _asked_again(publisher: Publisher, first: int) -> list[tuple[int, float]]:
    """(Number, time) of what a client gets that asks for batches from ``first`` on."""
    found: list[tuple[int, float]] = []
    with zmq_asyncio.Context.instance().socket(zmq.DEALER) as client:
        client.connect(publisher.replay_address)
        await client.send_multipart((b"", first.to_bytes(8, "big")))
        while True:
            empty, number, payload = await client.recv_multipart()
            assert empty == b""
            if number == END:
                return found
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)[0]))


async def test_subscribers_get_numbered_batches() -> None:
    """In order, with the topic in front."""
    async with asyncio.timeout(30), Publisher(FREE, FREE, "kv") as publisher:
        with zmq_asyncio.Context.instance().socket(zmq.SUB) as reader:
            reader.connect(publisher.address)
            reader.subscribe(b"kv")
            sending = asyncio.create_task(_publish_until_cancelled(publisher))
            parts = [await reader.recv_multipart() for _ in range(3)]
            sending.cancel()
            await asyncio.wait({sending})

    numbers = [int.from_bytes(number, "big") for _, number, _ in parts]
    assert [topic for topic, _, _ in parts] == [b"kv"] * 3
    assert numbers == list(range(numbers[0], numbers[0] + 3))
    assert [msgspec.msgpack.decode(payload)[0] for *_, payload in parts] == [float(number) for number in numbers]


async def _publish_until_cancelled(publisher: Publisher) -> None:
    ts = 0.0
    while True:  # A subscription takes a moment to arrive.
        await publisher.publish(_batch(ts))
        ts += 1
        await asyncio.sleep(0.01)


async def test_kept_batches_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the end mark; who asks for more than is kept has everything told anew."""
    monkeypatch.setattr(publisher_module, "KEPT_BATCHES", 3)
    async with asyncio.timeout(30), Publisher(FREE, FREE, "") as publisher:
        for ts in range(5):
            await publisher.publish(_batch(ts))
        assert await _asked_again(publisher, 3) == [(3, 3.0), (4, 4.0)]
        before = publisher.is_everything_wanted
        assert await _asked_again(publisher, 0) == [(2, 2.0), (3, 3.0), (4, 4.0)]
        after = publisher.is_everything_wanted
        publisher.begin_anew()
        assert await _asked_again(publisher, 5) == []

    assert (before, after, publisher.is_everything_wanted) == (False, True, False)


async def test_kept_bytes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch at least stays, however large."""
    monkeypatch.setattr(publisher_module, "KEPT_BYTES", 1)
    async with asyncio.timeout(30), Publisher(FREE, FREE, "") as publisher:
        for ts in range(3):
            await publisher.publish(_batch(ts))
        assert await _asked_again(publisher, 2) == [(2, 2.0)]


async def test_an_address_of_no_use_is_refused() -> None:
    """With the address; nothing stays bound."""
    with pytest.raises(ConfigError, match=r"cannot listen on tcp://256\.0\.0\.1:5557"):
        async with Publisher("tcp://256.0.0.1:5557", "", ""):
            pass
    for address in (("tcp://127.0.0.1:99999999", ""), (FREE, "tcp://127.0.0.1:65536")):
        with pytest.raises(ConfigError, match=r"cannot listen on tcp://127\.0\.0\.1:\d+: the port is above 65535"):
            async with Publisher(*address, ""):
                pass
    with pytest.raises(ConfigError, match="is empty"):
        async with Publisher("", FREE, ""):
            pass
