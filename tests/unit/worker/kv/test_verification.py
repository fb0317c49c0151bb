"""What is checked under each setting, and what is found all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from services.worker.kv.device_pool import DevicePool
from services.worker.kv.movers.batched import BatchedMover
from services.worker.kv.verification import Verification
from shared.memory import HostPoolView
from shared.messages.base import unpack_int32
from tests.unit.worker.pools import GEOMETRY, SHM_PREFIX, device_page, fill_page, made_loads, page_load, page_promotion

PAGES = 12
LABELS = [f"page-{page}" for page in range(PAGES)]
IDENTITIES = np.random.default_rng(3).integers(0, 256, (20_000, 16), dtype=np.uint8)


class Loading:
    """Loads under one setting; transfers run when the test says so."""

    def __init__(self, verification: Verification) -> None:
        self.host = HostPoolView.create(SHM_PREFIX, GEOMETRY, PAGES)
        for page, label in enumerate(LABELS):
            fill_page(self.host, page, label)
        self.device = DevicePool.create(GEOMETRY, PAGES, device="cpu", shm_prefix=SHM_PREFIX)
        self.waiting: list[Callable[[], None]] = []
        self.loads = made_loads(
            GEOMETRY, PAGES, BatchedMover(self.device), submit=self.waiting.append, verification=verification
        )
        self.loads.attach("s", self.host.handle)

    def wrong(self) -> list[int]:
        """Load everything; the host pages that were reported."""
        everything = list(range(PAGES))
        transfer = self.loads.start([page_load(everything, everything, LABELS)])
        while self.waiting:
            self.waiting.pop(0)()
        return [page for failure in transfer.finish().failures for page in unpack_int32(failure.host_pages)]

    def close(self) -> None:
        self.loads.close()
        self.device.close()
        self.host.unlink()
        self.host.close()


@pytest.fixture
def loading(request: pytest.FixtureRequest) -> Iterator[Loading]:
    made = Loading(request.param)
    yield made
    made.close()


def test_the_sample_is_the_share_and_the_same_in_every_run() -> None:
    """About a tenth of many pages, drawn by identity and order and by nothing else."""
    one, other = Verification("sampled", 0.1), Verification("sampled", 0.1)

    drawn = [one.draw(IDENTITIES) for _ in range(3)]

    assert [0.09 < each.mean() < 0.11 for each in drawn] == [True] * 3
    assert all((each == other.draw(IDENTITIES)).all() for each in drawn)


def test_every_page_is_drawn_sooner_or_later() -> None:
    """The order's number is part of the draw, so no page escapes for good."""
    verification = Verification("sampled", 0.2)
    drawn = np.zeros(100, dtype=bool)

    for _ in range(100):
        drawn |= verification.draw(IDENTITIES[:100])

    assert drawn.all()


@pytest.mark.parametrize("loading", [Verification("never")], indirect=True)
def test_never_checks_identities_all_the_same(loading: Loading) -> None:
    """A flipped bit passes, a page of other tokens does not."""
    loading.host.pages[2, 0, 0] ^= 1
    assert loading.wrong() == []
    np.testing.assert_array_equal(device_page(loading.device, 2), loading.host.pages[2])
    fill_page(loading.host, 2, LABELS[2])

    fill_page(loading.host, 5, "other")

    assert loading.wrong() == [5]


@pytest.mark.parametrize(
    "loading", [Verification("never"), Verification("sampled", 1e-9)], indirect=True, ids=["never", "sampled"]
)
@pytest.mark.parametrize("reused", ["cleared", "sealed anew"])
def test_a_page_that_is_given_away_during_the_copy_is_found(loading: Loading, reused: str) -> None:
    """Identities are looked at again after the last byte, so torn pages are never used."""
    transfer = loading.loads.start([page_load([3, 4], [3, 4], LABELS[3:5])])
    if reused == "cleared":
        loading.host.clear(4)
    else:
        fill_page(loading.host, 4, "other")

    loading.waiting.pop()()

    result = transfer.finish()
    assert [unpack_int32(failure.host_pages) for failure in result.failures] == [[4]]
    assert result.lost_pages == {3, 4}
    assert transfer.gate.rejected == "identity"


@pytest.mark.parametrize("loading", [Verification("sampled", 1e-9)], indirect=True)
def test_a_failure_ends_the_trust_in_a_storage_until_its_pool_is_mapped_anew(loading: Loading) -> None:
    """What sampling would miss is found after any failure, in that order already, and missed again with a new pool."""
    loading.host.pages[7, 1, 3] ^= 1
    assert loading.wrong() == []
    fill_page(loading.host, 0, "other")
    assert loading.wrong() == [0, 7]
    fill_page(loading.host, 0, LABELS[0])

    assert loading.wrong() == [7]
    loading.loads.attach("s", loading.host.handle)
    assert loading.wrong() == []


@pytest.mark.parametrize("loading", [Verification("never")], indirect=True)
def test_a_promotion_looks_again_too(loading: Loading) -> None:
    """A page that changes between two pieces of a promotion fails it."""
    ended: list[Any] = []
    loading.loads.promote(page_promotion([1, 2], [1, 2], LABELS[1:3]), ended.append)
    loading.waiting.pop(0)()
    fill_page(loading.host, 2, "other")

    while loading.waiting:
        loading.waiting.pop(0)()

    assert [(each.is_ok, unpack_int32(each.bad_host_pages)) for each in ended] == [(False, [2])]
