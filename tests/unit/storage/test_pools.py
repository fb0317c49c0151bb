"""The pools that a storage creates and maps."""

from collections.abc import Callable

import msgspec
import pytest

from services.storage.pools import Pools
from shared.errors import ConfigError, InvalidRequest, TransportError
from shared.memory import pages_for, unlink_all
from shared.memory.segment import SHM_DIRECTORY
from shared.memory.segment_name import parse_segment_name
from shared.messages.pools import HIDDEN, KvGeometry, PoolHandle
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


def _hidden(geometry: KvGeometry, **change: int) -> KvGeometry:
    """Hidden states of all layers, of 24 values."""
    shape: dict[str, int] = {"hidden": 24, "from_hidden": geometry.layers}
    return msgspec.structs.replace(geometry, **(shape | change))


def test_the_hidden_pool_stands_beside_the_host_pool(shm_prefix: str, geometry: KvGeometry) -> None:
    """It has a budget and a segment of its own, for this user alone, and its name goes with the storage."""
    pools = Pools(shm_prefix, 100_000, 50_000)
    host = pools.create_host(geometry)

    state = pools.create_hidden(_hidden(geometry))

    assert state.pages == pages_for(_hidden(geometry), 50_000) == pools.hidden_pages > 0
    assert pools.create_hidden(_hidden(geometry)) == state
    assert (pools.pool("kv").handle, pools.pool(HIDDEN).handle) == (host, state)
    assert (SHM_DIRECTORY / state.name).stat().st_mode & 0o777 == 0o600
    pools.close()
    assert not (SHM_DIRECTORY / state.name).exists()
    assert not (SHM_DIRECTORY / host.name).exists()


def test_a_killed_storages_hidden_pool_is_reaped_like_its_host_pool(shm_prefix: str, geometry: KvGeometry) -> None:
    """Its name says whose it is, so that the next start finds it."""
    pools = Pools(shm_prefix, 100_000, 50_000)
    pools.create_host(geometry)
    handle = pools.create_hidden(_hidden(geometry))

    name = parse_segment_name(handle.name)

    assert name is not None
    assert (name.prefix, name.owner_is_alive()) == (shm_prefix, True)
    assert handle.name in unlink_all(shm_prefix)
    pools.close()


def test_hidden_states_of_other_kv_are_refused(shm_prefix: str, geometry: KvGeometry) -> None:
    """What is restored must be what the host pool holds; a second shape of hidden states is refused, and the first
    stays.
    """
    pools = Pools(shm_prefix, 100_000, 50_000)
    with pytest.raises(InvalidRequest, match="no host pool"):
        pools.create_hidden(_hidden(geometry))
    pools.create_host(geometry)
    for change in ({"kv_heads": 1}, {"page_size": 8}, {"layers": 4}, {"layers": 4, "from_hidden": 4}):
        with pytest.raises(ConfigError, match="not restored from"):
            pools.create_hidden(_hidden(geometry, **change))
    handle = pools.create_hidden(_hidden(geometry))
    with pytest.raises(ConfigError, match="the hidden pool has geometry"):
        pools.create_hidden(_hidden(geometry, absent=1, from_hidden=2))

    assert pools.hidden.handle == handle


@pytest.mark.parametrize(("budget", "reason"), [(0, "--hidden-bytes is 0"), (300, "raise --hidden-bytes")])
def test_hidden_states_need_a_budget(shm_prefix: str, geometry: KvGeometry, budget: int, reason: str) -> None:
    """None, or one below a page, is refused with the flag that helps; so is a shape that no page can have."""
    pools = Pools(shm_prefix, 100_000, budget)
    pools.create_host(geometry)

    with pytest.raises(ConfigError, match=reason):
        pools.create_hidden(_hidden(geometry))
    with pytest.raises(InvalidRequest, match="no hidden pool"):
        pools.pool(HIDDEN)


def test_a_state_that_no_page_can_have_is_refused(shm_prefix: str, geometry: KvGeometry) -> None:
    """Layers that do not add up are said to be such, and nothing is made."""
    pools = Pools(shm_prefix, 100_000, 50_000)
    pools.create_host(geometry)

    with pytest.raises(ConfigError, match="do not add up"):
        pools.create_hidden(_hidden(geometry, absent=1))
    assert pools.hidden_pages == 0
