"""Hidden pools are mapped writable, and only where they restore this worker's KV."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from services.worker.restore.hidden_pools import HiddenPools
from shared.errors import TransportError
from shared.memory import HostPoolView
from shared.messages.pools import KvGeometry
from tests.unit.worker.pools import GEOMETRY, SHM_PREFIX, identity_of
from tests.unit.worker.restore.hidden_pages import hidden_geometry

HIDDEN_GEOMETRY = hidden_geometry(GEOMETRY, 1, 1, 8)


class Pins:
    """Remembers what is pinned."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.pinned: list[int] = []
        self._refuses = refuses

    def start(self, work: Callable[[], None]) -> None:
        work()

    def finish(self) -> None:
        """Nothing is left to be done."""

    def pin(self, array: npt.NDArray[np.uint8]) -> None:
        if self._refuses:
            raise TransportError("too much locked memory")
        self.pinned.append(array.nbytes)

    def unpin(self, array: npt.NDArray[np.uint8]) -> None:
        self.pinned.remove(array.nbytes)


@pytest.fixture
def owned() -> Iterator[HostPoolView]:
    """A storage's pool of four hidden pages."""
    made = HostPoolView.create(SHM_PREFIX, HIDDEN_GEOMETRY, 4)
    yield made
    made.unlink()
    made.close()


def test_what_is_written_here_is_seen_there(owned: HostPoolView) -> None:
    """The storage verifies what this worker has sealed."""
    pools = HiddenPools(GEOMETRY)
    pools.attach("s", owned.handle)
    view = pools.view("s")

    view.pages[2] = 7
    view.seal_page(2, identity_of("a"))

    for unit in range(HIDDEN_GEOMETRY.units):
        owned.verify_layer(2, unit, identity_of("a"))
    assert (owned.pages[2] == 7).all()
    pools.close()


def test_an_unknown_pool_is_said() -> None:
    """Also after it has been detached."""
    pools = HiddenPools(GEOMETRY)
    pools.detach("s")

    with pytest.raises(TransportError, match="no hidden pool of s"):
        pools.view("s")


@pytest.mark.parametrize(
    "geometry",
    [GEOMETRY, KvGeometry(layers=4, kv_heads=2, head_dim=4, page_size=4, dtype="float32", absent=1)],
)
def test_a_pool_of_anything_else_is_not_mapped(geometry: KvGeometry) -> None:
    """Neither of KV nor of another model's hidden states; the reason is kept."""
    other = HostPoolView.create(SHM_PREFIX, geometry, 2)
    pools = HiddenPools(GEOMETRY)

    pools.attach("s", other.handle)

    with pytest.raises(TransportError, match="holds no hidden states"):
        pools.view("s")
    other.unlink()
    other.close()


def test_a_pool_is_unmapped_behind_what_writes_to_it(owned: HostPoolView) -> None:
    """It is gone at once for whoever asks, and stays readable for who holds it until then."""
    later: list[object] = []
    pins = Pins()
    pools = HiddenPools(GEOMETRY, pins, later.append)
    pools.attach("s", owned.handle)
    view = pools.view("s")
    assert pools.is_pinned("s")

    pools.detach("s")
    with pytest.raises(TransportError):
        pools.view("s")
    assert view.pages.shape == (4, HIDDEN_GEOMETRY.units, HIDDEN_GEOMETRY.unit_bytes)
    assert pins.pinned
    for work in later:
        work()  # type: ignore[operator]

    assert pins.pinned == []
    assert view.pages.size == 0


def test_a_pool_that_cannot_be_pinned_serves_all_the_same(owned: HostPoolView) -> None:
    """Copies are staged then."""
    pools = HiddenPools(GEOMETRY, Pins(refuses=True))

    pools.attach("s", owned.handle)

    assert not pools.is_pinned("s")
    assert pools.view("s").handle == owned.handle
    pools.close()
