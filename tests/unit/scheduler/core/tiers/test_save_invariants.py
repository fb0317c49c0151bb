"""The checker of saves and neighbours finds what it is for."""

import pytest

from services.scheduler.core import check_invariants
from shared.errors import InvariantViolated


@pytest.fixture
def cell(make_cell):
    """A save under way that reads a device, and a load from a neighbour."""
    cell = make_cell(page_size=16, pages=64, host_pages=32, disk_chunks=50, workers=2, disk_writes="off")
    document = list(range(200))
    cell.submit(document, max_tokens=1)
    cell.drain()
    cell.submit([*document, *[9] * 300], max_tokens=20, ignore_eos=True)
    cell.submit([*document, 7], max_tokens=1)
    cell.state.config = type(cell.state.config)(lease_tokens=4, reserve_fraction=0.0)
    busy = cell.workers["worker-0"]
    busy.step()
    while cell.deliver(busy):
        pass
    assert cell.state.saves
    assert any(load.neighbour_id for load in cell.state.workers["worker-1"].batches[0].loads)
    return cell


def forget_a_chunk(state):
    state.storages["storage"].saving.popitem()


def miscount_late(state):
    state.storages["storage"].late_saves += 1


def lose_a_deadline(state):
    (save,) = state.saves.values()
    del state.timers[save.timer_id]


def forget_what_is_read(state):
    next(iter(state.saves.values())).node = 0


def lose_the_reader(state):
    next(iter(state.saves.values())).worker_id = "nobody"


def save_to_nobody(state):
    next(iter(state.saves.values())).storage_id = "nobody"


def save_twice(state):
    next(iter(state.saves.values())).chunks *= 2


def read_a_stranger(state):
    state.workers["worker-1"].batches[0].loads[0].neighbour_id = "stranger"


def read_from_two(state):
    state.workers["worker-1"].batches[0].loads[0].storage_id = "storage"


def know_a_stranger(state):
    state.workers["worker-1"].neighbours["stranger"] = True


def unlock_a_neighbour(state):
    state.workers["worker-1"].batches[0].loads[0].neighbour_id = ""


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
def test_a_fault_is_found(cell, fault):
    """A state that contradicts itself does not pass."""
    check_invariants(cell.state)

    fault(cell.state)

    with pytest.raises((InvariantViolated, KeyError)):
        check_invariants(cell.state)
