"""The movers on a GPU: the same suite as on CPU, with pinned memory, a stream of their own and the compiled kernel."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np
import pytest
import torch

from services.worker.kv.host_pools import HostPools
from services.worker.kv.host_stores import HostStores
from services.worker.kv.loads import Loads
from services.worker.kv.measured_loads import load_scene
from services.worker.kv.movers import make_mover
from services.worker.kv.movers.batched_cuda import BatchedCudaMover
from services.worker.kv.movers.gpu_assisted import GpuAssistedMover
from services.worker.kv.page_memory import PageMemory
from services.worker.kv.pinning import CudaPins
from services.worker.kv.row_checks import RowChecks
from services.worker.thread_device import use_device
from shared.errors import TransportError
from shared.memory import HostPoolView, unlink_all
from shared.messages.base import pack_int32
from shared.messages.page_stores import StorePages
from shared.messages.pools import KvGeometry
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


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_checksums_of_rows_on_the_device_are_xxhashs(page_size: int) -> None:
    """Pages of Llama-3.1-8B's width in more pieces than slots: every right row passes, every wrong one is found."""
    geometry = KvGeometry(layers=2, kv_heads=8, head_dim=128, page_size=page_size, dtype="bfloat16")
    with load_scene(geometry, 64 * page_size, device="cuda", shm_prefix=shm_prefix("sums")) as at:
        mover = GpuAssistedMover(at.device, programs=2)
        mover.piece_pages = 7
        at.load(mover, verified=True)
        wrong = np.random.default_rng(1).permutation(64)[:5]
        for index in wrong:
            at.host.view.pages[at.pages[index], 1, (37 * index) % geometry.unit_bytes] ^= 1
        expected = at.host.view.checksums[at.pages, 1].reshape(-1, 1)
        checks = RowChecks(expected, at.host.view.identities[at.pages], np.ones(64, dtype=bool))

        verdict = mover.load(at.host.memory(), range(1, 2), at.pages, at.device_pages, checks)

        assert sorted(np.flatnonzero(verdict.wrong())) == sorted(wrong)


def test_pages_are_stored_for_backups_beside_loads() -> None:
    """Both directions at a time, each on its own thread: the host pages hold what the device pages held."""
    geometry = KvGeometry(layers=4, kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16")
    device = torch.device("cuda", torch.cuda.current_device())
    with load_scene(geometry, 128 * 16, device="cuda", shm_prefix=shm_prefix("stores")) as at:
        loads = Loads(
            geometry, 128, make_mover(at.device, "gpu_assisted", programs=2), timeout_s=60, clock_ns=time.time_ns,
            pins=CudaPins(device), device_type="cuda", on_thread=partial(use_device, device),
            stores=HostStores(GpuAssistedMover(at.device), 128, on_thread=partial(use_device, device)),
        )  # fmt: skip
        host = HostPoolView.create(shm_prefix("stores"), geometry, 128)
        loads.attach("s", host.handle)
        numbers = pack_int32(range(64))
        call = StorePages(
            worker_incarnation="i", storage_id="s", storage_incarnation="si", pool=host.handle.name,
            device_pages=numbers, host_pages=numbers,
        )  # fmt: skip
        assert loads.stores is not None
        while (
            loads.stores.begin(loads.pools, msgspec.structs.replace(call, device_pages=b"", host_pages=b""))
            .result(60)
            .refused
        ):
            time.sleep(0.01)  # It is being pinned.
        at.load(make_mover(at.device, "gpu_assisted", programs=2), verified=False)

        answers = [loads.stores.begin(loads.pools, call) for _ in range(3)]
        at.load(loads._mover, verified=True)

        assert [answer.result(60).error or answer.result().refused for answer in answers] == ["", "", ""]
        where = {int(device_page): int(page) for page, device_page in zip(at.pages, at.device_pages, strict=True)}
        for page in range(64):
            np.testing.assert_array_equal(host.pages[page], at.host.view.pages[where[page]])
        loads.close()
        host.unlink()
        host.close()


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
