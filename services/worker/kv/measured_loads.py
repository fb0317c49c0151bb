"""A synthetic host pool and device pool, and how long a mover takes to load from one into the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.worker.kv.device_pool import DevicePool
from services.worker.kv.host_pools import AttachedPool
from services.worker.kv.movers.protocol import PageMover, Verdict
from services.worker.kv.page_memory import PageNumbers
from services.worker.kv.pinning import cuda_pins
from services.worker.kv.row_checks import RowChecks
from shared.errors import ConfigError
from shared.memory import HostPoolView, reap
from shared.messages.pools import KvGeometry


@dataclass(slots=True)
class LoadScene:
    """Sealed pages in ``host``, room for them in ``device``, and a permutation of both.

    Pages are adjacent only by chance. Make it with :func:`load_scene`.
    """

    host: AttachedPool
    device: DevicePool
    pages: PageNumbers
    device_pages: PageNumbers

    @property
    def nbytes(self) -> int:
        """Bytes that one pass moves."""
        return len(self.pages) * self.device.geometry.page_bytes

    def load(self, mover: PageMover, *, verified: bool, count: int | None = None) -> None:
        """Load all layers of the first ``count`` pages, one after the other, as a batch does.

        A layer's verdicts are read when the next one has been launched.
        """
        in_order = np.argsort(self.pages[:count], kind="stable")  # In the order in which orders copy pages.
        pages, device_pages = self.pages[in_order], self.device_pages[in_order]
        identities = self.host.view.identities[pages]
        wanted = np.ones(len(pages), dtype=bool)
        earlier: list[Verdict] = []
        for layer in range(self.device.geometry.layers):
            verdicts: list[Verdict] = []
            for start in range(0, len(pages), mover.piece_pages):
                part = slice(start, start + mover.piece_pages)
                checks = None
                if verified:
                    expected = self.host.view.checksums[pages[part], layer].reshape(-1, 1)
                    checks = RowChecks(expected, identities[part], wanted[part])
                layers = range(layer, layer + 1)
                verdicts.append(mover.load(self.host.memory(), layers, pages[part], device_pages[part], checks))
            assert not any(verdict.wrong().any() for verdict in earlier)
            earlier = verdicts
        assert not any(verdict.wrong().any() for verdict in earlier)
        mover.drain()


@contextmanager
def load_scene(geometry: KvGeometry, tokens: int, *, device: str, shm_prefix: str) -> Iterator[LoadScene]:
    """Open pools of just ``tokens`` tokens. Raises ConfigError when there is no room for them."""
    reap(shm_prefix)  # Remove segments of a measurement that was killed.
    random = np.random.default_rng(0)
    count = tokens // geometry.page_size
    if count < 1:
        raise ConfigError(f"{tokens} tokens do not fill a page of {geometry.page_size}")
    view = HostPoolView.create(shm_prefix, geometry, count)
    try:
        pool = DevicePool.create(geometry, count, device=device, shm_prefix=shm_prefix)
        try:
            flat = view.flat_pages()
            flat[...] = random.integers(0, 256, flat.shape, dtype=np.uint8)
            for page in range(count):
                view.seal_page(page, random.bytes(16))
            pins = cuda_pins(pool.device)
            if pins is not None:
                pins.pin(flat)
            numbers = [random.permutation(count).astype(np.int32) for _ in range(2)]
            try:
                yield LoadScene(AttachedPool(view, is_pinned=pins is not None), pool, *numbers)
            finally:
                if pins is not None:
                    pins.unpin(flat)
        finally:
            pool.close()
    finally:
        view.unlink()
        view.close()


def seconds(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return how long one call takes, by this clock."""
    started = clock()
    work()
    return clock() - started


def medians(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each work.

    Rounds alternate between them, after one that is not counted, because other work on the machine changes the result
    of a single round.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    for round_number in range(rounds + 1):
        for name, work in works.items():
            spent = seconds(work)
            if round_number:
                times[name].append(spent)
    return {name: float(np.median(each)) for name, each in times.items()}


def plain_copy(scene: LoadScene) -> Callable[[], object]:
    """Return a copy of the same bytes between the same pools in one piece: memcpy on a CPU, one DMA to a GPU."""
    source = scene.host.view.flat_pages()[: scene.nbytes]
    memory = scene.device.memory()
    if memory.array is not None:
        target: npt.NDArray[np.uint8] = memory.array[: scene.nbytes]
        return lambda: np.copyto(target, source)
    tensor, pinned = memory.tensor, torch.from_numpy(source)
    assert tensor is not None

    def copy() -> None:
        tensor.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize()

    return copy
