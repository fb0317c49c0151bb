"""Loads from the device pool of another process (a neighbour) through CUDA IPC: right, and how fast?

Two processes on one GPU. First the bytes are compared, then bandwidth is measured by page size and mover; beside it,
one copy of the same bytes within the device in one piece.

``python -m bench.gpu.ipc [--quick] [--rounds 9]``
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch

from bench.gpu import reading
from bench.gpu.other_worker import content, other_worker
from services.worker.kv.device_pool import DevicePool
from services.worker.kv.measured_loads import medians
from services.worker.kv.movers import make_mover
from services.worker.kv.movers.protocol import PageMover
from services.worker.kv.neighbours import Neighbour, Neighbours
from shared.messages.pools import KvGeometry

PAGE_SIZES = (16, 1, 64)


def load(mover: PageMover, neighbour: Neighbour, layers: int, pages: np.ndarray, device_pages: np.ndarray) -> None:
    """All layers of these pages, as a batch loads them."""
    for layer in range(layers):
        for start in range(0, len(pages), mover.piece_pages):
            part = slice(start, start + mover.piece_pages)
            neighbour.load(mover, layer, pages[part], device_pages[part])
    mover.drain()


def measure(geometry: KvGeometry, tokens: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Attach another process's pool, compare, measure, and let go of it before that process ends."""
    count = tokens // geometry.page_size
    pool = DevicePool.create(geometry, count, device=device, shm_prefix=reading.PREFIX)
    neighbours = Neighbours(geometry, device.type)
    try:
        with other_worker(geometry, count, reading.PREFIX, device) as handle:
            began = time.perf_counter()
            neighbours.attach("other", "i", handle)
            attach_ms = (time.perf_counter() - began) * 1e3
            try:
                return {"attach_ms": attach_ms, **_bandwidth(pool, neighbours.find("other", "i"), rounds)}
            finally:
                neighbours.close()
    finally:
        pool.close()


def _bandwidth(pool: DevicePool, neighbour: Neighbour, rounds: int) -> dict[str, float]:
    """GB/s of each mover, and of one copy in one piece."""
    geometry, count = pool.geometry, pool.pages
    random = np.random.default_rng(0)
    pages, device_pages = (random.permutation(count).astype(np.int32) for _ in range(2))
    memory = neighbour.memory
    assert memory is not None
    ours, theirs = pool.tensor.view(torch.uint8).reshape(-1), memory.tensor
    if theirs is None:  # In shared memory, which may only be read.
        assert memory.array is not None
        theirs = torch.from_numpy(memory.array.copy())

    def plain() -> None:
        ours.copy_(theirs)
        _synchronize(pool)

    found = {"one_piece_gb_s": ours.numel() / medians({"plain": plain}, rounds)["plain"] / 1e9}
    expected = content(geometry, count)[:, :, pages]
    for name in ("per_page", "batched", "gpu_assisted") if pool.device.type == "cuda" else ("per_page", "batched"):
        mover = make_mover(pool, name, programs=2)
        some = len(pages) if name != "per_page" else max(1, len(pages) // 16)
        ours.zero_()
        _synchronize(pool)
        load(mover, neighbour, geometry.layers, pages, device_pages)
        now = ours.cpu().numpy().reshape(geometry.layers, 2, count, geometry.half_bytes)
        if not np.array_equal(now[:, :, device_pages], expected):
            raise SystemExit(f"{name} brought wrong bytes at page size {geometry.page_size}")
        work = partial(load, mover, neighbour, geometry.layers, pages[:some], device_pages[:some])
        found[f"{name}_gb_s"] = some * geometry.page_bytes / medians({"load": work}, rounds)["load"] / 1e9
    return found


def _synchronize(pool: DevicePool) -> None:
    if pool.device.type == "cuda":
        torch.cuda.synchronize()


def headline(results: dict[str, Any]) -> reading.Headline:
    """The fastest mover of each page size."""
    lines: list[tuple[str, float | None, str]] = []
    for page_size, found in results.items():
        speeds = {name: speed for name, speed in found.items() if name.endswith("_gb_s") and not name.startswith("one")}
        name = max(speeds, key=lambda each: speeds[each])
        peak = f"GB/s of {found['one_piece_gb_s']:.3g}"
        lines.append((f"pages of {page_size}: {name.removesuffix('_gb_s')}", speeds[name], peak))
    return lines


def main() -> None:
    run = reading.begin("ipc", __doc__)
    geometry = run.choose(reading.LLAMA_8B, reading.LLAMA_8B_SHALLOW, reading.TINY)
    tokens = run.choose(8192, 1024, 256)
    results: dict[str, Any] = {}
    found = {"tokens": tokens, "page_sizes": results}
    for page_size in run.each(run.choose(PAGE_SIZES, PAGE_SIZES, PAGE_SIZES[:1])):
        of_size = msgspec.structs.replace(geometry, page_size=page_size)
        results[str(page_size)] = measure(of_size, tokens, run.rounds, run.device)
        run.keep(found)
    run.finish(found, headline(results))


if __name__ == "__main__":
    main()
