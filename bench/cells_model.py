"""Several cells at the level of blocks, behind the router's own code: what :mod:`bench.cells` compares.

A cell is a cache of equal blocks that evicts by last use, and workers each of which computes one prompt at a time;
requests wait in one line. What an answer takes behind its prompt is time in which the request is in progress and no
work of the workers. Once a second each cell tells its load and the heads that its gateways have noted, by the gateways'
own code, and every router hears it. Left out: tiers, batches, the network, and placement among the workers of a cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from random import Random
from typing import Protocol

import xxhash

from bench.blocks import BlockRequest
from services.gateway.held_heads import HeldHeads
from services.gateway.prompt_heads import Asked, Head, next_depth
from services.gateway.router.cells import Cells
from services.gateway.router.choice import Rules
from shared.messages.cells import CellHeads, CellLoad

TOKEN_BYTES = 4
"""Of text, about."""

ANSWER_TOKEN_S = 0.03
REPORT_S = 1.0
WINDOW_S = 30.0
WORKERS_A_GATEWAY = 160


def heads_of(requests: Sequence[BlockRequest], block_tokens: int) -> Iterator[Head]:
    """The heads that prompts of these blocks would have: at each depth the last whole block above it."""
    block_bytes = block_tokens * TOKEN_BYTES
    depths: list[tuple[int, int]] = []  # Whole blocks and bytes, for blocks that no shallower depth has.
    depth = 0
    most = max(len(request.blocks) for request in requests)
    while not depths or depths[-1][0] < most:
        depth = next_depth(depth)
        blocks = depth // block_bytes
        if blocks and (not depths or blocks > depths[-1][0]):
            depths.append((blocks, depth))
    digest_of: dict[int, int] = {}
    for request in requests:
        digests, found = [], []
        for blocks, depth in depths:
            if blocks > len(request.blocks):
                break
            block = request.blocks[blocks - 1]
            digest = digest_of.get(block)
            if digest is None:
                digest = digest_of[block] = xxhash.xxh3_64_intdigest(block.to_bytes(8, "little"))
            digests.append(digest)
            found.append(depth)
        yield Head(tuple(digests), tuple(found), max(request.prompt_tokens * TOKEN_BYTES, found[-1] if found else 0))


class Chooser(Protocol):
    """Says which cell a request goes to; is told when it ends, and what cells tell."""

    def choose(self, number: int, head: Head, now_s: float) -> int: ...

    def ended(self, number: int, cell: int) -> None: ...

    def told(self, loads: Sequence[CellLoad], heads: Sequence[CellHeads], now_s: float) -> None: ...


class Routers:
    """The router's own code: routers that each have an even part of the requests and know nothing of another."""

    def __init__(self, cells: int, rules: Rules, *, routers: int = 2) -> None:
        self._names = [f"cell-{place}" for place in range(cells)]
        self._routers = [Cells(self._names, rules) for _ in range(routers)]
        self._place = {name: place for place, name in enumerate(self._names)}

    def choose(self, number: int, head: Head, now_s: float) -> int:
        router = self._routers[number % len(self._routers)]
        choice = router.choose(Asked(head))
        assert choice is not None
        name = choice.name
        router.begin(choice, head, now_s)
        return self._place[name]

    def ended(self, number: int, cell: int) -> None:
        self._routers[number % len(self._routers)].end(self._names[cell])

    def told(self, loads: Sequence[CellLoad], heads: Sequence[CellHeads], now_s: float) -> None:
        for router in self._routers:
            for told in heads:
                router.hear_heads(told, now_s)
            for load in loads:
                router.hear_load(load, now_s)
            router.sweep(now_s)


class Simple:
    """A baseline: ``round robin``, ``random``, ``least loaded``, ``least work``, or ``hashing`` of the first
    ``hashed_tokens``.

    What is in progress is known exactly and at once, for all routers together; so is the work that each request is,
    which :meth:`costs` says.
    """

    def __init__(self, kind: str, cells: int, *, seed: int, hashed_tokens: int = 1024) -> None:
        self._kind = kind
        self._busy = [0] * cells
        self._rng = Random(seed)
        self._hashed_bytes = hashed_tokens * TOKEN_BYTES
        self._work = [0] * cells
        self._tokens: Sequence[int] = ()

    def costs(self, tokens: Sequence[int]) -> Simple:
        """Work of each request, wherever it goes; ``least work`` needs it."""
        self._tokens = tokens
        return self

    def choose(self, number: int, head: Head, now_s: float) -> int:
        cells = len(self._busy)
        if self._kind == "round robin":
            place = number % cells
        elif self._kind == "least loaded":
            least = min(self._busy)
            place = self._rng.choice([each for each, busy in enumerate(self._busy) if busy == least])
        elif self._kind == "least work":
            place = min(range(cells), key=self._work.__getitem__)
            self._work[place] += self._tokens[number]
        elif self._kind == "hashing" and head.digests:
            within = [
                digest for digest, depth in zip(head.digests, head.depths, strict=True) if depth <= self._hashed_bytes
            ]
            digest = within[-1] if within else head.digests[0]
            place = min(range(cells), key=lambda each: xxhash.xxh3_64_intdigest(b"cell-%d" % each, seed=digest))
        else:
            place = self._rng.randrange(cells)
        self._busy[place] += 1
        return place

    def ended(self, number: int, cell: int) -> None:
        self._busy[cell] -= 1

    def told(self, loads: Sequence[CellLoad], heads: Sequence[CellHeads], now_s: float) -> None:
        """Nothing is learned."""


@dataclass(slots=True)
class ModelCell:
    """One cell. ``free_s`` is a heap of when each worker is free."""

    name: str
    workers: int
    blocks: int
    block_tokens: int
    tells: bool
    free_s: list[float] = field(default_factory=list)
    busy: int = 0
    work_s: float = 0.0
    cache: dict[int, None] = field(default_factory=dict)
    gateways: list[HeldHeads] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    asked: int = 0
    asked_tokens: list[int] = field(default_factory=list)
    found_tokens: int = 0
    unadmitted: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free_s = [0.0] * self.workers
        heapify(self.free_s)
        if self.tells:
            many = max(1, self.workers // WORKERS_A_GATEWAY)
            self.gateways = [HeldHeads() for _ in range(many)]
            self.numbers, self.asked_tokens = [-1] * many, [0] * many
            for gateway in self.gateways:
                gateway.bound(self.blocks * self.block_tokens)

    def ask(
        self, request: BlockRequest, head: Head, now_s: float, token_s: float, cached: int | None = None
    ) -> tuple[int, float]:
        """Cached tokens, which are ``cached`` where that is given, and when the prompt is computed."""
        if cached is None:
            cached = self._cache(request)
        work_s = (request.prompt_tokens - cached) * token_s
        start_s = max(now_s, heappop(self.free_s))
        heappush(self.free_s, start_s + work_s)
        self.busy += 1
        self.work_s += work_s
        if self.gateways:
            self.gateways[self.asked % len(self.gateways)].note(head, request.prompt_tokens, cached)
            self.asked_tokens[self.asked % len(self.gateways)] += request.prompt_tokens
            self.asked += 1
            heappush(self.unadmitted, (start_s, cached))
        return cached, start_s + work_s

    def _cache(self, request: BlockRequest) -> int:
        """Tokens that are found; then all of the prompt is held."""
        hits = 0
        for block in request.blocks:
            if block not in self.cache:
                break
            hits += 1
        for block in reversed(request.blocks[: self.blocks]):
            self.cache.pop(block, None)
            self.cache[block] = None
        while len(self.cache) > self.blocks:
            del self.cache[next(iter(self.cache))]
        return min(hits * self.block_tokens, request.prompt_tokens)

    def tell(self, now_s: float) -> tuple[list[CellLoad], list[CellHeads]]:
        """What its gateways say after a second."""
        loads, heads = [], []
        while self.unadmitted and self.unadmitted[0][0] <= now_s:
            self.found_tokens += heappop(self.unadmitted)[1]
        for place, gateway in enumerate(self.gateways):
            added, removed = gateway.take_changes()
            is_first = self.numbers[place] < 0
            if added or removed or is_first:
                self.numbers[place] += 1
                heads.append(
                    CellHeads(
                        cell=self.name,
                        gateway=f"gateway-{place}",
                        incarnation="one",
                        number=self.numbers[place],
                        added=added,
                        removed=removed,
                        is_first=is_first,
                    )
                )
            loads.append(
                CellLoad(
                    cell=self.name,
                    gateway=f"gateway-{place}",
                    incarnation="one",
                    workers=self.workers,
                    running=self.busy,
                    heads_number=self.numbers[place],
                    asked_tokens=self.asked_tokens[place],
                    found_tokens=self.found_tokens,
                    token_bytes=TOKEN_BYTES,
                )
            )
        return loads, heads


@dataclass(frozen=True, slots=True)
class Run:
    """Figures of a run. ``imbalance`` is the busiest cell's work over the mean, less 1, of the whole run.

    ``imbalance_now`` is the same of requests in progress, looked at every WINDOW_S behind the first tenth: the sum of
    what the busiest cell had each time, over the sum of means.
    """

    hit_ratio: float
    imbalance: float
    imbalance_now: float
    wait_mean_s: float
    wait_p99_s: float
    told_bytes_per_s: float
    work_s: float


def found_by_one(requests: Sequence[BlockRequest], blocks: int, block_tokens: int) -> list[int]:
    """Tokens that one cell of so many blocks finds of each prompt."""
    cell = ModelCell("ideal", 1, blocks, block_tokens, tells=False)
    return [cell.ask(request, Head(), 0.0, 0.0)[0] for request in requests]


def simulate(
    requests: Sequence[BlockRequest],
    heads: Sequence[Head],
    chooser: Chooser,
    *,
    cells: int,
    workers: int,
    blocks: int,
    block_tokens: int,
    token_s: float,
    cached: Sequence[int] = (),
) -> Run:
    """``workers`` and ``blocks`` are of all cells together; each has an even part. ``token_s`` is a worker's speed.
    ``cached``, where given, is what is found of each prompt wherever it goes: then caches play no part.
    """
    tells = isinstance(chooser, Routers)
    made = [
        ModelCell(f"cell-{place}", workers // cells, max(1, blocks // cells), block_tokens, tells)
        for place in range(cells)
    ]
    ends: list[tuple[float, int, int]] = []
    waits: list[float] = []
    busiest = mean_busy = 0.0
    cached_tokens = prompt_tokens = told_bytes = 0
    first_s = requests[0].time_ns / 1e9
    next_report_s, next_window_s = first_s + REPORT_S, first_s + (requests[-1].time_ns / 1e9 - first_s) / 10
    for number, request, head in zip(count(), requests, heads, strict=False):
        now_s = request.time_ns / 1e9
        while ends and ends[0][0] <= now_s:
            _, earlier, place = heappop(ends)
            made[place].busy -= 1
            chooser.ended(earlier, place)
        while tells and next_report_s <= now_s:
            told = [cell.tell(next_report_s) for cell in made]
            changes = [each for _, some in told for each in some]
            told_bytes += sum(len(each.added) + len(each.removed) for each in changes)
            chooser.told([load for some, _ in told for load in some], changes, next_report_s)
            next_report_s += REPORT_S
        while next_window_s <= now_s:
            busiest += max(cell.busy for cell in made)
            mean_busy += sum(cell.busy for cell in made) / cells
            next_window_s += WINDOW_S
        place = chooser.choose(number, head, now_s)
        found_tokens, done_s = made[place].ask(request, head, now_s, token_s, cached[number] if cached else None)
        cached_tokens += found_tokens
        prompt_tokens += request.prompt_tokens
        waits.append(done_s - now_s)
        heappush(ends, (done_s + request.answer_tokens * ANSWER_TOKEN_S, number, place))
    work = [cell.work_s for cell in made]
    waits.sort()
    duration_s = max(1e-9, requests[-1].time_ns / 1e9 - first_s)
    return Run(
        hit_ratio=cached_tokens / prompt_tokens,
        imbalance=max(work) / (sum(work) / cells) - 1,
        imbalance_now=busiest / max(mean_busy, 1e-9) - 1,
        wait_mean_s=sum(waits) / len(waits),
        wait_p99_s=waits[int(0.99 * (len(waits) - 1))],
        told_bytes_per_s=told_bytes / duration_s,
        work_s=sum(work),
    )
