"""Promotions bring whole, verified pages or nothing, give way to loads, and never write after their answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from services.worker.kv.device_pool import DevicePool
from services.worker.kv.loads import Loads
from services.worker.kv.movers.batched import BatchedMover
from services.worker.kv.promotions import PIECE_PAGES, Promoted
from shared.memory import HostPoolView
from shared.messages.base import unpack_int32
from shared.messages.worker_plans import PromotePages
from tests.unit.worker.pools import GEOMETRY, SHM_PREFIX, device_page, fill_page, page_load, page_promotion

PAGES = PIECE_PAGES + 2


class Promoting:
    """Loads whose transfer thread is the test: ``waiting`` holds what it has not run yet."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.ended: list[Promoted] = []
        self.host = HostPoolView.create(SHM_PREFIX, GEOMETRY, 40)
        for page in range(40):
            fill_page(self.host, page, f"page-{page}")
        self.device = DevicePool.create(GEOMETRY, 50, device="cpu", shm_prefix=SHM_PREFIX)
        self.loads = self.make(self.waiting.append)

    def make(self, submit: Callable[[Callable[[], None]], object] | None) -> Loads:
        loads = Loads(GEOMETRY, 50, BatchedMover(self.device), timeout_s=60, clock_ns=lambda: 7, submit=submit)
        loads.attach("s", self.host.handle)
        return loads

    def promote(self, count: int = PAGES, *, first: int = 0, promotion_id: int = 1) -> None:
        """Host pages 0 and up to device pages ``first`` and up."""
        pages = range(count)
        self.give(
            page_promotion(
                pages, [first + page for page in pages], [f"page-{page}" for page in pages], promotion_id=promotion_id
            )
        )

    def give(self, order: PromotePages) -> None:
        self.loads.promote(order, self.ended.append)

    def run(self, most: int = 1000) -> int:
        """Run what waits, and what comes of it; returns how many turns of the thread that took."""
        for turns in range(most):
            if not self.waiting:
                return turns
            self.waiting.pop(0)()
        return most

    def written(self) -> list[int]:
        """Device pages that are not all zero."""
        return [page for page in range(50) if device_page(self.device, page).any()]

    def close(self) -> None:
        self.loads.close()
        self.host.unlink()
        self.host.close()
        self.device.close()


@pytest.fixture
def made() -> Iterator[Promoting]:
    promoting = Promoting()
    yield promoting
    promoting.close()


def test_promoted_pages_arrive_byte_for_byte(made: Promoting) -> None:
    """In pieces of one layer of a few pages; other pages stay as they were."""
    made.promote(first=5)

    turns = made.run()

    assert [(each.is_ok, each.pages, each.bad_host_pages) for each in made.ended] == [(True, PAGES, b"")]
    assert turns == 2 * GEOMETRY.layers + 1
    for page in range(PAGES):
        np.testing.assert_array_equal(device_page(made.device, 5 + page), made.host.pages[page])
    assert made.written() == list(range(5, 5 + PAGES))


def test_a_load_waits_for_one_piece_at_most(made: Promoting) -> None:
    """It is done long before the promotion that was there first, which then goes on."""
    made.promote()
    made.run(most=1)
    transfer = made.loads.start([page_load([30], [40], ["page-30"])])

    made.run(most=2)

    assert transfer.finish().pages == 1
    assert made.ended == []
    made.run()
    assert [each.is_ok for each in made.ended] == [True]


def test_one_promotion_at_a_time_in_order(made: Promoting) -> None:
    """There is never more than one piece in the thread's queue."""
    for number in range(3):
        made.promote(2, first=10 * number, promotion_id=number)
    while made.waiting:
        assert len(made.waiting) == 1
        made.run(most=1)

    assert [(each.promotion_id, each.is_ok) for each in made.ended] == [(0, True), (1, True), (2, True)]
    assert made.written() == [0, 1, 10, 11, 20, 21]


def test_all_wrong_pages_of_a_promotion_are_named(made: Promoting) -> None:
    """Identity, first layer or last, in any piece: it fails as a whole and says which copies are bad."""
    fill_page(made.host, 3, "another")
    made.host.pages[1, 0, 5] ^= 1
    made.host.pages[PIECE_PAGES + 1, GEOMETRY.layers - 1, 0] ^= 1
    made.promote()

    made.run()

    (ended,) = made.ended
    assert not ended.is_ok
    assert unpack_int32(ended.bad_host_pages) == [1, 3, PIECE_PAGES + 1]
    assert ended.pages == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"storage_id": "gone"},
        {"host_pages": b"\0" * 4},
        {"device_pages": b"\0" * 12},
        {"identities": b"\0" * 16},
        {"host_pages": np.array([0, 1], "<i4").tobytes() + b"\0"},
        {"device_pages": np.array([4, 5], "<i4").tobytes() + b"\0"},
        {"host_pages": np.array([0, 40], "<i4").tobytes()},
        {"host_pages": np.array([-1, 0], "<i4").tobytes()},
        {"device_pages": np.array([0, 50], "<i4").tobytes()},
        {"device_pages": np.array([3, 3], "<i4").tobytes()},
    ],
    ids=str,
)
def test_an_order_that_cannot_be_right_is_answered(made: Promoting, fields: dict[str, Any]) -> None:
    """Unknown storage, lists that do not match, pages outside the pools or named twice: not one byte is written, and
    no copy is blamed for it.
    """
    good = page_promotion([0, 1], [4, 5], ["page-0", "page-1"])
    order = {name: getattr(good, name) for name in good.__struct_fields__} | fields
    made.give(PromotePages(**order))

    made.run()

    assert [(each.is_ok, each.bad_host_pages) for each in made.ended] == [(False, b"")]
    assert made.written() == []


def test_nothing_to_promote_is_done_at_once(made: Promoting) -> None:
    """An empty order is fine."""
    made.promote(0)

    made.run()

    assert [each.is_ok for each in made.ended] == [True]


@pytest.mark.parametrize("change", ["detach", "attach"])
def test_a_host_pool_that_goes_fails_its_promotions(made: Promoting, change: str) -> None:
    """The one under way and the one that waits; after their answers nothing of them is written."""
    made.promote()
    made.promote(2, first=30, promotion_id=2)
    made.run(most=1)
    if change == "detach":
        made.loads.detach("s")
    else:
        made.loads.attach("s", made.host.handle)
    made.run(most=1)
    assert [(each.promotion_id, each.is_ok, each.bad_host_pages) for each in made.ended] == [(1, False, b"")]
    written = made.device.bytes_view().copy()

    made.run()

    assert [each.promotion_id for each in made.ended] == [1, 2]
    assert not made.ended[1].is_ok
    np.testing.assert_array_equal(made.device.bytes_view(), written)
    if change == "attach":
        made.promote(2, first=30, promotion_id=3)
        made.run()
        assert made.ended[2].is_ok


def test_a_pool_that_is_unmapped_in_the_midst_of_a_piece_is_a_failure(made: Promoting) -> None:
    """Whatever a copy raises ends that promotion alone."""
    made.promote()
    made.loads.pools.detach("s")  # Behind the promotion's back.

    made.run()

    assert [(each.is_ok, each.bad_host_pages) for each in made.ended] == [(False, b"")]


def test_after_closing_no_piece_is_written(made: Promoting) -> None:
    """A worker that ends answers no promotion any more."""
    made.promote()
    made.run(most=1)
    written = made.device.bytes_view().copy()
    made.loads._promotions.close()
    made.promote(2, first=30, promotion_id=2)

    made.run()

    assert made.ended == []
    np.testing.assert_array_equal(made.device.bytes_view(), written)


def test_one_thread_moves_all_rows(made: Promoting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads and promotions share the mover, which has one staging buffer, so they never run at once."""
    threads: set[int] = set()
    load = BatchedMover.load

    def watched(mover: BatchedMover, *arguments: Any) -> Any:
        threads.add(threading.get_ident())
        return load(mover, *arguments)

    monkeypatch.setattr(BatchedMover, "load", watched)
    over = threading.Event()
    made.loads = made.make(None)
    order = page_promotion(range(PAGES), range(PAGES), [f"page-{page}" for page in range(PAGES)])

    def ended(promoted: Promoted) -> None:
        made.ended.append(promoted)
        over.set()

    made.loads.promote(order, ended)
    result = made.loads.start([page_load([30], [40], ["page-30"])]).finish()
    assert over.wait(10)

    assert result.pages == 1
    assert [each.is_ok for each in made.ended] == [True]
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    np.testing.assert_array_equal(device_page(made.device, 40), made.host.pages[30])
    np.testing.assert_array_equal(device_page(made.device, PAGES - 1), made.host.pages[PAGES - 1])
