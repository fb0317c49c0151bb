"""How fast and how large the scheduler's core is with a tree of one million nodes.

Matching, insertion and splitting of prompts of 131,072 tokens; eviction by each policy; ``step`` with 10,000 queued
requests while the pools are full; snapshots; the loss of a worker and of a storage; bytes of metadata per node and
per token, against the KV that they describe (Llama-3.1-8B in bfloat16, pages of 16 tokens).

One process, no broker, garbage collector set as in the scheduler. Times are of one call each, by the wall's clock and
in processor time (losses, too; of snapshots only the latter). "Cold" calls come after
64 MiB of other memory were read, which is more than a core's caches hold. Sizes are growth of resident memory.

``python -m bench.core_speed [--nodes 1000000] [--queued 10000]``
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import services.scheduler.policies  # noqa: F401  To be measured.
from bench import core_steps, results_file
from bench.core_times import Times
from bench.million_nodes import (
    HOST,
    KV_BYTES_PER_TOKEN,
    NAMESPACE,
    PAGE_SIZE,
    MillionNodes,
    ask,
    empty_cell,
    million_nodes,
    resident_bytes,
)
from bench.node_account import account
from services.scheduler import core
from services.scheduler.apart import Apart
from services.scheduler.core.cache.eviction import POLICIES
from services.scheduler.core.cache.eviction_orders import renew_orders
from services.scheduler.core.cache.insertion import publish_final
from services.scheduler.core.cache.prefix_match import match_again, match_prefix
from services.scheduler.core.cache.residency import drop_device, split_node
from services.scheduler.core.cache.victims import take_device_victim
from services.scheduler.core.request import Request
from services.scheduler.core.state import Worker
from services.scheduler.heap import trim_heap
from shared.messages.cell_events import CellConfig, CellConfigured, FlushCache, StorageLost, TimerFired, WorkerLost

PROMPT_TOKENS = 131_072
PROMPT_PAGES = PROMPT_TOKENS // PAGE_SIZE
SHAPES = {
    "in 4 nodes": (4, 4),
    "in 100 nodes": (100, 4),
    "in 500 nodes": (500, 2),
    "in 8192 nodes of a page": (PROMPT_PAGES, 2),
}
"""Into how many nodes a known prompt is cut, and how many such prompts there are."""

EVICTED = 1000
_LONGEST_ENCODING_S = 600.0
_COPIES = 5
_OTHER_MEMORY = np.ones(8 << 20, dtype=np.int64)


def timed(calls: Iterable[Callable[[], object]], *, is_cold: bool = False) -> dict[str, float]:
    """Times of these calls."""
    times = Times()
    for call in calls:
        if is_cold:
            int(_OTHER_MEMORY.sum())
        times.take(call)
    return times.summary()


def known_prompt(cell: MillionNodes, nodes: int, number: int) -> bytes:
    """A prompt of PROMPT_TOKENS that the tree has, in so many nodes of equal length or nearly."""
    workers = list(cell.state.workers.values())
    worker = workers[number % len(workers)]
    tokens = cell.tokens(PROMPT_TOKENS)
    parent = cell.root()
    cuts = [round(PROMPT_PAGES * index / nodes) * PAGE_SIZE * 4 for index in range(nodes + 1)]
    for start, end in pairwise(cuts):
        parent = cell.grow(worker, parent, tokens[start:end])
    return tokens


def measure_match(cell: MillionNodes) -> dict[str, Any]:
    """Known prompts of each shape, one that leaves the tree half way, and an unknown one."""
    tree = cell.state.tree
    found: dict[str, Any] = {}

    def match(prompt: bytes, pages: int) -> Callable[[], object]:
        def call() -> None:
            path = match_prefix(tree, NAMESPACE, prompt, PROMPT_PAGES)
            if sum(size for _, size in path) != pages:
                raise SystemExit("a match found another number of pages than it should have")

        return call

    for shape, (nodes, prompts) in SHAPES.items():
        known = [known_prompt(cell, nodes, number) for number in range(prompts)]
        calls = [match(prompt, PROMPT_PAGES) for prompt in known]
        found[shape] = {"cold": timed(calls * 3, is_cold=True), "warm": timed([calls[0]] * 30)}
        deepest = match_prefix(tree, NAMESPACE, known[0], PROMPT_PAGES)[-1][0].id
        again = [lambda: match_again(tree, NAMESPACE, known[0], PROMPT_PAGES, deepest, PROMPT_TOKENS)] * 30  # noqa: B023
        found[shape]["again"] = timed(again)
        if nodes == 4:
            half = known[0][: PROMPT_TOKENS * 2] + cell.tokens(PROMPT_TOKENS // 2)
            found["half known"] = {"cold": timed([match(half, PROMPT_PAGES // 2)] * 10, is_cold=True)}
    found["unknown"] = {"cold": timed([match(cell.tokens(PROMPT_TOKENS), 0)] * 10, is_cold=True)}
    return found


def measure_insert(cell: MillionNodes) -> dict[str, Any]:
    """A finished prompt becomes one node; then it is cut in the middle; and allocations of the pages for it."""
    workers = list(cell.state.workers.values())
    allocations = {str(size): Times() for size in (64, 512, PROMPT_PAGES)}
    inserts, splits = Times(), Times()
    for worker in workers:
        tokens = cell.tokens(PROMPT_TOKENS)
        pages = b""
        for size in (64, 512, PROMPT_PAGES):
            worker.pool.release(pages)
            pages = allocations[str(size)].take(partial(worker.pool.allocate, size)) or b""
        turn = cell.turn()
        request = Request(ask("inserted", tokens), turn.seq, turn.time_ns, pages=pages)
        inserts.take(partial(publish_final, turn, request, worker, tokens, PROMPT_TOKENS))
        ((node, _),) = match_prefix(cell.state.tree, NAMESPACE, tokens, PROMPT_PAGES)
        splits.take(partial(split_node, cell.state, node, PROMPT_PAGES // 2))
    return {
        "insert": inserts.summary(),
        "split": splits.summary(),
        "allocate": {size: times.summary() for size, times in allocations.items()},
    }


def measure_evictions(nodes: int, seed: int) -> dict[str, Any]:
    """Name and drop EVICTED nodes with each policy, on a smaller tree that is built once."""
    cell = million_nodes(nodes=nodes, seed=seed, config=CellConfig())
    workers = list(cell.state.workers.values())
    found = {}
    for index, policy in enumerate(POLICIES):
        worker = workers[index % len(workers)]
        cell.state.policy = policy
        renew_orders(cell.state)
        cell.turn()

        def evict(worker: Worker = worker) -> None:
            node = take_device_victim(cell.state, worker.worker_id, {})
            if node is None:
                raise SystemExit("a policy named no victim")
            drop_device(cell.state, node, worker)

        found[policy] = timed([evict] * min(EVICTED, nodes // 100))
    return found


def measure_snapshot(cell: MillionNodes, folder: Path) -> dict[str, Any]:
    """Encode here and in a copy of this process; decode in another one, whose memory holds nothing else."""
    gc.collect()
    start = time.thread_time()
    encoded = core.encode_state(cell.state)
    encode_s = time.thread_time() - start
    size = len(encoded)
    path = folder / "snapshot"
    path.write_bytes(encoded)
    del encoded
    forks = Times()
    for _ in range(_COPIES):
        copy = forks.take(partial(Apart, partial(core.encode_state, cell.state)))
        if len(asyncio.run(copy.result(_LONGEST_ENCODING_S))) != size:
            raise SystemExit("a copy of this process encoded another state")
    answer = subprocess.run(
        [sys.executable, "-m", "bench.core_speed", "--decode", str(path)], capture_output=True, text=True, check=True
    )
    decode_s, resident = answer.stdout.split()
    path.unlink()
    return {
        "encode_s": round(encode_s, 2),
        "fork": forks.summary(),
        "encoded_bytes": size,
        "decode_s": float(decode_s),
        "decoded_resident_bytes": int(resident),
    }


def decode(path: Path) -> None:
    """Print the processor seconds and the resident bytes that a decoded snapshot takes."""
    data = path.read_bytes()
    before = resident_bytes()
    start = time.thread_time()
    state = core.decode_state(data)
    seconds = time.thread_time() - start
    trim_heap()
    print(round(seconds, 2), resident_bytes() - before)
    del state


def measure_single_pages(nodes: int, seed: int) -> float:
    """Bytes a node, its policy's share included, where every node is one page: the worst case."""
    config = CellConfig()
    cell = empty_cell(seed=seed, config=config, workers=1, device_pages=nodes * 2, host_pages=1)
    (worker,) = cell.state.workers.values()
    parents = [cell.root()]
    cell.tokens(1)
    trim_heap()
    before = resident_bytes()
    for index in range(nodes):
        parents.append(cell.grow(worker, parents[index // 2], cell.tokens(PAGE_SIZE)))
    del parents
    trim_heap()
    return (resident_bytes() - before) / nodes


def measure_losses(cell: MillionNodes) -> dict[str, Any]:
    """A worker with its share of the nodes is lost, then the storage with half of the others; then a flush."""
    worker = next(iter(cell.state.workers.values()))
    held = sum(worker.worker_id in node.device for node in cell.state.tree.nodes.values())
    lost = _in_slices(cell, WorkerLost(worker_id=worker.worker_id, incarnation=worker.incarnation))
    copied = sum(HOST in node.host for node in cell.state.tree.nodes.values())
    storage = _in_slices(cell, StorageLost(storage_id=HOST, incarnation="one"))
    flushed = len(cell.state.tree.nodes)
    flush = _in_slices(cell, FlushCache(call_id="flush"))
    return {
        "worker": {"nodes": held} | lost,
        "storage": {"nodes": copied} | storage,
        "flush": {"nodes": flushed} | flush,
    }


def _change(policy: str) -> CellConfigured:
    return CellConfigured(config=msgspec.structs.replace(core_steps.CONFIG, policy=policy))


def _in_slices(cell: MillionNodes, message: object) -> dict[str, float]:
    """Fold an input and the timers that go on with it: the longest step, and all of them together."""
    times = Times()
    times.take(partial(cell.fold, message))
    while due := cell.state.timers.keys() & {"strike", "flush", "renew"}:
        times.take(partial(cell.fold, TimerFired(timer_id=min(due))))
    while cell.state.retired:  # Any input lets go of one.
        times.take(partial(cell.fold, TimerFired(timer_id="none")))
    longest = times.summary()
    return {
        "steps": len(times.cpu),
        "ms": longest["max_ms"],
        "cpu_ms": longest["cpu_max_ms"],
        "all_cpu_ms": round(sum(times.cpu), 1),
    }


def measure(*, nodes: int, queued: int, seed: int) -> dict[str, Any]:
    """All of it; prints what it is at."""
    results: dict[str, Any] = {"page_size": PAGE_SIZE, "kv_bytes_per_token": KV_BYTES_PER_TOKEN}

    def say(name: str, value: Any) -> None:
        results[name] = value
        print(name, value, flush=True)

    say("bytes_per_single_page_node", round(measure_single_pages(nodes // 10, seed)))
    say("evictions", measure_evictions(nodes // 10, seed))
    trim_heap()  # What smaller trees left behind would be taken for this one's, or hide a part of it.
    before = resident_bytes()
    start = time.perf_counter()
    cell = million_nodes(nodes=nodes, seed=seed, config=core_steps.CONFIG)
    say("build_s", round(time.perf_counter() - start, 1))
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    tokens = sum(node.size for node in cell.state.tree.nodes.values())
    made = len(cell.state.tree.nodes)
    trim_heap()  # As before every snapshot.
    grown = resident_bytes() - before
    say("nodes", made)
    say("pages_per_node", round(tokens / PAGE_SIZE / made, 2))
    say("resident_bytes_per_node", round(grown / made))
    say("resident_bytes_per_token", round(grown / tokens, 2))
    say("kv_percent", round(grown / tokens / KV_BYTES_PER_TOKEN * 100, 4))
    say("account", account(cell.state, grown))
    with tempfile.TemporaryDirectory() as folder:
        snapshot = measure_snapshot(cell, Path(folder))
    say("snapshot", snapshot | {"decoded_bytes_per_node": round(snapshot["decoded_resident_bytes"] / made)})
    say("match", measure_match(cell))
    say("insert", measure_insert(cell))
    say("step", {name: times.summary() for name, times in core_steps.measure(cell, queued=queued).items()})
    say("renewals", {policy: _in_slices(cell, _change(policy)) for policy in ("lru", CellConfig().policy)})
    say("losses", measure_losses(cell))
    return results


def main() -> None:
    parser = results_file.arguments(__doc__, "--seed", "--out")
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--queued", type=int, default=10_000)
    parser.add_argument("--decode", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.decode is not None:
        decode(options.decode)
        return
    if options.nodes < 10_000 or options.queued < 1:
        parser.error("--nodes must be at least 10000 and --queued at least 1")
    results = measure(nodes=options.nodes, queued=options.queued, seed=options.seed)
    print(results_file.write("core_speed", results, seed=options.seed, out=options.out))


if __name__ == "__main__":
    main()
