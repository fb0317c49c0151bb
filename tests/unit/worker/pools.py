"""A host pool and a device pool of one small geometry, with pages whose bytes follow from their identity."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from services.worker.kv.device_pool import DevicePool
from services.worker.kv.loads import Loads
from services.worker.kv.movers.protocol import PageMover
from shared.errors import TransportError
from shared.memory import HostPoolView
from shared.messages.base import pack_int32
from shared.messages.pools import KvGeometry
from shared.messages.worker_plans import PageLoad, PromotePages
from tests.run_name import shm_prefix

GEOMETRY = KvGeometry(layers=3, kv_heads=2, head_dim=4, page_size=4, dtype="float32")
SHM_PREFIX = shm_prefix("pools")


def identity_of(label: str) -> bytes:
    return hashlib.blake2b(label.encode(), digest_size=16).digest()


class PlayedPins:
    """Satisfies ``Pins`` and pins nothing: ``calls`` has what was asked. ``refuses`` stands for a driver without
    lockable memory; where there is a list ``waiting``, it gets what is started.
    """

    def __init__(self, *, refuses: bool = False, waiting: list[Callable[[], None]] | None = None) -> None:
        self.refuses, self.waiting = refuses, waiting
        self.calls: list[tuple[str, int]] = []

    def start(self, work: Callable[[], None]) -> None:
        if self.waiting is None:
            work()
        else:
            self.waiting.append(work)

    def finish(self) -> None:
        """Nothing is left to be done."""

    def pin(self, array: np.ndarray) -> None:
        assert array.flags.writeable
        if self.refuses:
            raise TransportError("cudaHostRegister failed")
        self.calls.append(("pin", array.nbytes))

    def unpin(self, array: np.ndarray) -> None:
        self.calls.append(("unpin", array.nbytes))


@contextmanager
def host_pool(pages: int, geometry: KvGeometry = GEOMETRY, labels: Sequence[str] = ()) -> Iterator[HostPoolView]:
    """A host pool whose first pages have these ``labels``, removed at the end of the block."""
    host = HostPoolView.create(SHM_PREFIX, geometry, pages)
    try:
        for page, label in enumerate(labels):
            fill_page(host, page, label)
        yield host
    finally:
        host.unlink()
        host.close()


def made_loads(geometry: KvGeometry, pages: int, mover: PageMover, **options: Any) -> Loads:
    """Loads whose transfers run at once, and at a time that stands still."""
    settings: dict[str, Any] = {"timeout_s": 5, "clock_ns": lambda: 7, "submit": lambda work: work(), **options}
    return Loads(geometry, pages, mover, **settings)


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


def neighbour_load(source: Sequence[int], device: Sequence[int], **fields: Any) -> PageLoad:
    """A load of pages of incarnation "inc-1" of the worker "w1"."""
    load = PageLoad(
        request_id="r",
        attempt=1,
        storage_id="",
        host_pages=pack_int32(source),
        device_pages=pack_int32(device),
        identities=bytes(16 * len(source)),
        neighbour_id="w1",
        neighbour_incarnation="inc-1",
    )
    return msgspec.structs.replace(load, **fields)


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
