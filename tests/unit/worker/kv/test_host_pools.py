"""Host pools are mapped, pinned where there is a GPU, and let go of behind whatever still reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from services.worker.kv.device_pool import DevicePool
from services.worker.kv.host_pools import HostPools
from services.worker.kv.movers.batched import BatchedMover
from services.worker.kv.movers.protocol import Known, nothing_wrong
from services.worker.kv.page_memory import PageMemory
from shared.memory import HostPoolView
from tests.unit.worker.pools import GEOMETRY, SHM_PREFIX, PlayedPins, device_page, host_pool, made_loads, page_load


@pytest.fixture
def host() -> Iterator[HostPoolView]:
    with host_pool(4, labels="xa") as view:
        yield view


def test_a_pool_is_pinned_while_it_is_attached(host: HostPoolView) -> None:
    """All of its pages; it is unpinned, behind the transfers, when it is detached or replaced."""
    pins, waiting = PlayedPins(), list[Callable[[], None]]()
    pools = HostPools(GEOMETRY, pins, waiting.append)
    nbytes = 4 * GEOMETRY.page_bytes

    pools.attach("s", host.handle)
    assert pools.find("s").memory().is_pinned
    pools.attach("s", host.handle)
    assert pins.calls == [("pin", nbytes)] * 2
    waiting.pop()()
    assert pins.calls[2:] == [("unpin", nbytes)]
    pools.close()

    assert pins.calls[3:] == [("unpin", nbytes)]
    assert waiting == []


def test_a_pool_that_cannot_be_pinned_serves_all_the_same(host: HostPoolView) -> None:
    """Movers learn that they must stage its rows."""
    pins = PlayedPins(refuses=True)
    pools = HostPools(GEOMETRY, pins)
    pools.attach("s", host.handle)

    assert not pools.find("s").memory().is_pinned
    assert pools.faults() == [("host pool", "that of s is not pinned: cudaHostRegister failed")]
    pools.detach("s")
    assert (pins.calls, pools.faults()) == ([], [])


def test_a_pool_serves_while_it_is_being_pinned(host: HostPoolView) -> None:
    """Pinning takes minutes: until it is done rows are staged, and a pool that goes meanwhile is not pinned at all."""
    started = list[Callable[[], None]]()
    pins = PlayedPins(waiting=started)
    pools = HostPools(GEOMETRY, pins)

    pools.attach("s", host.handle)
    assert not pools.find("s").memory().is_pinned
    started.pop()()
    assert pools.find("s").memory().is_pinned
    pools.detach("s")
    pools.attach("s", host.handle)
    pools.detach("s")
    while started:
        started.pop(0)()

    nbytes = 4 * GEOMETRY.page_bytes
    assert pins.calls == [("pin", nbytes), ("unpin", nbytes)]


def test_without_a_gpu_pools_are_read_only(host: HostPoolView) -> None:
    """Nothing but the storage may write them."""
    pools = HostPools(GEOMETRY)
    pools.attach("s", host.handle)

    array = pools.find("s").memory().array
    assert array is not None
    assert not array.flags.writeable
    pools.close()


class LaggingMover(BatchedMover):
    """As on a GPU: what was launched happens when its fence is waited for."""

    def __init__(self, pool: DevicePool) -> None:
        super().__init__(pool)
        self.launched: list[Callable[[], Any]] = []
        self.log: list[str] = []

    def load(self, source: PageMemory, layers: range, pages: Any, device_pages: Any, checks: Any = None) -> Known:
        self.log.append(f"launch {layers.start}")
        bare = super().load
        self.launched.append(lambda: bare(source, layers, pages, device_pages))
        return nothing_wrong(len(pages))

    def fence(self) -> LaggingFence:
        return LaggingFence(self, len(self.launched))

    def drain(self) -> None:
        self.do(len(self.launched))

    def do(self, count: int) -> None:
        for index in range(count):
            self.launched[index]()
        del self.launched[:count]
        self.log.append("arrived")


class LaggingFence:
    def __init__(self, mover: LaggingMover, count: int) -> None:
        self._mover, self._count = mover, count

    def synchronize(self) -> None:
        self._mover.do(min(1, self._count))


def test_a_layer_is_released_when_it_has_arrived_and_the_next_is_on_its_way(host: HostPoolView) -> None:
    """Launching runs one layer ahead of waiting, and the end waits for everything."""
    device = DevicePool.create(GEOMETRY, 4, device="cpu", shm_prefix=SHM_PREFIX)
    mover = LaggingMover(device)
    loads = made_loads(GEOMETRY, 4, mover)
    loads.attach("s", host.handle)
    assert GEOMETRY.layers == 3

    result = loads.start([page_load([1], [2], ["a"])]).finish()

    assert mover.log[:6] == ["launch 0", "launch 1", "arrived", "launch 2", "arrived", "arrived"]
    assert result.failures == []
    np.testing.assert_array_equal(device_page(device, 2), host.pages[1])
    loads.close()
    device.close()


def test_a_device_that_breaks_fails_the_load(host: HostPoolView, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that shows only when the copies are waited for loses the pages; it does not end the thread."""
    device = DevicePool.create(GEOMETRY, 4, device="cpu", shm_prefix=SHM_PREFIX)
    mover = BatchedMover(device)

    def broken() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(mover, "drain", broken)
    loads = made_loads(GEOMETRY, 4, mover)
    loads.attach("s", host.handle)

    transfer = loads.start([page_load([1], [2], ["a"])])

    assert transfer.finish().lost_pages == {2}
    assert "illegal memory access" in (transfer.gate.rejected or "")
    loads.close()
    device.close()
