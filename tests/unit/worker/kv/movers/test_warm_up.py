"""No kernel of a mover is compiled while a load waits: the warm-up has asked for every variant that a call can ask for.

Triton's own binder says which variant a launch is (see ``kernels/test_variants.py``); nothing is launched here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from services.worker.kernels.page_gather import copy_pages_kernel
from services.worker.kernels.row_checksums import block_sums_kernel, join_sums_kernel
from services.worker.kv.device_pool import DevicePool
from services.worker.kv.movers.device_checks import DeviceChecks
from services.worker.kv.movers.gpu_assisted import GpuAssistedMover
from services.worker.kv.page_memory import PageLayout, PageMemory
from services.worker.kv.row_checks import RowChecks
from shared.messages.pools import KvGeometry
from tests.run_name import shm_prefix

KERNELS = (copy_pages_kernel, block_sums_kernel, join_sums_kernel)
PAGES = 70


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """Variants that are launched from now on."""
    found: set[tuple[str, str]] = set()
    backend = make_backend(GPUTarget("cuda", 90, 32))
    for kernel in KERNELS:
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)

        def run(*args: Any, grid: Any, warmup: bool, kernel: Any = kernel, binder: Any = binder, **kwargs: Any) -> None:
            bound, specialization, options = binder(*args, **kwargs)
            constants = {param.name: bound[param.name] for param in kernel.params if param.is_constexpr}
            found.add((kernel.__name__, f"{specialization} {constants} {options}"))

        monkeypatch.setattr(kernel, "run", run)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    agree = DeviceChecks.agree_with_xxhash
    monkeypatch.setattr(DeviceChecks, "agree_with_xxhash", lambda checks: agree(checks) or True)  # Nothing is computed.
    return found


@pytest.fixture(params=[(1, 8), (16, 8), (1, 1)], ids=["pages of a token", "pages of sixteen", "a narrow model"])
def pool(request: pytest.FixtureRequest) -> Iterator[DevicePool]:
    page_size, kv_heads = request.param
    geometry = KvGeometry(layers=4, kv_heads=kv_heads, head_dim=128, page_size=page_size, dtype="bfloat16")
    made = DevicePool.create(geometry, PAGES, device="cpu", shm_prefix=shm_prefix("warm"))
    yield made
    made.close()


def test_loads_and_stores_of_all_shapes_ask_for_nothing_new(pool: DevicePool, seen: set[tuple[str, str]]) -> None:
    """Any number of pages, in any layer, checked or not, whole or in part, there and back."""
    geometry = pool.geometry
    host = PageMemory(
        PageLayout.page_first(geometry, PAGES), array=np.zeros(PAGES * geometry.page_bytes, np.uint8), is_pinned=True
    )
    mover = GpuAssistedMover(pool, programs=2)
    mover._warm_up(PageLayout.page_first(geometry, 1))
    warmed = set(seen)

    for count in (0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 64, PAGES):
        numbers = np.arange(count, dtype=np.int32)
        identities = np.ones((count, 16), dtype=np.uint8)
        for layers in (range(1), range(1, 2), range(2, 4), range(4)):
            expected = np.ones((count, len(layers)), dtype=np.uint64)
            for wanted in (numbers >= 0, numbers % 2 == 0, numbers == 0):
                mover.load(host, layers, numbers, numbers, RowChecks(expected, identities, wanted))
            mover.load(host, layers, numbers, numbers)
            mover.store(host, layers, numbers, numbers)

    assert sorted(name for name, _ in warmed) == [
        "block_sums_kernel", "copy_pages_kernel", "copy_pages_kernel", "join_sums_kernel",
    ]  # fmt: skip
    assert seen - warmed == set()
