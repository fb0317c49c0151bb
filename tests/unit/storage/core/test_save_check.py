"""Saves and fetches are not trusted."""

from __future__ import annotations

import numpy as np
import pytest

from services.storage.backends import ChunkKey
from services.storage.core.fetch_check import check_fetch
from services.storage.core.save_check import check_save, host_pages_of, reads_device
from shared.chunks import geometry_id
from shared.errors import InvalidRequest
from shared.ids import chain_pages, chain_root, namespace_digest
from shared.messages.base import pack_int32
from shared.messages.pools import HIDDEN, KvGeometry, PoolHandle
from shared.messages.storage_plans import FetchChunks, SaveChunks

GEOMETRY = KvGeometry(layers=1, kv_heads=1, head_dim=1, page_size=32, dtype="float16")
NAMESPACE = namespace_digest("model")
TOKENS = pack_int32(range(3 * 64))
IDENTITIES = chain_pages(chain_root(NAMESPACE), TOKENS, 128)


def _pool(pages: int, geometry: KvGeometry = GEOMETRY) -> PoolHandle:
    return PoolHandle(kind="shm", layout="page_first", name="pool", nbytes=1, pages=pages, geometry=geometry)


def _save(**change: object) -> SaveChunks:
    """Of the second and third chunk: two pages each."""
    fields: dict[str, object] = {
        "save_id": 1,
        "namespace": NAMESPACE,
        "depth": 64,
        "tokens": TOKENS[64 * 4 :],
        "parent": IDENTITIES[16:32],
        "identities": IDENTITIES[32:],
        "host_pages": pack_int32([5, -1, 6, 5]),
        "device_pages": pack_int32([-1, 9, -1, -1]),
    }
    return SaveChunks(**(fields | change))  # type: ignore[arg-type]


def _fetch(**change: object) -> FetchChunks:
    fields: dict[str, object] = {
        "fetch_id": 1,
        "namespace": NAMESPACE,
        "depth": 64,
        "identities": IDENTITIES[32:],
        "host_pages": pack_int32([5, -1, 6, 7]),
        "deadline_ms": 100,
    }
    return FetchChunks(**(fields | change))  # type: ignore[arg-type]


def test_a_save_is_cut_into_its_chunks() -> None:
    """Each knows its name, its place, what is above it, and where its pages are."""
    first, second = check_save(_save(), _pool(8), _pool(10))

    shape = geometry_id(GEOMETRY)
    assert first.key == ChunkKey(NAMESPACE, shape, IDENTITIES[48:64])
    assert (first.place, first.parent, first.above) == (1, IDENTITIES[16:32], ChunkKey(NAMESPACE, shape, first.parent))
    assert (second.place, second.parent, second.above) == (2, first.key.identity, first.key)
    assert second.key.identity == IDENTITIES[80:]
    assert first.tokens + second.tokens == TOKENS[256:]
    assert first.identities + second.identities == IDENTITIES[32:]
    assert host_pages_of(first) == [5]
    assert host_pages_of(second) == [6, 5]
    assert first.device_pages.tolist() == [-1, 9]


def test_the_first_chunk_has_nothing_above_it() -> None:
    """At the root the parent is the namespace's root."""
    order = _save(
        depth=0,
        tokens=TOKENS[:256],
        parent=chain_root(NAMESPACE),
        identities=IDENTITIES[:32],
        host_pages=pack_int32([0, 1]),
        device_pages=pack_int32([-1, -1]),
    )
    (chunk,) = check_save(order, _pool(8), None)

    assert (chunk.place, chunk.above) == (0, None)
    assert not reads_device(order)
    assert reads_device(_save())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"namespace": NAMESPACE.upper()}, "no namespace"),
        ({"namespace": ""}, "no namespace"),
        ({"identities": b""}, "whole chunks"),
        ({"identities": IDENTITIES[32:80]}, "whole chunks"),
        ({"depth": -64}, "not a multiple"),
        ({"depth": 65}, "not a multiple"),
        ({"depth": 0}, "cannot be above"),
        ({"parent": chain_root(NAMESPACE)}, "cannot be above"),
        ({"parent": b""}, "cannot be above"),
        ({"tokens": TOKENS}, "bytes of tokens"),
        ({"host_pages": pack_int32([5, -1, 6])}, "4 host pages"),
        ({"host_pages": b"\0"}, "4 host pages"),
        ({"host_pages": pack_int32([8, 0, 1, 2])}, "host pages"),
        ({"host_pages": pack_int32([-2, 0, 1, 2])}, "host pages"),
        ({"device_pages": pack_int32([-1, 10, -1, -1])}, "device pages"),
        ({"device_pages": pack_int32([-1, -1, -1, -1])}, "no source"),
    ],
)
def test_a_save_that_makes_no_chunks_is_refused(change: dict[str, object], reason: str) -> None:
    """Whatever is wrong with it, the answer says what."""
    with pytest.raises(InvalidRequest, match=reason):
        check_save(_save(**change), _pool(8), _pool(10))


def test_pools_of_different_geometry_are_refused() -> None:
    """Pages of another shape cannot become one chunk."""
    other = KvGeometry(layers=2, kv_heads=1, head_dim=1, page_size=32, dtype="float16")
    with pytest.raises(InvalidRequest, match="differ in geometry"):
        check_save(_save(), _pool(8), _pool(10, other))


HIDDEN_GEOMETRY = KvGeometry(
    layers=3, kv_heads=1, head_dim=1, page_size=32, dtype="float16", hidden=9, absent=1, from_hidden=2
)
POOLED = {"host_pages": pack_int32([5, 4, 6, 5]), "device_pages": pack_int32([-1] * 4)}


def test_hidden_states_are_cut_into_chunks_with_the_names_of_kv() -> None:
    """Their identities are those of KV of the same tokens; their geometry is that of the hidden pool."""
    first, second = check_save(_save(**POOLED, form=HIDDEN), _pool(8, HIDDEN_GEOMETRY), None)
    of_kv = check_save(_save(), _pool(8), _pool(10))

    assert [first.key.identity, second.key.identity] == [chunk.key.identity for chunk in of_kv]
    assert first.key.geometry == second.key.geometry == geometry_id(HIDDEN_GEOMETRY) != geometry_id(GEOMETRY)
    assert first.above == ChunkKey(NAMESPACE, geometry_id(HIDDEN_GEOMETRY), first.parent)
    assert second.above == first.key
    assert host_pages_of(first) == [5, 4]


@pytest.mark.parametrize(
    "change",
    [
        {"host_pages": pack_int32([5, -1, 6, 5])},
        {"device_pages": pack_int32([-1, 3, -1, -1])},
    ],
    ids=str,
)
@pytest.mark.parametrize("device", [None, _pool(10, HIDDEN_GEOMETRY)], ids=["none", "hidden"])
def test_hidden_states_come_from_their_pool_alone(change: dict[str, object], device: PoolHandle | None) -> None:
    """No page of it can be on a device, whatever is attached there."""
    with pytest.raises(InvalidRequest):
        check_save(_save(**(POOLED | change), form=HIDDEN), _pool(8, HIDDEN_GEOMETRY), device)


def test_a_fetch_is_cut_into_its_chunks() -> None:
    """Each knows its name, its place, and where its pages go."""
    first, second = check_fetch(_fetch(), _pool(8))

    assert (first.place, second.place) == (1, 2)
    assert second.key == ChunkKey(NAMESPACE, geometry_id(GEOMETRY), IDENTITIES[80:])
    assert np.array_equal(first.host_pages, [5, -1])
    assert first.identities + second.identities == IDENTITIES[32:]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"namespace": "../" * 10}, "no namespace"),
        ({"identities": IDENTITIES[:20]}, "whole chunks"),
        ({"depth": 1}, "not a multiple"),
        ({"host_pages": pack_int32([1, 2])}, "4 host pages"),
        ({"host_pages": pack_int32([1, 2, 3, 8])}, "host pages"),
        ({"host_pages": pack_int32([1, 2, 3, -2])}, "host pages"),
        ({"host_pages": pack_int32([1, 2, 3, 1])}, "twice"),
        ({"deadline_ms": -1}, "deadline"),
    ],
)
def test_a_fetch_that_names_no_chunks_is_refused(change: dict[str, object], reason: str) -> None:
    """Whatever is wrong with it, the answer says what."""
    with pytest.raises(InvalidRequest, match=reason):
        check_fetch(_fetch(**change), _pool(8))
