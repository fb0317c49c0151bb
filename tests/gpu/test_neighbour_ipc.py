"""A load from the device pool of another process, through CUDA IPC."""

from __future__ import annotations

import base64
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from services.worker.kv.device_pool import DevicePool
from services.worker.kv.loads import Loads
from services.worker.kv.movers import make_mover
from services.worker.kv.movers.protocol import MoverName
from shared.codec import decode
from shared.messages.base import pack_int32
from shared.messages.pools import KvGeometry, PoolHandle
from shared.messages.worker_plans import PageLoad

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

GEOMETRY = KvGeometry(layers=4, kv_heads=2, head_dim=64, page_size=16, dtype="bfloat16")
PAGES = 32

# The neighbour: a pool of random bytes whose seed both processes know.
NEIGHBOUR = f"""
import base64, numpy as np, torch
from services.worker.kv.device_pool import DevicePool
from shared.codec import encode
from shared.messages.pools import KvGeometry
geometry = KvGeometry(layers=4, kv_heads=2, head_dim=64, page_size=16, dtype="bfloat16")
pool = DevicePool.create(geometry, {PAGES}, device="cuda", shm_prefix="test-ipc")
content = np.random.default_rng(7).integers(0, 256, {PAGES} * geometry.page_bytes, dtype=np.uint8)
pool.tensor.view(torch.uint8).reshape(-1).copy_(torch.from_numpy(content))
torch.cuda.synchronize()
print(base64.b64encode(encode(pool.handle())).decode(), flush=True)
input()
"""


@pytest.mark.parametrize("mover", ["per_page", "batched", "gpu_assisted"])
def test_pages_of_a_neighbours_gpu_memory_arrive(mover: MoverName) -> None:
    """To the bit, layer by layer behind the gate; after the neighbour is detached its loads fail."""
    neighbour = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(NEIGHBOUR)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert neighbour.stdout is not None
    handle = decode(base64.b64decode(neighbour.stdout.readline()), PoolHandle)
    pool = DevicePool.create(GEOMETRY, 8, device="cuda", shm_prefix="test-ipc")
    moving = make_mover(pool, mover, programs=2)
    loads = Loads(GEOMETRY, 8, moving, timeout_s=30, clock_ns=lambda: 7, device_type="cuda")
    load = PageLoad(
        request_id="r", attempt=1, storage_id="", host_pages=pack_int32([31, 0, 9]), device_pages=pack_int32([5, 6, 0]),
        identities=bytes(48), neighbour_id="o", neighbour_incarnation="i",
    )  # fmt: skip
    try:
        loads.neighbours.attach("o", "i", handle)

        transfer = loads.start([load])
        for layer in range(GEOMETRY.layers):
            transfer.gate.wait(layer)
        result = transfer.finish()

        content = np.random.default_rng(7).integers(0, 256, PAGES * GEOMETRY.page_bytes, dtype=np.uint8)
        theirs = content.reshape(GEOMETRY.layers, 2, PAGES, GEOMETRY.half_bytes)
        ours = pool.tensor.view(torch.uint8).cpu().numpy().reshape(GEOMETRY.layers, 2, 8, GEOMETRY.half_bytes)
        assert result.failures == []
        np.testing.assert_array_equal(ours[:, :, [5, 6, 0]], theirs[:, :, [31, 0, 9]])
        loads.neighbours.detach("o", "i")
        assert loads.start([load]).finish().failures[0].neighbour_id == "o"
        neighbour.communicate("\n", timeout=60)
    finally:
        loads.close()
        pool.close()
        neighbour.kill()
        neighbour.wait()
