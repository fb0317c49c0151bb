"""What does an object store at a distance give: how fast do chunks go there, and how fast does a prefix come back?

A store of ``bench.store_server`` answers each request 5 or 50 ms late, in a process of its own. Prefixes are restored
over HTTP and over HTTPS, which stores at a distance are asked by.

*Uploads*: chunks that an earlier start left on the disk are found by comparing disk and store, read, verified and put
into the store, as after a restart; chunks per second from the first question to the last answer. Beside it as many
that were just saved, which are not compared or verified, and how fast all are deleted again.

*Restoring*: a run of 64 chunks (4,096 tokens of an 88M Llama, 790,528 bytes each) comes from the store into the host
pool, verified, by the path of a fetch. The yardstick, in turn with it: 64 range reads by the same client at once, each
of a whole object, of which nothing is verified or kept. Reported are medians, and the share of the yardstick.

``python -m bench.store_latency [--dir DIR] [--rounds 9] [--chunks 1024] [--json]``
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import obstore

from bench import results_file
from bench.chunk_chains import random_chain
from services.storage.backends import ChunkEntry, ChunkKey
from services.storage.backends.disk import DiskBackend
from services.storage.backends.object_store import ObjectStoreBackend, open_remote
from services.storage.backends.remote_location import parse_remote
from services.storage.backends.remote_stores import connect
from services.storage.buffers import Buffers
from services.storage.chunk_format import blob_nbytes
from services.storage.chunk_keys import ChunkKeys
from services.storage.chunk_names import ChunkNames
from services.storage.chunk_source import ChunkSource
from services.storage.chunk_writing import blob_digest
from services.storage.config import StorageConfig
from services.storage.core.fetch_check import FetchChunk
from services.storage.core.fetch_progress import FetchProgress
from services.storage.disk_tier import DiskTier
from services.storage.fetch_run import FetchRun
from services.storage.io_threads import IoThreads
from services.storage.reconciliation import Reconciliation
from services.storage.remote_tier import RemoteTier
from services.storage.staging import Staging
from services.storage.uploads import Upload, Uploads
from shared import logs
from shared.chunks import chunk_pages
from shared.memory import HostPoolView
from shared.messages.pools import KvGeometry
from tests.certificates import Authority

LATENCIES_MS = (5, 50)
UPLOADS_PER_S, SHARE_OF_RANGE_READS = 500, 0.8
"""Targets: chunks uploaded at 50 ms, and the share of plain range reads at which a run is restored."""
PREFIX = KvGeometry(layers=12, kv_heads=4, head_dim=64, page_size=16, dtype="bfloat16")
PREFIX_CHUNKS = 64
SMALL = KvGeometry(layers=2, kv_heads=2, head_dim=64, page_size=16, dtype="bfloat16")
"""For uploads: 64 KiB of KV, so that neither the disk nor loopback is what is measured."""

TIMEOUT_S = 60.0
THREADS = 8  # A storage's default.


@contextmanager
def far_store(latency_ms: float, certificates: Path | None = None) -> Iterator[StorageConfig]:
    """A store that answers late, and the settings by which a storage finds it; sets variables of this process.

    With a folder for ``certificates`` it speaks TLS.
    """
    command = [sys.executable, "-m", "bench.store_server", f"--latency-ms={latency_ms}"]
    if certificates is not None:
        authority = Authority(certificates)
        certificate, key = authority.issue("store")
        command += [f"--tls-cert={certificate}", f"--tls-key={key}"]
        os.environ["SSL_CERT_FILE"] = str(authority.ca)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            scheme = "http" if certificates is None else "https"
            endpoint = f"{scheme}://127.0.0.1:{server.stdout.readline().strip()}"
            os.environ |= {"AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
            os.environ |= {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
            yield StorageConfig(remote="s3://bench/store", remote_timeout_ms=int(TIMEOUT_S * 1000))
        finally:
            server.stdin.close()
            server.wait(TIMEOUT_S)


def open_backend(config: StorageConfig) -> ObjectStoreBackend:
    """The store as a storage opens it."""
    backend = open_remote(config)
    assert isinstance(backend, ObjectStoreBackend)
    return backend


async def upload(config: StorageConfig, folder: Path, count: int, seed: int) -> dict[str, float]:
    """Chunks per second: found after a start, just saved, and deleted."""
    chunks = list(random_chain(SMALL, np.random.default_rng(seed), count))
    nbytes = blob_nbytes(SMALL)
    threads, backend = IoThreads(THREADS), open_backend(config)
    disk = DiskTier(DiskBackend([str(folder)]), 2**40, threads)
    buffers = Buffers(Staging(64 * nbytes, nbytes))
    remote = RemoteTier(backend, threads, timeout_s=TIMEOUT_S)
    uploads = Uploads(remote, disk, threads, ChunkKeys(None), on_bad=_none_is, max_waiting=count)
    uploads.open(SMALL, buffers)
    reconciliation = Reconciliation(disk, remote, uploads, ChunkNames())
    for key, _, blob in chunks:
        disk.backend.put(key, blob, stripe=0, timeout_s=TIMEOUT_S)
    disk.found([ChunkEntry(key, nbytes) for key, _, _ in chunks])
    is_listed = asyncio.Event()
    is_listed.set()
    tasks = [asyncio.create_task(uploads.run()), asyncio.create_task(reconciliation.run(is_listed))]
    rates = {}
    try:
        started_s, spent_s = time.perf_counter(), time.process_time()
        reconciliation.want()
        await _uploaded(remote, count)
        rates["found_chunks_per_s"] = count / (time.perf_counter() - started_s)
        rates["found_processor_us_per_chunk"] = (time.process_time() - spent_s) / count * 1e6
        rates["deleted_chunks_per_s"] = await _delete(backend, count)
        started_s = time.perf_counter()
        for key, _, blob in chunks:
            uploads.add(Upload(key, nbytes, blob_digest(blob)))
        await _uploaded(remote, 2 * count)
        rates["saved_chunks_per_s"] = count / (time.perf_counter() - started_s)
        await _delete(backend, count)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for part in (buffers, threads, backend, disk.backend):
            part.close()
    return rates


async def _uploaded(remote: RemoteTier, count: int) -> None:
    while remote.uploaded < count:  # noqa: ASYNC110 - a counter has no event.
        await asyncio.sleep(0.001)


async def _delete(backend: ObjectStoreBackend, count: int) -> float:
    """As ``drops`` does; chunks per second."""
    started_s = time.perf_counter()
    keys = await asyncio.to_thread(lambda: [entry.key for entry in backend.entries()])
    assert len(keys) == count
    for start in range(0, count, 256):
        await backend.remove(keys[start : start + 256], timeout_s=TIMEOUT_S)
    return count / (time.perf_counter() - started_s)


async def restore(config: StorageConfig, rounds: int, seed: int) -> dict[str, Any]:
    """Seconds of restoring a prefix, and of reading as many objects at once."""
    chain = list(random_chain(PREFIX, np.random.default_rng(seed), PREFIX_CHUNKS))
    each = chunk_pages(PREFIX.page_size)
    chunks = [
        FetchChunk(key, place, identities, np.arange(place * each, (place + 1) * each, dtype=np.int32))
        for place, (key, identities, _) in enumerate(chain)
    ]
    threads, backend, nbytes = IoThreads(THREADS), open_backend(config), blob_nbytes(PREFIX)
    plain = connect(parse_remote(config.remote), timeout_s=TIMEOUT_S, environ=os.environ)
    buffers = Buffers(Staging(256 * 2**20, nbytes))
    remote = RemoteTier(backend, threads, timeout_s=TIMEOUT_S)
    source = ChunkSource(PREFIX, disk=None, remote=remote, buffers=buffers, keys=ChunkKeys(None), promotions=None)
    host = HostPoolView.create(f"bench-{secrets.token_hex(4)}", PREFIX, PREFIX_CHUNKS * each)
    taken: dict[str, list[float]] = {"restored": [], "read": []}
    spent: dict[str, list[float]] = {"restored": [], "read": []}
    try:
        await asyncio.gather(*(remote.write(key, bytes(blob)) for key, _, blob in chain))
        for turn in range(rounds + 1):
            progress = FetchProgress(len(chunks))
            run = FetchRun(chunks, progress, source, threads, host, key_id="", left_s=lambda: TIMEOUT_S)
            started_s, spent_s = time.perf_counter(), time.process_time()
            error = await run.bring(_nothing)
            restored_s = time.perf_counter() - started_s
            assert (error, progress.remote_chunks) == ("", len(chunks))
            restored_spent_s = time.process_time() - spent_s
            started_s, spent_s = time.perf_counter(), time.process_time()
            bodies = await asyncio.gather(
                *(obstore.get_range_async(plain, key.path, start=0, length=nbytes) for key, _, _ in chain)
            )
            read_s = time.perf_counter() - started_s
            read_spent_s = time.process_time() - spent_s
            assert sum(map(len, bodies)) == nbytes * len(chunks)
            if turn:  # The first one opens connections and touches memory.
                taken["restored"].append(restored_s)
                taken["read"].append(read_s)
                spent["restored"].append(restored_spent_s)
                spent["read"].append(read_spent_s)
    finally:
        host.unlink()
        host.close()
        for part in (buffers, threads, backend):
            part.close()
    medians = {f"{name}_ms": statistics.median(seconds) * 1e3 for name, seconds in taken.items()}
    medians |= {f"{name}_processor_ms": statistics.median(seconds) * 1e3 for name, seconds in spent.items()}
    share = statistics.median(read / restored for read, restored in zip(taken["read"], taken["restored"], strict=True))
    return medians | {"share_of_range_reads": share}


async def _nothing() -> None:
    """A fetch reports to nobody."""


async def _none_is(keys: list[ChunkKey]) -> None:
    raise AssertionError(f"{keys} are bad")


def measure(folder: Path, rounds: int, count: int, seed: int) -> dict[str, Any]:
    """Both, at each latency."""
    results: dict[str, Any] = {
        "upload_chunk_bytes": blob_nbytes(SMALL),
        "upload_chunks": count,
        "prefix_chunk_bytes": blob_nbytes(PREFIX),
        "prefix_chunks": PREFIX_CHUNKS,
    }
    for latency_ms in LATENCIES_MS:
        with far_store(latency_ms) as config, tempfile.TemporaryDirectory(dir=folder) as files:
            uploaded = asyncio.run(upload(config, Path(files), count, seed))
            results[f"at_{latency_ms}_ms"] = uploaded | asyncio.run(restore(config, rounds, seed))
    for latency_ms in LATENCIES_MS:
        with tempfile.TemporaryDirectory(dir=folder) as files, far_store(latency_ms, Path(files)) as config:
            results[f"at_{latency_ms}_ms"]["over_tls"] = asyncio.run(restore(config, rounds, seed))
    return results | {"reached": reached(results)}


def reached(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """What of the targets was measured, as ratios."""
    slow = results["at_50_ms"]
    found: dict[str, dict[str, float]] = {
        f"uploads_over_{UPLOADS_PER_S}_chunks_a_second_at_50_ms": {
            "ratio": slow["found_chunks_per_s"] / UPLOADS_PER_S,
            "target": 1.0,
        }
    }
    for latency_ms in LATENCIES_MS:
        row = results[f"at_{latency_ms}_ms"]
        for name, share in {
            "": row["share_of_range_reads"],
            "_over_tls": row["over_tls"]["share_of_range_reads"],
        }.items():
            key = f"restoring_over_range_reads_at_{latency_ms}_ms{name}"
            found[key] = {"ratio": share, "target": SHARE_OF_RANGE_READS}
    return found


def main() -> None:
    parser = results_file.arguments(__doc__, "--seed", "--out")
    parser.add_argument("--dir", type=Path, default=Path(), help="a directory on the disk to upload from")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--chunks", type=int, default=1024, help="chunks that are uploaded")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    logs.configure("bench", "store_latency", level="error")
    with tempfile.TemporaryDirectory(dir=options.dir, prefix=".store-latency-") as folder:
        results = measure(Path(folder), options.rounds, options.chunks, options.seed)
    path = results_file.write("store_latency", {"rounds": options.rounds} | results, seed=options.seed, out=options.out)
    if options.json:
        print(json.dumps(results, indent=2))
        return
    for latency_ms in LATENCIES_MS:
        row = results[f"at_{latency_ms}_ms"]
        print(
            f"{latency_ms:3} ms: uploads {row['found_chunks_per_s']:.0f}/s found, "
            f"{row['saved_chunks_per_s']:.0f}/s saved, deletions {row['deleted_chunks_per_s']:.0f}/s; "
            f"{PREFIX_CHUNKS} chunks restored in {row['restored_ms']:.0f} ms, read in {row['read_ms']:.0f} ms: "
            f"{row['share_of_range_reads']:.0%}, {row['over_tls']['share_of_range_reads']:.0%} over TLS"
        )
    print("->", path)


if __name__ == "__main__":
    main()
