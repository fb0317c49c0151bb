"""Another process with a device pool in CUDA memory, exported through CUDA IPC. Its bytes follow from a seed."""

from __future__ import annotations

import base64
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from shared.codec import decode
from shared.messages.pools import KvGeometry, PoolHandle
from tests.run_name import shm_prefix

GEOMETRY = KvGeometry(layers=4, kv_heads=2, head_dim=64, page_size=16, dtype="bfloat16")
PAGES = 32

_PROGRAM = f"""
import base64, numpy as np, torch
from services.worker.kv.device_pool import DevicePool
from shared.codec import encode
from shared.messages.pools import KvGeometry
geometry = KvGeometry(layers=4, kv_heads=2, head_dim=64, page_size=16, dtype="bfloat16")
pool = DevicePool.create(geometry, {PAGES}, device="cuda", shm_prefix="{shm_prefix("exporter")}")
content = np.random.default_rng(7).integers(0, 256, {PAGES} * geometry.page_bytes, dtype=np.uint8)
pool.tensor.view(torch.uint8).reshape(-1).copy_(torch.from_numpy(content))
torch.cuda.synchronize()
print(base64.b64encode(encode(pool.handle())).decode(), flush=True)
input()
"""


@contextmanager
def exported_pool() -> Iterator[PoolHandle]:
    """The handle of the other process's pool, which lives until the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield decode(base64.b64decode(process.stdout.readline()), PoolHandle)
        process.communicate("\n", timeout=60)
    finally:
        process.kill()
        process.wait()


def exported_bytes() -> npt.NDArray[np.uint8]:
    """What the pool holds: uint8 [layers, 2, pages, half_bytes]."""
    content = np.random.default_rng(7).integers(0, 256, PAGES * GEOMETRY.page_bytes, dtype=np.uint8)
    return content.reshape(GEOMETRY.layers, 2, PAGES, GEOMETRY.half_bytes)
