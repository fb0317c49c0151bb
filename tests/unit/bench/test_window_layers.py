"""The comparison of ways to keep KV of layers with a window."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from bench.blocks import BlockCache, BlockRequest, BlockRequests, run_blocks
from bench.window_layers import Model, Pages, Slots, compare, hit_ratio
from services.scheduler.core.cache.eviction import make_policy
from shared.messages.cell_events import CellConfig
from thermocline.testing.exact_hotness import ExactHotness

BLOCK = 64
MODEL = Model("two of three layers with a window of one block", BLOCK, 1 / 3, 2 / 3)


def sessions(seed: int, count: int = 60) -> list[BlockRequest]:
    """Prompts below a few heads; some go on from an earlier one, and some leave it in its midst."""
    rng, found, known = Random(seed), BlockRequests(BLOCK), [[0, 1, 2, 3], [4, 5]]
    for number in range(count):
        before = rng.choice(known)
        names = [
            *before[: rng.randint(1, len(before))],
            *(1000 * (number + 1) + each for each in range(rng.randint(1, 6))),
        ]
        known.append(names)
        found.append(names)
    return found.requests


def test_whole_pages_are_the_least_recently_used_ones() -> None:
    """The same hits as a cache of blocks under the scheduler's own LRU."""
    requests = sessions(3, 200)
    policy = make_policy("lru", 40 * BLOCK, CellConfig(), [])
    expected = run_blocks(BlockCache(policy, 40, ExactHotness(), block_tokens=BLOCK), requests)

    assert hit_ratio(Pages(1, BLOCK, 40 * BLOCK).ask, requests) == pytest.approx(expected.ratio)


@pytest.mark.parametrize("checkpoint_tokens", [0, 4 * BLOCK])
def test_with_room_for_all_every_way_but_copies_finds_the_same(checkpoint_tokens: int) -> None:
    """Nothing is given up without need; copies are only at boundaries."""
    requests = sessions(1)
    room = 1e9

    whole = hit_ratio(Pages(1, BLOCK, room).ask, requests)
    assert hit_ratio(Slots(MODEL, BLOCK, room, checkpoint_tokens=checkpoint_tokens).ask, requests) == whole
    assert hit_ratio(Slots(MODEL, BLOCK, room, is_copied=True).ask, requests) < whole


def test_windows_that_no_boundary_needs_go_first() -> None:
    """A prompt that leaves another in its midst begins at the last checkpoint above, or anew."""
    first, second = list(range(8)), list(range(100, 108))
    # Of two prompts of eight blocks one is kept whole, and of the other the full layers and a few windows.
    plain = Slots(MODEL, BLOCK, 12 * BLOCK)
    marked = Slots(MODEL, BLOCK, 12 * BLOCK, checkpoint_tokens=3 * BLOCK)
    for way in (plain, marked):
        assert (way.ask(first), way.ask(second)) == (0, 0)

    assert plain.ask([*first, 9]) == 8
    assert plain.ask([0, 1, 2, 3, 50]) == 0
    assert marked.ask([0, 1, 2, 3, 50]) == 3


@pytest.mark.parametrize("way", [{}, {"checkpoint_tokens": 4 * BLOCK}, {"is_copied": True}])
def test_bytes_are_counted(way: dict[str, int]) -> None:
    """What the pool counts is what its blocks hold, however they came and went, and is within its capacity."""
    slots = Slots(MODEL, BLOCK, 30 * BLOCK, **way)  # type: ignore[arg-type]
    for request in sessions(5, 300):
        slots.ask(request.blocks)
        used, left = 0.0, list(slots._root.children.values())
        while left:
            block = left.pop()
            assert block.children or block.is_boundary
            assert block.held >= slots._needed(block)
            copied = BLOCK * MODEL.windowed if block.is_boundary and "is_copied" in way else 0.0
            used += BLOCK * MODEL.full + block.held * MODEL.windowed + copied
            left += block.children.values()
        assert slots._used == pytest.approx(used)
        assert slots._used <= 30 * BLOCK + 1e-6


def test_more_room_finds_more() -> None:
    """In every way, over capacities that differ by a factor of two."""
    rows = compare(MODEL, sessions(2, 400), BLOCK)

    for less, more in pairwise(rows):
        assert all(less[way] <= more[way] + 0.01 for way in ("pages", "slots", "checkpoints", "copies", "large"))
    assert rows[-1]["pages"] > rows[0]["pages"] > 0
