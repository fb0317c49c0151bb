"""A host pool and a device pool of one small geometry, with pages whose bytes follow from their identity."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from services.worker.kv.device_pool import DevicePool
from shared.memory import HostPoolView
from shared.messages.base import pack_int32
from shared.messages.pools import KvGeometry
from shared.messages.worker_plans import PageLoad, PromotePages
from tests.run_name import shm_prefix

GEOMETRY = KvGeometry(layers=3, kv_heads=2, head_dim=4, page_size=4, dtype="float32")
SHM_PREFIX = shm_prefix("pools")


def identity_of(label: str) -> bytes:
    return hashlib.blake2b(label.encode(), digest_size=16).digest()


def fill_page(host: HostPoolView, page: int, label: str) -> None:
    """Write and seal the page of this label, as the storage does after a backup."""
    seed = int.from_bytes(identity_of(label)[:4], "little")
    content = np.random.default_rng(seed).integers(0, 256, host.pages[page].shape, dtype=np.uint8)
    host.pages[page] = content
    host.seal_page(page, identity_of(label))


def page_load(
    host: Sequence[int], device: Sequence[int], labels: Sequence[str], *, request_id: str = "r", storage_id: str = "s"
) -> PageLoad:
    return PageLoad(
        request_id=request_id,
        attempt=1,
        storage_id=storage_id,
        host_pages=pack_int32(host),
        device_pages=pack_int32(device),
        identities=b"".join(identity_of(label) for label in labels),
    )


def page_promotion(
    host: Sequence[int],
    device: Sequence[int],
    labels: Sequence[str],
    *,
    promotion_id: int = 1,
    storage_id: str = "s",
) -> PromotePages:
    return PromotePages(
        promotion_id=promotion_id,
        storage_id=storage_id,
        host_pages=pack_int32(host),
        device_pages=pack_int32(device),
        identities=b"".join(identity_of(label) for label in labels),
    )


def device_page(device: DevicePool, page: int) -> np.ndarray:
    """A device page in page-first layout, uint8 [layers, 2 * half_bytes], as a host page has it."""
    halves = device.bytes_view()
    return np.concatenate((halves[:, 0, page], halves[:, 1, page]), axis=1)
