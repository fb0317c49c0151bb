"""What has arrived enters the tree, whatever became of the tree meanwhile."""

import random

from services.scheduler.core import check_invariants
from services.scheduler.core.cache.prefix_match import match_prefix
from services.scheduler.core.cache.prefix_tree import page_count
from services.scheduler.core.cache.residency import give_host
from services.scheduler.core.state import CellState
from services.scheduler.core.step import Step
from services.scheduler.core.tiers.fetch_insertion import insert_fetched
from services.scheduler.core.tiers.under_way import Fetch
from shared.messages.base import pack_int32, unpack_int32
from tests.cases import case
from tests.present import present
from tests.stateful.cell_model import CellModel, namespace
from tests.unit.scheduler.core.cell_fixtures import MakeCell
from tests.unit.scheduler.core.fetching import CHUNK, PAGE, prompt

TOKENS = prompt(6, tail=0)
PAGES = len(TOKENS) // PAGE


def copies(state: CellState) -> list[bool | None]:
    """For each page of the tokens: True with a host copy, False without one, None where the tree ends."""
    found = []
    for node, pages in match_prefix(state.tree, namespace(), pack_int32(TOKENS), PAGES):
        found += [("storage" in node.host)] * pages
    return found + [None] * (PAGES - len(found))


def grow(cell: CellModel, chance: random.Random) -> None:
    """A tree that knows some of the tokens, cut at a few places, with copies of some of its nodes."""
    state = cell.state
    storage = state.storages["storage"]
    for _ in range(chance.randint(0, 3)):
        known = chance.randint(1, PAGES) * PAGE
        cell.serve([*TOKENS[:known], 7, chance.randrange(100)], max_tokens=1)
    for node in list(state.tree.nodes.values()):
        if node.parent and chance.random() < 0.4:
            assert storage.pool is not None
            give_host(state, node, storage, present(storage.pool.allocate(page_count(state.tree, node))))


def test_pages_become_copies_where_they_have_something_to_stand_on(make_cell: MakeCell) -> None:
    """As a page by page model has it; all other leased pages are free again."""
    for seed in range(60):
        with case(seed=seed):
            _pages_become_copies(make_cell, random.Random(seed))


def _pages_become_copies(make_cell: MakeCell, chance: random.Random) -> None:
    cell = make_cell(page_size=PAGE, pages=64, host_pages=60, policy="lru")
    grow(cell, chance)
    state = cell.state
    storage = state.storages["storage"]
    first = chance.randint(0, 3)
    chunks = chance.randint(1, 6 - first)
    start, end = first * CHUNK // PAGE, (first + chunks) * CHUNK // PAGE
    leased = [chance.random() < 0.8 for _ in range(start, end)]
    assert storage.pool is not None
    pages = iter(unpack_int32(present(storage.pool.allocate(sum(leased)))))
    fetch = Fetch(
        fetch_id=1,
        storage_id="storage",
        namespace=namespace(),
        tokens=pack_int32(TOKENS[: end * PAGE]),
        depth=start * PAGE,
        pages=pack_int32([next(pages) if is_leased else -1 for is_leased in leased]),
        timer_id="",
    )
    storage.fetching.pages = sum(leased)
    expected = copies(state)
    is_grounded = start == 0 or expected[start - 1] is not None
    for position, is_leased in zip(range(start, end), leased, strict=True):
        if expected[position] is None:
            is_grounded = is_grounded and is_leased
            expected[position] = True if is_grounded else None
        elif is_leased:
            expected[position] = True

    for arrived in sorted({chance.randint(1, chunks), chunks}):
        insert_fetched(Step(state, cell.seq, cell.time_ns), storage, fetch, arrived)

    assert copies(state) == expected
    assert storage.fetching.pages == 0
    assert set(unpack_int32(fetch.pages)) == {-1}
    check_invariants(state)
