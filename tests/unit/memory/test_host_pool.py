"""The page-first host pool: layout, sealing and verification."""

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError, IntegrityError, TransportError
from shared.memory import HostPoolView, SharedSegment, pages_for
from shared.memory.host_pool import nbytes_for
from shared.messages.pools import KvGeometry, PoolHandle
from tests.chunk_makers import HIDDEN_GEOMETRIES

GEOMETRIES = [
    KvGeometry(layers=layers, kv_heads=heads, head_dim=dim, page_size=page_size, dtype=dtype)
    for layers, heads, dim, dtype in [(1, 1, 1, "float16"), (3, 2, 24, "bfloat16"), (4, 4, 64, "float32")]
    for page_size in (1, 16, 64)
]
SMALL = KvGeometry(layers=2, kv_heads=2, head_dim=4, page_size=4, dtype="float32")
IDENTITY = bytes(range(1, 17))


@pytest.fixture
def pool(shm_prefix: str) -> HostPoolView:
    view = HostPoolView.create(shm_prefix, SMALL, 5)
    view.pages[:] = np.random.default_rng(0).integers(0, 256, view.pages.shape, dtype=np.uint8)
    return view


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_another_mapping_reads_what_was_sealed(shm_prefix: str, geometry: KvGeometry) -> None:
    """Pages sealed through one mapping verify in every layer through another, for every geometry."""
    writer = HostPoolView.create(shm_prefix, geometry, 3)
    reader = HostPoolView.attach(writer.handle, writable=False)
    random = np.random.default_rng(1)
    identities = [random.bytes(16) for _ in range(3)]

    for page, identity in enumerate(identities):
        writer.pages[page] = random.integers(0, 256, writer.pages[page].shape, dtype=np.uint8)
        writer.seal_page(page, identity)

    assert reader.pages.shape == (3, geometry.layers, 2 * geometry.half_bytes)
    assert (reader.pages == writer.pages).all()
    for page, identity in enumerate(identities):
        for layer in range(geometry.layers):
            reader.verify_layer(page, layer, identity)


@pytest.mark.parametrize("geometry", [*GEOMETRIES, *HIDDEN_GEOMETRIES.values()], ids=str)
def test_the_tables_lie_where_the_handle_says(shm_prefix: str, geometry: KvGeometry) -> None:
    """Reading the raw bytes by the handle's documentation finds pages, identities and a checksum for each unit."""
    view = HostPoolView.create(shm_prefix, geometry, 3)
    view.pages[1] = 77
    view.seal_page(1, IDENTITY)
    handle = view.handle

    raw = SharedSegment.attach(handle.name, handle.nbytes).array
    identities = raw[handle.table_offset : handle.table_offset + 3 * 16].reshape(3, 16)
    checksums = raw[handle.table_offset + 3 * 16 :].view("<u8").reshape(3, geometry.units)
    page = raw[geometry.page_bytes : 2 * geometry.page_bytes].reshape(geometry.units, geometry.unit_bytes)

    assert (page == 77).all()
    assert handle.nbytes == nbytes_for(geometry, 3)
    assert identities[1].tobytes() == IDENTITY
    seed = int.from_bytes(IDENTITY[:8], "little")
    assert checksums[1].tolist() == [xxhash.xxh3_64_intdigest(unit.tobytes(), seed) for unit in page]
    assert not identities[[0, 2]].any()
    assert not checksums[2].any()


def test_a_wrong_byte_is_found_in_its_layer_only(pool: HostPoolView) -> None:
    """One flipped bit fails the layer it is in, names it, and leaves the other layer good."""
    pool.seal_page(3, IDENTITY)

    pool.pages[3, 1, 17] ^= 1

    pool.verify_layer(3, 0, IDENTITY)
    with pytest.raises(IntegrityError, match=r"wrong checksum: host page 3 .* layer 1") as caught:
        pool.verify_layer(3, 1, IDENTITY)
    assert caught.value.code == "wrong_checksum"


def test_a_page_of_another_prefix_is_refused(pool: HostPoolView) -> None:
    """A good page with another identity than expected is an IntegrityError that names both."""
    pool.seal_page(0, IDENTITY)
    other = bytes(reversed(IDENTITY))

    with pytest.raises(IntegrityError, match=f"{IDENTITY.hex()}, not {other.hex()}") as caught:
        pool.verify_layer(0, 0, other)

    assert caught.value.code == "wrong_identity"


def test_an_identity_moved_to_another_page_is_found(pool: HostPoolView) -> None:
    """Checksums are seeded by identity, so a table that mixes up identities does not verify."""
    other = bytes(reversed(IDENTITY))
    pool.seal_page(0, IDENTITY)
    pool.identities[0] = np.frombuffer(other, np.uint8)

    with pytest.raises(IntegrityError, match="wrong checksum"):
        pool.verify_layer(0, 0, other)


def test_unsealed_and_cleared_pages_verify_as_nothing(pool: HostPoolView) -> None:
    """Neither a fresh nor a cleared page verifies, not even as the all-zero identity."""
    pool.seal_page(2, IDENTITY)
    pool.clear(2)

    for page in (1, 2):
        for identity in (IDENTITY, bytes(16)):
            with pytest.raises(IntegrityError, match="never been sealed"):
                pool.verify_layer(page, 0, identity)


@pytest.mark.parametrize("identity", [b"", bytes(16), bytes(range(15))])
def test_an_identity_that_is_none_cannot_be_sealed(pool: HostPoolView, identity: bytes) -> None:
    """Empty, short and all-zero identities are refused."""
    with pytest.raises(IntegrityError, match="cannot be sealed"):
        pool.seal_page(0, identity)


@given(
    layers=st.integers(1, 40),
    width=st.integers(1, 300),
    page_size=st.sampled_from([1, 16, 32, 64]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    budget=st.integers(0, 2**28),
)
def test_a_budget_is_used_to_the_last_page(layers: int, width: int, page_size: int, dtype: str, budget: int) -> None:
    """The pages that fit with their tables do, and one more would not."""
    geometry = KvGeometry(layers=layers, kv_heads=1, head_dim=width, page_size=page_size, dtype=dtype)

    pages = pages_for(geometry, budget)

    assert pages == 0 or nbytes_for(geometry, pages) <= budget
    assert nbytes_for(geometry, pages + 1) > budget


@pytest.mark.parametrize(
    "change",
    [
        {"layout": "layer_first"},
        {"kind": "cuda_ipc"},
        {"pages": 6},
        {"pages": 0},
        {"table_offset": 0},
        {"nbytes": 4},
        {"geometry": KvGeometry(layers=2, kv_heads=2, head_dim=4, page_size=4, dtype="int3")},
    ],
    ids=str,
)
def test_a_handle_that_contradicts_itself_is_refused(pool: HostPoolView, change: dict[str, object]) -> None:
    """A handle whose parts disagree is a TransportError, never a wrong view."""
    fields = {name: getattr(pool.handle, name) for name in PoolHandle.__struct_fields__} | change

    with pytest.raises(TransportError):
        HostPoolView.attach(PoolHandle(**fields))


def test_a_pool_without_room_for_a_page_is_the_operators_fault(shm_prefix: str) -> None:
    """No pages, or a geometry with a size of zero, is a ConfigError."""
    with pytest.raises(ConfigError, match="one page at least"):
        HostPoolView.create(shm_prefix, SMALL, 0)
    with pytest.raises(ConfigError, match="no pool can have"):
        pages_for(KvGeometry(layers=0, kv_heads=1, head_dim=1, page_size=1, dtype="float32"), 100)


def test_closing_a_pool_unmaps_it(pool: HostPoolView) -> None:
    """Without views outside, close gives the memory back; unlink may come before and twice."""
    pool.unlink()
    pool.unlink()

    assert pool.close()
