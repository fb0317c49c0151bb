"""A worker's pool in CUDA memory, backed up by another process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.storage.core.backup_check import Transfer
from services.storage.mover import copy_transfer
from services.storage.pools import open_device_pool
from shared.memory import HostPoolView, unlink_all
from tests.gpu.exporter import GEOMETRY, exported_bytes, exported_pool
from tests.run_name import shm_prefix

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_pages_of_another_processs_gpu_memory_arrive_sealed() -> None:
    """Pages copied through CUDA IPC equal the worker's, half by half, and verify."""
    host = HostPoolView.create(shm_prefix("ipc"), GEOMETRY, 16)
    device_pages = np.array([3, 4, 5, 31, 0], dtype=np.int32)
    host_pages = np.array([8, 9, 10, 0, 15], dtype=np.int32)
    identities = tuple(bytes([page + 1]) * 16 for page in host_pages.tolist())
    try:
        with exported_pool() as handle:
            source = open_device_pool(handle)

            copy_transfer(Transfer(1, "w0", "i0", device_pages, host_pages, identities), source, host)
            source.close()

        halves = exported_bytes()
        for device, target, identity in zip(device_pages.tolist(), host_pages.tolist(), identities, strict=True):
            for layer in range(GEOMETRY.layers):
                assert host.pages[target, layer].tobytes() == halves[layer, :, device].tobytes()
                host.verify_layer(target, layer, identity)
    finally:
        unlink_all(shm_prefix("ipc"))
