"""How much of a disk's sequential bandwidth does reading a prefix from the disk tier reach, verified?

The tier: 64 chunks (4,096 tokens) of an 88M Llama (12 layers, 4 KV heads of 64, bfloat16, pages of 16) are read through
the disk backend by 1 to 16 threads, each chunk into a staging buffer and fully verified: header, name, every page and
layer. Each sample reads another prefix, past the page cache (O_DIRECT). The yardstick, in turn with it on the same
directory: a file of 1 GiB is read in order past the page cache in blocks of 1 MiB, by one thread and by eight; by
``fio`` where it is installed, otherwise by a reader here, into the same kind of memory. Reported are medians, the
tier's share of the better of the two yardsticks, what a chunk costs one thread (processor time of reading it, and of
verifying it when it has just come from the disk and when it is in the processor's caches), and durable writing.

``--realtime`` lets yardstick and tier run before all other work of the machine, which is needed where there is any.

``python -m bench.disk_tier --dir DIR [--rounds 7] [--realtime] [--json]``
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench import results_file
from bench.chunk_chains import random_chain
from services.storage.backends import ChunkKey
from services.storage.backends.disk import DiskBackend
from services.storage.chunk_format import blob_nbytes
from services.storage.chunk_reading import verify_chunk
from services.storage.staging import Staging
from shared import logs
from shared.messages.pools import KvGeometry

GEOMETRY = KvGeometry(layers=12, kv_heads=4, head_dim=64, page_size=16, dtype="bfloat16")
PREFIX_CHUNKS = 64
PREFIXES = 12  # More than is read in one round, so that a disk's own cache has forgotten a prefix when it comes again.
THREADS = (1, 2, 4, 8, 16)
SAMPLES = 2  # Prefixes for each number of threads in a round.

FILE_BYTES = 2**30
BLOCK = 2**20
DEPTHS = (1, 8)
TIMEOUT_S = 60.0


def write_prefixes(backend: DiskBackend, seed: int) -> tuple[list[list[ChunkKey]], float]:
    """Write random chains by eight threads; their keys, and bytes per second."""
    random = np.random.default_rng(seed)
    prefixes: list[list[ChunkKey]] = []
    spent_s = 0.0
    for _ in range(PREFIXES):
        chain = list(random_chain(GEOMETRY, random, PREFIX_CHUNKS))
        keys, blobs = [key for key, _, _ in chain], [blob for _, _, blob in chain]

        def put(place: int, keys: list[ChunkKey] = keys, blobs: list[memoryview] = blobs) -> None:
            backend.put(keys[place], blobs[place], stripe=place, timeout_s=TIMEOUT_S)

        started_s = time.perf_counter()
        with ThreadPoolExecutor(8) as executor:
            list(executor.map(put, range(PREFIX_CHUNKS)))
        spent_s += time.perf_counter() - started_s
        prefixes.append(keys)
    return prefixes, PREFIXES * PREFIX_CHUNKS * blob_nbytes(GEOMETRY) / spent_s


@contextmanager
def held(staging: Staging) -> Iterator[memoryview]:
    """A buffer for the block."""
    buffer = staging.take()
    try:
        yield buffer
    finally:
        staging.give_back(buffer)


def tier_speed(
    backend: DiskBackend, staging: Staging, keys: list[ChunkKey], executor: ThreadPoolExecutor, *, is_verified: bool
) -> float:
    """Bytes per second of reading and (unless told otherwise) verifying a prefix by the executor's threads."""

    def read(key: ChunkKey) -> int:
        with held(staging) as buffer:
            nbytes = backend.get(key, buffer, timeout_s=TIMEOUT_S)
            if is_verified:
                verify_chunk(buffer[:nbytes], key, GEOMETRY)
        return nbytes

    return together(read, keys, len(keys) * blob_nbytes(GEOMETRY), executor)


def together(read: Callable[[Any], int], places: Sequence[Any], nbytes: int, executor: ThreadPoolExecutor) -> float:
    """Bytes per second when all threads of an executor walk through ``places``, each taking the next one."""
    threads: int = executor._max_workers  # The threads that it was made with.
    start = threading.Barrier(threads + 1)
    # Drawing from one iterator is atomic.
    coming = iter(places)

    def walk() -> int:
        start.wait()
        return sum(map(read, coming))

    walks = [executor.submit(walk) for _ in range(threads)]
    start.wait()
    started_s = time.perf_counter()
    assert sum(walk.result() for walk in walks) == nbytes
    return nbytes / (time.perf_counter() - started_s)


def chunk_costs(backend: DiskBackend, keys: list[ChunkKey]) -> dict[str, float]:
    """Processor time of one thread for one chunk, microseconds, medians."""
    staging = Staging(blob_nbytes(GEOMETRY), blob_nbytes(GEOMETRY))
    costs: dict[str, list[int]] = {"read": [], "verify_from_disk": [], "verify_from_caches": []}
    with held(staging) as buffer:
        for key in keys:
            started = time.thread_time_ns()
            backend.get(key, buffer, timeout_s=TIMEOUT_S)
            costs["read"].append(time.thread_time_ns() - started)
            for name in ("verify_from_disk", "verify_from_caches"):
                started = time.thread_time_ns()
                verify_chunk(buffer, key, GEOMETRY)
                costs[name].append(time.thread_time_ns() - started)
    return {f"{name}_us": statistics.median(found) / 1e3 for name, found in costs.items()}


def own_reader(path: str, depth: int) -> float:
    """Bytes per second of reading the file in order, ``depth`` blocks at a time."""
    staging = Staging(depth * BLOCK, BLOCK)
    for buffer in [staging.take() for _ in range(depth)]:
        buffer[:] = bytes(BLOCK)
        staging.give_back(buffer)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(offset: int) -> int:
        with held(staging) as buffer:
            return os.preadv(fd, [buffer], offset)

    try:
        with ThreadPoolExecutor(depth) as executor:
            return together(read, range(0, FILE_BYTES, BLOCK), FILE_BYTES, executor)
    finally:
        os.close(fd)


def fio(path: str, depth: int) -> float:
    """The same by fio."""
    command = ["fio", "--name=read", "--rw=read", "--direct=1", "--output-format=json", f"--filename={path}"]
    command += [f"--bs={BLOCK}", f"--size={FILE_BYTES}", "--ioengine=libaio", f"--iodepth={depth}", "--readonly"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"])


def write_file(path: str, seed: int) -> None:
    """A file of random bytes on the disk, past the page cache."""
    random, block = np.random.default_rng(seed), memoryview(mmap.mmap(-1, 16 * BLOCK))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    try:
        for offset in range(0, FILE_BYTES, block.nbytes):
            block[:] = random.bytes(block.nbytes)
            assert os.pwrite(fd, block, offset) == block.nbytes
        os.fsync(fd)
    finally:
        os.close(fd)


def measure(folder: Path, rounds: int, seed: int) -> dict[str, Any]:
    """Alternating rounds of yardstick and tier."""
    sequential: Callable[[str, int], float] = fio if shutil.which("fio") else own_reader
    file = str(folder / "sequential")
    write_file(file, seed)
    tier = folder / "tier"
    tier.mkdir()
    backend = DiskBackend([str(tier)])
    staging = Staging(max(THREADS) * blob_nbytes(GEOMETRY), blob_nbytes(GEOMETRY))
    for buffer in [staging.take() for _ in range(staging.buffers)]:
        buffer[:] = bytes(buffer.nbytes)  # A storage has used its buffers before.
        staging.give_back(buffer)
    try:
        prefixes, written = write_prefixes(backend, seed)
        yardstick: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
        verified: dict[int, list[float]] = {threads: [] for threads in THREADS}
        unverified: dict[int, list[float]] = {threads: [] for threads in THREADS}
        turn = 0
        for _ in range(rounds):
            for depth in DEPTHS:
                yardstick[depth].append(sequential(file, depth))
            for threads in THREADS:
                with ThreadPoolExecutor(threads) as executor:
                    for samples, is_verified in ((verified, True), (unverified, False)):
                        for _ in range(SAMPLES):
                            keys = prefixes[turn % PREFIXES]
                            turn += 1
                            speed = tier_speed(backend, staging, keys, executor, is_verified=is_verified)
                            samples[threads].append(speed)
        costs = chunk_costs(backend, [key for keys in prefixes[:4] for key in keys])
        is_direct = backend.directories[0].is_direct
    finally:
        backend.close()
    best = max(statistics.median(speeds) for speeds in yardstick.values())
    return {
        "sequential_by": sequential.__name__,
        "sequential": {f"depth_{depth}": _speeds(speeds) for depth, speeds in yardstick.items()},
        "is_direct": is_direct,
        "chunk_bytes": blob_nbytes(GEOMETRY),
        "prefix_chunks": PREFIX_CHUNKS,
        "write_durable_gb_per_s": written / 1e9,
        "chunk_costs": costs,
        "tier": {
            f"threads_{threads}": {
                "verified": _speeds(verified[threads]),
                "unverified": _speeds(unverified[threads]),
                "share_of_sequential": statistics.median(verified[threads]) / best,
            }
            for threads in THREADS
        },
        "best_share_of_sequential": max(statistics.median(speeds) for speeds in verified.values()) / best,
    }


def _speeds(samples: list[float]) -> dict[str, float]:
    return {
        "median_gb_per_s": statistics.median(samples) / 1e9,
        "min_gb_per_s": min(samples) / 1e9,
        "max_gb_per_s": max(samples) / 1e9,
    }


def main() -> None:
    parser = results_file.arguments(__doc__, "--seed", "--out")
    parser.add_argument("--dir", type=Path, default=Path(), help="a directory on the disk to measure")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--realtime", action="store_true", help="run before all other work of this machine (root)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    logs.configure("bench", "disk_tier", level="warning")
    if options.realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))
    with tempfile.TemporaryDirectory(dir=options.dir, prefix=".disk-tier-") as folder:
        results = measure(Path(folder), options.rounds, options.seed)
    path = results_file.write("disk_tier", {"rounds": options.rounds} | results, seed=options.seed, out=options.out)
    if options.json:
        print(json.dumps(results, indent=2))
        return
    for depth, speeds in results["sequential"].items():
        print(f"sequential {depth:10} {speeds['median_gb_per_s']:.2f} GB/s by {results['sequential_by']}")
    for threads, row in results["tier"].items():
        print(
            f"tier {threads:16} {row['verified']['median_gb_per_s']:.2f} GB/s verified, "
            f"{row['unverified']['median_gb_per_s']:.2f} without: {row['share_of_sequential']:.0%} of sequential"
        )
    print("one chunk:", ", ".join(f"{name} {cost:.0f}" for name, cost in results["chunk_costs"].items()))
    print(f"durable writes by 8 threads: {results['write_durable_gb_per_s']:.2f} GB/s")
    print("->", path)


if __name__ == "__main__":
    main()
