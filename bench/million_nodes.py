"""A scheduler's state with a tree of about a million nodes, for measurements of the core.

A fast builder: it uses the functions that insertion uses (``add_child``, ``split_node``, ``give_device``,
``node_inserted``, pages from the worker's pool), but knows where each sequence belongs and does not match it first.
Pools, policies and the hotness filter are therefore what they would be; ``check_invariants`` holds. What the nodes
look like, at page size 16:

* half are tails of 20 to 416 tokens behind shared documents of 1k to 16k tokens; one in fifty forks inside the
  document, which splits it;
* four in ten are turns of chats, of 32 to 480 tokens each, twelve to a chat, below system prompts of 256 tokens;
* one in ten is a prompt of a single page.

Every second node has a copy in host memory. Tokens are random numbers below Llama 3's vocabulary.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Literal

import numpy as np

from services.scheduler import core
from services.scheduler.core.cache.hotness.tracking import node_inserted
from services.scheduler.core.cache.prefix_tree import Node, add_child, page_count, root_of
from services.scheduler.core.cache.residency import give_device, give_host, host_pool, split_node
from services.scheduler.core.state import CellState, Worker
from services.scheduler.core.step import Step
from shared.ids import namespace_digest
from shared.messages.cell_events import CellConfig, CellConfigured
from shared.messages.pools import KvGeometry, PoolHandle
from shared.messages.requests import SamplingParams, SubmitRequest
from shared.messages.storage_events import HostPoolCreated, StorageJoined
from shared.messages.worker_events import WorkerJoined

PAGE_SIZE = 16
VOCABULARY = 128_256
NAMESPACE = namespace_digest("llama-3.1-8b")
GEOMETRY = KvGeometry(layers=32, kv_heads=8, head_dim=128, page_size=PAGE_SIZE, dtype="bfloat16")
KV_BYTES_PER_TOKEN = GEOMETRY.page_bytes // PAGE_SIZE
MAX_CONTEXT = 262_144
START_NS = 1_700_000_000 * 10**9
HOST = "storage-0"

_DOCUMENT_TAILS = 250
_DOCUMENTS_KEPT = 64
_SYSTEM_PROMPTS = 4  # Of each worker.
_CHAT_TURNS = 12
_SOURCE_TOKENS = 1 << 22


@dataclass
class MillionNodes:
    """A state and the means to go on with it: the last sequence number and the source of tokens."""

    state: CellState
    random: np.random.Generator
    seq: int = 0
    documents: list[bytes] = field(default_factory=list)  # Tokens of some documents that have tails.
    _source: bytes = b""
    _used: int = 0

    def turn(self) -> Step:
        """The next input's turn, for calls of the core's functions outside ``step``."""
        self.seq += 1
        self.state.last_seq, self.state.now_ns = self.seq, START_NS + self.seq * 1_000_000
        return Step(self.state, self.seq, self.state.now_ns)

    def fold(self, message: object) -> list[core.Output]:
        """Fold one input."""
        self.seq += 1
        return core.step(self.state, core.Stamped(self.seq, START_NS + self.seq * 1_000_000, message))  # type: ignore[arg-type]

    def tokens(self, count: int) -> bytes:
        """So many random tokens, packed."""
        end = self._used + count * 4
        if end > len(self._source):
            size = max(count, _SOURCE_TOKENS)
            self._source = self.random.integers(0, VOCABULARY, size, dtype=np.int32).tobytes()
            end = count * 4
        self._used = end
        return self._source[end - count * 4 : end]

    def forget_source(self) -> None:
        """Let go of the tokens that are drawn ahead."""
        self._source, self._used = b"", 0

    def grow(self, worker: Worker, parent: Node, tokens: bytes) -> Node:
        """Put the whole pages of ``tokens`` under ``parent``, on this worker's device."""
        page = self.state.tree.page_token_bytes
        node = add_child(self.state.tree, parent, tokens[: len(tokens) // page * page])
        pages = worker.pool.allocate(page_count(self.state.tree, node))
        if pages is None:
            raise SystemExit(f"the pool of {worker.worker_id} is too small for the tree")
        turn = self.turn()
        node_inserted(turn, node)
        node.last_use = turn.seq
        give_device(self.state, node, worker, pages)
        return node

    def root(self) -> Node:
        """The root of the one namespace."""
        return root_of(self.state.tree, NAMESPACE)


def resident_bytes() -> int:
    """Resident memory of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def ask(request_id: str, prompt: bytes, max_tokens: int = 16) -> SubmitRequest:
    """A request for these tokens."""
    return SubmitRequest(
        request_id=request_id,
        gateway_id="gateway-0",
        namespace=NAMESPACE,
        prompt=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
    )


def empty_cell(*, seed: int, config: CellConfig, workers: int, device_pages: int, host_pages: int) -> MillionNodes:
    """A cell of ``workers`` workers and one storage with empty pools."""
    cell = MillionNodes(core.new_state(), np.random.default_rng(seed))
    cell.fold(CellConfigured(config=config))
    cell.fold(StorageJoined(storage_id=HOST, incarnation="one", node="node", host_bytes=host_pages))
    for number in range(workers):
        name = f"worker-{number}"
        handle = _handle(name, "layer_first", device_pages)
        cell.fold(
            WorkerJoined(
                worker_id=name, incarnation="one", node="node", model="llama", pool=handle, max_context=MAX_CONTEXT
            )
        )
    handle = _handle(HOST, "page_first", host_pages)
    cell.fold(HostPoolCreated(storage_id=HOST, incarnation="one", handle=handle))
    return cell


def _handle(name: str, layout: Literal["layer_first", "page_first"], pages: int) -> PoolHandle:
    return PoolHandle(
        kind="shm", layout=layout, name=name, nbytes=pages * GEOMETRY.page_bytes, pages=pages, geometry=GEOMETRY
    )


def million_nodes(*, nodes: int, seed: int, config: CellConfig, workers: int = 8) -> MillionNodes:
    """A cell whose tree has ``nodes`` nodes or a few more."""
    pages = nodes * 15 // workers + 100_000
    cell = empty_cell(seed=seed, config=config, workers=workers, device_pages=pages, host_pages=nodes * 10 + 100_000)
    owners = list(cell.state.workers.values())
    known = cell.state.tree.nodes
    kinds = [_documents(cell, owners), _chats(cell, owners), _single_pages(cell, owners)]
    shares = (0.5, 0.4, 0.1)
    added = [0, 0, 0]
    while len(known) < nodes:
        kind = min(range(3), key=lambda index: added[index] / shares[index])
        before = len(known)
        next(kinds[kind])
        added[kind] += len(known) - before
    _copy_to_host(cell)
    cell.forget_source()  # It is no part of the state, and 17 bytes a node of a million.
    return cell


def fill_pools(cell: MillionNodes, free_fraction: float) -> None:
    """Add nodes of 256 pages until no more than this part of any device pool is free."""
    for worker in cell.state.workers.values():
        while worker.pool.free > worker.pool.total * free_fraction:
            cell.grow(worker, cell.root(), cell.tokens(PAGE_SIZE * 256))


def _documents(cell: MillionNodes, owners: list[Worker]) -> Iterator[None]:
    for number in count():
        worker = owners[number % len(owners)]
        document = cell.tokens(PAGE_SIZE * int(cell.random.integers(64, 1024)))
        if number < _DOCUMENTS_KEPT:
            cell.documents.append(document)
        last = cell.grow(worker, cell.root(), document)
        for _ in range(_DOCUMENT_TAILS):
            parent = last
            if cell.random.random() < 0.02 and page_count(cell.state.tree, last) > 1:
                parent = split_node(cell.state, last, int(cell.random.integers(1, page_count(cell.state.tree, last))))
            cell.grow(worker, parent, cell.tokens(PAGE_SIZE + int(cell.random.integers(4, 400))))
            yield


def _chats(cell: MillionNodes, owners: list[Worker]) -> Iterator[None]:
    systems = [
        cell.grow(worker, cell.root(), cell.tokens(PAGE_SIZE * 16)) for worker in owners for _ in range(_SYSTEM_PROMPTS)
    ]
    for number in count():
        last = systems[number % len(systems)]
        for _ in range(_CHAT_TURNS):
            last = cell.grow(
                owners[number % len(systems) // _SYSTEM_PROMPTS], last, cell.tokens(int(cell.random.integers(32, 480)))
            )
            yield


def _single_pages(cell: MillionNodes, owners: list[Worker]) -> Iterator[None]:
    for number in count():
        cell.grow(owners[number % len(owners)], cell.root(), cell.tokens(PAGE_SIZE))
        yield


def _copy_to_host(cell: MillionNodes) -> None:
    """Give every second node a copy in host memory."""
    storage = cell.state.storages[HOST]
    pool = host_pool(storage)
    for index, node in enumerate(list(cell.state.tree.nodes.values())):
        if index % 2 and node.parent:
            pages = pool.allocate(page_count(cell.state.tree, node))
            if pages is not None:
                give_host(cell.state, node, storage, pages)
