"""What layers with a window would save: hit ratios of one pool whose pages, or slots, keep different things.

A layer with a window of W tokens attends to the last W tokens, so a prefix can be continued from depth d with K and V
of its full layers for all d tokens and of its window layers for the last W. Five ways to keep them, in a pool of as
many bytes, evicted least recently used:

* ``pages``: every page keeps all tokens of all layers, as today;
* ``slots``: window layers have slots of their own. What lies within W of a boundary (where a request ended or branched
  off) is kept with the boundary; the rest is kept while there is room, and goes first;
* ``checkpoints``: the same, and each CHECKPOINT_WINDOWS * W tokens of a computed path are a boundary, too (ADR 0078);
* ``copies``: each boundary has a copy of the last W tokens of the window layers, and pages have none;
* ``large``: a page is as long as a multiple of W and keeps in its window layers the last W tokens alone. Prefixes are
  reused in such pages; the multiple is the one of 2, 4 and 8 with the most hits.

A request is a path of blocks; none runs beside another, and only prompts are kept. A hit is a block whose K and V need
not be computed. Blocks are counted, not times.

``python -m bench.window_layers [--trace FILE] [--save]``
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from bench import results_file
from bench.block_workloads import LONG_BLOCK, WORKLOADS
from bench.blocks import BlockRequest, read_blocks

CAPACITIES = (0.05, 0.1, 0.2, 0.4)
"""Of the bytes that whole pages of all different blocks of a workload take."""

MULTIPLES = (2, 4, 8)
CHECKPOINT_WINDOWS = 8


@dataclass(frozen=True, slots=True)
class Model:
    """``window`` in tokens; shares of a token's bytes in layers without and with a window."""

    name: str
    window: int
    full: float
    windowed: float


def _alike(name: str, window: int, full_layers: int, windowed_layers: int) -> Model:
    layers = full_layers + windowed_layers
    return Model(name, window, full_layers / layers, windowed_layers / layers)


MODELS = (
    _alike("gpt-oss-20b", 128, 12, 12),
    _alike("gemma-3-1b", 512, 4, 22),
    _alike("gemma-3-27b", 1024, 10, 52),
    _alike("command-a", 4096, 16, 48),
)


@dataclass(slots=True, eq=False)
class _Block:
    parent: _Block | None
    number: int
    children: dict[int, _Block] = field(default_factory=dict)
    held: int = 0  # Tokens of window layers that are kept, counted from the block's end.
    reach: int = 0  # Tokens of window layers that boundaries here and below need, counted from the block's end.
    is_boundary: bool = False


class Slots:
    """``slots``, ``checkpoints`` every so many tokens, or ``copies``; ``capacity`` in tokens of whole KV."""

    def __init__(
        self, model: Model, block: int, capacity: float, *, checkpoint_tokens: int = 0, is_copied: bool = False
    ) -> None:
        self._model, self._block, self._capacity, self._is_copied = model, block, capacity, is_copied
        self._period = max(1, checkpoint_tokens // block) if checkpoint_tokens else 0
        self._root = _Block(None, -1)
        self._spare: dict[_Block, None] = {}  # Keep more than boundaries need, least recently used first.
        self._boundaries: dict[_Block, None] = {}  # Least recently used first.
        self._used = 0.0

    def ask(self, numbers: Sequence[int]) -> int:
        """Serve one request; return how many of its blocks were reused."""
        numbers = numbers[: int(self._capacity // self._block)]
        path: list[_Block] = []
        node = self._root
        for number in numbers:
            found = node.children.get(number)
            if found is None:
                break
            path.append(node := found)
        matched, reused = len(path), self._usable(path)
        for number in numbers[matched:]:
            node.children[number] = node = _Block(node, number)
            self._used += self._block * self._model.full
            path.append(node)
        for each in path[reused:]:
            self._hold(each, 0 if self._is_copied else self._block)
        for each in path:
            if self._spare.pop(each, 0) is None or each.held > self._needed(each):
                self._spare[each] = None
        ends = {reused, matched, len(path)} - {0}
        if self._period:
            ends.update(range((reused // self._period + 1) * self._period, len(path), self._period))
        for end in sorted(ends):
            self._set_boundary(path[end - 1], end)
        while self._used > self._capacity + 1e-6 and self._give_way():
            pass
        return reused

    def _usable(self, path: list[_Block]) -> int:
        """Return the deepest depth of the path from which a request can go on."""
        if self._is_copied:
            return next((depth for depth in range(len(path), 0, -1) if path[depth - 1].is_boundary), 0)
        window, block = self._model.window, self._block
        for depth in range(len(path), 0, -1):
            missing, at = window, depth
            while missing > 0 and at and path[at - 1].held >= min(block, missing):
                at, missing = at - 1, missing - block
            if missing <= 0 or not at:
                return depth
        return 0

    def _needed(self, block: _Block) -> int:
        return 0 if self._is_copied else min(self._block, block.reach)

    def _hold(self, block: _Block, tokens: int) -> None:
        self._used += (tokens - block.held) * self._model.windowed
        block.held = tokens

    def _set_boundary(self, block: _Block, depth: int) -> None:
        if not block.is_boundary:
            block.is_boundary = True
            self._used += self._copied(depth)
            self._renew(block)
        self._boundaries.pop(block, None)
        self._boundaries[block] = None

    def _copied(self, depth: int) -> float:
        return min(self._model.window, depth * self._block) * self._model.windowed if self._is_copied else 0.0

    def _renew(self, block: _Block | None) -> None:
        """Say again what boundaries need of a block and of those above."""
        while block is not None and block.parent is not None:
            below = max((each.reach - self._block for each in block.children.values()), default=0)
            reach = max(self._model.window if block.is_boundary else 0, below, 0)
            if reach == block.reach:
                return
            block.reach = reach
            if block not in self._spare and block.held > self._needed(block):
                self._hold(block, self._needed(block))
            block = block.parent

    def _give_way(self) -> bool:
        """Let the coldest go that no boundary needs, then the coldest boundary with what it alone keeps."""
        if self._spare:
            block = next(iter(self._spare))
            del self._spare[block]
            if block.held > self._needed(block):
                self._hold(block, self._needed(block))
            return True
        if len(self._boundaries) < 2:
            return False
        block = next(iter(self._boundaries))
        del self._boundaries[block]
        block.is_boundary = False
        self._used -= self._copied(_depth(block))
        self._renew(block)
        while block.parent is not None and not block.children and not block.is_boundary:
            self._hold(block, 0)
            self._used -= self._block * self._model.full
            del block.parent.children[block.number]
            above = block.parent
            self._renew(above)
            block = above
        return True


def _depth(block: _Block) -> int:
    depth = 0
    while block.parent is not None:
        depth, block = depth + 1, block.parent
    return depth


class Pages:
    """Pages of ``size`` blocks, each of ``cost`` tokens of whole KV: ``pages`` and ``large``."""

    def __init__(self, size: int, cost: float, capacity: float) -> None:
        self._size, self._most = size, int(capacity / cost)
        self._pages: dict[int, list[int]] = {}  # Last use, pages below and parent, by the number of the last block.
        self._leaves: list[tuple[int, int]] = []  # A heap of last uses and pages, some out of date.
        self._requests = 0

    def ask(self, numbers: Sequence[int]) -> int:
        """Serve one request; return how many of its blocks were reused."""
        self._requests += 1
        pages = numbers[self._size - 1 :: self._size][: self._most]
        hits = next((at for at, page in enumerate(pages) if page not in self._pages), len(pages))
        for above, page in zip([-1, *pages], pages, strict=False):
            if page not in self._pages:
                self._pages[page] = [0, 0, above]
                if above >= 0:
                    self._pages[above][1] += 1
            self._pages[page][0] = self._requests
        if pages:
            self._offer(pages[-1])
        while len(self._pages) > self._most:
            last_use, page = heappop(self._leaves)
            if page in self._pages and self._pages[page][:2] == [last_use, 0]:
                above = self._pages.pop(page)[2]
                if above >= 0:
                    self._pages[above][1] -= 1
                    self._offer(above)
        return hits * self._size

    def _offer(self, page: int) -> None:
        last_use, below, _ = self._pages[page]
        if not below:
            heappush(self._leaves, (last_use, page))


def hit_ratio(ask: Callable[[Sequence[int]], int], requests: Sequence[BlockRequest]) -> float:
    """Share of blocks that were reused."""
    return sum(ask(each.blocks) for each in requests) / sum(len(each.blocks) for each in requests)


def compare(model: Model, requests: Sequence[BlockRequest], block: int) -> list[dict[str, Any]]:
    """Hit ratios of the four ways, by capacity."""
    footprint = block * (1 + max(number for each in requests for number in each.blocks))
    found = []
    for share in CAPACITIES:
        capacity = share * footprint
        large = {}
        for multiple in MULTIPLES:
            size = max(1, multiple * model.window // block)
            tokens = size * block
            cost = tokens * model.full + min(model.window, tokens) * model.windowed
            large[multiple] = hit_ratio(Pages(size, cost, capacity).ask, requests)
        best = max(large, key=large.__getitem__)
        ratios = {
            "pages": hit_ratio(Pages(1, block, capacity).ask, requests),
            "slots": hit_ratio(Slots(model, block, capacity).ask, requests),
            "checkpoints": hit_ratio(
                Slots(model, block, capacity, checkpoint_tokens=CHECKPOINT_WINDOWS * model.window).ask, requests
            ),
            "copies": hit_ratio(Slots(model, block, capacity, is_copied=True).ask, requests),
            "large": large[best],
        }
        found.append(
            {"capacity": share, "large_multiple": best} | {way: round(each, 4) for way, each in ratios.items()}
        )
    return found


def main() -> None:
    parser = results_file.arguments(__doc__, "--seed", "--save", "--out")
    parser.add_argument("--trace", type=Path, help="a trace in the Mooncake format, as one workload more")
    options = parser.parse_args()
    made = {name: (block, make(options.seed)) for name, (block, make) in WORKLOADS.items()}
    if options.trace:
        made["trace"] = (LONG_BLOCK, read_blocks(options.trace))
    results = {}
    for name, (block, requests) in made.items():
        results[name] = {model.name: compare(model, requests, block) for model in MODELS}
        for model, rows in results[name].items():
            for row in rows:
                print(f"{name:20} {model:12}", *(f"{key} {value:<7}" for key, value in row.items()), flush=True)
    if options.save or options.out:
        print(results_file.write("window_layers", results, seed=options.seed, out=options.out))


if __name__ == "__main__":
    main()
