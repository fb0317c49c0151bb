"""Copies at rest: an idle worker that is killed takes no whole page with it."""

from typing import Any

import pytest

from services.scheduler.core.tiers.writes import MOST_ENDS, TOKENS_AT_ONCE
from shared.messages.storage_plans import BackupPages
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, nodes_of, orders_of, worker_goes_on, worker_runs

DOCUMENT = list(range(200))
PAGE = 16


@pytest.fixture
def make_tiers(make_cell: MakeCell) -> MakeCell:
    """A cell whose chunks are of four pages, with a disk."""

    def make(**options: Any) -> CellModel:
        return make_cell(
            **{"page_size": PAGE, "pages": 32, "host_pages": 64, "disk_chunks": 50, "copies_at_rest": True} | options
        )

    return make


def run(cell: CellModel, *prompts: list[int], **request: Any) -> None:
    """Let these prompts be answered, one after another."""
    for prompt in prompts:
        cell.serve(prompt, **{"max_tokens": 1} | request)


@pytest.mark.parametrize("new", [17, 48, 100])
def test_a_killed_idle_worker_costs_less_than_a_page(make_tiers: MakeCell, new: int) -> None:
    """Also where host memory had the beginning of a sequence, and the rest is too short to come from the disk."""
    cell = make_tiers(workers=2)
    first = DOCUMENT[:112]
    second = first + [7] * new
    run(cell, first, second)
    assert cell.admitted[-1].device_tokens == 112
    (home,) = {node.device for node in nodes_of(cell, second)}

    cell.lose_worker(*home)
    run(cell, [*second, 8])

    found = cell.admitted[-1]
    assert found.host_tokens + found.disk_tokens == len(second) // PAGE * PAGE


def test_an_idle_worker_has_what_it_computed_copied(make_tiers: MakeCell) -> None:
    """Whole pages of the answer too; they stay on the device, and are copied once."""
    cell = make_tiers()
    run(cell, DOCUMENT, max_tokens=50, ignore_eos=True)
    run(cell, DOCUMENT)

    (order,) = orders_of(cell, BackupPages)
    assert len(order.host_pages) // 4 == 249 // PAGE
    assert all(
        len(node.host_pages("storage")) == len(node.device_pages("worker-0")) for node in nodes_of(cell, DOCUMENT)
    )
    assert cell.state.counters["copied_at_rest_pages"] == 249 // PAGE
    assert cell.state.workers["worker-0"].moves.uncopied == {}


def test_a_worker_that_has_something_to_do_copies_nothing(make_tiers: MakeCell) -> None:
    """What ended meanwhile gets its copy once nothing runs any more."""
    cell = make_tiers()
    cell.submit(DOCUMENT, max_tokens=1)
    cell.submit([3] * 40, max_tokens=60, ignore_eos=True)
    while len(cell.state.requests) == 2:
        worker_goes_on(cell)
    assert orders_of(cell, BackupPages) == []

    cell.drain()

    (order,) = orders_of(cell, BackupPages)
    assert len(order.host_pages) // 4 == 12 + 99 // PAGE


def test_copies_at_rest_are_of_a_bounded_size_and_one_at_a_time(make_tiers: MakeCell) -> None:
    """A long sequence is cut, and goes from its beginning; each answer brings the next piece."""
    pages = TOKENS_AT_ONCE // PAGE
    cell = make_tiers(pages=3 * pages, host_pages=3 * pages, disk_writes="off", max_batch_tokens=4 * TOKENS_AT_ONCE)
    prompt = [*range(2 * TOKENS_AT_ONCE + 5 * PAGE), 1]

    cell.submit(prompt, max_tokens=1)
    worker_runs(cell)
    assert [len(order.host_pages) // 4 for order in orders_of(cell, BackupPages)] == [pages]
    cell.drain()

    assert [len(order.host_pages) // 4 for order in orders_of(cell, BackupPages)] == [pages, pages, 5]
    assert all("storage" in node.host for node in nodes_of(cell, prompt))
    assert len(nodes_of(cell, prompt)) == 3


def test_a_request_that_comes_meanwhile_goes_first(make_tiers: MakeCell) -> None:
    """The next piece waits until the worker is idle again."""
    pages = TOKENS_AT_ONCE // PAGE
    cell = make_tiers(pages=3 * pages, host_pages=3 * pages, disk_writes="off")
    cell.submit([*range(TOKENS_AT_ONCE + 5 * PAGE), 1], max_tokens=1)
    worker_runs(cell)

    cell.submit([9] * 40, max_tokens=20, ignore_eos=True)
    cell.storages["storage"].step()
    cell.deliver(cell.storages["storage"])
    assert len(orders_of(cell, BackupPages)) == 1
    cell.drain()

    assert sum(len(order.host_pages) // 4 for order in orders_of(cell, BackupPages)) == pages + 5 + 59 // PAGE


def test_what_sequences_share_is_copied_once(make_tiers: MakeCell) -> None:
    """Both ends are copied in one backup, behind what they share."""
    cell = make_tiers(pages=64)
    cell.submit(DOCUMENT[:96] + [1] * 40, max_tokens=1)
    cell.submit(DOCUMENT[:96] + [2] * 40, max_tokens=1)
    worker_runs(cell)

    (order,) = orders_of(cell, BackupPages)
    assert len(order.host_pages) // 4 == 6 + 2 + 2


def test_admission_decides_on_copies_at_rest(make_tiers: MakeCell) -> None:
    """What is not worth a copy at its eviction is not worth one before, nor is what hangs below it."""
    cell = make_tiers(admission="selective", admission_frequency=2)
    run(cell, DOCUMENT[:96] + [1] * 40)
    assert orders_of(cell, BackupPages) == []

    run(cell, DOCUMENT[:96] + [2] * 40)

    (order,) = orders_of(cell, BackupPages)
    assert len(order.host_pages) // 4 == 6


@pytest.mark.parametrize("options", [{"copies_at_rest": False}, {"host_tier": False}, {"admission": "none"}])
def test_nothing_is_copied_at_rest_where_it_is_not_wanted(make_tiers: MakeCell, options: dict[str, Any]) -> None:
    """It is off, or no copies are made at all; then no ends pile up."""
    cell = make_tiers(**options)
    run(cell, DOCUMENT)

    assert orders_of(cell, BackupPages) == []
    assert cell.state.workers["worker-0"].moves.uncopied == {}


def test_a_request_that_must_not_write_is_not_copied(make_tiers: MakeCell) -> None:
    """It leaves nothing to copy."""
    cell = make_tiers()
    run(cell, DOCUMENT, write=False)

    assert orders_of(cell, BackupPages) == []


def test_ends_of_a_worker_that_is_never_idle_are_bounded(make_tiers: MakeCell) -> None:
    """Those used longest ago are forgotten, which is counted."""
    cell = make_tiers(pages=3 * MOST_ENDS, host_pages=4, disk_writes="off")
    cell.steps_a_check = 1_000
    cell.submit([5] * 20, max_tokens=2 * MOST_ENDS, ignore_eos=True, request_id="long")
    for number in range(MOST_ENDS + 3):
        cell.submit([number] * 17, max_tokens=1, request_id=f"short-{number}")
    while len(cell.state.requests) > 1:
        worker_goes_on(cell)

    assert len(cell.state.workers["worker-0"].moves.uncopied) == MOST_ENDS
    assert cell.state.counters["ends_forgotten"] == 3


def test_a_copy_at_rest_that_fails_is_made_once_its_sequence_is_used_again(make_tiers: MakeCell) -> None:
    """A storage that fails is not asked again and again for the same."""
    cell = make_tiers(disk_writes="off")
    cell.submit(DOCUMENT, max_tokens=1)
    worker_runs(cell)
    cell.storages["storage"].step(backups_succeed=False)
    cell.drain()
    assert len(orders_of(cell, BackupPages)) == 1

    run(cell, DOCUMENT)

    assert all("storage" in node.host for node in nodes_of(cell, DOCUMENT))


def test_no_copy_leaves_for_one_at_rest(make_tiers: MakeCell) -> None:
    """Where host memory is full, what was copied before stays, and what ends later has its device alone."""
    cell = make_tiers(pages=64, host_pages=14, disk_writes="off")
    run(cell, DOCUMENT)
    run(cell, [7] * 100)

    assert all("storage" in node.host for node in nodes_of(cell, DOCUMENT))
    assert [node.host for node in nodes_of(cell, [7] * 100)] == [()]
    assert cell.state.counters.get("evicted_pages_host", 0) == 0
