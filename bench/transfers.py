"""How fast pages move: between tiers in memory, from disk by layout, and beside computation.

``movers``: 4,096 tokens of KV of the 88M model, in random order, from the page-first host pool to the layer-first
device pool, layer by layer, by each mover and page size, with and without checksums. Each run has a neighbour, one
plain copy of the same bytes (memcpy), and ``of_memcpy`` is the median of the ratios of neighbours, because other work
on the machine changes what a single run shows. For the same reason these times are the copying thread's own (CPU time):
the copies use one thread, and a moment in which another process had its core says nothing about them.

``host_layout`` and ``disk_layout`` (Strata figure 12): the same load from a host pool whose layout is layer-first, and
pages read from disk where a page is one piece or ``2 * layers`` pieces.

``overlap``: new tokens are computed behind a prefix of 4,096 that is loaded meanwhile, layer by layer, at the speed of
memory and slowed down to 0.2 GB/s, as from a disk. Hidden is the share of the load's time in which computation did not
wait for it.

``python -m bench.transfers [--rounds 9] [--disk-dir DIR]``
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from bench import results_file
from bench.make_model import save_llama
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.model_runner import ModelRunner
from services.worker.kv.device_pool import DevicePool
from services.worker.kv.loads import Loads
from services.worker.kv.measured_loads import LoadScene, load_scene, medians, plain_copy, seconds
from services.worker.kv.movers.batched import BatchedMover
from services.worker.kv.movers.per_page import PerPageMover
from services.worker.kv.movers.protocol import PageMover
from services.worker.kv.page_memory import PageLayout, PageMemory
from services.worker.kv.verification import Verification
from shared.messages.base import pack_int32
from shared.messages.pools import KvGeometry
from shared.messages.worker_plans import PageLoad

PREFIX = "thermocline-bench"
TOKENS = 4096
GEOMETRY = KvGeometry(layers=12, kv_heads=4, head_dim=64, page_size=16, dtype="float32")
DTYPES = ("float32", "bfloat16")
PAGE_SIZES = (1, 16, 32, 64)
DISK_MODELS = {
    "llama-88m": KvGeometry(layers=12, kv_heads=4, head_dim=64, page_size=32, dtype="bfloat16"),
    "llama-3.1-8b": KvGeometry(layers=32, kv_heads=8, head_dim=128, page_size=32, dtype="bfloat16"),
}
DISK_TOKENS = 8192
ALIGNMENT = 4096


def movers(dtype: str, page_size: int, rounds: int) -> dict[str, Any]:
    """GB/s of every mover and of the plain copies beside it, medians."""
    geometry = msgspec.structs.replace(GEOMETRY, page_size=page_size, dtype=dtype)
    with load_scene(geometry, TOKENS, device="cpu", shm_prefix=PREFIX) as scene:
        entries: dict[str, PageMover] = {
            "per_page": PerPageMover(scene.device),
            "batched": BatchedMover(scene.device),
            "batched_without_compiler": BatchedMover(scene.device, native=False),
        }
        plain = plain_copy(scene)
        found: dict[str, Any] = {}
        for name, mover in entries.items():
            for verified in (False, True):
                # One round of the slowest takes seconds.
                few = max(3, rounds // 3) if name == "per_page" and page_size == 1 else rounds
                pairs = _beside(plain, partial(scene.load, mover, verified=verified), few)
                found[f"{name}_verified" if verified else name] = {
                    "gb_s": scene.nbytes / statistics.median(own for _, own in pairs) / 1e9,
                    "memcpy_gb_s": scene.nbytes / statistics.median(copy for copy, _ in pairs) / 1e9,
                    "of_memcpy": statistics.median(copy / own for copy, own in pairs),
                }
    return found


def _beside(plain: Callable[[], object], work: Callable[[], object], rounds: int) -> list[tuple[float, float]]:
    """CPU seconds of a plain copy and of ``work``, neighbours in time, after one round that is not counted."""
    clock = time.thread_time
    return [(seconds(plain, clock), seconds(work, clock)) for _ in range(rounds + 1)][1:]


def verification_modes(rounds: int) -> dict[str, float]:
    """Milliseconds of one load of 4,096 tokens by the worker's own path, by ``verify_host``; page size 16."""
    with load_scene(GEOMETRY, TOKENS, device="cpu", shm_prefix=PREFIX) as scene:
        works: dict[str, Callable[[], object]] = {}
        opened = []
        modes = {
            "always": Verification("always"),
            "sampled_10%": Verification("sampled", 0.1),
            "never": Verification("never"),
        }
        for name, verification in modes.items():
            loads, order = _loads(scene, verification, BatchedMover(scene.device))
            opened.append(loads)
            works[name] = partial(_run, loads, order)
        spent = medians(works, rounds)
        for loads in opened:
            loads.close()
    return {name: each * 1e3 for name, each in spent.items()}


def host_layout(rounds: int) -> dict[str, Any]:
    """The load from a page-first and from a layer-first host pool, page size 32."""
    found = {}
    for dtype in DTYPES:
        geometry = msgspec.structs.replace(GEOMETRY, page_size=32, dtype=dtype)
        with load_scene(geometry, TOKENS, device="cpu", shm_prefix=PREFIX) as scene:
            mover = BatchedMover(scene.device)
            first = scene.host.memory()
            layers = PageLayout.layer_first(geometry, first.layout.pages)
            sources = {"page_first": first, "layer_first": PageMemory(layers, array=first.array)}

            def load(source: PageMemory, scene: LoadScene = scene, mover: BatchedMover = mover) -> None:
                for layer in range(scene.device.geometry.layers):
                    mover.load(source, range(layer, layer + 1), scene.pages, scene.device_pages)

            spent = medians({name: partial(load, source) for name, source in sources.items()}, rounds)
        found[dtype] = {f"{name}_ms": each * 1e3 for name, each in spent.items()}
    return found


def disk_layout(directory: Path, rounds: int) -> dict[str, Any]:
    """Milliseconds to read pages of 8,192 tokens in random order past the page cache, and of one sequential read."""
    found = {}
    for name, geometry in DISK_MODELS.items():
        pages = DISK_TOKENS // geometry.page_size
        layout = {"page_first": geometry.page_bytes, "layer_first": geometry.half_bytes}
        order = np.random.default_rng(0).permutation(pages)
        starts = {
            "page_first": order * geometry.page_bytes,
            "layer_first": (
                order[:, None] * geometry.half_bytes + np.arange(2 * geometry.layers) * (pages * geometry.half_bytes)
            ).reshape(-1),
        }
        with tempfile.NamedTemporaryFile(dir=directory) as file:
            block = os.urandom(2**20)
            for _ in range(-(-pages * geometry.page_bytes // len(block))):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            fd = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
            try:
                works: dict[str, Callable[[], object]] = {
                    each: partial(_read, fd, starts[each].tolist(), layout[each]) for each in layout
                }
                spent = medians(works, rounds)
            finally:
                os.close(fd)
        found[name] = {
            "bytes": pages * geometry.page_bytes,
            **{f"{each}_ms": spent[each] * 1e3 for each in layout},
            **{f"{each}_read_bytes": layout[each] for each in layout},
            "ratio": spent["layer_first"] / spent["page_first"],
        }
    return found


def overlap(rounds: int, threads: int) -> dict[str, Any]:
    """Share of a load that a prefill hides. float32, page size 16, everything verified; by load speed."""
    with tempfile.TemporaryDirectory() as folder:
        model = save_llama(Path(folder), dtype="float32")
        runner = ModelRunner.load(
            model, dtype="float32", device="cpu", page_size=16, device_kv_bytes=None, pages=(TOKENS + 512) // 16,
            threads=threads, shm_prefix=PREFIX,
        )  # fmt: skip
    try:
        with load_scene(runner.geometry, TOKENS, device="cpu", shm_prefix=PREFIX) as scene:
            scene.device_pages = np.arange(TOKENS // 16, dtype=np.int32)
            found = {}
            for name, mover in {"memory": BatchedMover(runner.pool), "0.2_gb_s": SlowMover(runner.pool, 0.2)}.items():
                loads, order = _loads(scene, Verification(), mover, runner)
                found[name] = _overlap(runner, loads, order, rounds)
                loads.close()
            return found
    finally:
        runner.close()


def _overlap(runner: ModelRunner, loads: Loads, order: PageLoad, rounds: int) -> dict[str, Any]:
    pages = np.arange(runner.pool.pages, dtype=np.int32)
    found = {}
    for rows in (512, 32):
        ids, positions = torch.ones(rows, dtype=torch.int64), torch.arange(TOKENS, TOKENS + rows)
        readings = []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            transfer = loads.start([order])
            meta = ForwardMeta.build([Segment(rows, TOKENS, pages)], 16, torch.device("cpu"), transfer.gate)
            runner.forward(ids, positions, meta, torch.tensor([rows - 1]))
            result = transfer.finish()
            assert not result.failures
            spent = time.perf_counter() - began
            readings.append((result.load_ns / 1e6, spent * 1e3, 1 - result.waited_ns / result.load_ns))
        load_ms, step_ms, hidden = (statistics.median(column) for column in zip(*readings[1:], strict=True))
        found[f"{rows}_new_tokens"] = {"load_ms": load_ms, "step_ms": step_ms, "hidden_share_of_load": hidden}
    return found


class SlowMover(BatchedMover):
    """Takes as long as a link of so many GB/s would."""

    def __init__(self, pool: DevicePool, gb_s: float) -> None:
        super().__init__(pool)
        self._ns_per_byte = 1 / gb_s
        self._half_bytes = pool.geometry.half_bytes

    def load(self, source: PageMemory, layers: range, pages: Any, device_pages: Any, checks: Any = None) -> Any:
        began = time.perf_counter()
        wrong = super().load(source, layers, pages, device_pages, checks)
        due_s = len(layers) * len(pages) * 2 * self._half_bytes * self._ns_per_byte / 1e9
        time.sleep(max(0.0, due_s - (time.perf_counter() - began)))
        return wrong


def _loads(
    scene: LoadScene, verification: Verification, mover: BatchedMover, runner: ModelRunner | None = None
) -> tuple[Loads, PageLoad]:
    pool = scene.device if runner is None else runner.pool
    loads = Loads(
        pool.geometry, pool.pages, mover, timeout_s=60, clock_ns=time.perf_counter_ns,
        verification=verification,
    )  # fmt: skip
    loads.attach("storage", scene.host.view.handle)
    order = PageLoad(
        request_id="r",
        attempt=1,
        storage_id="storage",
        host_pages=pack_int32(scene.pages.tolist()),
        device_pages=pack_int32(scene.device_pages.tolist()),
        identities=scene.host.view.identities[scene.pages].tobytes(),
    )
    return loads, order


def _run(loads: Loads, order: PageLoad) -> None:
    result = loads.start([order]).finish()
    assert not result.failures, result.failures[0].reason


def _read(fd: int, starts: list[int], nbytes: int) -> None:
    buffer = mmap.mmap(-1, -(-nbytes // ALIGNMENT) * ALIGNMENT)
    view = memoryview(buffer)[:nbytes]
    for start in starts:
        got = os.preadv(fd, [view], start)
        assert got == nbytes
    view.release()
    buffer.close()


def main() -> None:
    known = results_file.arguments(__doc__, "--out")
    known.add_argument("--rounds", type=int, default=9)
    known.add_argument("--threads", type=int, default=1, help="of the model, in the overlap")
    known.add_argument("--disk-dir", type=Path, default=Path(tempfile.gettempdir()))
    options = known.parse_args()
    results: dict[str, Any] = {"tokens": TOKENS, "movers": {}}
    for dtype in DTYPES:
        for page_size in PAGE_SIZES:
            found = movers(dtype, page_size, options.rounds)
            results["movers"].setdefault(dtype, {})[str(page_size)] = found
            shown = {name: f"{each['gb_s']:.2f} GB/s {each['of_memcpy']:.0%}" for name, each in found.items()}
            print(dtype, page_size, shown, flush=True)
    results["verify_host_ms"] = verification_modes(options.rounds)
    results["host_layout"] = host_layout(options.rounds)
    results["disk_layout"] = disk_layout(options.disk_dir, max(3, options.rounds // 2))
    results["overlap"] = overlap(max(3, options.rounds // 2), options.threads)
    for name in ("verify_host_ms", "host_layout", "disk_layout", "overlap"):
        print(name, results[name])
    print(results_file.write("transfers", results, seed=0, out=options.out))


if __name__ == "__main__":
    main()
