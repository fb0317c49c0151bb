"""TTFT of one shared prefix by where it is found: device, host, another node, disk, object store, or nowhere.

A cell of two nodes on this machine, every process real (:mod:`bench.node_cell`). Node *a* computes documents and keeps
them in host memory by leases; then its worker ends. Node *b* answers all that is timed. It is asked about *a*'s
documents, which it has nowhere itself, and then about its own, each of which is computed and then found on one tier
after another: tiers above are emptied by an order before each question. So what is measured is one load and the
computation of the question. Host memory of *a* is read over TCP, between network namespaces where the machine
allows them. The object store is in memory, in a process of its own, and answers each request 5 or 50 ms late.

Beside it stands what the link allows: the time that plain sockets take for a document's bytes between the same nodes
(:mod:`bench.raw_link`), with one stream or two, whichever is faster, added to the TTFT from one's own host memory.

A document that nothing but *a*'s disk has is asked about once, and "served" says whether it was found.

``python -m bench.ttft_ladder [--repeats 7] [--tokens 4096] [--dtype float32] [--directory DIR] [--out FILE]``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from bench import results_file
from bench.asking import ask_one
from bench.emptying import empty, rest
from bench.make_model import make_model
from bench.node_cell import NodeCell
from shared.bus.protocol import Bus
from thermocline.client import Answer, served_model

VOCABULARY = 16_000
TOKEN_BYTES = {"float32": 24_576, "bfloat16": 12_288}
QUESTION_TOKENS = 32
LATENCIES_MS = (5, 50)
NEIGHBOUR, NEIGHBOUR_DISK = "neighbour", "neighbour_disk"
RUNGS = {
    "recomputed": "nowhere",
    "device": "device memory",
    "host": "own host memory",
    NEIGHBOUR: "host memory of another node, over TCP",
    "disk": "own disk",
    NEIGHBOUR_DISK: "disk of another node",
    **{f"remote_{latency_ms}_ms": f"object store, {latency_ms} ms away" for latency_ms in LATENCIES_MS},
}
"""Where the prefix is, in words, by the name of a rung."""

SOURCES = {name: "remote" for name in RUNGS if name.startswith("remote")}
"""What the answer's usage says of a rung, where it has another name there."""

EMPTIED: dict[str, tuple[str, ...]] = {
    "device": (),
    "host": ("device",),
    "disk": ("device", "host"),
    **{name: ("device", "host", "disk") for name in RUNGS if name.startswith("remote")},
}
"""What is emptied before the question that finds *b*'s document on a rung."""

MOST_OF_HOST = 1.5
LEAST_OF_RECOMPUTED = 5.0
"""Targets: the neighbour's host memory over one's own, and computing over the neighbour's host memory."""


class Store:
    """The object store's process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.port = self._line()

    def answer_after(self, latency_ms: int) -> None:
        """Set how late it answers from now on."""
        assert self._process.stdin is not None
        print(latency_ms, file=self._process.stdin, flush=True)
        self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def object_store(host: str) -> Iterator[Store]:
    """A store at an address of this machine."""
    command = [sys.executable, "-m", "bench.store_server", f"--host={host}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        try:
            yield Store(process)
        finally:
            process.stdin.close()


class Ladder:
    """Asks, and sees to it that what is found was where it should be."""

    def __init__(
        self, cell: NodeCell, bus: Bus, store: Store, client: httpx.AsyncClient, options: argparse.Namespace
    ) -> None:
        self._cell, self._bus, self._store, self._client = cell, bus, store, client
        self._tokens = options.tokens
        self._rng = random.Random(options.seed)
        self._model = ""
        self._kept = [self._fresh(self._tokens) for _ in range(options.repeats + 1)]
        self._on_disk = [self._fresh(self._tokens) for _ in range(options.repeats)]
        self.times: dict[str, list[float]] = {name: [] for name in RUNGS}

    async def fill(self) -> None:
        """Have node *a* compute documents, which its host memory keeps, and end its worker."""
        await self._cell.ready(self._bus, ("worker-a",))
        self._model = (await served_model(self._client))["id"]
        for document in self._kept:
            await self._ask(document, prompt_cache_retention="24h")
        for document in self._on_disk:
            await self._ask(document)
        status = await rest(self._bus)
        if status.cache_leases != len(self._kept):
            raise SystemExit(f"{status.cache_leases} of {len(self._kept)} documents are kept by leases")
        self._cell.kill("worker-a")

    async def move(self) -> None:
        """Ask node *b* from now on, and make its connection to *a*."""
        await self._cell.ready(self._bus, ("worker-b",))
        await empty(self._bus, ("device", "host", "remote"))
        await self._ask(self._fresh(512))
        await self._lent(self._kept.pop())

    async def measure(self) -> None:
        """Go once up and down the ladder for each of the documents, first over those of node *a*.

        An order that empties disks empties *a*'s, too.
        """
        self._store.answer_after(LATENCIES_MS[0])
        for kept, on_disk in zip(self._kept, self._on_disk, strict=True):
            # A lease keeps copies in host memory; other documents then are on the node's disk alone.
            await empty(self._bus, ("device", "host"))
            self.times[NEIGHBOUR].append((await self._lent(kept)).ttft_s * 1e3)
            self.times[NEIGHBOUR_DISK].append((await self._lent(on_disk)).ttft_s * 1e3)
        for _ in self.times[NEIGHBOUR]:
            self._store.answer_after(LATENCIES_MS[0])
            own = self._fresh(self._tokens)
            for name in RUNGS:
                if name in (NEIGHBOUR, NEIGHBOUR_DISK):
                    continue
                if name in EMPTIED:
                    await empty(self._bus, EMPTIED[name])
                if name.startswith("remote"):
                    self._store.answer_after(int(name.split("_")[1]))
                answer = await self._ask(own)
                if answer.source != SOURCES.get(name, name):
                    raise SystemExit(f"wanted {name}, got {answer}")
                self.times[name].append(answer.ttft_s * 1e3)

    async def _lent(self, document: list[int]) -> Answer:
        before = (await rest(self._bus)).counters.get("fetched_tokens_lent", 0)
        answer = await self._ask(document)
        lent = (await rest(self._bus)).counters.get("fetched_tokens_lent", 0) - before
        if lent != self._tokens:
            raise SystemExit(f"{lent} of {self._tokens} tokens were lent: {answer}")
        return answer

    async def _ask(self, document: list[int], **extra: Any) -> Answer:
        answer = await ask_one(self._client, self._model, document + self._fresh(QUESTION_TOKENS), **extra)
        await rest(self._bus)
        return answer

    def _fresh(self, length: int) -> list[int]:
        return [self._rng.randrange(8, VOCABULARY) for _ in range(length)]


def report(times: dict[str, list[float]], raw_ms: dict[int, list[float]]) -> dict[str, Any]:
    """Median TTFT in ms by rung, quartiles, and how many times faster than computing; beside them the targets.

    ``raw_ms`` are times of a document's bytes alone between the nodes, by number of streams.
    """
    computed = statistics.median(times["recomputed"])
    rungs: dict[str, Any] = {}
    for name, values in times.items():
        rungs[name] = {"where": RUNGS[name], "is_served": bool(values)}
        if values:
            middle = statistics.median(values)
            low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
            rungs[name] |= {"ttft_ms": middle, "quartiles_ms": [low, high], "speedup": computed / middle}
    near, own = rungs[NEIGHBOUR]["ttft_ms"], rungs["host"]["ttft_ms"]
    raw = min(statistics.median(each) for each in raw_ms.values())
    return {
        "by_tier": rungs,
        "raw_link_ms": raw,
        "limit_of_neighbour_over_host": (own + raw) / own,
        "neighbour_over_host": near / own,
        "target_neighbour_over_host": MOST_OF_HOST,
        "recomputed_over_neighbour": computed / near,
        "target_recomputed_over_neighbour": LEAST_OF_RECOMPUTED,
    }


async def climb(cell: NodeCell, store: Store, options: argparse.Namespace) -> dict[str, list[float]]:
    """Start the cell and measure; TTFTs in ms by rung."""
    token_bytes = TOKEN_BYTES[options.dtype]
    storage = {
        "share": "nixl",
        "remote": "s3://bench/store",
        "host_kv_bytes": (options.repeats + 6) * (options.tokens + 512) * token_bytes,
        "disk_kv_bytes": 8 * 2**30,
        "hidden_bytes": 0,
    }
    # Write through to every tier; a whole wait, so that a slow tier shows as slow and not as recomputed.
    scheduler = {"host_writes": "through", "prefetch_wait": "full", "hidden_form": "off", "pin_fraction": 0.9}
    leased = (options.repeats + 2) * (options.tokens + 512)
    bus = await cell.start(scheduler=scheduler, gateway={"max_leased_tokens": leased})
    worker = {"dtype": options.dtype, "device_kv_bytes": 2 * (options.tokens + 512) * token_bytes}
    worker["threads"] = os.cpu_count() or 1
    async with httpx.AsyncClient(base_url=cell.base_url, timeout=300, trust_env=False) as client:
        ladder = Ladder(cell, bus, store, client, options)
        for node, follow in (("a", ladder.fill), ("b", ladder.move)):
            disk = Path(options.folder) / f"disk-{node}"
            disk.mkdir()
            cell.start_storage(node, disk_dir=disk, **storage)
            cell.start_worker(node, **worker)
            await follow()
        await ladder.measure()
    await bus.close()
    return ladder.times


def main() -> None:
    parser = results_file.arguments(__doc__, "--seed", "--out")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dtype", choices=tuple(TOKEN_BYTES), default="float32")
    parser.add_argument("--directory", default="", help="where the disk tiers lie; default: temporary")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory or None) as folder:
        options.folder = folder
        model = make_model(Path(folder) / "llama-88m", seed=options.seed)
        environ = {"UCX_TLS": "tcp", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
        environ |= {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
        with NodeCell(Path(folder), model, ("a", "b"), environ) as cell, object_store(cell.host) as store:
            cell.environ["AWS_ENDPOINT_URL"] = f"http://{cell.host}:{store.port}"
            times = asyncio.run(climb(cell, store, options))
            # The processes of both nodes are idle, as they are while a document is lent but for the two storages.
            nbytes = options.tokens * TOKEN_BYTES[options.dtype]
            raw = cell.raw_times_s("a", "b", nbytes, options.repeats)
            network = cell.network
    results = report(times, {streams: [each * 1e3 for each in all_s] for streams, all_s in raw.items()})
    for name, row in results["by_tier"].items():
        said = f"{row['ttft_ms']:>9.1f} ms   {row['speedup']:>6.1f}x" if row["is_served"] else "not served"
        print(f"{name:<16} {said}")
    print(json.dumps({name: value for name, value in results.items() if name != "by_tier"}))
    about = {"tokens": options.tokens, "question_tokens": QUESTION_TOKENS, "repeats": options.repeats}
    about |= {"dtype": options.dtype, "network": network}
    print(results_file.write("ttft_ladder", about | results, seed=options.seed, out=options.out))


if __name__ == "__main__":
    main()
