"""Backups to host memory."""

import pytest

from services.scheduler.core.fold import main_loop
from services.scheduler.core.state import Worker
from services.scheduler.core.step import Step
from shared.messages.storage_plans import BackupPages
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, host_pool, orders_of


def start_backup(cell: CellModel) -> int:
    """Fill the device and ask for more; returns the id of the transfer that this leads to."""
    cell.serve([1] * 40, max_tokens=1)
    cell.submit([2] * 40, max_tokens=1, request_id="next")
    (transfer_id,) = cell.state.transfers
    return transfer_id


def test_pages_under_backup_are_not_reused(make_cell: MakeCell) -> None:
    """The request that needs them waits for BackupDone."""
    cell = make_cell(pages=12, host_pages=60)
    start_backup(cell)

    assert cell.admitted[-1].request_id != "next"
    cell.storages["storage"].step()
    cell.deliver(cell.storages["storage"])
    assert cell.admitted[-1].request_id == "next"
    (order,) = orders_of(cell, BackupPages)
    assert len(order.identities) == len(order.host_pages) * 4 == len(order.device_pages) * 4


def test_a_prefix_that_is_used_while_it_is_backed_up_stays(make_cell: MakeCell) -> None:
    """The device pages are still good; the backup only adds a copy."""
    cell = make_cell(pages=14, host_pages=60, max_running=4)
    cell.serve([1] * 40, max_tokens=1)
    cell.submit([2] * 24, max_tokens=1)
    assert cell.state.transfers
    cell.serve([1] * 40, max_tokens=1, request_id="again", priority=1)

    assert cell.admitted[-2].request_id == "again"
    assert cell.admitted[-2].device_tokens > 0


def test_a_failed_backup_drops_the_pages(make_cell: MakeCell) -> None:
    """Eviction goes on without a copy."""
    cell = make_cell(pages=12, host_pages=60)
    start_backup(cell)
    cell.storages["storage"].step(backups_succeed=False)
    cell.drain()

    assert cell.state.counters["backups_failed"] == 1
    assert host_pool(cell).cached == 0
    assert cell.gateways["gateway"].ended["next"] == "finished"


def test_a_late_backup_keeps_its_pages_until_it_answers(make_cell: MakeCell) -> None:
    """Past the deadline it counts as failed, yet neither its device pages nor its host pages are reused."""
    cell = make_cell(pages=12, host_pages=60)
    transfer_id = start_backup(cell)

    cell.fire(f"backup.{transfer_id}")

    assert cell.state.counters["backups_failed"] == 1
    assert cell.admitted[-1].request_id != "next"
    assert host_pool(cell).leased > 0
    cell.storages["storage"].step()
    cell.deliver(cell.storages["storage"])
    assert host_pool(cell).leased == 0
    assert host_pool(cell).cached == 0
    cell.drain()
    assert cell.gateways["gateway"].ended["next"] == "finished"


def test_a_storage_that_is_late_gets_no_more_backups(make_cell: MakeCell) -> None:
    """Until it answers, eviction drops what it must."""
    cell = make_cell(pages=24, host_pages=60)
    cell.submit([1] * 40, max_tokens=1)
    cell.serve([3] * 36, max_tokens=1)
    cell.submit([2] * 40, max_tokens=1, request_id="next")
    (transfer_id,) = cell.state.transfers
    before = len(orders_of(cell, BackupPages))

    cell.fire(f"backup.{transfer_id}")

    assert cell.admitted[-1].request_id == "next"
    assert len(orders_of(cell, BackupPages)) == before


def test_a_lost_storage_ends_its_backups(make_cell: MakeCell) -> None:
    """Nothing waits for it any more."""
    cell = make_cell(pages=12, host_pages=60)
    start_backup(cell)

    cell.lose_storage("storage")
    cell.drain()

    assert cell.state.transfers == {}
    assert cell.timers == {}
    assert cell.gateways["gateway"].ended["next"] == "finished"


def test_host_pages_of_a_lost_workers_backup_wait_for_the_answer(make_cell: MakeCell) -> None:
    """The storage may still write to them."""
    cell = make_cell(pages=12, host_pages=60)
    start_backup(cell)

    cell.lose_worker("worker-0")

    assert host_pool(cell).leased > 0
    cell.add_worker("worker-0", pages=12)
    cell.drain()
    assert host_pool(cell).leased == 0


def test_the_host_pool_evicts_its_oldest(make_cell: MakeCell) -> None:
    """A full host pool makes room by the same policy."""
    cell = make_cell(pages=12, host_pages=21)
    for number in range(5):
        cell.serve([number] * 40, max_tokens=1)

    assert cell.state.counters["evicted_pages_host"] > 0
    cell.serve([3] * 40, max_tokens=1)
    assert cell.admitted[-1].host_tokens > 0


def test_what_the_host_cannot_take_is_dropped(make_cell: MakeCell) -> None:
    """A node larger than the whole host pool leaves without a copy."""
    cell = make_cell(pages=12, host_pages=2)
    cell.serve([1] * 40, max_tokens=1)
    cell.serve([2] * 40, max_tokens=1)

    assert cell.state.counters["evicted_pages_device"] > 0
    assert len(cell.gateways["gateway"].ended) == 2


def test_an_answer_lets_its_own_worker_go_on_and_leaves_the_others_alone(
    make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cell of many workers, serving all of them at each backup's end would be most of the work."""
    cell = make_cell(pages=12, host_pages=60, workers=3)
    for number in range(3):
        cell.serve([number + 1] * 40, max_tokens=1)
    served = []
    serve = main_loop._serve

    def note_and_serve(turn: Step, worker: Worker) -> bool:
        served.append(worker.worker_id)
        return serve(turn, worker)

    monkeypatch.setattr(main_loop, "_serve", note_and_serve)
    cell.submit([9] * 40, max_tokens=1, request_id="next")
    (transfer,) = cell.state.transfers.values()
    served.clear()
    cell.storages["storage"].step()
    cell.deliver(cell.storages["storage"])

    assert served == [transfer.worker_id]
    assert cell.admitted[-1].request_id == "next"
