"""Pages of another worker's device pool arrive to the bit, or the load fails and says whose fault it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from services.worker.kv.device_pool import DevicePool
from services.worker.kv.movers.batched import BatchedMover
from services.worker.kv.movers.per_page import PerPageMover
from shared.messages.worker_plans import PageLoad
from tests.unit.worker.pools import GEOMETRY, SHM_PREFIX, device_page, host_pool, made_loads, neighbour_load, page_load

OURS, THEIRS = 20, 30


class Beside:
    """Our pool and a neighbour's with random bytes in it."""

    def __init__(self, mover: Any = BatchedMover) -> None:
        self.ours = DevicePool.create(GEOMETRY, OURS, device="cpu", shm_prefix=SHM_PREFIX)
        self.theirs = DevicePool.create(GEOMETRY, THEIRS, device="cpu", shm_prefix=SHM_PREFIX)
        view = self.theirs.bytes_view()
        view[...] = np.random.default_rng(1).integers(0, 256, view.shape, dtype=np.uint8)
        self.loads = made_loads(GEOMETRY, OURS, mover(self.ours))
        self.loads.neighbours.attach("w1", "inc-1", self.theirs.handle())

    def close(self) -> None:
        self.loads.close()
        self.ours.close()
        self.theirs.close()


@pytest.fixture
def beside() -> Iterator[Beside]:
    made = Beside()
    yield made
    made.close()


@pytest.mark.parametrize("mover", [BatchedMover, PerPageMover])
def test_pages_arrive_byte_for_byte(mover: Any) -> None:
    """In every layer and both halves; pages that nobody named stay as they were, and so does the neighbour."""
    made = Beside(mover)
    before = made.theirs.bytes_view().copy()
    transfer = made.loads.start([neighbour_load([29, 0, 7], [3, 19, 0])])
    result = transfer.finish()

    for source, device in ((29, 3), (0, 19), (7, 0)):
        np.testing.assert_array_equal(device_page(made.ours, device), device_page(made.theirs, source))
    assert not made.ours.bytes_view()[:, :, 4:19].any()
    np.testing.assert_array_equal(made.theirs.bytes_view(), before)
    assert (result.failures, result.pages, result.nbytes) == ([], 3, 3 * GEOMETRY.page_bytes)
    transfer.gate.wait(GEOMETRY.layers - 1)
    made.close()


def test_host_and_neighbour_loads_share_a_batch(beside: Beside) -> None:
    """One gate serves both, and one that fails leaves the other."""
    with host_pool(3, labels="xya") as host:
        beside.loads.attach("s", host.handle)

        result = beside.loads.start(
            [page_load([2], [5], ["a"], request_id="q"), neighbour_load([1, THEIRS], [6, 7])]
        ).finish()

        np.testing.assert_array_equal(device_page(beside.ours, 5), host.pages[2])
    assert result.failed_requests == ["r"]
    assert result.lost_pages == {6, 7}


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (neighbour_load([1], [2], neighbour_id="w9"), "no device pool of w9"),
        (neighbour_load([1], [2], neighbour_incarnation="inc-2"), "of incarnation inc-1"),
        (neighbour_load([THEIRS], [2]), "outside the pools"),
        (neighbour_load([-1], [2]), "outside the pools"),
        (neighbour_load([1], [OURS]), "outside the pools"),
        (neighbour_load([1, 2], [3, 3]), "a device page twice"),
        (neighbour_load([1, 2], [3]), "differ in length"),
    ],
    ids=["unknown", "incarnation", "page", "negative", "own-page", "twice", "lengths"],
)
def test_a_load_that_cannot_be_right_fails_by_name(beside: Beside, load: PageLoad, reason: str) -> None:
    """Not one byte is written, and the failure names the neighbour and its pages."""
    transfer = beside.loads.start([load])
    (failure,) = transfer.finish().failures

    assert not beside.ours.bytes_view().any()
    assert (failure.storage_id, failure.neighbour_id) == ("", load.neighbour_id)
    assert failure.host_pages == load.host_pages
    assert transfer.gate.rejected == failure.reason
    assert reason in failure.reason


@pytest.mark.parametrize("change", ["geometry", "kind", "layout", "size"])
def test_a_pool_that_does_not_fit_is_not_mapped(beside: Beside, change: str) -> None:
    """Another geometry, memory of another kind, a host pool, or a handle whose size is wrong: loads say why."""
    handle = beside.theirs.handle()
    faults: dict[str, dict[str, Any]] = {
        "geometry": {"geometry": msgspec.structs.replace(GEOMETRY, layers=2)},
        "kind": {"kind": "cuda_ipc"},
        "layout": {"layout": "page_first"},
        "size": {"nbytes": handle.nbytes + 1},
    }
    beside.loads.neighbours.attach("w2", "inc-1", msgspec.structs.replace(handle, **faults[change]))

    (failure,) = beside.loads.start([neighbour_load([1], [2], neighbour_id="w2")]).finish().failures

    assert failure.neighbour_id == "w2"
    assert not failure.reason.startswith("no device pool")


def test_a_newer_incarnation_replaces_the_older(beside: Beside) -> None:
    """Loads from the older fail from then on, and a late Detach of the older leaves the newer."""
    newer = DevicePool.create(GEOMETRY, 2, device="cpu", shm_prefix=SHM_PREFIX)
    newer.k(0).fill_(1.0)
    beside.loads.neighbours.attach("w1", "inc-2", newer.handle())

    assert beside.loads.start([neighbour_load([1], [2])]).finish().failed_requests == ["r"]
    beside.loads.neighbours.detach("w1", "inc-1")
    good = neighbour_load([1], [2], neighbour_incarnation="inc-2")
    assert beside.loads.start([good]).finish().failures == []
    np.testing.assert_array_equal(device_page(beside.ours, 2), device_page(newer, 1))
    beside.loads.neighbours.detach("w1", "inc-2")
    assert beside.loads.start([good]).finish().failed_requests == ["r"]
    newer.close()


def test_a_neighbour_that_has_died_is_read_until_it_is_detached(beside: Beside) -> None:
    """Its name is gone from /dev/shm, the bytes are not: the scheduler decides whether to use them."""
    expected = device_page(beside.theirs, 4)
    beside.theirs.close()

    result = beside.loads.start([neighbour_load([4], [1])]).finish()

    assert result.failures == []
    np.testing.assert_array_equal(device_page(beside.ours, 1), expected)
