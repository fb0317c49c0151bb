"""Loads put verified pages on the device, and nothing else, whatever the host pool holds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.worker.kv.device_pool import DevicePool
from services.worker.kv.layer_gate import LoadRejected
from services.worker.kv.loads import Loads
from services.worker.kv.movers.batched import BatchedMover
from shared.memory import HostPoolView
from shared.messages.base import unpack_int32
from tests.unit.worker.pools import GEOMETRY, SHM_PREFIX, device_page, fill_page, host_pool, made_loads, page_load


@pytest.fixture
def host() -> Iterator[HostPoolView]:
    with host_pool(80, labels="abcd") as view:
        yield view


@pytest.fixture
def device() -> Iterator[DevicePool]:
    pool = DevicePool.create(GEOMETRY, 90, device="cpu", shm_prefix=SHM_PREFIX)
    yield pool
    pool.close()


@pytest.fixture
def loads(host: HostPoolView, device: DevicePool) -> Iterator[Loads]:
    made = make_loads(device, lambda work: work())
    made.pools.attach("s", host.handle)
    yield made
    made.close()


def make_loads(device: DevicePool, submit: Callable[[Callable[[], None]], object] | None) -> Loads:
    mover = BatchedMover(device)
    mover.piece_pages = 64
    return made_loads(GEOMETRY, device.pages, mover, submit=submit)


def test_pages_arrive_byte_for_byte(host: HostPoolView, device: DevicePool, loads: Loads) -> None:
    """The layer-first device pages hold what the page-first host pages hold; other pages stay as they were."""
    transfer = loads.start([page_load([0, 2], [9, 4], ["a", "c"]), page_load([3], [6], ["d"], request_id="q")])
    result = transfer.finish()

    for host_page, page in ((0, 9), (2, 4), (3, 6)):
        np.testing.assert_array_equal(device_page(device, page), host.pages[host_page])
    assert not device_page(device, 5).any()
    assert (result.failures, result.lost_pages, result.pages) == ([], frozenset(), 3)
    assert result.nbytes == 3 * GEOMETRY.page_bytes
    transfer.gate.wait(GEOMETRY.layers - 1)


def test_more_pages_than_one_piece_has_arrive(host: HostPoolView, device: DevicePool, loads: Loads) -> None:
    """A long load goes in several pieces per layer."""
    pages = list(range(80))
    for page in pages:
        fill_page(host, page, f"page-{page}")

    result = loads.start([page_load(pages, pages[::-1], [f"page-{page}" for page in pages])]).finish()

    assert result.failures == []
    for page in pages:
        np.testing.assert_array_equal(device_page(device, 79 - page), host.pages[page])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=40)
@given(
    page=st.integers(0, 2), layer=st.integers(0, GEOMETRY.layers - 1), byte=st.integers(0, 2 * GEOMETRY.half_bytes - 1)
)
def test_one_wrong_byte_anywhere_is_found_before_it_is_written(
    host: HostPoolView, device: DevicePool, loads: Loads, page: int, layer: int, byte: int
) -> None:
    """The page is reported and its wrong layer never reaches the device; nobody may count on the load's other pages."""
    device.bytes_view()[...] = 0
    host.pages[page, layer, byte] ^= 0x10
    try:
        transfer = loads.start([page_load([0, 1, 2], [3, 4, 5], ["a", "b", "c"])])
        result = transfer.finish()
        rejected = transfer.gate.rejected
        good = [other for other in range(3) if other != page]
        for other in good:
            np.testing.assert_array_equal(device_page(device, 3 + other), host.pages[other])
        assert not device_page(device, 3 + page)[layer:].any()
    finally:
        host.pages[page, layer, byte] ^= 0x10

    assert rejected == f"checksum of layer {layer}"
    assert result.lost_pages == {3, 4, 5}
    assert result.failed_requests == ["r"]
    (failure,) = result.failures
    assert (failure.storage_id, unpack_int32(failure.host_pages), failure.reason) == ("s", [page], rejected)


def test_a_page_of_another_identity_is_refused(device: DevicePool, loads: Loads) -> None:
    """The host page was given to other tokens since the plan was made; not one byte of it is written."""
    result = loads.start([page_load([0, 1], [3, 4], ["a", "x"])]).finish()

    assert result.lost_pages == {3, 4}
    assert result.failures[0].reason == "identity"
    assert unpack_int32(result.failures[0].host_pages) == [1]
    assert not device_page(device, 4).any()
    assert device_page(device, 3).any()


def test_a_page_reused_during_the_load_is_refused(host: HostPoolView, device: DevicePool) -> None:
    """Identity is checked at the start; a page that is sealed for other tokens after that fails its checksum."""
    waiting: list[Callable[[], None]] = []
    loads = make_loads(device, waiting.append)
    loads.pools.attach("s", host.handle)
    transfer = loads.start([page_load([0], [3], ["a"])])
    fill_page(host, 0, "other")

    waiting.pop()()

    assert transfer.finish().lost_pages == {3}
    assert not device_page(device, 3).any()
    loads.close()


def test_a_missing_pool_fails_only_its_own_loads(device: DevicePool, loads: Loads) -> None:
    """The other storage's pages arrive."""
    good, bad = page_load([0], [3], ["a"]), page_load([1], [4], ["b"], request_id="q", storage_id="gone")

    result = loads.start([bad, good]).finish()

    assert result.failed_requests == ["q"]
    assert result.lost_pages == {4}
    assert device_page(device, 3).any()


def test_a_detached_pool_is_missing(loads: Loads) -> None:
    """After DetachHostPool no load may name it."""
    loads.pools.detach("s")

    assert loads.start([page_load([0], [3], ["a"])]).finish().lost_pages == {3}


def test_pages_outside_the_pools_are_refused(loads: Loads) -> None:
    """A plan that contradicts the pools is a failed load, not a crash."""
    for host_page, page in ((80, 3), (-1, 3), (0, 90), (0, -1)):
        result = loads.start([page_load([host_page], [page], ["a"])]).finish()

        assert result.failed_requests == ["r"]
    assert loads.start([page_load([0, 1], [3], ["a", "b"])]).finish().failed_requests == ["r"]


def test_a_load_that_takes_too_long_is_given_up(host: HostPoolView, device: DevicePool) -> None:
    """Past its deadline the request recomputes; nothing is written after ``finish`` has returned."""
    waiting: list[Callable[[], None]] = []
    loads = made_loads(GEOMETRY, device.pages, BatchedMover(device), timeout_s=0.01, submit=waiting.append)
    loads.pools.attach("s", host.handle)
    transfer = loads.start([page_load([0], [3], ["a"])])
    with pytest.raises(LoadRejected):
        transfer.gate.wait(0)

    # The transfer thread gets its turn only while ``finish`` is waiting for it.
    late = threading.Timer(0.05, waiting.pop())
    late.start()
    result = transfer.finish()
    late.join()

    assert result.lost_pages == {3}
    assert not device_page(device, 3).any()
    loads.close()


def test_loads_run_on_a_thread_of_their_own(host: HostPoolView, device: DevicePool) -> None:
    """By default the compute thread only waits at the gate."""
    loads = make_loads(device, None)
    loads.pools.attach("s", host.handle)

    transfer = loads.start([page_load([0], [3], ["a"])])
    for layer in range(GEOMETRY.layers):
        transfer.gate.wait(layer)

    assert transfer.finish().failures == []
    np.testing.assert_array_equal(device_page(device, 3), host.pages[0])
    loads.close()
