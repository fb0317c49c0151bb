"""The movers on a GPU: the same suite as on CPU, with pinned memory, a stream of their own and the compiled kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from services.worker.kv.host_pools import HostPools
from services.worker.kv.movers.batched_cuda import BatchedCudaMover
from services.worker.kv.movers.gpu_assisted import GpuAssistedMover
from services.worker.kv.page_memory import PageMemory
from services.worker.kv.pinning import CudaPins
from shared.errors import TransportError
from shared.memory import HostPoolView, unlink_all
from tests.cases import case
from tests.run_name import shm_prefix
from tests.unit.worker.kv.movers.cases import EVERY_CHECK, Case, every_case, scene
from tests.unit.worker.pools import GEOMETRY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("mover", ["per_page", "batched", "gpu_assisted"])
@pytest.mark.parametrize("check", EVERY_CHECK, ids=lambda check: check.__name__)
def test_a_mover_on_cuda(mover: str, check: Callable[[Case], None]) -> None:
    """Rows go where they belong, wrong ones nowhere, in both directions and from another pool on a GPU."""
    for geometry in every_case(mover, device="cuda"):
        with case(geometry=geometry):
            check(geometry)


def test_more_rows_than_the_staging_buffers_hold() -> None:
    """The two buffers take turns: neither is filled while its last copy is on its way."""
    with scene(Case("batched", 16, "bfloat16", "even", "cuda")) as at:
        mover = BatchedCudaMover(at.pool)
        mover.piece_pages = 2
        before = at.device()
        mover.load(at.host_memory, at.layers, at.pages, at.device_pages)
        mover.drain()

        for page, device_page in zip(at.pages, at.device_pages, strict=True):
            before[:, :, device_page] = at.host[page]
        np.testing.assert_array_equal(at.device(), before)


def test_memory_that_is_not_pinned_is_staged_or_refused() -> None:
    """A kernel would fault on it."""
    with scene(Case("gpu_assisted", 16, "bfloat16", "even", "cuda")) as at:
        unpinned = PageMemory(at.host_memory.layout, array=at.host.copy().reshape(-1))
        with pytest.raises(TransportError, match="not pinned"):
            GpuAssistedMover(at.pool).load(unpinned, at.layers, at.pages, at.device_pages)

        at.mover.load(unpinned, at.layers, at.pages, at.device_pages)
        at.mover.drain()

        np.testing.assert_array_equal(at.device()[:, :, at.device_pages[3]], at.host[at.pages[3]])


def test_a_mapped_host_pool_is_pinned_and_let_go() -> None:
    """A segment of another owner, in /dev/shm, registered by the driver and unregistered before it is unmapped."""
    host = HostPoolView.create(shm_prefix("pins"), GEOMETRY, 64)
    try:
        pins = CudaPins(torch.device("cuda"))
        pools = HostPools(GEOMETRY, pins)
        for _ in range(2):
            pools.attach("s", host.handle)
            is_done = threading.Event()
            pins.start(is_done.set)
            assert is_done.wait(60)
            memory = pools.find("s").memory()
            assert memory.is_pinned
            assert torch.from_numpy(memory.array).is_pinned()
            pools.detach("s")
    finally:
        host.close()
        unlink_all(shm_prefix("pins"))
