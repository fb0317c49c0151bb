"""The mover against a naive copy."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.storage import mover
from services.storage.core.backup_check import Transfer
from services.storage.mover import copy_transfer, merge_runs
from shared.errors import IntegrityError, TransportError
from shared.memory import DevicePoolView, HostPoolView
from shared.memory.device_pool_view import DeviceRun
from shared.messages.pools import KvGeometry, PoolHandle

MakePool = Callable[[KvGeometry, int], PoolHandle]

GEOMETRIES = [
    KvGeometry(layers=1, kv_heads=1, head_dim=5, page_size=1, dtype="bfloat16"),
    KvGeometry(layers=4, kv_heads=2, head_dim=16, page_size=64, dtype="float32"),
    KvGeometry(layers=3, kv_heads=3, head_dim=20, page_size=16, dtype="float16"),
]


def _transfer(pairs: list[tuple[int, int]]) -> Transfer:
    device, host = (np.array(column, dtype=np.int32) for column in zip(*pairs, strict=True))
    identities = tuple(bytes([page % 255 + 1]) * 16 for page in host.tolist())
    return Transfer(1, "w0", "i0", device, host, identities)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("slice_bytes", [1, 2 * 2**20])
def test_every_page_arrives_sealed(
    shm_prefix: str,
    make_device_pool: MakePool,
    monkeypatch: pytest.MonkeyPatch,
    geometry: KvGeometry,
    slice_bytes: int,
) -> None:
    """Scattered and consecutive pages equal a copy made half by half, and verify; other pages are untouched."""
    monkeypatch.setattr(mover, "SLICE_BYTES", slice_bytes)
    source = DevicePoolView.attach(make_device_pool(geometry, 9))
    target = HostPoolView.create(shm_prefix, geometry, 12)
    pairs = [(0, 4), (1, 5), (2, 6), (8, 0), (5, 11), (6, 10)]
    transfer = _transfer(pairs)

    nbytes = copy_transfer(transfer, source, target)

    assert nbytes == len(pairs) * geometry.page_bytes
    for (device, host), identity in zip(pairs, transfer.identities, strict=True):
        for layer in range(geometry.layers):
            expected = source.halves[layer, 0, device].tobytes() + source.halves[layer, 1, device].tobytes()
            assert target.pages[host, layer].tobytes() == expected
            target.verify_layer(host, layer, identity)
    untouched = sorted(set(range(12)) - {host for _, host in pairs})
    assert not target.pages[untouched].any()
    assert not target.identities[untouched].any()


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=30),
    st.integers(1, 4),
)
def test_runs_cover_exactly_the_pairs(pairs: list[tuple[int, int]], longest: int) -> None:
    """Unrolled, the runs are the pairs in order; none is longer than allowed, and no two could be one."""
    device, host = np.array(pairs, dtype=np.int32).reshape(-1, 2).T

    runs = list(merge_runs(device, host, longest))

    assert [(first + i, second + i) for first, second, count in runs for i in range(count)] == pairs
    assert all(0 < count <= longest for _, _, count in runs)
    for (d0, h0, n0), (d1, h1, _) in pairwise(runs):
        assert (d0 + n0, h0 + n0) != (d1, h1) or n0 == longest


class _BreakingPool:
    """A device pool that can be read once."""

    def __init__(self, view: DevicePoolView) -> None:
        self.handle = view.handle
        self.fault = ""
        self._view = view
        self._left = 1

    def copy_run(self, run: DeviceRun, into: np.ndarray) -> None:
        if not self._left:
            raise TransportError("the device is gone")
        self._left -= 1
        self._view.copy_run(run, into)

    def close(self) -> bool:
        return self._view.close()


def test_a_copy_that_dies_leaves_no_page_that_verifies_wrongly(
    shm_prefix: str, make_device_pool: MakePool, geometry: KvGeometry
) -> None:
    """Pages of an interrupted transfer that were not rewritten lose the identity that they had."""
    source = DevicePoolView.attach(make_device_pool(geometry, 4))
    target = HostPoolView.create(shm_prefix, geometry, 4)
    target.seal_page(3, b"o" * 16)

    with pytest.raises(TransportError):
        copy_transfer(_transfer([(0, 1), (2, 3)]), _BreakingPool(source), target)

    target.verify_layer(1, 0, bytes([2]) * 16)
    with pytest.raises(IntegrityError, match="never been sealed"):
        target.verify_layer(3, 0, b"o" * 16)
