"""A worker's pool in CUDA memory, backed up by another process."""

from __future__ import annotations

import base64
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from services.storage.core.backup_check import Transfer
from services.storage.mover import copy_transfer
from services.storage.pools import open_device_pool
from shared.codec import decode
from shared.memory import HostPoolView, unlink_all
from shared.messages.pools import KvGeometry, PoolHandle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

GEOMETRY = KvGeometry(layers=4, kv_heads=2, head_dim=64, page_size=16, dtype="bfloat16")
PAGES = 32

# The worker: a pool of random bytes whose seed both processes know.
WORKER = f"""
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


def test_pages_of_another_processs_gpu_memory_arrive_sealed() -> None:
    """Pages copied through CUDA IPC equal the worker's, half by half, and verify."""
    worker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert worker.stdout is not None
    handle = decode(base64.b64decode(worker.stdout.readline()), PoolHandle)
    host = HostPoolView.create("test-ipc", GEOMETRY, 16)
    device_pages = np.array([3, 4, 5, 31, 0], dtype=np.int32)
    host_pages = np.array([8, 9, 10, 0, 15], dtype=np.int32)
    identities = tuple(bytes([page + 1]) * 16 for page in host_pages.tolist())
    try:
        source = open_device_pool(handle)

        copy_transfer(Transfer(1, "w0", "i0", device_pages, host_pages, identities), source, host)
        source.close()
        worker.communicate("\n", timeout=60)

        content = np.random.default_rng(7).integers(0, 256, PAGES * GEOMETRY.page_bytes, dtype=np.uint8)
        halves = content.reshape(GEOMETRY.layers, 2, PAGES, GEOMETRY.half_bytes)
        for device, target, identity in zip(device_pages.tolist(), host_pages.tolist(), identities, strict=True):
            for layer in range(GEOMETRY.layers):
                assert host.pages[target, layer].tobytes() == halves[layer, :, device].tobytes()
                host.verify_layer(target, layer, identity)
    finally:
        worker.kill()
        worker.wait()
        unlink_all("test-ipc")
