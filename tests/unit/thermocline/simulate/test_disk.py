"""A virtual disk and the virtual storage over it, driven by orders."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shared.chunks import chunk_bytes
from shared.errors import InternalError
from shared.ids import chain_pages, chain_root
from shared.messages import storage_events as events
from shared.messages import storage_plans as plans
from shared.messages.base import pack_int32
from thermocline.simulate.cost import backup_s, costs_of
from thermocline.simulate.disk import PIECE_CHUNKS, VirtualDisk
from thermocline.simulate.events import NS_PER_S, EventQueue
from thermocline.simulate.link import Link
from thermocline.simulate.profiles import load_hardware, load_model
from thermocline.simulate.storage import VirtualStorage

PAGE, NAMESPACE = 16, "ab" * 16
HARDWARE, MODEL = load_hardware("h200-pcie5"), load_model("llama-3.1-8b")
GEOMETRY = MODEL.geometry(PAGE)
LATENCY_S = HARDWARE.disk.latency_us / 1e6
CHUNK_S = chunk_bytes(GEOMETRY) / (HARDWARE.disk.bandwidth_gb_s * 1e9)


class _Alone:
    """A storage with a disk for so many chunks, and somebody who writes down what it says and when."""

    def __init__(self, chunks: int = 100) -> None:
        self.queue = EventQueue()
        self.said: list[tuple[float, Any]] = []
        self.costs = costs_of(HARDWARE, MODEL, page_size=PAGE)
        disk = VirtualDisk(chunks * 64, GEOMETRY, HARDWARE, self.queue)
        links = {"w": Link(self.queue, full_duplex=True)}
        self.storage = VirtualStorage("s", "s-1", 1000, self.costs, links, disk, self._tell)

    def _tell(self, messages: list[Any]) -> None:
        self.said += [(self.queue.now_ns / NS_PER_S, message) for message in messages]

    def order(self, *orders: Any) -> None:
        self.storage.deliver(list(enumerate(orders, 1)))

    def run(self) -> None:
        while self.queue.run_next():
            pass

    def of(self, kind: type) -> list[tuple[float, Any]]:
        return [(time_s, message) for time_s, message in self.said if isinstance(message, kind)]


def identities(chunks: int, kind: int = 1) -> bytes:
    """Of the pages of a prompt of so many chunks."""
    return chain_pages(chain_root(NAMESPACE), pack_int32([kind] * (chunks * 64)), PAGE * 4)


def save(chunks: int, *, save_id: int = 1, kind: int = 1, is_on_device: bool = False) -> plans.SaveChunks:
    """An order to save a prompt from host memory or from the device."""
    pages = pack_int32(range(chunks * 4))
    nowhere = pack_int32([-1] * (chunks * 4))
    return plans.SaveChunks(
        save_id=save_id,
        namespace=NAMESPACE,
        depth=0,
        tokens=pack_int32([kind] * (chunks * 64)),
        parent=chain_root(NAMESPACE),
        identities=identities(chunks, kind),
        host_pages=nowhere if is_on_device else pages,
        device_pages=pages if is_on_device else nowhere,
        worker_id="w" if is_on_device else "",
    )


def fetch(chunks: int, *, fetch_id: int = 1, kind: int = 1) -> plans.FetchChunks:
    """An order to bring a prompt up."""
    return plans.FetchChunks(
        fetch_id=fetch_id,
        namespace=NAMESPACE,
        depth=0,
        identities=identities(chunks, kind),
        host_pages=pack_int32(range(chunks * 4)),
        deadline_ms=1000,
    )


def test_a_save_takes_the_disks_time_and_names_what_is_durable() -> None:
    """Latency once, then every chunk's bytes."""
    alone = _Alone()
    alone.order(save(3))

    alone.run()

    ((time_s, saved),) = alone.of(events.ChunksSaved)
    assert time_s == pytest.approx(LATENCY_S + 3 * CHUNK_S, rel=1e-3)
    assert len(saved.chunks) == 3 * 16
    assert saved.nbytes == 3 * chunk_bytes(GEOMETRY)


def test_an_owner_keeps_no_more_than_its_quota() -> None:
    """As on a real disk: its own chunks go for it, and at once when the quota is lowered. Equals stay."""
    alone = _Alone()
    for save_id, (chunks, allowed) in enumerate([(3, 4), (2, 4), (1, 1)], 1):
        quota = plans.DiskQuota(owner="a", disk_bytes=allowed * chunk_bytes(GEOMETRY))
        alone.order(msgspec.structs.replace(save(chunks, save_id=save_id, kind=save_id), quota=quota))
        alone.run()

    assert [len(saved.dropped) // 16 for _, saved in alone.of(events.ChunksSaved)] == [0, 1, 3]
    assert len(alone.storage.disk.index) == 1


def test_what_is_saved_again_is_not_written_again() -> None:
    """It is durable all the same."""
    alone = _Alone()
    alone.order(save(3))
    alone.run()
    alone.order(save(3, save_id=2))

    alone.run()

    (_, (_, again)) = alone.of(events.ChunksSaved)
    assert (len(again.chunks), again.nbytes) == (3 * 16, 0)


def test_a_save_from_the_device_crosses_the_link_first() -> None:
    """Host memory costs nothing, the link does."""
    alone = _Alone()
    alone.order(save(3, is_on_device=True))

    alone.run()

    ((time_s, _),) = alone.of(events.ChunksSaved)
    assert time_s == pytest.approx(backup_s(alone.costs, 3 * 64) + LATENCY_S + 3 * CHUNK_S, rel=1e-3)


def test_a_full_disk_gives_up_what_is_worth_least() -> None:
    """What had to go is named, and no more is kept than there is room for."""
    alone = _Alone(chunks=4)
    alone.order(save(3))
    alone.run()
    alone.order(save(3, save_id=2, kind=2))

    alone.run()

    (_, second) = [message for _, message in alone.of(events.ChunksSaved)]
    assert len(second.dropped) // 16 == len(second.chunks) // 16 - 1
    assert len(alone.storage.disk.index) <= 4


def test_a_fetch_comes_in_pieces() -> None:
    """The scheduler hears of each, and the last says that it is over."""
    alone = _Alone()
    chunks = PIECE_CHUNKS + 5
    alone.order(save(chunks))
    alone.run()
    start_s = alone.queue.now_ns / NS_PER_S
    alone.order(fetch(chunks))

    alone.run()

    reports = alone.of(events.ChunksFetched)
    assert [(report.chunks, report.is_over) for _, report in reports] == [(PIECE_CHUNKS, False), (chunks, True)]
    last_s, last = reports[-1]
    assert last_s - start_s == pytest.approx(LATENCY_S + chunks * CHUNK_S, rel=1e-3)
    assert (last.disk_chunks, last.nbytes) == (chunks, chunks * chunk_bytes(GEOMETRY))
    assert last.seconds == pytest.approx(last_s - start_s)


def test_a_fetch_ends_at_the_first_chunk_that_is_not_there() -> None:
    """That one is named as missing."""
    alone = _Alone()
    alone.order(save(2))
    alone.run()
    alone.order(fetch(4))

    alone.run()

    ((_, report),) = alone.of(events.ChunksFetched)
    assert (report.chunks, report.is_over) == (2, True)
    assert report.missing == identities(3)[-16:]


def test_a_cancelled_fetch_reads_no_further_piece() -> None:
    """What it had read counts."""
    alone = _Alone()
    alone.order(save(3 * PIECE_CHUNKS))
    alone.run()
    alone.order(fetch(3 * PIECE_CHUNKS), plans.CancelFetch(fetch_id=1), plans.CancelFetch(fetch_id=7))

    alone.run()

    (_, report) = alone.of(events.ChunksFetched)[-1]
    assert (report.chunks, report.is_over) == (PIECE_CHUNKS, True)


def test_dropping_a_namespace_names_its_chunks() -> None:
    """Another namespace keeps its own, and the object store is nobody's business here."""
    alone = _Alone()
    alone.order(save(2))
    alone.run()

    alone.order(plans.DropChunks(namespace="cd" * 16), plans.DropChunks(tiers=("remote",)), plans.DropChunks())

    dropped = [message.chunks for _, message in alone.of(events.ChunksDropped)]
    assert [len(chunks) // 16 for chunks in dropped] == [0, 2]


def test_pinned_chunks_stay() -> None:
    """A disk that is full of them takes nothing new."""
    alone = _Alone(chunks=2)
    alone.order(save(2), plans.PinChunks(chunks=identities(2)[3 * 16 : 4 * 16] + identities(2)[-16:]))
    alone.run()
    alone.order(save(2, save_id=2, kind=2))

    alone.run()

    (_, second) = [message for _, message in alone.of(events.ChunksSaved)]
    assert (second.chunks, second.dropped) == (b"", b"")


def test_an_unknown_order_is_a_fault_of_the_simulator() -> None:
    """Nothing is passed over in silence."""
    with pytest.raises(InternalError):
        _Alone().order("order")
