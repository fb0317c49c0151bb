"""Pools of hidden pages: their units, their sizes, and what no pool can have."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from shared.chunks import chunk_bytes, geometry_id
from shared.errors import ConfigError, IntegrityError, TransportError
from shared.memory import HostPoolView, pages_for
from shared.messages.pools import KvGeometry
from tests.chunk_makers import HIDDEN_GEOMETRIES

IDENTITY = bytes(range(1, 17))
KV = KvGeometry(layers=6, kv_heads=2, head_dim=4, page_size=8, dtype="float16")


def _hidden(absent: int, from_hidden: int, hidden: int) -> KvGeometry:
    return msgspec.structs.replace(KV, absent=absent, from_hidden=from_hidden, hidden=hidden)


@pytest.mark.parametrize(
    ("geometry", "units", "unit_bytes"),
    [
        (KV, 6, 2 * 8 * 8 * 2),
        (_hidden(0, 6, 20), 6, 8 * 20 * 2),
        (_hidden(2, 4, 20), 4, 8 * 20 * 2),
        (_hidden(1, 2, 8), 2 + 2 * 3, 8 * 8 * 2),
        (_hidden(0, 1, 8), 1 + 2 * 5, 8 * 8 * 2),
        (_hidden(4, 0, 0), 2 * 2, 8 * 8 * 2),
    ],
)
def test_a_page_consists_of_units_of_one_size(geometry: KvGeometry, units: int, unit_bytes: int) -> None:
    """One unit a layer of KV; of hidden states one for hidden states, two for K and V, and none for what is absent."""
    assert geometry.fault() == ""
    assert (geometry.units, geometry.unit_bytes) == (units, unit_bytes)
    assert geometry.page_bytes == units * unit_bytes == geometry.token_bytes * 8
    assert chunk_bytes(geometry) == 8 * geometry.page_bytes
    assert geometry.as_kv == KV


@pytest.mark.parametrize(
    "geometry",
    [
        _hidden(6, 0, 0),
        _hidden(7, 0, 0),
        _hidden(3, 4, 8),
        _hidden(0, 7, 8),
        _hidden(0, 3, 0),
        _hidden(0, 0, 8),
        _hidden(2, 0, 8),
        _hidden(0, 3, 20),
        _hidden(-1, 7, 8),
        _hidden(1, -1, -8),
    ],
    ids=str,
)
def test_what_no_hidden_pool_can_be_is_refused(shm_prefix: str, geometry: KvGeometry) -> None:
    """Layers that do not add up, and hidden states beside KV of another width, make neither pool nor handle."""
    good = HostPoolView.create(shm_prefix, KV, 2).handle

    with pytest.raises(ConfigError, match="no pool can have"):
        HostPoolView.create(shm_prefix, geometry, 2)
    with pytest.raises(ConfigError, match="no pool can have"):
        pages_for(geometry, 2**20)
    with pytest.raises(TransportError):
        HostPoolView.attach(msgspec.structs.replace(good, geometry=geometry))


def test_every_form_has_a_name_of_its_own() -> None:
    """No two geometries share the digest under which their chunks lie, however alike they are."""
    geometries = [KV, _hidden(0, 6, 8), _hidden(1, 5, 8), _hidden(0, 5, 8), _hidden(1, 0, 0), _hidden(0, 6, 16)]

    assert len({geometry_id(geometry) for geometry in geometries}) == len(geometries)


@pytest.mark.parametrize("geometry", HIDDEN_GEOMETRIES.values(), ids=HIDDEN_GEOMETRIES)
def test_a_worker_writes_what_the_storage_verifies(shm_prefix: str, geometry: KvGeometry) -> None:
    """A page that another mapping sealed verifies unit by unit, and a wrong byte is found in its unit only."""
    pool = HostPoolView.create(shm_prefix, geometry, 2)
    writer = HostPoolView.attach(pool.handle)
    writer.pages[:] = np.random.default_rng(2).integers(0, 256, writer.pages.shape, dtype=np.uint8)
    writer.seal_page(0, IDENTITY)
    bad = geometry.units - 1
    writer.pages[0, bad, 3] ^= 4

    for unit in range(bad):
        pool.verify_layer(0, unit, IDENTITY)
    with pytest.raises(IntegrityError) as caught:
        pool.verify_layer(0, bad, IDENTITY)
    assert caught.value.code == "wrong_checksum"
