"""A load from the device pool of another process, through CUDA IPC."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.worker.kv.device_pool import DevicePool
from services.worker.kv.loads import Loads
from services.worker.kv.movers import make_mover
from services.worker.kv.movers.protocol import MoverName
from shared.messages.base import pack_int32
from shared.messages.worker_plans import PageLoad
from tests.gpu.exporter import GEOMETRY, exported_bytes, exported_pool
from tests.run_name import shm_prefix

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("mover", ["per_page", "batched", "gpu_assisted"])
def test_pages_of_a_neighbours_gpu_memory_arrive(mover: MoverName) -> None:
    """To the bit, layer by layer behind the gate; after the neighbour is detached its loads fail."""
    with exported_pool() as handle:
        pool = DevicePool.create(GEOMETRY, 8, device="cuda", shm_prefix=shm_prefix("neighbour"))
        moving = make_mover(pool, mover, programs=2)
        loads = Loads(GEOMETRY, 8, moving, timeout_s=30, clock_ns=lambda: 7, device_type="cuda")
        load = PageLoad(
            request_id="r", attempt=1, storage_id="", host_pages=pack_int32([31, 0, 9]),
            device_pages=pack_int32([5, 6, 0]), identities=bytes(48), neighbour_id="o", neighbour_incarnation="i",
        )  # fmt: skip
        try:
            loads.neighbours.attach("o", "i", handle)

            transfer = loads.start([load])
            for layer in range(GEOMETRY.layers):
                transfer.gate.wait(layer)
            result = transfer.finish()

            ours = pool.tensor.view(torch.uint8).cpu().numpy().reshape(GEOMETRY.layers, 2, 8, GEOMETRY.half_bytes)
            assert result.failures == []
            np.testing.assert_array_equal(ours[:, :, [5, 6, 0]], exported_bytes()[:, :, [31, 0, 9]])
            loads.neighbours.detach("o", "i")
            assert loads.start([load]).finish().failures[0].neighbour_id == "o"
        finally:
            loads.close()
            pool.close()
