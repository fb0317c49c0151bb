"""The checker of saves and neighbours finds what it is for."""

from collections.abc import Callable

import pytest

from services.scheduler.core import check_invariants
from services.scheduler.core.state import CellState
from shared.errors import InvariantViolated
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell


@pytest.fixture
def cell(make_cell: MakeCell) -> CellModel:
    """A save under way that reads a device, and a load from a neighbour."""
    cell = make_cell(page_size=16, pages=64, host_pages=32, disk_chunks=50, workers=2, disk_writes="off")
    document = list(range(200))
    cell.serve(document, max_tokens=1)
    cell.submit([*document, *[9] * 300], max_tokens=20, ignore_eos=True)
    cell.submit([*document, 7], max_tokens=1)
    cell.state.config = type(cell.state.config)(lease_tokens=4, reserve_fraction=0.0)
    busy = cell.workers["worker-0"]
    busy.step()
    while cell.deliver(busy):
        pass
    assert cell.state.saves
    assert any(load.neighbour_id for load in cell.state.workers["worker-1"].work.batches[0].loads)
    return cell


def forget_a_chunk(state: CellState) -> None:
    state.storages["storage"].disk.saving.popitem()


def miscount_late(state: CellState) -> None:
    state.storages["storage"].disk.late_saves += 1


def lose_a_deadline(state: CellState) -> None:
    (save,) = state.saves.values()
    del state.timers[save.timer_id]


def forget_what_is_read(state: CellState) -> None:
    next(iter(state.saves.values())).node = 0


def lose_the_reader(state: CellState) -> None:
    next(iter(state.saves.values())).worker_id = "nobody"


def save_to_nobody(state: CellState) -> None:
    next(iter(state.saves.values())).storage_id = "nobody"


def save_twice(state: CellState) -> None:
    next(iter(state.saves.values())).chunks *= 2


def read_a_stranger(state: CellState) -> None:
    state.workers["worker-1"].work.batches[0].loads[0].neighbour_id = "stranger"


def read_from_two(state: CellState) -> None:
    state.workers["worker-1"].work.batches[0].loads[0].storage_id = "storage"


def know_a_stranger(state: CellState) -> None:
    state.workers["worker-1"].moves.neighbours["stranger"] = True


def unlock_a_neighbour(state: CellState) -> None:
    state.workers["worker-1"].work.batches[0].loads[0].neighbour_id = ""


FAULTS = [
    forget_a_chunk,
    miscount_late,
    lose_a_deadline,
    forget_what_is_read,
    lose_the_reader,
    save_to_nobody,
    save_twice,
    read_a_stranger,
    read_from_two,
    know_a_stranger,
    unlock_a_neighbour,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(cell: CellModel, fault: Callable[..., None]) -> None:
    """A state that contradicts itself does not pass."""
    check_invariants(cell.state)

    fault(cell.state)

    with pytest.raises((InvariantViolated, KeyError)):
        check_invariants(cell.state)
