"""The pools that a storage creates and maps."""

from collections.abc import Callable

import pytest

from services.storage.pools import Pools
from shared.errors import ConfigError, InvalidRequest, TransportError
from shared.memory import pages_for
from shared.memory.segment import SHM_DIRECTORY
from shared.messages.pools import KvGeometry, PoolHandle
from shared.messages.storage_plans import AttachDevicePool

MakePool = Callable[[KvGeometry, int], PoolHandle]


def test_the_host_pool_uses_its_budget(shm_prefix: str, geometry: KvGeometry) -> None:
    """As many pages as fit, tables included; asking again answers the same pool."""
    pools = Pools(shm_prefix, 100_000)

    handle = pools.create_host(geometry)

    assert handle.pages == pages_for(geometry, 100_000) > 0
    assert handle.nbytes <= 100_000
    assert pools.create_host(geometry) == handle
    pools.close()
    assert not (SHM_DIRECTORY / handle.name).exists()


def test_another_geometry_needs_another_storage(shm_prefix: str, geometry: KvGeometry) -> None:
    """A second pool of another shape is refused, and the first stays."""
    pools = Pools(shm_prefix, 100_000)
    handle = pools.create_host(geometry)
    other = KvGeometry(layers=1, kv_heads=1, head_dim=8, page_size=1, dtype="float32")

    with pytest.raises(ConfigError, match="has geometry"):
        pools.create_host(other)

    assert pools.host.handle == handle


def test_a_budget_below_one_page_is_the_operators_fault(shm_prefix: str, geometry: KvGeometry) -> None:
    """The error says how large a page is and which flag to raise."""
    with pytest.raises(ConfigError, match=f"{geometry.page_bytes} bytes: raise --host-kv-bytes"):
        Pools(shm_prefix, geometry.page_bytes).create_host(geometry)


def test_a_pool_that_cannot_be_mapped_says_why_later(
    shm_prefix: str, geometry: KvGeometry, make_device_pool: MakePool
) -> None:
    """The reason is raised at once, and again for every use of that pool."""
    pools = Pools(shm_prefix, 100_000)
    handle = make_device_pool(geometry, 2)
    (SHM_DIRECTORY / handle.name).unlink()

    with pytest.raises(TransportError, match="No such file"):
        pools.attach(AttachDevicePool(worker_id="w0", worker_incarnation="i0", handle=handle))
    with pytest.raises(InvalidRequest, match="No such file"):
        pools.device("w0", "i0")


def test_a_pool_belongs_to_one_incarnation(shm_prefix: str, geometry: KvGeometry, make_device_pool: MakePool) -> None:
    """Another incarnation's pool is neither found nor detached."""
    pools = Pools(shm_prefix, 100_000)
    handle = make_device_pool(geometry, 2)
    pools.attach(AttachDevicePool(worker_id="w0", worker_incarnation="i1", handle=handle))

    assert not pools.detach("w0", "i0")
    assert pools.device("w0", "i1").handle == handle
    with pytest.raises(InvalidRequest, match=r"worker w0 \(i0\)"):
        pools.device("w0", "i0")
    assert pools.detach("w0", "i1")
    with pytest.raises(InvalidRequest):
        pools.device("w0", "i1")
