"""What every mover must do, as functions that raise AssertionError: the same on CPU, interpreted, and on a GPU.

The oracle is a loop over pages, layers and halves on arrays of the documented shapes.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from services.worker.kv.device_pool import DevicePool
from services.worker.kv.movers import make_mover
from services.worker.kv.movers.batched import BatchedMover
from services.worker.kv.movers.gpu_assisted import GpuAssistedMover
from services.worker.kv.movers.protocol import Known, PageMover
from services.worker.kv.page_memory import PageLayout, PageMemory
from services.worker.kv.pinning import cuda_pins
from services.worker.kv.row_checks import RowChecks
from shared.memory import unlink_all
from shared.messages.pools import KvGeometry
from tests.run_name import RUN

PAGE_SIZES = (1, 16, 32, 64)
DTYPES = ("float32", "bfloat16")
SHAPES = {"even": (3, 2, 64), "odd": (2, 3, 5), "single": (1, 1, 3)}  # layers, kv_heads, head_dim
HOST_PAGES, DEVICE_PAGES, MOVED = 11, 13, 9


@dataclass(frozen=True)
class Case:
    """One mover, geometry and device. ``mover`` is a setting's name, or ``numpy``: batched without C code."""

    mover: str
    page_size: int
    dtype: str
    shape: str
    device: str = "cpu"

    @property
    def geometry(self) -> KvGeometry:
        layers, kv_heads, head_dim = SHAPES[self.shape]
        return KvGeometry(
            layers=layers, kv_heads=kv_heads, head_dim=head_dim, page_size=self.page_size, dtype=self.dtype
        )

    def __str__(self) -> str:
        return f"{self.mover}-{self.page_size}-{self.dtype}-{self.shape}"


def every_case(*movers: str, device: str = "cpu") -> list[Case]:
    return [Case(*fields, device=device) for fields in itertools.product(movers, PAGE_SIZES, DTYPES, SHAPES)]


class Scene:
    """Random pages on both sides, a mover, and a random permutation of pages to move."""

    def __init__(self, case: Case, prefix: str) -> None:
        self.geometry = case.geometry
        self.random = np.random.default_rng(7)
        layers, half = self.geometry.layers, self.geometry.half_bytes
        self.host = self.random.integers(0, 256, (HOST_PAGES, layers, 2, half), dtype=np.uint8)
        self.pool = DevicePool.create(self.geometry, DEVICE_PAGES, device=case.device, shm_prefix=prefix)
        content = self.random.integers(0, 256, (layers, 2, DEVICE_PAGES, half), dtype=np.uint8)
        self._bytes().copy_(torch.from_numpy(content.reshape(-1)))
        self.mover = _make(case, self.pool)
        self.layers = range(layers)
        self.pages = self.random.permutation(HOST_PAGES)[:MOVED].astype(np.int32)
        self.device_pages = self.random.permutation(DEVICE_PAGES)[:MOVED].astype(np.int32)
        self._pins = cuda_pins(self.pool.device)
        if self._pins is not None:
            self._pins.pin(self.host.reshape(-1))

    @property
    def host_memory(self) -> PageMemory:
        layout = PageLayout.page_first(self.geometry, HOST_PAGES)
        return PageMemory(layout, array=self.host.reshape(-1), is_pinned=self._pins is not None)

    def device(self) -> np.ndarray:
        """The device pool now, uint8 [layers, 2, pages, half_bytes]."""
        shape = (self.geometry.layers, 2, DEVICE_PAGES, self.geometry.half_bytes)
        return self._bytes().cpu().numpy().copy().reshape(shape)

    def checks(self, layers: range) -> RowChecks:
        """Right checksums for the pages that are moved, by another way than the mover's."""
        identities = self.random.integers(0, 256, (MOVED, 16), dtype=np.uint8)
        expected = np.empty((MOVED, len(layers)), dtype=np.uint64)
        for index, page in enumerate(self.pages):
            seed = int.from_bytes(identities[index, :8].tobytes(), "little")
            for at, layer in enumerate(layers):
                expected[index, at] = xxhash.xxh3_64_intdigest(self.host[page, layer].tobytes(), seed=seed)
        return RowChecks(expected, identities, np.ones(MOVED, dtype=bool))

    def close(self) -> None:
        self.mover.drain()
        if self._pins is not None:
            self._pins.unpin(self.host.reshape(-1))
        self.pool.close()

    def _bytes(self) -> torch.Tensor:
        return self.pool.tensor.view(torch.uint8).reshape(-1)


@contextmanager
def scene(case: Case) -> Iterator[Scene]:
    prefix = f"{RUN}-{secrets.token_hex(4)}"
    made = Scene(case, prefix)
    try:
        yield made
    finally:
        made.close()
        unlink_all(prefix)


def loads_a_permutation(case: Case) -> None:
    """Every layer alone, then all in one call: the named pages hold the host's bytes, others are untouched."""
    with scene(case) as at:
        before = at.device()
        for calls in ([range(layer, layer + 1) for layer in at.layers], [at.layers]):
            at._bytes().copy_(torch.from_numpy(before.reshape(-1)))
            for layers in calls:
                verdict = at.mover.load(at.host_memory, layers, at.pages, at.device_pages)
                assert not verdict.wrong().any()
            _settle(at.mover)
            np.testing.assert_array_equal(at.device(), _oracle_load(at, before, at.layers))
        part = at.layers[-1:]
        at._bytes().copy_(torch.from_numpy(before.reshape(-1)))
        at.mover.load(at.host_memory, part, at.pages[:1], at.device_pages[:1])
        at.mover.load(at.host_memory, at.layers, at.pages[:0], at.device_pages[:0])
        _settle(at.mover)
        changed = (at.device() != before).any(axis=(1, 3))
        assert not changed[: part.start].any()
        assert set(np.flatnonzero(changed[part.start])) <= {int(at.device_pages[0])}


def checks_what_it_loads(case: Case) -> None:
    """Right checksums pass; a wrong one is found, and those that nobody asked about are not looked at. A mover that
    checks before it copies does not write the wrong row.
    """
    with scene(case) as at:
        before = at.device()
        checks = at.checks(at.layers)
        assert not at.mover.load(at.host_memory, at.layers, at.pages, at.device_pages, checks).wrong().any()
        _settle(at.mover)
        np.testing.assert_array_equal(at.device(), _oracle_load(at, before, at.layers))

        at._bytes().copy_(torch.from_numpy(before.reshape(-1)))
        last = at.layers[-1:]
        for index in (0, 4):
            at.host[at.pages[index], last.start, 1, -1] ^= 1
        wanted = np.ones(MOVED, dtype=bool)
        wanted[4] = False
        one_layer = RowChecks(checks.expected[:, last.start :], checks.identities, wanted)
        verdict = at.mover.load(at.host_memory, last, at.pages, at.device_pages, one_layer)
        _settle(at.mover)

        assert np.flatnonzero(verdict.wrong()).tolist() == [0]
        expected = _oracle_load(at, before, last)
        if isinstance(verdict, Known):
            expected[:, :, at.device_pages[0]] = before[:, :, at.device_pages[0]]
        np.testing.assert_array_equal(at.device(), expected)


def stores_a_permutation(case: Case) -> None:
    """The reverse: device pages arrive in host pages, other host pages are untouched."""
    with scene(case) as at:
        expected, device = at.host.copy(), at.device()
        for device_page, page in zip(at.device_pages, at.pages, strict=True):
            for layer in at.layers:
                for half in (0, 1):
                    expected[page, layer, half] = device[layer, half, device_page]

        for layer in at.layers:
            at.mover.store(at.host_memory, range(layer, layer + 1), at.device_pages, at.pages)

        np.testing.assert_array_equal(at.host, expected)
        np.testing.assert_array_equal(at.device(), device)


def loads_from_a_device(case: Case) -> None:
    """Pages of another device pool, layer-first like ours, arrive to the bit."""
    with scene(case) as at, scene(case) as neighbour:
        before, source = at.device(), neighbour.device()
        source[:] = np.random.default_rng(8).integers(0, 256, source.shape, dtype=np.uint8)
        neighbour._bytes().copy_(torch.from_numpy(source.reshape(-1)))
        if at.pool.device.type == "cuda":
            torch.cuda.synchronize()
        for layer in at.layers:
            at.mover.load(neighbour.pool.memory(), range(layer, layer + 1), at.pages, at.device_pages)
        _settle(at.mover)

        before[:, :, at.device_pages] = source[:, :, at.pages]
        np.testing.assert_array_equal(at.device(), before)


EVERY_CHECK: tuple[Any, ...] = (loads_a_permutation, checks_what_it_loads, stores_a_permutation, loads_from_a_device)


def _oracle_load(at: Scene, before: np.ndarray, layers: range) -> np.ndarray:
    after = before.copy()
    for page, device_page in zip(at.pages, at.device_pages, strict=True):
        for layer in layers:
            for half in (0, 1):
                after[layer, half, device_page] = at.host[page, layer, half]
    return after


def _settle(mover: PageMover) -> None:
    fence = mover.fence()
    if fence is not None:
        fence.synchronize()


def _make(case: Case, pool: DevicePool) -> PageMover:
    if case.mover == "numpy":
        return BatchedMover(pool, native=False)
    if case.mover == "gpu_assisted" and case.device == "cpu":
        return GpuAssistedMover(pool, programs=3)  # Under the interpreter.
    return make_mover(pool, case.mover, programs=2)  # type: ignore[arg-type]
