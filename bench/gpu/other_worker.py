"""Another process with a device pool of known bytes: prints its handle, then holds the pool until told to end."""

from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from services.worker.kv.device_pool import DevicePool
from shared.codec import decode, encode
from shared.messages.pools import KvGeometry, PoolHandle

SEED = 7


def content(geometry: KvGeometry, pages: int) -> npt.NDArray[np.uint8]:
    """What that process's pool holds, uint8 [layers, 2, pages, half_bytes]."""
    random = np.random.default_rng(SEED).integers(0, 256, pages * geometry.page_bytes, dtype=np.uint8)
    return random.reshape(geometry.layers, 2, pages, geometry.half_bytes)


@contextmanager
def other_worker(geometry: KvGeometry, pages: int, prefix: str, device: torch.device) -> Iterator[PoolHandle]:
    """Start one; the handle of its pool. It ends with the context."""
    shape = msgspec.json.encode(geometry).decode()
    command = [sys.executable, "-m", "bench.gpu.other_worker", shape, str(pages), prefix, device.type]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield decode(base64.b64decode(process.stdout.readline()), PoolHandle)
        process.communicate("\n", timeout=60)
    finally:
        process.kill()
        process.wait()


def main() -> None:
    shape, pages, prefix, device = sys.argv[1:]
    geometry = msgspec.json.decode(shape, type=KvGeometry)
    pool = DevicePool.create(geometry, int(pages), device=device, shm_prefix=prefix)
    pool.tensor.view(torch.uint8).reshape(-1).copy_(torch.from_numpy(content(geometry, int(pages)).reshape(-1)))
    if device == "cuda":
        torch.cuda.synchronize()
    print(base64.b64encode(encode(pool.handle())).decode(), flush=True)
    sys.stdin.readline()
    pool.close()


if __name__ == "__main__":
    main()
