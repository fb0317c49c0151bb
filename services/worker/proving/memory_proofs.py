"""Proofs of movers, and of host memory that is registered with the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import msgspec
import numpy as np
import torch
import xxhash

from services.worker.kv.device_pool import DevicePool
from services.worker.kv.movers import make_mover
from services.worker.kv.movers.protocol import MoverName, PageMover
from services.worker.kv.page_memory import PageLayout, PageMemory
from services.worker.kv.row_checks import RowChecks
from services.worker.proving.cases import is_timed, speed_of
from services.worker.proving.part import WrongResult
from services.worker.proving.table import ServedShape, Speed
from shared.memory import reap
from shared.memory.cuda_runtime import loaded_runtime
from shared.memory.pinned import PinnedMemory
from shared.memory.segment import SharedSegment

PREFIX = "thermocline-proof"

PROVEN_LAYERS = 3
PAGES, MOVED = 13, 9
SPEED_BYTES = 16 * 2**20
PROGRAMS = 2


def prove_mover(
    name: MoverName, shape: ServedShape, make: Callable[[DevicePool], PageMover] | None = None
) -> Speed | None:
    """Prove that pages arrive to the bit and in place, and come back, and that a row with another checksum is found.

    The speed is that of unverified loads from the kind of memory that this mover uses.
    """
    make = make or partial(make_mover, name=name, programs=PROGRAMS)
    geometry = msgspec.structs.replace(shape.geometry, layers=min(PROVEN_LAYERS, shape.geometry.layers))
    is_pinned = name == "gpu_assisted" and torch.device(shape.device).type == "cuda"
    shape = msgspec.structs.replace(shape, geometry=geometry)
    _prove_bytes(shape, make, is_pinned=is_pinned)
    if not is_timed(shape.device):
        return None
    pages = max(1, SPEED_BYTES // geometry.page_bytes)
    with _pools(shape, pages, is_pinned=is_pinned) as (host, pool):
        mover, numbers = make(pool), np.random.default_rng(5).permutation(pages).astype(np.int32)

        def load() -> None:
            for layer in range(geometry.layers):
                for start in range(0, pages, mover.piece_pages):
                    piece = numbers[start : start + mover.piece_pages]
                    mover.load(host, range(layer, layer + 1), piece, piece)
            mover.drain()

        return speed_of(load, pages * geometry.page_bytes, shape.device, rounds=3)


def _prove_bytes(shape: ServedShape, make: Callable[[DevicePool], PageMover], *, is_pinned: bool) -> None:
    geometry, random = shape.geometry, np.random.default_rng(7)
    layers = range(geometry.layers)
    with _pools(shape, PAGES, is_pinned=is_pinned) as (host, pool):
        rows = host.host_rows()
        rows[...] = random.integers(0, 256, rows.shape, dtype=np.uint8)
        mover = make(pool)
        pages, device_pages = (random.permutation(PAGES)[:MOVED].astype(np.int32) for _ in range(2))
        # The checksums are computed here, by the definition of PoolHandle; one page's is that of other bytes.
        checks = _checks(rows, pages, random)
        checks.expected[2, -1] ^= np.uint64(1)
        verdict = mover.load(host, layers, pages, device_pages, checks)
        fence = mover.fence()
        if fence is not None:
            fence.synchronize()
        wrong = verdict.wrong()
        if np.flatnonzero(wrong).tolist() != [2]:
            raise WrongResult(f"of {MOVED} loaded pages, {np.flatnonzero(wrong).tolist()} fail their checks, not [2]")
        good = np.delete(np.arange(MOVED), 2)
        arrived = _halves(pool)[:, :, device_pages[good]].transpose(2, 0, 1, 3)
        if not np.array_equal(arrived, rows[pages[good]]):
            raise WrongResult("loaded pages differ from those of host memory")
        before = rows.copy()
        back = np.setdiff1d(np.arange(PAGES), pages)[: len(good)].astype(np.int32)
        mover.store(host, layers, device_pages[good][: len(back)], back)
        mover.drain()
        if not np.array_equal(rows[back], before[pages[good][: len(back)]]):
            raise WrongResult("stored pages differ from those on the device")
        rows[back] = before[back]
        if not np.array_equal(rows, before):
            raise WrongResult("storing has changed other pages")


def _checks(rows: np.ndarray, pages: np.ndarray, random: np.random.Generator) -> RowChecks:
    identities = random.integers(0, 256, (len(pages), 16), dtype=np.uint8)
    expected = np.empty((len(pages), rows.shape[1]), dtype=np.uint64)
    for at, page in enumerate(pages.tolist()):
        seed = int.from_bytes(identities[at, :8].tobytes(), "little")
        for layer in range(rows.shape[1]):
            expected[at, layer] = xxhash.xxh3_64_intdigest(rows[page, layer].tobytes(), seed=seed)
    return RowChecks(expected, identities, np.ones(len(pages), dtype=bool))


def _halves(pool: DevicePool) -> np.ndarray:
    """Return the bytes of the pool, uint8 [layers, 2, pages, half_bytes]."""
    shape = (pool.geometry.layers, 2, pool.pages, pool.geometry.half_bytes)
    return pool.tensor.contiguous().view(torch.uint8).cpu().numpy().reshape(shape)


@contextmanager
def _pools(shape: ServedShape, pages: int, *, is_pinned: bool) -> Iterator[tuple[PageMemory, DevicePool]]:
    """Yield memory of host pages in a shared segment, as storages have it, and a device pool, of as many pages."""
    reap(PREFIX)  # Left by processes that were killed.
    nbytes = pages * shape.geometry.page_bytes
    segment = SharedSegment.create(PREFIX, "host", nbytes)
    array, pins = segment.array[:nbytes], PinnedMemory(loaded_runtime)
    try:
        if is_pinned:
            pins.register(array)
        pool = DevicePool.create(shape.geometry, pages, device=shape.device, shm_prefix=PREFIX)
        try:
            if pool.device.type == "cuda":
                torch.cuda.synchronize()  # It is zeroed on another stream than movers copy on.
            layout = PageLayout.page_first(shape.geometry, pages)
            yield PageMemory(layout, array=array, is_pinned=is_pinned), pool
        finally:
            pool.close()
            if is_pinned:
                pins.unregister(array)
    finally:
        segment.unlink()
        segment.close()


def prove_registration(shape: ServedShape) -> Speed | None:
    """Prove that shared host memory can be registered, read and written by the device, and unregistered."""
    reap(PREFIX)
    segment = SharedSegment.create(PREFIX, "host", SPEED_BYTES)
    pins, array = PinnedMemory(loaded_runtime), segment.array[:SPEED_BYTES]
    try:
        array[...] = np.random.default_rng(3).integers(0, 256, SPEED_BYTES, dtype=np.uint8)
        pins.register(array)
        try:
            host = torch.from_numpy(array)
            on_device = torch.zeros(SPEED_BYTES, dtype=torch.uint8, device=shape.device)
            on_device.copy_(host, non_blocking=True)
            speed = speed_of(lambda: on_device.copy_(host, non_blocking=True), SPEED_BYTES, shape.device, rounds=3)
            if not np.array_equal(on_device.cpu().numpy(), array):
                raise WrongResult("the device has read other bytes from registered memory")
            host.copy_(on_device.flip(0), non_blocking=True)
            torch.cuda.synchronize()
            if not np.array_equal(on_device.cpu().numpy()[::-1], array):
                raise WrongResult("the device has written other bytes to registered memory")
        finally:
            pins.unregister(array)
    finally:
        segment.unlink()
        segment.close()
    return speed
