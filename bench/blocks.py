"""A cache of equal blocks under one eviction policy, of which only leaves can go: how policies are compared.

The policies are the scheduler's own, driven as its core drives them; what is left out is everything else: workers,
time, splits, lower tiers. One block is one node. A request reuses its longest resident prefix. Then room is made for
all that it lacks, before any of it is inserted, and no block of its own path is evicted for it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple

from bench.blocks_hotness import BlockHotness
from services.scheduler.core.cache.digests import mix
from services.scheduler.core.cache.eviction.policy import Moment, Policy
from services.scheduler.core.cache.holdings import written
from services.scheduler.core.cache.labels import NARROW_BYTES
from services.scheduler.core.cache.prefix_tree import Node
from shared.errors import InvalidRequest, InvariantViolated
from thermocline.trace.format import BLOCK_TOKENS, read_trace

ANSWER_TOKEN_NS = 30_000_000
"""From one token of an answer to the next, about what people are served with; traces do not say when answers end."""

_NO_BLOCK = -1


class BlockRequest(NamedTuple):
    """The blocks of a prompt by number, first one first. Two requests share a block where they share all before it.

    A request whose time is 0 has none: it has ended when the next one comes.
    """

    blocks: list[int]
    time_ns: int
    prompt_tokens: int
    answer_tokens: int = 0

    @property
    def end_ns(self) -> int:
        """When the last token of the answer is sampled, and so its length known."""
        return self.time_ns + self.answer_tokens * ANSWER_TOKEN_NS if self.time_ns else 0


class BlockRequests:
    """Numbers the blocks of requests whose parts are named by anything hashable, from the prompt's start."""

    def __init__(self, block_tokens: int = BLOCK_TOKENS) -> None:
        self.requests: list[BlockRequest] = []
        self._block_tokens = block_tokens
        self._numbers: dict[tuple[int, Hashable], int] = {}

    def append(
        self, names: Iterable[Hashable], *, time_ns: int = 0, prompt_tokens: int = 0, answer_tokens: int = 0
    ) -> None:
        """One request more. ``prompt_tokens`` is that of its blocks unless it is given."""
        blocks: list[int] = []
        block = _NO_BLOCK
        for name in names:
            block = self._numbers.setdefault((block, name), len(self._numbers))
            blocks.append(block)
        prompt_tokens = prompt_tokens or len(blocks) * self._block_tokens
        self.requests.append(BlockRequest(blocks, time_ns, prompt_tokens, answer_tokens))


def read_blocks(path: Path) -> list[BlockRequest]:
    """The requests of a trace in the Mooncake format, at least one.

    Raises InvalidRequest, which names the line that is malformed, and for blocks of another size than 512 tokens.
    """
    found = BlockRequests()
    for request in read_trace(path):
        if request.block_tokens != BLOCK_TOKENS:
            raise InvalidRequest(f"{path} has blocks of {request.block_tokens} tokens; here they have {BLOCK_TOKENS}")
        found.append(
            request.hash_ids,
            time_ns=round(request.timestamp * 1_000_000),
            prompt_tokens=request.input_length,
            answer_tokens=request.output_length,
        )
    if not found.requests:
        raise InvalidRequest(f"{path} holds no request")
    return found.requests


class BlockCache:
    """A pool of ``capacity`` blocks. A request that is longer keeps as many of its first blocks as fit."""

    def __init__(
        self, policy: Policy, capacity: int, hotness: BlockHotness, *, block_tokens: int = BLOCK_TOKENS
    ) -> None:
        self._policy = policy
        self._capacity = capacity
        self._hotness = hotness
        self._block_tokens = block_tokens
        self._label = bytes(block_tokens * NARROW_BYTES)  # All blocks share one: no policy looks at tokens.
        self._resident: dict[int, Node] = {}  # By block.
        self._nodes: dict[int, Node] = {}
        self._blocks: dict[int, int] = {}  # By node id.
        self._below: dict[int, int] = {}  # Resident children by node id.
        self._own_path: dict[int, bool] = {}  # Nodes that the request at hand keeps from eviction.
        self._running: list[
            tuple[int, int, int, int]
        ] = []  # A heap: when it ends, its number, its answer, its last node.
        self._requests = 0
        self._last_id = 0

    def __len__(self) -> int:
        """Resident blocks."""
        return len(self._resident)

    def digests(self) -> list[int]:
        """Of all resident blocks."""
        return [node.digest for node in self._nodes.values()]

    def ask(self, request: BlockRequest) -> int:
        """Serve one request; returns how many of its blocks were resident."""
        self._end_requests(request.time_ns)
        self._requests += 1
        moment = Moment(self._requests, request.time_ns, self._requests, self._hotness, admission=self._requests)
        path = self._reuse(request)
        self._hotness.admitted([node.digest for node in path])
        self._policy.visit(path, request.prompt_tokens, moment)
        hits = len(path)
        self._own_path = dict.fromkeys((node.id for node in path), True)
        wanted = min(len(request.blocks), self._capacity)
        while len(self._resident) + wanted - hits > self._capacity:
            victim = self._policy.victim(self._evictable, moment)
            if victim is None:
                raise InvariantViolated("the policy found no victim though other leaves are resident")
            self._evict(victim, moment)
        for block in request.blocks[hits:wanted]:
            path.append(self._insert(block, path[-1] if path else None, moment))
        self._own_path = {}
        if path:
            heappush(self._running, (request.end_ns, self._requests, request.answer_tokens, path[-1].id))
            if self._evictable(path[-1].id):
                self._policy.offer(path[-1])
        return hits

    def _end_requests(self, now_ns: int) -> None:
        """Say of the requests that have ended by now how long their answers are."""
        while self._running and self._running[0][0] <= now_ns:
            _, number, answer_tokens, node_id = heappop(self._running)
            self._policy.ended(number, answer_tokens)
            node = self._evictable(node_id)
            if node is not None:
                self._policy.offer(node)

    def _reuse(self, request: BlockRequest) -> list[Node]:
        path: list[Node] = []
        for block in request.blocks:
            node = self._resident.get(block)
            if node is None:
                break
            node.last_use = self._requests
            path.append(node)
        return path

    def _insert(self, block: int, parent: Node | None, moment: Moment) -> Node:
        self._last_id += 1
        node = Node(
            id=self._last_id,
            parent=0 if parent is None else parent.id,
            label=self._label,
            last_use=self._requests,
            depth=0 if parent is None else parent.depth + self._block_tokens,
            record=written(mix(block), mix(block)),
        )
        self._resident[block] = node
        self._nodes[node.id] = node
        self._blocks[node.id] = block
        self._own_path[node.id] = True
        if parent is not None:
            self._below[parent.id] = self._below.get(parent.id, 0) + 1
        self._hotness.inserted(node.digest, node.depth // self._block_tokens + 1)
        self._policy.add(node, moment)
        return node

    def _evictable(self, node_id: int) -> Node | None:
        if node_id in self._below or node_id in self._own_path:
            return None
        return self._nodes.get(node_id)

    def _evict(self, node: Node, moment: Moment) -> None:
        if self._evictable(node.id) is not node:
            raise InvariantViolated(f"the policy named node {node.id}, which may not be evicted")
        del self._nodes[node.id]
        del self._resident[self._blocks.pop(node.id)]
        self._policy.remove(node, moment)
        if not node.parent:
            return
        left = self._below[node.parent] - 1
        if left:
            self._below[node.parent] = left
            return
        del self._below[node.parent]
        parent = self._evictable(node.parent)
        if parent is not None:
            self._policy.offer(parent)


@dataclass(frozen=True, slots=True)
class BlockHits:
    """Blocks that were resident when asked for, and all that were asked for: of every request, and of the last ones."""

    hits: int
    blocks: int
    late_hits: int
    late_blocks: int

    @property
    def ratio(self) -> float:
        return self.hits / self.blocks if self.blocks else 0.0

    @property
    def late_ratio(self) -> float:
        return self.late_hits / self.late_blocks if self.late_blocks else 0.0


def run_blocks(cache: BlockCache, requests: Sequence[BlockRequest], *, late_share: float = 0.2) -> BlockHits:
    """Ask for every request in order; the last ``late_share`` of them are counted apart as well."""
    late_from = len(requests) - round(len(requests) * late_share)
    hits = blocks = late_hits = late_blocks = 0
    for number, request in enumerate(requests):
        found, asked = cache.ask(request), len(request.blocks)
        hits += found
        blocks += asked
        if number >= late_from:
            late_hits += found
            late_blocks += asked
    return BlockHits(hits, blocks, late_hits, late_blocks)
