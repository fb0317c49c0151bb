"""Pages into a blob and out of one, against copies made page by page."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from services.storage.backends import ChunkKey
from services.storage.chunk_format import ChunkHeader, blob_nbytes, payload_view
from services.storage.chunk_gathering import gather_chunk, pages_of, scatter_chunk, verify_into
from services.storage.core.fetch_check import FetchChunk
from services.storage.core.save_check import SaveChunk
from shared.chunks import chunk_pages, geometry_id
from shared.errors import IntegrityError, InvalidRequest
from shared.memory import DevicePoolView, HostPoolView
from shared.memory.host_pool import layer_checksum
from shared.messages.pools import KvGeometry, PoolHandle
from tests.chunk_makers import HIDDEN_GEOMETRIES

MakePool = Callable[[KvGeometry, int], PoolHandle]

IDENTITIES = [bytes([page + 1]) * 16 for page in range(64)]


def _chunk(geometry: KvGeometry, host: list[int], device: list[int]) -> SaveChunk:
    pages = chunk_pages(geometry.page_size)
    return SaveChunk(
        key=ChunkKey("00" * 16, geometry_id(geometry), IDENTITIES[pages - 1]),
        place=0,
        above=None,
        parent=bytes(16),
        tokens=b"",
        identities=b"".join(IDENTITIES[:pages]),
        host_pages=np.array(host, np.int32),
        device_pages=np.array(device, np.int32),
    )


@pytest.fixture
def host(shm_prefix: str, geometry: KvGeometry) -> HostPoolView:
    """Page p holds random KV; pages 0 to 15 are sealed as those of the chunk, in reverse."""
    pool = HostPoolView.create(shm_prefix, geometry, 24)
    pool.pages[:] = np.random.default_rng(3).integers(0, 256, pool.pages.shape, dtype=np.uint8)
    for page in range(16):
        pool.seal_page(page, IDENTITIES[15 - page])
    return pool


def test_pages_of_both_pools_make_one_chunk(
    geometry: KvGeometry, host: HostPoolView, make_device_pool: MakePool
) -> None:
    """Scattered pages of host and device lie in order; checksums are those of a host pool."""
    device = DevicePoolView.attach(make_device_pool(geometry, 20))
    from_host = [15, 14, 13, -1, -1, 10, -1, 8, 7, 6, 5, 4, 3, -1, 1, -1]
    from_device = [-1, -1, -1, 3, 4, -1, 19, -1, -1, -1, -1, -1, -1, 0, -1, 5]
    chunk = _chunk(geometry, from_host, from_device)
    blob = memoryview(bytearray(blob_nbytes(geometry)))

    checksums = gather_chunk(chunk, blob, host, device)

    pages = pages_of(blob, geometry)
    for page in range(16):
        for layer in range(geometry.layers):
            source = (
                host.pages[from_host[page], layer].tobytes()
                if from_host[page] >= 0
                else device.halves[layer, :, from_device[page]].tobytes()
            )
            assert pages[page, layer].tobytes() == source
            assert checksums[page, layer] == layer_checksum(pages[page, layer], IDENTITIES[page])


def test_a_page_of_another_identity_is_found_out(geometry: KvGeometry, host: HostPoolView) -> None:
    """A host page that holds something else, sealed or cleared, is never saved as this chunk's."""
    chunk = _chunk(geometry, list(range(15, -1, -1)), [-1] * 16)
    blob = memoryview(bytearray(blob_nbytes(geometry)))
    host.seal_page(4, b"x" * 16)
    with pytest.raises(IntegrityError, match="replaced"):
        gather_chunk(chunk, blob, host, None)
    host.clear(4)
    with pytest.raises(IntegrityError, match="replaced"):
        gather_chunk(chunk, blob, host, None)


def test_bytes_that_do_not_fit_their_checksums_are_found_out(geometry: KvGeometry, host: HostPoolView) -> None:
    """A host page that rotted, or that is being overwritten, is never saved."""
    chunk = _chunk(geometry, list(range(15, -1, -1)), [-1] * 16)
    host.pages[9, 2, 7] ^= 64
    with pytest.raises(IntegrityError, match="damaged"):
        gather_chunk(chunk, memoryview(bytearray(blob_nbytes(geometry))), host, None)


def test_device_pages_need_a_device(geometry: KvGeometry, host: HostPoolView) -> None:
    """An order that names device pages but no worker is refused."""
    chunk = _chunk(geometry, [-1] * 16, list(range(16)))
    with pytest.raises(InvalidRequest):
        gather_chunk(chunk, memoryview(bytearray(blob_nbytes(geometry))), host, None)


def test_wanted_pages_are_sealed_and_others_untouched(geometry: KvGeometry, host: HostPoolView) -> None:
    """Pages go where they are wanted, verify there, and nothing else changes."""
    chunk = _chunk(geometry, list(range(15, -1, -1)), [-1] * 16)
    blob = memoryview(bytearray(blob_nbytes(geometry)))
    checksums = gather_chunk(chunk, blob, host, None)
    before = host.pages.copy(), host.identities.copy()
    targets = [-1] * 16
    targets[2:5], targets[9], targets[15] = [20, 21, 22], 17, 23
    fetched = FetchChunk(chunk.key, 0, chunk.identities, np.array(targets, np.int32))

    scatter_chunk(fetched, blob, checksums, host)

    wanted = {target: page for page, target in enumerate(targets) if target >= 0}
    for at in range(24):
        if at in wanted:
            for layer in range(geometry.layers):
                host.verify_layer(at, layer, IDENTITIES[wanted[at]])
            assert np.array_equal(host.pages[at], pages_of(blob, geometry)[wanted[at]])
        else:
            assert np.array_equal(host.pages[at], before[0][at])
            assert np.array_equal(host.identities[at], before[1][at])


def test_nothing_wanted_is_nothing_written(geometry: KvGeometry, host: HostPoolView) -> None:
    """A chunk of which no page is wanted leaves the pool as it is."""
    chunk = _chunk(geometry, list(range(15, -1, -1)), [-1] * 16)
    blob = memoryview(bytearray(blob_nbytes(geometry)))
    checksums = gather_chunk(chunk, blob, host, None)
    before = host.identities.copy()
    fetched = FetchChunk(chunk.key, 0, chunk.identities, np.full(16, -1, np.int32))

    scatter_chunk(fetched, blob, checksums, host)

    assert np.array_equal(host.identities, before)


@pytest.mark.parametrize("is_damaged", [False, True], ids=["sound", "damaged"])
def test_a_chunk_is_verified_on_its_way(geometry: KvGeometry, host: HostPoolView, is_damaged: bool) -> None:
    """One flipped bit in a page, wanted or not, and none of its pages verifies in the pool."""
    chunk = _chunk(geometry, list(range(15, -1, -1)), [-1] * 16)
    blob = memoryview(bytearray(blob_nbytes(geometry)))
    checksums = gather_chunk(chunk, blob, host, None)
    header = ChunkHeader(
        namespace=chunk.key.namespace,
        identity=chunk.key.identity,
        parent=chunk.parent,
        depth=0,
        geometry=geometry,
        identities=chunk.identities,
        checksum_table=checksums.tobytes(),
    )
    targets = np.array([-1, *range(16, 24), *[-1] * 7], np.int32)
    fetched = FetchChunk(chunk.key, 0, chunk.identities, targets)
    payload_view(blob, geometry)[-1] ^= is_damaged

    if is_damaged:
        with pytest.raises(IntegrityError, match="wrong checksum: page 15"):
            verify_into(fetched, blob, header, host)
        assert not host.identities[16:24].any()
    else:
        verify_into(fetched, blob, header, host)
        for at in range(16, 24):
            for layer in range(geometry.layers):
                host.verify_layer(at, layer, IDENTITIES[at - 15])


def _hidden_pool(shm_prefix: str, geometry: KvGeometry) -> HostPoolView:
    """A hidden pool of which each page of a chunk is random and sealed, the first page last."""
    pages = chunk_pages(geometry.page_size)
    pool = HostPoolView.create(shm_prefix, geometry, 2 * pages)
    pool.pages[:] = np.random.default_rng(5).integers(0, 256, pool.pages.shape, dtype=np.uint8)
    for page in range(pages):
        pool.seal_page(page, IDENTITIES[pages - 1 - page])
    return pool


@pytest.mark.parametrize("geometry", HIDDEN_GEOMETRIES.values(), ids=HIDDEN_GEOMETRIES)
def test_hidden_pages_make_a_chunk_and_come_back(shm_prefix: str, geometry: KvGeometry) -> None:
    """Of every shape of hidden pages: each unit lies in order with its checksum, and verifies where it goes to."""
    pool, pages = _hidden_pool(shm_prefix, geometry), chunk_pages(geometry.page_size)
    chunk = _chunk(geometry, list(range(pages - 1, -1, -1)), [-1] * pages)
    blob = memoryview(bytearray(blob_nbytes(geometry)))

    checksums = gather_chunk(chunk, blob, pool, None)
    targets = np.arange(pages, 2 * pages, dtype=np.int32)
    scatter_chunk(FetchChunk(chunk.key, 0, chunk.identities, targets), blob, checksums, pool)

    assert checksums.shape == (pages, geometry.units)
    for page in range(pages):
        assert np.array_equal(pages_of(blob, geometry)[page], pool.pages[pages - 1 - page])
        assert np.array_equal(pool.pages[pages + page], pool.pages[pages - 1 - page])
        for unit in range(geometry.units):
            pool.verify_layer(pages + page, unit, IDENTITIES[page])


@pytest.mark.parametrize("geometry", HIDDEN_GEOMETRIES.values(), ids=HIDDEN_GEOMETRIES)
def test_a_state_page_that_was_overwritten_is_found_out(shm_prefix: str, geometry: KvGeometry) -> None:
    """Whichever unit a worker wrote to that was not to write any more, and whether it sealed the page or not."""
    pool, pages = _hidden_pool(shm_prefix, geometry), chunk_pages(geometry.page_size)
    chunk = _chunk(geometry, list(range(pages - 1, -1, -1)), [-1] * pages)
    blob = memoryview(bytearray(blob_nbytes(geometry)))
    for unit in range(geometry.units):
        pool.pages[0, unit, -1] ^= 1
        with pytest.raises(IntegrityError, match="damaged"):
            gather_chunk(chunk, blob, pool, None)
        pool.pages[0, unit, -1] ^= 1
    pool.seal_page(0, b"another's page .")

    with pytest.raises(IntegrityError, match="replaced"):
        gather_chunk(chunk, blob, pool, None)
