"""What a trace tells of each prefix when a request ends, and what becomes of the prefix afterwards.

A request's blocks fall into *runs* with an equal past: used as often before, last by the same request, with no branch
between them. All blocks of a run have the same features, which follow from the requests up to this one alone. A run
is cut into *pieces* where its blocks part later, because another request uses only some of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.blocks import BlockRequest
from thermocline.trace.format import BLOCK_TOKENS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Features = NDArray[np.float32]

UNKNOWN = -1.0
SHARED_BLOCKS = 1  # At the top of a prompt: strangers share them, so they join nobody to a conversation.
RECENT_GAPS = 4
TICK_S = 1e-6  # What a request adds to the clock, so that order counts where time stands still.

OF_REQUEST = (
    "prompt tokens",
    "answer tokens",
    "answer by prompt",
    "new tokens",
    "blocks",
    "known blocks",
    "branches",  # Continuations of the deepest known block, this request's among them.
    "turn",  # How many requests continued one another to come to this one.
    "gap",  # Seconds since the request that this one continues.
    "gap before",
    "gap before both",
    "shortest gap",  # Of the recent ones.
    "longest gap",
    "pace",  # Mean of the gaps of all turns.
    "message tokens",  # Of the prompt, what is neither prompt nor answer of the request that it continues.
    "prompt tokens before",
    "answer tokens before",
    "known blocks before",
    "conversation age",  # Seconds since its first turn.
    "tree requests",  # Earlier ones of the tree: a conversation with all its branches.
    "tree gap",
    "tree age",
)
OF_RUN = (
    "uses",  # Before this one.
    "use gap",  # Seconds since the last of them.
    "continuations",  # Of the run's last block, this request's among them.
    "is last block",
    "blocks above",
    "blocks below",
)
FEATURES = OF_REQUEST + OF_RUN


@dataclass(frozen=True, slots=True)
class Runs:
    """Blocks ``first`` to ``stop`` of a request's prompt; a row for each run, in the order of requests."""

    request: Ints
    first: Ints
    stop: Ints
    features: Features  # Columns as in ``FEATURES``; UNKNOWN where there was nothing before.


@dataclass(frozen=True, slots=True)
class Pieces:
    """Parts of runs, in the same order. A request's number stands for its time; the number of requests for never."""

    run: Ints
    request: Ints
    first: Ints
    stop: Ints
    next_use: Ints  # The request that uses the piece again.
    passed_by: Ints  # The request of the same tree that goes another way before that.
    share: Floats  # Of its run, by blocks.


@dataclass(frozen=True, slots=True)
class _Turn:
    """A request, as one that continues it looks back on it. Times in seconds of the trace."""

    request: int
    number: int
    at: float
    began: float  # The conversation's first turn.
    gaps: tuple[float, ...]  # The newest first.
    gaps_sum: float
    known: int


@dataclass(slots=True)
class _Tree:
    requests: int
    began: float
    last: float


def clock_of(requests: Sequence[BlockRequest]) -> Floats:
    """Seconds since the first request, strictly increasing where the trace is in order."""
    times = np.array([request.time_ns for request in requests], np.int64)
    return np.asarray((times - times[0]) / 1e9 + np.arange(len(times)) * TICK_S)


def tree_of(request: BlockRequest) -> int:
    """The block that tells a conversation, with all its branches, from others; -1 where there are no blocks."""
    return request.blocks[min(SHARED_BLOCKS, len(request.blocks) - 1)] if request.blocks else -1


class _Past:
    """What was seen of blocks, requests and trees so far. Tokens and seconds."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._uses: dict[int, int] = {}  # By block, as are the next three.
        self._last_use: dict[int, float] = {}
        self._last_user: dict[int, int] = {}
        self._children: dict[int, int] = {}
        self._requests: list[BlockRequest] = []
        self._turns: list[_Turn] = []
        self._trees: dict[int, _Tree] = {}

    def enter(self, request: BlockRequest, now: float) -> tuple[float, ...]:
        """One request more; returns the features that all its runs share."""
        blocks = request.blocks
        known = next((at for at, block in enumerate(blocks) if block not in self._uses), len(blocks))
        if known < len(blocks):
            for above in blocks[max(known - 1, 0) : -1]:
                self._children[above] = self._children.get(above, 0) + 1
        before = self._turns[self._last_user[blocks[known - 1]]] if known > SHARED_BLOCKS else None
        turn = _next_turn(before, len(self._turns), known, now)
        self._turns.append(turn)
        self._requests.append(request)
        return (
            request.prompt_tokens,
            request.answer_tokens,
            request.answer_tokens / max(request.prompt_tokens, 1),
            request.prompt_tokens - known * self._block_tokens,
            len(blocks),
            known,
            self._children.get(blocks[known - 1], 0) if known else 0,
            turn.number,
            *(turn.gaps[:3] + (UNKNOWN,) * (3 - len(turn.gaps))),
            min(turn.gaps, default=UNKNOWN),
            max(turn.gaps, default=UNKNOWN),
            turn.gaps_sum / turn.number if turn.number else UNKNOWN,
            *self._since_before(request, before),
            now - turn.began,
            *self._of_tree(tree_of(request), now),
        )

    def _since_before(self, request: BlockRequest, before: _Turn | None) -> tuple[float, ...]:
        """How the request differs from the one that it continues: message, and that one's prompt, answer, known."""
        if before is None:
            return (request.prompt_tokens, UNKNOWN, UNKNOWN, UNKNOWN)
        old = self._requests[before.request]
        message = request.prompt_tokens - old.prompt_tokens - old.answer_tokens
        return (message, old.prompt_tokens, old.answer_tokens, before.known)

    def _of_tree(self, tree: int, now: float) -> tuple[float, ...]:
        seen = self._trees.setdefault(tree, _Tree(0, now, now))
        features = (seen.requests, now - seen.last, now - seen.began)
        seen.requests, seen.last = seen.requests + 1, now
        return features

    def runs(self, blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Bounds of the runs of the request that has just entered. The last block, maybe a partial one, is a run."""
        first = 0
        for stop in range(1, len(blocks) + 1):
            upper, lower = blocks[stop - 1], blocks[min(stop, len(blocks) - 1)]
            if (
                stop >= len(blocks) - 1
                or self._uses.get(upper, 0) != self._uses.get(lower, 0)
                or self._last_user.get(upper) != self._last_user.get(lower)
                or self._children[upper] > 1
            ):
                yield first, stop
                first = stop

    def of_run(self, blocks: Sequence[int], first: int, stop: int, now: float) -> tuple[float, ...]:
        """Features that only this run has."""
        since = now - self._last_use[blocks[first]] if blocks[first] in self._last_use else UNKNOWN
        continuations = self._children.get(blocks[stop - 1], 0)
        is_last = float(stop == len(blocks))
        return (self._uses.get(blocks[first], 0), since, continuations, is_last, first, len(blocks) - stop)

    def leave(self, request: BlockRequest, now: float) -> None:
        """The request that entered has used its blocks."""
        for block in request.blocks:
            self._uses[block] = self._uses.get(block, 0) + 1
            self._last_use[block] = now
            self._last_user[block] = len(self._turns) - 1


def _next_turn(before: _Turn | None, request: int, known: int, now: float) -> _Turn:
    if before is None:
        return _Turn(request, 0, now, now, (), 0.0, known)
    gap = now - before.at
    gaps = (gap, *before.gaps)[:RECENT_GAPS]
    return _Turn(request, before.number + 1, now, before.began, gaps, before.gaps_sum + gap, known)


def runs_of(requests: Sequence[BlockRequest], block_tokens: int = BLOCK_TOKENS) -> Runs:
    """The runs of all requests, of which there is one at least. What comes after a request changes none of its."""
    past = _Past(block_tokens)
    bounds: list[tuple[int, int, int]] = []
    rows: list[tuple[float, ...]] = []
    for number, now in enumerate(clock_of(requests).tolist()):
        request = requests[number]
        shared = past.enter(request, now)
        for first, stop in past.runs(request.blocks):
            bounds.append((number, first, stop))
            rows.append(shared + past.of_run(request.blocks, first, stop, now))
        past.leave(request, now)
    owner, starts, stops = np.array(bounds, np.int64).T
    return Runs(owner, starts, stops, np.array(rows, np.float32))


def next_uses(requests: Sequence[BlockRequest]) -> list[list[int]]:
    """By request and block: the number of the next request that uses the block, or that of all requests."""
    coming: dict[int, int] = {}
    found: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        blocks = requests[number].blocks
        found.append([coming.get(block, len(requests)) for block in blocks])
        coming.update(dict.fromkeys(blocks, number))
    return found[::-1]


def pieces_of(requests: Sequence[BlockRequest], runs: Runs) -> Pieces:
    """What becomes of the runs, which is what a judge is to tell.

    Whoever uses a block uses all above it. So the next request of the tree uses a block, or is the one that passes it
    by; above the tree nobody is passed by, because what a stranger does says nothing.
    """
    never = len(requests)
    uses = next_uses(requests)
    rows: list[tuple[int, int, int, int, int, int]] = []
    shares: list[float] = []
    bounds = zip(runs.request.tolist(), runs.first.tolist(), runs.stop.tolist(), strict=True)
    for run, (request, first, stop) in enumerate(bounds):
        coming = uses[request]
        start = first
        for end in range(first + 1, stop + 1):
            if end < stop and coming[end] == coming[start]:
                continue
            next_of_tree = coming[SHARED_BLOCKS] if start >= SHARED_BLOCKS else never
            passed_by = next_of_tree if next_of_tree < coming[start] else never
            rows.append((run, request, start, end, coming[start], passed_by))
            shares.append((end - start) / (stop - first))
            start = end
    run_of, owner, starts, stops, next_use, passed = np.array(rows, np.int64).T
    return Pieces(run_of, owner, starts, stops, next_use, passed, np.array(shares))
