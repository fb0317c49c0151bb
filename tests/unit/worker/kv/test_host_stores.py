"""A worker copies pages to host pools for backups: all bytes are there when it says so, or none is being written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from services.worker.kv.device_pool import DevicePool
from services.worker.kv.host_stores import HostStores
from services.worker.kv.movers.batched import BatchedMover
from services.worker.kv.movers.gpu_assisted import GpuAssistedMover
from shared.memory import HostPoolView
from shared.messages.base import pack_int32
from shared.messages.page_stores import PagesStored, StorePages
from tests.cuda.late_streams import late_streams
from tests.unit.worker.pools import GEOMETRY, SHM_PREFIX, PlayedPins, device_page, made_loads

PAGES = 16


class Scene:
    """A host pool, a device pool of random pages, loads that share the host pool, and what stores."""

    def __init__(self) -> None:
        self.host = HostPoolView.create(SHM_PREFIX, GEOMETRY, PAGES)
        self.device = DevicePool.create(GEOMETRY, PAGES, device="cpu", shm_prefix=SHM_PREFIX)
        halves = self.device.bytes_view()
        halves[...] = np.random.default_rng(4).integers(0, 256, halves.shape, dtype=np.uint8)
        self.pins = PlayedPins()
        self.mover: Any = GpuAssistedMover(self.device)
        self.mover.piece_pages = 4
        self.stores = HostStores(self.mover, PAGES, clock_s=lambda: 1.0)
        self.loads = made_loads(GEOMETRY, PAGES, BatchedMover(self.device), pins=self.pins, stores=self.stores)
        self.loads.attach("s", self.host.handle)

    def call(self, device: list[int], host: list[int], **changes: Any) -> StorePages:
        made = StorePages(
            worker_incarnation="i", storage_id="s", storage_incarnation="si", pool=self.host.handle.name,
            device_pages=pack_int32(device), host_pages=pack_int32(host),
        )  # fmt: skip
        return msgspec.structs.replace(made, **changes)

    def store(self, call: StorePages) -> PagesStored:
        return self.stores.begin(self.loads.pools, call).result(20)

    def close(self) -> None:
        self.loads.close()
        self.host.unlink()
        self.host.close()
        self.device.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    with late_streams():
        made = Scene()
        yield made
        made.close()


def test_bytes_are_there_when_it_says_so(scene: Scene) -> None:
    """On a device that does nothing until somebody waits, in more pieces than one, and nowhere else."""
    device, host = [3, 1, 15, 4, 9, 2], [0, 7, 5, 6, 11, 15]

    answer = scene.store(scene.call(device, host))

    assert answer == PagesStored()
    for page, host_page in zip(device, host, strict=True):
        np.testing.assert_array_equal(scene.host.pages[host_page], device_page(scene.device, page))
    untouched = [page for page in range(PAGES) if page not in host]
    assert not scene.host.pages[untouched].any()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"storage_id": "t"}, "no host pool of t"),
        ({"pool": "another"}, "not another"),
        ({"host_pages": pack_int32([1])}, "differ in length"),
        ({"device_pages": b"12345"}, "differ in length"),
        ({"device_pages": pack_int32([0, PAGES])}, "outside the pools"),
        ({"host_pages": pack_int32([-1, 2])}, "outside the pools"),
        ({"host_pages": pack_int32([2, 2])}, "twice"),
    ],
)
def test_what_cannot_be_done_is_refused_before_a_byte_moves(scene: Scene, changes: dict[str, Any], reason: str) -> None:
    """The storage may then do it by itself."""
    answer = scene.store(scene.call([0, 1], [2, 3], **changes))

    assert reason in answer.refused
    assert answer.error == ""
    assert not scene.host.pages.any()


def test_a_pool_that_is_not_pinned_is_refused(scene: Scene) -> None:
    """A kernel would fault on it. A call without pages tells the same."""
    scene.pins.waiting = []
    scene.loads.attach("s", scene.host.handle)

    assert "not pinned" in scene.store(scene.call([0], [0])).refused
    assert "not pinned" in scene.store(scene.call([], [])).refused
    for work in scene.pins.waiting:  # Which may also let go of the memory of the pool before.
        work()
    assert scene.store(scene.call([], [])) == PagesStored()


def test_an_error_is_told_when_nothing_is_written_any_more(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was launched before it has ended, and the next call is carried out."""
    log: list[str] = []

    def fail(*_: Any) -> None:
        log.append("launched")
        raise RuntimeError("CUDA error: out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(scene.mover, "store", fail)
        patched.setattr(scene.mover, "drain", lambda: log.append("drained"))
        answer = scene.store(scene.call([0], [0]))

    assert answer == PagesStored(error="RuntimeError: CUDA error: out of memory")
    assert log == ["launched", "drained"]
    assert scene.store(scene.call([0], [0])) == PagesStored()


def test_a_pool_is_let_go_of_behind_the_copies_into_it(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what comes later finds it gone."""
    store = scene.mover.store

    def detach_then_store(*arguments: Any) -> None:
        scene.loads.detach("s")
        store(*arguments)
        scene.pins.calls.append(("stored", 0))

    monkeypatch.setattr(scene.mover, "store", detach_then_store)
    first = scene.store(scene.call([0], [0]))
    second = scene.store(scene.call([1], [1]))

    assert first == PagesStored()
    assert "no host pool" in second.refused
    assert [what for what, _ in scene.pins.calls] == ["pin", "stored", "unpin"]
