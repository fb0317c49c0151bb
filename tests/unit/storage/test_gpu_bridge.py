"""The GPU bridge over CPU memory: how copies go, and that a broken GPU is asked nothing more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from services.storage import gpu_bridge
from services.storage.gpu_bridge import CudaDevicePool
from services.storage.pools import Pools
from shared.errors import DeviceFailed, TransportError
from shared.memory.pinned import PinnedMemory
from shared.messages.pools import KvGeometry, PoolHandle
from shared.messages.storage_plans import AttachDevicePool
from tests.cuda.runtime import FakeRuntime
from tests.run_name import shm_prefix

GEOMETRY = KvGeometry(layers=2, kv_heads=1, head_dim=4, page_size=1, dtype="float32")
PAGES = 4
HANDLE = PoolHandle(
    kind="cuda_ipc", layout="layer_first", name="", nbytes=PAGES * GEOMETRY.page_bytes, pages=PAGES, geometry=GEOMETRY
)


class FakeCuda:
    """Streams and events that do nothing but count; ``error`` is what waiting for an event raises."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.waits = 0

    def Stream(self, **_: Any) -> Any:  # noqa: N802 - torch's name.
        return SimpleNamespace()

    @contextmanager
    def stream(self, _: Any) -> Iterator[None]:
        yield

    def Event(self) -> Any:  # noqa: N802 - torch's name.
        return SimpleNamespace(record=lambda _: None, synchronize=self._wait)

    def set_device(self, _: Any) -> None: ...

    def _wait(self) -> None:
        self.waits += 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    monkeypatch.setattr(gpu_bridge, "_cuda", made)
    monkeypatch.setattr(gpu_bridge, "_failed", {})
    monkeypatch.setattr(gpu_bridge, "_pinned_rows", lambda *shape: torch.empty(shape, dtype=torch.uint8))
    return made


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    made = FakeRuntime()
    monkeypatch.setattr(gpu_bridge, "_MEMORY", PinnedMemory(lambda: made))
    return made


def halves() -> torch.Tensor:
    count = PAGES * GEOMETRY.page_bytes
    return torch.arange(count).to(torch.uint8).view(GEOMETRY.layers, 2, PAGES, GEOMETRY.half_bytes)


@pytest.mark.parametrize("is_pinned", [False, True])
def test_pages_arrive_whether_their_memory_is_pinned_or_not(
    is_pinned: bool, cuda: FakeCuda, runtime: FakeRuntime
) -> None:
    """And no copy registers anything: buffers come and go under the driver's hands else."""
    into = np.zeros((8, GEOMETRY.layers, 2 * GEOMETRY.half_bytes), dtype=np.uint8)
    if is_pinned:
        gpu_bridge._MEMORY.register(into)
    before = runtime.calls

    CudaDevicePool(HANDLE, halves()).copy_run((1, 5, 2), into)

    for page in range(2):
        assert into[5 + page].tobytes() == halves()[:, :, 1 + page].numpy().tobytes()
    assert not into[:5].any()
    assert (cuda.waits, runtime.calls) == (1, before)


def test_an_error_that_stays_ends_the_bridge_of_that_gpu(cuda: FakeCuda, runtime: FakeRuntime) -> None:
    """The first copy fails with a typed reason, and later ones of any pool on that GPU do not even ask it."""
    pool, other = CudaDevicePool(HANDLE, halves()), CudaDevicePool(HANDLE, halves())
    into = np.zeros((8, GEOMETRY.layers, 2 * GEOMETRY.half_bytes), dtype=np.uint8)
    cuda.error = RuntimeError("CUDA error: an illegal memory access was encountered")

    for each in (pool, pool, other):
        with pytest.raises(DeviceFailed, match="illegal memory access"):
            each.copy_run((0, 0, 1), into)
    assert cuda.waits == 1
    assert "illegal memory access" in other.fault
    assert runtime.calls == 0


def test_another_error_is_that_of_one_copy(cuda: FakeCuda, runtime: FakeRuntime) -> None:
    """The next one is tried."""
    pool = CudaDevicePool(HANDLE, halves())
    into = np.zeros((8, GEOMETRY.layers, 2 * GEOMETRY.half_bytes), dtype=np.uint8)
    cuda.error = RuntimeError("CUDA error: invalid argument")
    with pytest.raises(TransportError) as caught:
        pool.copy_run((0, 0, 1), into)
    cuda.error = None

    pool.copy_run((0, 0, 1), into)

    assert not isinstance(caught.value, DeviceFailed)
    assert (pool.fault, runtime.calls) == ("", 0)


def test_pools_are_pinned_once_where_a_gpu_writes_to_them_and_lost_ones_refused(
    cuda: FakeCuda, runtime: FakeRuntime
) -> None:
    """Whichever is there first; orders for a worker on a broken GPU are refused at once, and the cell is told."""
    pinned, unpinned = list[str](), list[str]()
    pools = Pools(
        shm_prefix("bridge"), 64 * 1024, open_device=lambda handle: CudaDevicePool(handle, halves()),
        pin=lambda pool: pinned.append(pool.handle.name), unpin=lambda pool: unpinned.append(pool.handle.name),
    )  # fmt: skip
    try:
        handle = pools.create_host(GEOMETRY)
        assert pinned == []
        for number in range(2):
            pools.attach(AttachDevicePool(worker_id=f"w{number}", worker_incarnation="i", handle=HANDLE))
        assert pinned == [handle.name]
        cuda.error = RuntimeError("CUDA error: unspecified launch failure")
        with pytest.raises(DeviceFailed):
            pools.device("w0", "i").copy_run((0, 0, 1), pools.host.pages)

        with pytest.raises(DeviceFailed, match="worker w1 is lost"):
            pools.device("w1", "i")
        assert [what for what, *_ in pools.faults()] == ["device pool of w0", "device pool of w1"]
    finally:
        pools.close()
    assert unpinned == [handle.name]
    assert runtime.calls == 0
