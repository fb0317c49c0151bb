"""Hidden pools are mapped writable, and only where they restore this worker's KV."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.worker.restore.hidden_pools import HiddenPools
from shared.errors import TransportError
from shared.memory import HostPoolView
from shared.messages.pools import KvGeometry
from tests.unit.worker.pools import GEOMETRY, PlayedPins, host_pool, identity_of
from tests.unit.worker.restore.hidden_pages import hidden_geometry

HIDDEN_GEOMETRY = hidden_geometry(GEOMETRY, 1, 1, 8)


@pytest.fixture
def owned() -> Iterator[HostPoolView]:
    """A storage's pool of four hidden pages."""
    with host_pool(4, HIDDEN_GEOMETRY) as made:
        yield made


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
    pools = HiddenPools(GEOMETRY)
    with host_pool(2, geometry) as other:
        pools.attach("s", other.handle)

    with pytest.raises(TransportError, match="holds no hidden states"):
        pools.view("s")


def test_a_pool_is_unmapped_behind_what_writes_to_it(owned: HostPoolView) -> None:
    """It is gone at once for whoever asks, and stays readable for who holds it until then."""
    later: list[object] = []
    pins = PlayedPins()
    pools = HiddenPools(GEOMETRY, pins, later.append)
    pools.attach("s", owned.handle)
    view = pools.view("s")
    assert pools.is_pinned("s")

    pools.detach("s")
    with pytest.raises(TransportError):
        pools.view("s")
    assert view.pages.shape == (4, HIDDEN_GEOMETRY.units, HIDDEN_GEOMETRY.unit_bytes)
    assert [what for what, _ in pins.calls] == ["pin"]
    for work in later:
        work()  # type: ignore[operator]

    assert [what for what, _ in pins.calls] == ["pin", "unpin"]
    assert view.pages.size == 0
