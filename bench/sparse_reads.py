"""What does reading scattered tokens of a prefix from the disk cost, beside reading all of it?

Copies of a prefix that can be read in part (4,096 tokens of an 8B Llama: 32 layers, 8 KV heads of 128, bfloat16) lie in
a directory, and every layer is read once with a share of its tokens, chosen at random: K and V of all heads, verified.
Twice, in turns: each part by a call of its own, and with the gaps that cost less than another call
(``read_plan.gap_worth_reading``). Counted are reads and bytes; medians are given of the time and of the processor time
of this process.

``python -m bench.sparse_reads [--dir DIR] [--layers 32] [--rounds 5] [--json]``
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench import results_file
from bench.chunk_chains import random_chain
from services.storage.backends import ChunkEntry, ChunkKey
from services.storage.backends.disk import DiskBackend
from services.storage.backends.file_calls import FileCalls
from services.storage.buffers import Buffers
from services.storage.chunk_format import payload_view, read_header
from services.storage.chunk_keys import ChunkKeys, NoCipher
from services.storage.disk_tier import DiskTier
from services.storage.io_threads import IoThreads
from services.storage.sparse.chunk_turns import ChunkTurns
from services.storage.sparse.format import SparseHeader
from services.storage.sparse.layout import SparseLayout
from services.storage.sparse.making import complete, copy_pages
from services.storage.sparse.opened_heads import OpenedHeads
from services.storage.sparse.read_plan import gap_worth_reading, region_bytes
from services.storage.sparse.reader import SparseReader
from services.storage.staging import Staging
from shared import logs
from shared.disk_speed import measure_disk
from shared.messages.base import pack_int32
from shared.messages.pools import KvGeometry
from shared.messages.sparse_reads import ReadSparse

TOKENS = 4096
SHARES = (0.02, 0.1, 0.25, 0.5, 1.0)
THREADS = 8  # A storage's default.
TIMEOUT_S = 60.0


class CountedCalls(FileCalls):
    """Counts reads."""

    def __init__(self) -> None:
        self.reads = 0

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        self.reads += 1
        return super().read(fd, into, offset)


def write_copies(backend: DiskBackend, layout: SparseLayout, seed: int) -> list[ChunkKey]:
    """Copies of the chunks of one prefix, in order."""
    keys, blob = [], memoryview(bytearray(layout.blob_bytes(is_sealed=False)))
    mapping = np.arange(layout.tokens, dtype=np.uint32)
    for place, (_, _, chunk) in enumerate(
        random_chain(layout.geometry, np.random.default_rng(seed), TOKENS // layout.tokens)
    ):
        header = SparseHeader.of(read_header(chunk), layout, cipher=NoCipher())
        copy_pages(payload_view(chunk, layout.geometry), blob, layout, is_sealed=False)
        complete(blob, header, mapping, NoCipher())
        key = layout.key(header.namespace, header.identity)
        backend.put(key, blob, stripe=place, timeout_s=TIMEOUT_S)
        keys.append(key)
    return keys


async def measure(folder: Path, layers: int, rounds: int, seed: int) -> dict[str, Any]:
    """Figures by share of the tokens and by how gaps are read."""
    disk_bytes_per_s = measure_disk(folder).read_bytes_per_s
    layout = SparseLayout.of(KvGeometry(layers=layers, kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16"))
    calls, threads = CountedCalls(), IoThreads(THREADS)
    backend = DiskBackend([str(folder)], calls=calls)
    disk = DiskTier(backend, 2**40, threads)
    region = max(region_bytes(layout), layout.header_bytes(is_sealed=False))
    buffers = Buffers(Staging(THREADS * region, region))
    keys = write_copies(backend, layout, seed)
    disk.found([ChunkEntry(key, layout.blob_bytes(is_sealed=False)) for key in keys])
    # Events are of copies that turn out to be bad: there are none.
    parts: dict[str, Any] = {"turns": ChunkTurns(), "heads": OpenedHeads(), "keys": ChunkKeys(None), "events": None}
    gaps = {"alone": 0, "with_gaps": gap_worth_reading(disk_bytes_per_s)}
    readers = {
        name: SparseReader(layout, disk, buffers=buffers, at_once=THREADS, gap_bytes=gap, **parts)
        for name, gap in gaps.items()
    }
    into, random = memoryview(bytearray(2 * TOKENS * layout.row_bytes)), np.random.default_rng(seed)
    results: dict[str, Any] = {"disk_bytes_per_s": disk_bytes_per_s, "gap_bytes": gaps["with_gaps"]}
    try:
        for share in SHARES:
            count = round(share * TOKENS)
            chosen = [np.sort(random.choice(TOKENS, count, replace=False)) for _ in range(layers)]
            reads = [_call(keys, layer, tokens, layout) for layer, tokens in enumerate(chosen)]
            rows: dict[str, list[dict[str, float]]] = {name: [] for name in readers}
            for turn in range(rounds + 1):
                for name, reader in readers.items():
                    row = await _round(reader, reads, calls, into)
                    if turn:  # The first one touches memory and reads tables.
                        rows[name].append(row)
            results[f"{share:.0%}"] = {
                name: {figure: statistics.median(row[figure] for row in found) for figure in found[0]}
                for name, found in rows.items()
            }
    finally:
        for part in (buffers, threads, backend):
            part.close()
    return results


def _call(keys: list[ChunkKey], layer: int, tokens: np.ndarray[Any, Any], layout: SparseLayout) -> ReadSparse:
    return ReadSparse(
        namespace=keys[0].namespace,
        depth=0,
        chunks=b"".join(key.identity for key in keys),
        layer=layer,
        part="kv",
        buffer="bench",
        offset=0,
        nbytes=2 * len(tokens) * layout.row_bytes,
        tokens=pack_int32(tokens.tolist()),
    )


async def _round(
    reader: SparseReader, reads: list[ReadSparse], calls: CountedCalls, into: memoryview
) -> dict[str, float]:
    """Every layer once, as a worker reads them: one after the other."""
    counted, nbytes = calls.reads, 0
    started_s, spent_s = time.perf_counter(), time.process_time()
    for read in reads:
        nbytes += await reader.read(read, into[: read.nbytes])
    return {
        "seconds": time.perf_counter() - started_s,
        "processor_seconds": time.process_time() - spent_s,
        "reads": calls.reads - counted,
        "disk_bytes": nbytes,
    }


def main() -> None:
    parser = results_file.arguments(__doc__, "--seed", "--out")
    parser.add_argument("--dir", type=Path, default=Path(), help="a directory on the disk to read from")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    logs.configure("bench", "sparse_reads", level="error")
    with tempfile.TemporaryDirectory(dir=options.dir, prefix=".sparse-reads-") as folder:
        results = asyncio.run(measure(Path(folder), options.layers, options.rounds, options.seed))
    results = {"layers": options.layers, "rounds": options.rounds, "tokens": TOKENS} | results
    path = results_file.write("sparse_reads", results, seed=options.seed, out=options.out)
    if options.json:
        print(json.dumps(results, indent=2))
        return
    for share in SHARES:
        for name, row in results[f"{share:.0%}"].items():
            print(
                f"{share:5.0%} of the tokens, {name:9}: {row['reads']:6.0f} reads of {row['disk_bytes'] / 1e6:6.1f} MB "
                f"in {row['seconds'] * 1e3:5.0f} ms, {row['processor_seconds'] * 1e3:5.0f} ms of the processor"
            )
    print("->", path)


if __name__ == "__main__":
    main()
