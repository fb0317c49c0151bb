"""The device pool: one allocation, seen as tensors here and as bytes by others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from services.worker.kv.device_pool import TORCH_DTYPES, DevicePool
from shared.errors import ConfigError, InvariantViolated
from shared.memory.device_pool_view import DevicePoolView
from shared.messages.pools import KvGeometry
from tests.run_name import shm_prefix

PREFIX = shm_prefix("pool")


def geometry(dtype: str = "float32") -> KvGeometry:
    return KvGeometry(layers=3, kv_heads=2, head_dim=4, page_size=16, dtype=dtype)


@pytest.fixture
def pool() -> Iterator[DevicePool]:
    made = DevicePool.create(geometry(), 5, device="cpu", shm_prefix=PREFIX)
    yield made
    made.close()


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_halves_have_the_documented_shape_and_start_at_zero(dtype: str) -> None:
    """K and V of a layer are [pages, page_size, kv_heads, head_dim] of the geometry's dtype, all zero."""
    pool = DevicePool.create(geometry(dtype), 5, device="cpu", shm_prefix=PREFIX)
    try:
        for layer in range(3):
            for half in (pool.k(layer), pool.v(layer)):
                assert half.shape == (5, 16, 2, 4)
                assert half.dtype == TORCH_DTYPES[dtype]
                assert not half.any()
    finally:
        pool.close()


def test_bytes_view_is_the_same_memory_in_the_documented_layout(pool: DevicePool) -> None:
    """bytes_view()[layer, 0 or 1, page] are the bytes of that page's K or V."""
    for layer in range(3):
        pool.k(layer).copy_(torch.arange(5 * 16 * 8).view(5, 16, 2, 4) + layer)
        pool.v(layer).fill_(-layer)
    view = pool.bytes_view()

    assert view.shape == (3, 2, 5, pool.geometry.half_bytes)
    assert view[2, 0, 4].view(np.float32).tolist() == pool.k(2)[4].flatten().tolist()
    view[1, 1, 3] = np.full(pool.geometry.half_bytes // 4, 7.0, np.float32).view(np.uint8)
    assert (pool.v(1)[3] == 7).all()
    assert (pool.v(1)[2] == -1).all()


def test_another_process_maps_the_pool_by_its_handle(pool: DevicePool) -> None:
    """The handle describes the pool completely, and what is written through one mapping is read by the other."""
    handle = pool.handle()
    view = DevicePoolView.attach(handle)
    pool.v(2)[1].fill_(3.5)

    assert (handle.kind, handle.layout, handle.pages, handle.geometry) == ("shm", "layer_first", 5, geometry())
    assert handle.nbytes == 5 * geometry().page_bytes
    assert (view.halves[2, 1, 1].view(np.float32) == 3.5).all()
    view.close()


def test_close_removes_the_segment_and_is_idempotent() -> None:
    """After close nothing is left in /dev/shm and the pool refuses use; a view held elsewhere stays readable."""
    pool = DevicePool.create(geometry(), 5, device="cpu", shm_prefix=PREFIX)
    name, held = pool.handle().name, pool.k(0)
    assert (Path("/dev/shm") / name).exists()

    pool.close()
    pool.close()

    assert not (Path("/dev/shm") / name).exists()
    assert not held.any()
    for use in (pool.handle, pool.bytes_view, lambda: pool.tensor):
        with pytest.raises(InvariantViolated):
            use()


@pytest.mark.parametrize("pages", [0, 10**12])
def test_a_pool_that_cannot_be_is_refused(pages: int) -> None:
    """No page, or more memory than the machine has, is a configuration error."""
    with pytest.raises(ConfigError):
        DevicePool.create(geometry(), pages, device="cpu", shm_prefix=PREFIX)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_cuda_pool_is_exported_by_ipc() -> None:
    """On a GPU the pool is one CUDA allocation whose handle carries an IPC export."""
    pool = DevicePool.create(geometry("bfloat16"), 5, device="cuda", shm_prefix=PREFIX)
    handle = pool.handle()

    assert pool.k(2).is_cuda
    assert (handle.kind, handle.name) == ("cuda_ipc", "")
    assert len(handle.ipc) > 0
    with pytest.raises(InvariantViolated):
        pool.bytes_view()
    pool.close()
