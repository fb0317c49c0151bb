"""What backups take from loads and from computing, and how much less with half of the time (Strata 4.2, quota).

The paper gives backups one thread block of the GPU where loads have two; here ``--backup-share`` bounds the part of the
time in which devices are copied from. A process copies transfers of random pages out of a device pool and seals them,
as a storage does, without pause or with a share of a half or a quarter, on a core of its own; another loads pages
(``BatchedMover``, verified), or steps through small products (``decode``) or large ones (``prefill``). Reported are
processor time for each piece of work beside that without any copying in the same round, so that other work of the
machine does not count, and what was copied a second. Medians over rounds whose order changes. A GPU is not measured.

``python -m bench.backup_quota [--rounds 9] [--round-s 0.15] [--realtime]``; ``--realtime`` (root) lets both processes
run before all other work of the machine, each on its own core, and leaves it alone for longer in between.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # Before torch is imported: one core computes, the other copies.

import numpy as np
import torch

from bench import results_file
from bench.backup_driver import GEOMETRY, PAGES, Driver, ProcessDriver, copy_while, decode_step, prefill_step
from services.storage import copy_share
from services.worker.kv.measured_loads import load_scene
from services.worker.kv.movers import make_mover
from shared.codec import decode, encode
from shared.memory import DevicePoolView, HostPoolView, SharedSegment, unlink_all
from shared.messages.pools import PoolHandle

SHARES = {"all of the time": 1.0, "half of the time": 0.5, "a quarter of the time": 0.25}
NOTHING = "nothing"
LOAD_TOKENS = 1024


class _Copying(ProcessDriver):
    """Copies with a share of the time."""

    def __init__(self, handles: tuple[PoolHandle, PoolHandle], share: float, seed: int, *, is_realtime: bool) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.go, self._ended, self._total = spawn.Event(), spawn.Event(), spawn.Value("Q", 0, lock=False)
        encoded = (encode(handle) for handle in handles)
        self._process = spawn.Process(
            target=_copy_shared, args=(*encoded, self.go, self._ended, self._total, share, is_realtime, seed)
        )
        self._process.start()


def _copy_shared(
    device: bytes, host: bytes, go: Any, ended: Any, total: Any, share: float, is_realtime: bool, seed: int
) -> None:
    favour(1, is_realtime=is_realtime)
    if share < 1:
        turns = copy_share.CopyShare(share)
        attach = DevicePoolView.attach

        def shared(handle: PoolHandle) -> Any:
            return copy_share.SharedDevicePages(attach(handle), turns)

        DevicePoolView.attach = staticmethod(shared)  # type: ignore[method-assign,assignment]

    def add(nbytes: int) -> None:
        total.value += nbytes

    copy_while(decode(device, PoolHandle), decode(host, PoolHandle), go, ended, add, seed)


def favour(core: int, *, is_realtime: bool) -> None:
    """Run on this core before all other work of the machine."""
    if is_realtime:
        os.sched_setaffinity(0, {core})
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))


def cost_s(work: Callable[[], object], seconds: float) -> float:
    """Processor time of one piece of work, by as many as fit in so long."""
    count, ends, began = 0, time.perf_counter() + seconds, time.process_time()
    while time.perf_counter() < ends:
        work()
        count += 1
    return (time.process_time() - began) / count


def measure(rounds: int, round_s: float, seed: int, *, is_realtime: bool) -> dict[str, Any]:
    """For each kind of work: its cost alone, and beside copies by share."""
    torch.manual_seed(seed)
    favour(0, is_realtime=is_realtime)
    prefix = f"bench-{secrets.token_hex(4)}"
    segment = SharedSegment.create(prefix, "device", PAGES * GEOMETRY.page_bytes)
    segment.array[:] = np.random.default_rng(seed).integers(0, 256, segment.nbytes, dtype=np.uint8)
    device = PoolHandle(
        kind="shm", layout="layer_first", name=segment.name, nbytes=segment.nbytes, pages=PAGES, geometry=GEOMETRY
    )
    pool = HostPoolView.create(prefix, GEOMETRY, PAGES)
    drivers: dict[str, Driver] = {
        name: _Copying((device, pool.handle), share, seed, is_realtime=is_realtime) for name, share in SHARES.items()
    }
    try:
        for driver in drivers.values():  # Imports, mappings, first touches.
            driver.go.set()
            while not driver.nbytes():
                time.sleep(0.05)
            driver.go.clear()
        with load_scene(GEOMETRY, LOAD_TOKENS, device="cpu", shm_prefix=prefix) as scene:
            mover = make_mover(scene.device, "batched", programs=1)
            works = {
                "load": lambda: scene.load(mover, verified=True),
                "decode": decode_step(),
                "prefill": prefill_step(),
            }
            return {name: _compare(work, drivers, rounds, round_s) for name, work in works.items()}
    finally:
        for driver in drivers.values():
            driver.end()
        unlink_all(prefix)


def _compare(work: Callable[[], object], drivers: dict[str, Driver], rounds: int, round_s: float) -> dict[str, Any]:
    work()
    dearer: dict[str, list[float]] = {name: [] for name in drivers}
    copied: dict[str, list[float]] = {name: [] for name in drivers}
    alone: list[float] = []
    for number in range(rounds):
        costs: dict[str, float] = {}
        names = [NOTHING, *drivers]
        for name in names if number % 2 else reversed(names):
            time.sleep(2 * round_s)
            if name == NOTHING:
                costs[name] = cost_s(work, round_s)
                continue
            driver = drivers[name]
            before, started = driver.nbytes(), time.perf_counter()
            driver.go.set()
            costs[name] = cost_s(work, round_s)
            copied[name].append((driver.nbytes() - before) / (time.perf_counter() - started) / 1e9)
            driver.go.clear()
        alone.append(costs[NOTHING])
        for name in drivers:
            dearer[name].append(costs[name] / costs[NOTHING] - 1)
    return {"alone_us": statistics.median(alone) * 1e6} | {
        name: {
            "dearer_percent": 100 * statistics.median(dearer[name]),
            "dearer_quartiles_percent": [100 * each for each in statistics.quantiles(dearer[name], n=4)[::2]],
            "copied_gb_per_s": statistics.median(copied[name]),
        }
        for name in drivers
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--round-s", type=float, default=0.15)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--realtime", action="store_true", help="run before all other work of the machine (root)")
    options = parser.parse_args()
    found = measure(options.rounds, options.round_s, options.seed, is_realtime=options.realtime)
    shape = {"rounds": options.rounds, "round_s": options.round_s, "is_realtime": options.realtime}
    for work, row in found.items():
        for name in SHARES:
            print(
                f"{work:8} beside copies {name:22} {row[name]['dearer_percent']:+6.1f}%  "
                f"{row[name]['copied_gb_per_s']:.2f} GB/s copied"
            )
    print(results_file.write("backup_quota", shape | {"work": found}, seed=options.seed))


if __name__ == "__main__":
    main()
