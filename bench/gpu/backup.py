"""Device to host: a worker's pages into the host pool, by the storage through CUDA IPC, and by the worker's own movers.

The storage copies runs of consecutive pages with its low-priority stream (``services/storage/gpu_bridge.py``). A worker
that its storage asks copies pages in any order, with one block of its kernel, in large parts (``kv/host_stores.py``).
First the bytes are compared, then bandwidth is measured by run length and page size, beside one copy of the same bytes
in one piece.

``python -m bench.gpu.backup [--quick] [--rounds 9]``
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch

from bench.gpu import reading
from bench.gpu.other_worker import content, other_worker
from services.storage.gpu_bridge import CudaDevicePool
from services.worker.kv.measured_loads import LoadScene, load_scene, medians
from services.worker.kv.movers import make_mover
from shared.memory import DevicePoolView, HostPoolView
from shared.messages.pools import KvGeometry

RUNS = (1, 4, 16, 64)
"""Pages of one run."""

PAGE_SIZES = (16, 1, 64)


def by_storage(geometry: KvGeometry, tokens: int, rounds: int, device: torch.device) -> dict[str, float]:
    """GB/s by pages of a run."""
    count = tokens // geometry.page_size
    host = HostPoolView.create(reading.PREFIX, geometry, count)
    host.unlink()
    try:
        with other_worker(geometry, count, reading.PREFIX, device) as handle:
            source = CudaDevicePool.attach(handle) if device.type == "cuda" else DevicePoolView.attach(handle)

            def copy(run: int) -> None:
                # Runs change places, so that each is one piece on both sides and no two follow one another.
                starts = list(range(0, count - run + 1, run))
                for start, target in zip(starts, reversed(starts), strict=True):
                    source.copy_run((start, target, run), host.pages)

            expected = content(geometry, count)
            found = {}
            for run in (each for each in RUNS if each <= count):
                copy(run)
                start = (count // run - 1) * run
                for page in range(run):
                    layers = host.pages[start + page].reshape(geometry.layers, 2, geometry.half_bytes)
                    if not np.array_equal(layers, expected[:, :, page]):
                        raise SystemExit(f"a run of {run} pages arrived wrong")
                nbytes = count // run * run * geometry.page_bytes
                found[str(run)] = nbytes / medians({"copy": partial(copy, run)}, rounds)["copy"] / 1e9
            source.close()
            return found
    finally:
        host.close()


def by_movers(scene: LoadScene, rounds: int) -> dict[str, float]:
    """GB/s of each mover's ``store``, and of one copy in one piece."""
    host = scene.host.memory()
    assert host.array is not None
    tensor, array = scene.device.tensor.view(torch.uint8).reshape(-1), torch.from_numpy(host.array)
    layers = range(scene.device.geometry.layers)
    has_gpu = scene.device.device.type == "cuda"

    def plain() -> None:
        array.copy_(tensor, non_blocking=True)
        if has_gpu:
            torch.cuda.synchronize()

    works: dict[str, Callable[[], object]] = {"one_piece": plain}
    for name in ("batched", "gpu_assisted") if has_gpu else ("batched",):
        mover = make_mover(scene.device, name, programs=2)
        before = host.array.copy()
        scene.load(mover, verified=False)
        host.array[...] = 0
        mover.store(host, layers, scene.device_pages, scene.pages)
        if not np.array_equal(host.array, before):
            raise SystemExit(f"{name} does not bring back what it has taken")
        works[name] = partial(mover.store, host, layers, scene.device_pages, scene.pages)
    return {name: scene.nbytes / spent / 1e9 for name, spent in medians(works, rounds).items()}


def headline(results: dict[str, Any]) -> reading.Headline:
    """The longest runs of the storage, and the fastest mover, of each page size."""
    lines: list[tuple[str, float | None, str]] = []
    for page_size, found in results.items():
        run, speed = max(found["storage_gb_s"].items(), key=lambda each: int(each[0]))
        lines.append((f"pages of {page_size}: storage, runs of {run}", speed, "GB/s"))
        name, speed = max(found["movers_gb_s"].items(), key=lambda each: float(each[1]) * (each[0] != "one_piece"))
        lines.append((f"pages of {page_size}: {name}", speed, f"GB/s of {found['movers_gb_s']['one_piece']:.3g}"))
    return lines


def main() -> None:
    run = reading.begin("backup", __doc__)
    geometry = run.choose(reading.LLAMA_8B, reading.LLAMA_8B_SHALLOW, reading.TINY)
    tokens = run.choose(4096, 1024, 256)
    results: dict[str, Any] = {}
    found = {"tokens": tokens, "page_sizes": results}
    for page_size in run.each(run.choose(PAGE_SIZES, PAGE_SIZES, PAGE_SIZES[:1])):
        of_size = msgspec.structs.replace(geometry, page_size=page_size)
        with load_scene(of_size, tokens, device=run.device.type, shm_prefix=reading.PREFIX) as scene:
            movers = by_movers(scene, run.rounds)
        storage = by_storage(of_size, tokens, run.rounds, run.device)
        results[str(page_size)] = {"storage_gb_s": storage, "movers_gb_s": movers}
        run.keep(found)
    run.finish(found, headline(results))


if __name__ == "__main__":
    main()
