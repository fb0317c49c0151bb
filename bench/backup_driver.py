"""Which process should drive backups: the one that computes, or the storage?

A compute loop runs while pages are copied out of a device pool in shared memory into a host pool, and sealed, with
the storage's own mover, driven by a thread of the computing process, by another process, or by another process whose
priority is low (niceness 10; a thread must not have that, for it holds the interpreter lock). Reported for each:
copy speed, and how much slower compute became. Two loops: ``decode`` dispatches many small operations, as a decode
step does, and ``prefill`` few large ones. Rounds of nothing, thread and process alternate, and medians are taken,
because other work on the machine changes what a single round shows.

``python -m bench.backup_driver [--rounds 9] [--round-s 1.5]``
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event as ProcessEvent
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # Before torch is imported: one core computes, the other is free to copy.

import numpy as np
import torch

from bench import results_file
from services.storage.core.backup_check import Transfer
from services.storage.mover import copy_transfer
from shared.codec import decode, encode
from shared.memory import DevicePoolView, HostPoolView, SharedSegment, unlink_all
from shared.messages.pools import KvGeometry, PoolHandle

GEOMETRY = KvGeometry(layers=12, kv_heads=4, head_dim=64, page_size=16, dtype="bfloat16")
PAGES = 512  # 96 MiB: larger than the caches.
TRANSFER_PAGES = 32  # A prompt of 512 tokens.

DRIVERS = ("nothing", "thread", "process", "low_priority_process")
LOW_PRIORITY = 10


def copy_while(
    device: PoolHandle,
    host: PoolHandle,
    go: threading.Event | ProcessEvent,
    ended: threading.Event | ProcessEvent,
    add_bytes: Callable[[int], None],
    seed: int,
) -> None:
    """Copy transfers of random pages, half of them in runs, whenever ``go`` is set, until ``ended`` is."""
    source, target = DevicePoolView.attach(device), HostPoolView.attach(host)
    random = np.random.default_rng(seed)
    transfers = []
    for number in range(16):
        runs = np.concatenate([np.arange(start, start + 16) for start in random.choice(PAGES // 16, 1) * 16])
        scattered = random.choice(PAGES, TRANSFER_PAGES - len(runs), replace=False)
        pages = np.concatenate([runs, scattered]).astype(np.int32)
        into = random.choice(PAGES, TRANSFER_PAGES, replace=False).astype(np.int32)
        into[:16] = np.arange(16) + random.choice(PAGES // 16) * 16
        identities = tuple(bytes([number + 1]) * 16 for _ in pages)
        transfers.append(Transfer(number, "worker", "one", pages, into, identities))
    while not ended.is_set():
        if not go.wait(0.2):
            continue
        for transfer in transfers:
            if not go.is_set():
                break
            add_bytes(copy_transfer(transfer, source, target))


def _process_main(
    device: bytes, host: bytes, go: ProcessEvent, ended: ProcessEvent, total: Any, niceness: int, seed: int
) -> None:
    os.nice(niceness)

    def add(nbytes: int) -> None:
        total.value += nbytes

    copy_while(decode(device, PoolHandle), decode(host, PoolHandle), go, ended, add, seed)


class ThreadDriver:
    """Copies in a thread of this process."""

    def __init__(self, handles: tuple[PoolHandle, PoolHandle], seed: int) -> None:
        self.go, self._ended, self._nbytes = threading.Event(), threading.Event(), 0
        self._thread = threading.Thread(target=copy_while, args=(*handles, self.go, self._ended, self._add, seed))
        self._thread.start()

    def _add(self, nbytes: int) -> None:
        self._nbytes += nbytes

    def nbytes(self) -> int:
        return self._nbytes

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


class ProcessDriver:
    """Copies in a process of its own."""

    def __init__(self, handles: tuple[PoolHandle, PoolHandle], niceness: int, seed: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.go, self._ended, self._total = spawn.Event(), spawn.Event(), spawn.Value("Q", 0, lock=False)
        encoded = (encode(handle) for handle in handles)
        self._process = spawn.Process(
            target=_process_main, args=(*encoded, self.go, self._ended, self._total, niceness, seed)
        )
        self._process.start()

    def nbytes(self) -> int:
        return int(self._total.value)

    def end(self) -> None:
        self._ended.set()
        self._process.join()


Driver = ThreadDriver | ProcessDriver


def decode_step() -> Callable[[], None]:
    """160 small products of 8 rows, each with an elementwise operation."""
    weights, rows = torch.randn(256, 256) / 16, torch.randn(8, 256)

    def step() -> None:
        hidden = rows
        for _ in range(160):
            hidden = torch.tanh(hidden @ weights)

    return step


def prefill_step() -> Callable[[], None]:
    """4 products of 256 rows with a matrix of 1024 x 1024."""
    weights, rows = torch.randn(1024, 1024) / 32, torch.randn(256, 1024)

    def step() -> None:
        hidden = rows
        for _ in range(4):
            hidden = torch.tanh(hidden @ weights)

    return step


def steps_per_second(step: Callable[[], None], seconds: float) -> float:
    """Run ``step`` for so long."""
    count, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        step()
        count += 1
    return count / elapsed


def measure(rounds: int, round_s: float, seed: int) -> dict[str, Any]:
    """Medians over alternating rounds, for each loop and driver."""
    torch.manual_seed(seed)
    prefix = f"bench-{secrets.token_hex(4)}"
    segment = SharedSegment.create(prefix, "device", PAGES * GEOMETRY.page_bytes)
    segment.array[:] = np.random.default_rng(seed).integers(0, 256, segment.nbytes, dtype=np.uint8)
    device = PoolHandle(
        kind="shm", layout="layer_first", name=segment.name, nbytes=segment.nbytes, pages=PAGES, geometry=GEOMETRY
    )
    pool = HostPoolView.create(prefix, GEOMETRY, PAGES)
    handles = (device, pool.handle)
    drivers: list[Driver] = [ThreadDriver(handles, seed), ProcessDriver(handles, 0, seed)]
    drivers.append(ProcessDriver(handles, LOW_PRIORITY, seed))
    try:
        for driver in drivers:  # Imports, mappings, first touches.
            driver.go.set()
            while not driver.nbytes():
                time.sleep(0.05)
            driver.go.clear()
        results: dict[str, Any] = {}
        for name, step in (("decode", decode_step()), ("prefill", prefill_step())):
            step()
            rows: list[dict[str, tuple[float, float]]] = []
            for _ in range(rounds):
                row = {"nothing": (steps_per_second(step, round_s), 0.0)}
                for driver_name, driver in zip(DRIVERS[1:], drivers, strict=True):
                    before, started = driver.nbytes(), time.perf_counter()
                    driver.go.set()
                    speed = steps_per_second(step, round_s)
                    copied, elapsed = driver.nbytes() - before, time.perf_counter() - started
                    driver.go.clear()
                    time.sleep(0.1)  # What it had begun ends.
                    row[driver_name] = (speed, copied / elapsed / 1e9)
                rows.append(row)
            results[name] = _summary(rows)
        return results
    finally:
        for driver in drivers:
            driver.end()
        unlink_all(prefix)


def _summary(rows: list[dict[str, tuple[float, float]]]) -> dict[str, Any]:
    summary: dict[str, Any] = {"steps_per_s_alone": _median([row["nothing"][0] for row in rows])}
    for driver in DRIVERS[1:]:
        # Each round is compared with its own neighbour, so that slow drifts of the machine cancel.
        slower = [row["nothing"][0] / row[driver][0] - 1 for row in rows]
        speeds = [row[driver][1] for row in rows]
        summary[driver] = {
            "compute_slower_percent": {
                "median": 100 * _median(slower), "min": 100 * min(slower), "max": 100 * max(slower)
            },
            "copy_gb_per_s": {"median": _median(speeds), "min": min(speeds), "max": max(speeds)},
        }  # fmt: skip
    return summary


def _median(values: list[float]) -> float:
    return statistics.median(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--round-s", type=float, default=1.5)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    results = measure(options.rounds, options.round_s, options.seed)
    path = results_file.write(
        "backup_driver",
        {"rounds": options.rounds, "round_s": options.round_s, "pool_mib": PAGES * GEOMETRY.page_bytes / 2**20}
        | results,
        seed=options.seed,
    )
    for name in ("decode", "prefill"):
        for driver in DRIVERS[1:]:
            found = results[name][driver]
            print(
                f"{name:8} {driver:21} compute {found['compute_slower_percent']['median']:+.0f}%"
                f"  copies at {found['copy_gb_per_s']['median']:.2f} GB/s"
            )
    print("->", path)


if __name__ == "__main__":
    main()
