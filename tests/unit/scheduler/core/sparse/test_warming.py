"""Chunks that are read in part again and again come up to host memory."""

from typing import Any

import pytest
from msgspec import structs

from services.scheduler.core.sparse import warming
from shared.messages.cell_events import CellConfigured, FlushCache
from shared.messages.storage_plans import CancelFetch, FetchChunks
from tests.present import present
from tests.stateful import model_sparse
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders_of, set_heat, timer_of, worker_goes_on
from tests.unit.scheduler.core.fetching import CHUNK, host_tokens, prompt
from tests.unit.scheduler.core.reading_in_part import QUARTER, answered, put_in_parts, sparse_cell, storage_of
from tests.unit.scheduler.core.restoring_cells import storage_obeys


@pytest.fixture
def cell_that(make_cell: MakeCell) -> MakeCell:
    """A cell whose disk has four chunks of a prompt in both forms."""

    def make(**settings: Any) -> CellModel:
        cell = sparse_cell(make_cell, **settings)
        put_in_parts(cell, prompt(4))
        return cell

    return make


def read_in_part(cell: CellModel, tokens: list[int]) -> None:
    """A lossy request's first chunk is computed; the storage does nothing yet."""
    cell.submit(tokens, importance=QUARTER, max_tokens=1)
    assert cell.admitted[-1].sparse is not None
    worker_goes_on(cell)


def test_a_prefix_that_is_read_often_comes_up(cell_that: MakeCell) -> None:
    """At the second read; whoever comes next, exact or not, finds all of it in host memory."""
    cell = cell_that()
    answered(cell, prompt(4), importance=QUARTER)
    assert not orders_of(cell, FetchChunks)

    answered(cell, prompt(4), importance=QUARTER)

    assert cell.state.counters["warmings_started"] == 1
    assert host_tokens(cell, prompt(4)) == 4 * CHUNK
    lossy = answered(cell, prompt(4), importance=QUARTER)
    assert (lossy.sparse, lossy.host_tokens) == (None, 4 * CHUNK)


def test_the_frequency_is_what_selective_admission_asks_for(cell_that: MakeCell) -> None:
    """Set to three, two reads are not enough."""
    cell = cell_that(admission_frequency=3)
    for _ in range(2):
        answered(cell, prompt(4), importance=QUARTER)
    assert "warmings_started" not in cell.state.counters

    answered(cell, prompt(4), importance=QUARTER)

    assert cell.state.counters["warmings_started"] == 1


def test_reading_goes_on_until_it_cost_as_much_as_fetching(
    cell_that: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a read takes a quarter of the bytes, the fourth one brings the prefix up."""
    monkeypatch.setattr(model_sparse, "READS_FOR_ALL", 4)
    cell = cell_that()
    for _ in range(3):
        answered(cell, prompt(4), importance=QUARTER)
    assert "warmings_started" not in cell.state.counters

    answered(cell, prompt(4), importance=QUARTER)

    assert cell.state.counters["warmings_started"] == 1


def test_few_chunks_come_at_a_time(cell_that: MakeCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest follows with later reads, from where host memory ends."""
    monkeypatch.setattr(warming, "WARMED_CHUNKS", 1)
    cell = cell_that()
    for _ in range(2):
        answered(cell, prompt(4), importance=QUARTER)
    assert host_tokens(cell, prompt(4)) == CHUNK

    for _ in range(2):
        assert present(answered(cell, prompt(4), importance=QUARTER).sparse).start == CHUNK

    assert host_tokens(cell, prompt(4)) == 2 * CHUNK


def test_nothing_comes_up_while_others_wait_for_the_disk(cell_that: MakeCell) -> None:
    """A fetch of another is under way."""
    cell = cell_that()
    read_in_part(cell, prompt(4))
    put_in_parts(cell, prompt(4, kind=2))
    cell.submit(prompt(4, kind=2))
    storage_obeys(cell)

    read_in_part(cell, prompt(4))

    assert "warmings_started" not in cell.state.counters
    assert len(orders_of(cell, FetchChunks)) == 1
    cell.drain()


def test_one_comes_up_at_a_time(cell_that: MakeCell) -> None:
    """The storage is still busy with the first."""
    cell = cell_that()
    for _ in range(2):
        read_in_part(cell, prompt(4))
    put_in_parts(cell, prompt(4, kind=2))
    for _ in range(3):
        read_in_part(cell, prompt(4, kind=2))

    assert cell.state.counters["warmings_started"] == 1
    cell.drain()


def test_it_stays_within_its_part_of_the_pool(cell_that: MakeCell) -> None:
    """As all fetches do: of forty pages a tenth is two chunks, and a fortieth is none."""
    cell = cell_that(prefetch_fraction=0.1)
    for _ in range(2):
        answered(cell, prompt(4), importance=QUARTER)
    assert host_tokens(cell, prompt(4)) == 2 * CHUNK

    none = cell_that(prefetch_fraction=0.025)
    for _ in range(3):
        answered(none, prompt(4), importance=QUARTER)
    assert "warmings_started" not in none.state.counters


@pytest.mark.parametrize(("frequency", "comes"), [(200, False), (1, True)])
def test_what_would_have_to_go_is_worth_no_more(cell_that: MakeCell, frequency: int, comes: bool) -> None:
    """A full host pool gives way to what is hotter than its coldest copies, and to nothing else."""
    cell = cell_that(host_pages=8, prefetch_fraction=1.0, host_writes="through")
    answered(cell, prompt(4, kind=5), max_tokens=1)
    cell.feed(FlushCache(call_id="call", tiers=("device",)))
    assert host_tokens(cell, prompt(4, kind=5)) == 4 * CHUNK
    set_heat(cell, prompt(4, kind=5), frequency, frequency)

    for _ in range(3):
        answered(cell, prompt(4), importance=QUARTER)

    assert host_tokens(cell, prompt(4)) == (4 * CHUNK if comes else 0)
    assert cell.state.counters.get("warmings_refused", 0) == (0 if comes else 2)


def test_it_is_joined_by_who_waits(cell_that: MakeCell) -> None:
    """An exact request shares the fetch; when it goes, the fetch goes on all the same."""
    cell = cell_that()
    for _ in range(2):
        read_in_part(cell, prompt(4))
    exact = cell.submit(prompt(4, tail=9))
    assert cell.state.requests[exact].prefetch.fetch

    cell.cancel(exact)

    assert not orders_of(cell, CancelFetch)
    cell.drain()
    assert host_tokens(cell, prompt(4)) == 4 * CHUNK


def test_only_what_is_on_the_disk_as_kv_comes_up(cell_that: MakeCell) -> None:
    """A chunk that is left in parts alone ends it."""
    cell = cell_that()
    name = list(storage_of(cell).disk.chunks)[2]
    del storage_of(cell).disk.chunks[name]
    for _ in range(2):
        answered(cell, prompt(4), importance=QUARTER)

    assert host_tokens(cell, prompt(4)) == 2 * CHUNK


def test_what_is_in_host_memory_already_is_not_fetched(cell_that: MakeCell) -> None:
    """It came up while the request that reads it in part was under way."""
    cell = cell_that()
    answered(cell, prompt(4), importance=QUARTER)
    cell.submit(prompt(4), importance=QUARTER, max_tokens=1)
    cell.submit(prompt(4), max_tokens=1)
    while cell.storages["storage"].step() or cell.storages["storage"].fetch() or cell.deliver(cell.storages["storage"]):
        pass
    assert host_tokens(cell, prompt(4)) == 4 * CHUNK

    cell.drain()

    assert len(orders_of(cell, FetchChunks)) == 1


def test_without_a_host_tier_nothing_comes_up(cell_that: MakeCell) -> None:
    """It was switched off while the second request was under way."""
    cell = cell_that()
    answered(cell, prompt(4), importance=QUARTER)
    cell.submit(prompt(4), importance=QUARTER, max_tokens=1)
    cell.feed(CellConfigured(config=structs.replace(cell.state.config, host_tier=False)))

    worker_goes_on(cell)

    assert cell.state.counters["sparse_tokens_read"] == 8 * CHUNK
    assert "warmings_started" not in cell.state.counters


def test_a_deadline_ends_it_like_any_other_fetch(cell_that: MakeCell) -> None:
    """Nobody waited; the storage gets nothing more until it answers."""
    cell = cell_that()
    for _ in range(2):
        read_in_part(cell, prompt(4))
    cell.fire(timer_of(cell, "fetch."))

    assert len(orders_of(cell, CancelFetch)) == 1
    assert storage_of(cell).fetching.late == 1
    cell.drain()
    assert storage_of(cell).fetching.late == 0
