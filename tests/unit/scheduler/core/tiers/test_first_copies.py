"""Whether KV that was used once is copied into a full host pool, by what became of such copies."""

from itertools import count

import pytest

from services.scheduler.core.cache.prefix_tree import Node
from services.scheduler.core.tiers.first_copies import (
    LEARNED_TURNOVERS,
    REMEMBERED_TURNOVERS,
    SAMPLED,
    WORTH_ONE_IN,
    CopyReturns,
    is_sampled,
)
from shared.messages.storage_plans import BackupPages
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import FindOrders, MakeCell

POOL_PAGES = 80
PROMPT_TOKENS = 40


def node_that(*, is_in_sample: bool) -> Node:
    """A node that is in the sample, or is not."""
    nodes = (Node(id=1, parent=0, tokens=b"", digest=digest) for digest in count(1))
    return next(node for node in nodes if is_sampled(node) is is_in_sample)


IN_SAMPLE, OTHER = node_that(is_in_sample=True), node_that(is_in_sample=False)


def learned(made: int, loaded: int) -> CopyReturns:
    """What is known once so many sampled pages were copied and loaded."""
    return CopyReturns(made=made, loaded=loaded, is_learned=True)


def answer(cell: CellModel, *prompts: list[int]) -> None:
    """Let these prompts be answered, one after another."""
    for prompt in prompts:
        cell.submit(prompt, max_tokens=1)
        cell.drain()


def prompts_that(cell: CellModel, wanted: int, *, are_in_sample: bool) -> list[list[int]]:
    """Prompts whose nodes are in the sample, or are not: it is drawn by their digests."""
    found = []
    for first in count(100):
        answer(cell, [first] * PROMPT_TOKENS)
        (node,) = (node for node in cell.state.tree.nodes.values() if node.tokens[:4] == first.to_bytes(4, "little"))
        if is_sampled(node) is are_in_sample:
            found.append([first] * PROMPT_TOKENS)
        if len(found) == wanted:
            return found
    raise AssertionError


def test_first_copies_pay_until_enough_of_them_were_made() -> None:
    """A pool's worth of them, of which one in so many is counted."""
    returns = CopyReturns()
    enough = LEARNED_TURNOVERS * POOL_PAGES // SAMPLED

    returns.note_copy(IN_SAMPLE, enough - 1, POOL_PAGES)
    assert returns.first_copies_pay()
    returns.note_copy(IN_SAMPLE, 1, POOL_PAGES)
    assert not returns.first_copies_pay()


@pytest.mark.parametrize(("loaded", "pays"), [(19, False), (20, True), (100, True)])
def test_they_pay_while_one_page_in_eight_is_loaded(loaded: int, pays: bool) -> None:
    """Exactly so many are enough."""
    returns = learned(made=20 * WORTH_ONE_IN, loaded=loaded)

    assert returns.first_copies_pay() is pays


def test_what_is_not_in_the_sample_is_not_counted() -> None:
    """It is copied only while copies pay, so it would say what was decided and not what is right."""
    returns = CopyReturns()
    returns.note_copy(OTHER, 50, POOL_PAGES)
    returns.note_load(OTHER, 50)

    assert returns == CopyReturns()


def test_old_counts_fade() -> None:
    """Pages of the last turnovers outweigh all before, whatever they said."""
    returns = learned(made=0, loaded=0)
    for _ in range(40 * REMEMBERED_TURNOVERS):
        returns.note_copy(IN_SAMPLE, POOL_PAGES // SAMPLED, POOL_PAGES)
    assert returns.made < REMEMBERED_TURNOVERS * POOL_PAGES // SAMPLED
    for _ in range(2 * REMEMBERED_TURNOVERS):
        returns.note_copy(IN_SAMPLE, POOL_PAGES // SAMPLED, POOL_PAGES)
        returns.note_load(IN_SAMPLE, POOL_PAGES // SAMPLED)

    assert returns.first_copies_pay()


@pytest.mark.parametrize(("pays", "is_in_sample"), [(True, False), (False, False), (False, True)])
def test_a_full_pool_takes_what_pays_and_the_sample(
    make_cell: MakeCell, orders: FindOrders, pays: bool, is_in_sample: bool
) -> None:
    """What was used once and is neither is dropped at once, and what the pool holds stays."""
    first, second, third = prompts_that(make_cell(pages=64, admission="none"), 3, are_in_sample=is_in_sample)
    cell = make_cell(pages=12, host_pages=10, admission="measured", policy="lru")
    answer(cell, first, second)
    (storage,) = cell.state.storages.values()
    storage.returns = learned(made=100, loaded=100 if pays else 0)
    before = len(cell.outputs)
    answer(cell, third)

    is_taken = pays or is_in_sample
    assert bool(orders((output for step in cell.outputs[before:] for output in step), BackupPages)) is is_taken
    assert cell.state.counters.get("evicted_pages_host", 0) == (10 if is_taken else 0)
    assert cell.state.counters.get("host_refused_frequency_pages", 0) == (0 if is_taken else 10)


def test_a_pool_with_room_takes_everything(make_cell: MakeCell) -> None:
    """Nothing leaves for it, so it costs a copy and no more."""
    cell = make_cell(pages=12, host_pages=60, admission="measured")
    (storage,) = cell.state.storages.values()
    storage.returns = learned(made=100, loaded=0)
    answer(cell, [1] * PROMPT_TOKENS, [2] * PROMPT_TOKENS)

    assert cell.state.counters["host_admitted_pages"] == 10
    assert "host_refused_frequency_pages" not in cell.state.counters


def test_what_was_used_often_enough_is_always_taken(make_cell: MakeCell) -> None:
    """The threshold is that of selective admission."""
    cell = make_cell(pages=12, host_pages=10, admission="measured", policy="lru")
    (storage,) = cell.state.storages.values()
    storage.returns = learned(made=100, loaded=0)
    answer(cell, [1] * PROMPT_TOKENS, [2] * PROMPT_TOKENS, [2] * PROMPT_TOKENS, [3] * PROMPT_TOKENS)

    assert cell.state.counters["host_admitted_pages"] == 20
    assert cell.state.counters["evicted_pages_host"] == 10


def test_only_the_first_load_of_a_first_copy_counts(make_cell: MakeCell) -> None:
    """A copy that is loaded again says nothing more of what a first copy is worth."""
    first, second = prompts_that(make_cell(pages=64, admission="none"), 2, are_in_sample=True)
    cell = make_cell(pages=12, host_pages=60, admission="measured", policy="lru")
    (storage,) = cell.state.storages.values()
    answer(cell, first, second)
    assert (storage.returns.made, storage.returns.loaded) == (10, 0)
    answer(cell, first)
    loaded = storage.returns.loaded
    answer(cell, second, first, second, first)

    assert loaded > 0
    assert storage.returns.loaded == 2 * loaded
