"""Without prefix caching every prompt is computed whole, and nothing is kept of it on any tier."""

from typing import Any

import pytest

from services.scheduler.core import check_invariants
from shared.messages.cell_events import CellConfig, CellConfigured
from shared.messages.requests import ReclaimRequest
from shared.messages.storage_plans import BackupPages, FetchChunks, SaveChunks
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders_of
from tests.unit.scheduler.core.fetching import put_on_disk
from tests.unit.scheduler.core.reading_in_part import QUARTER

DOCUMENT = list(range(200))


@pytest.fixture
def make_tiers(make_cell: MakeCell) -> MakeCell:
    """A cell with a host pool and a disk, which keeps nothing unless told otherwise."""

    def make(**options: Any) -> CellModel:
        defaults = {"page_size": 16, "pages": 32, "host_pages": 32, "disk_chunks": 50, "prefix_caching": False}
        return make_cell(**defaults | options)

    return make


def ordered(cell: CellModel, *kinds: type[SaveChunks] | type[BackupPages] | type[FetchChunks]) -> list[Any]:
    """Every order of these kinds so far."""
    return [order for kind in kinds for order in orders_of(cell, kind)]


def hits(cell: CellModel) -> int:
    """Tokens that any request found anywhere."""
    return sum(count for name, count in cell.state.counters.items() if name.startswith("hit_tokens"))


def test_a_repeated_prompt_is_computed_again(make_tiers: MakeCell) -> None:
    """No request finds anything, the tree stays empty, and nothing is copied or saved."""
    cell = make_tiers(host_writes="through", disk_writes="through")
    for _ in range(3):
        cell.serve(DOCUMENT, max_tokens=4, ignore_eos=True)

    check_invariants(cell.state)
    assert cell.state.tree.nodes == {}
    assert hits(cell) == 0
    assert cell.state.counters["prefill_tokens_planned"] == 3 * len(DOCUMENT)
    assert ordered(cell, SaveChunks, BackupPages, FetchChunks) == []
    (worker,) = cell.state.workers.values()
    assert worker.pool.free == worker.pool.total


def test_two_at_once_do_not_wait_for_each_other(make_tiers: MakeCell) -> None:
    """Nobody is about to bring anything that another could use."""
    cell = make_tiers(defer_tokens=1)
    cell.submit(DOCUMENT)
    cell.submit(DOCUMENT)

    assert not cell.state.counters.get("requests_deferred")
    cell.drain()


def test_what_was_there_before_is_not_read(make_tiers: MakeCell) -> None:
    """Neither what is cached on a device nor what lies on a disk."""
    cell = make_tiers(prefix_caching=True)
    cell.serve(DOCUMENT)
    put_on_disk(cell, [7] * 128)
    assert cell.state.tree.nodes

    cell.feed(CellConfigured(config=CellConfig(prefix_caching=False)))
    fetched = len(ordered(cell, FetchChunks))
    cell.submit(DOCUMENT)
    cell.serve([7] * 128 + [8])

    assert hits(cell) == 0
    assert len(ordered(cell, FetchChunks)) == fetched


def test_what_may_be_read_in_part_is_computed_exactly(make_tiers: MakeCell) -> None:
    """The caller allowed less than everything, and gets everything."""
    cell = make_tiers()
    name = cell.submit(DOCUMENT, importance=QUARTER)

    assert cell.state.requests[name].submit.cache.importance is None
    cell.drain()


def test_a_reclaimed_request_reads_nothing_either(make_tiers: MakeCell) -> None:
    """It is accepted by another way, under the same rule."""
    cell = make_tiers()
    name = cell.submit(DOCUMENT)
    message = cell.submitted[name]
    cell.drain()

    cell.feed(ReclaimRequest(submit=message))

    assert not cell.state.requests[name].submit.cache.read


def test_a_cell_goes_back_to_caching(make_tiers: MakeCell) -> None:
    """From the next request on."""
    cell = make_tiers()
    cell.serve(DOCUMENT)
    cell.feed(CellConfigured(config=CellConfig()))
    for _ in range(2):
        cell.serve(DOCUMENT)

    assert cell.state.counters["hit_tokens_device"] == 192
