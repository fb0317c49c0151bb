"""The checks of state pools, leases and saves find what they are for."""

import pytest

from services.scheduler.core.fold.invariants import check_invariants
from shared.errors import InvariantViolated
from tests.unit.scheduler.core.fetching import prompt
from tests.unit.scheduler.core.saving_hidden import saving_cell, state_storage, worker_runs


def break_pool(cell):
    state_storage(cell).hidden_pool.allocate(1)


def break_ownership(cell):
    state_storage(cell).hidden_pool.release(cell.state.leases[2].pages[:4])


def break_lease_size(cell):
    cell.state.leases[2].pages = cell.state.leases[2].pages[4:]
    break_ownership(cell)


def break_request(cell):
    cell.state.requests["leasing"].hidden.lease = 0


def break_other_request(cell):
    cell.state.requests["leasing"].hidden.lease = 9


def break_lease_end(cell):
    cell.state.leases[2].request_id = ""


def break_worker(cell):
    cell.state.leases[2].worker_id = "nobody"


def break_storage(cell):
    cell.state.leases[2].storage_id = "nobody"


def break_depth(cell):
    cell.state.leases[2].depth = 1


def break_names(cell):
    cell.state.leases[2].names = b""


def break_saving(cell):
    state_storage(cell).hidden_saving[b"x" * 16] = 1


def break_twice(cell):
    (save,) = cell.state.hidden_saves.values()
    lease = cell.state.leases[2]
    lease.names = save.names[:16]


def break_deadline(cell):
    (save,) = cell.state.hidden_saves.values()
    del cell.state.timers[save.timer_id]


def break_late(cell):
    state_storage(cell).late_saves = 1


def break_save(cell):
    (save,) = cell.state.hidden_saves.values()
    save.names = save.names[16:]


def break_pool_without_handle(cell):
    state_storage(cell).hidden_handle = None


def break_settings(cell):
    cell.state.is_configured = False


def break_order_of_pools(cell):
    state_storage(cell).is_pool_requested = False


def break_catalogue(cell):
    state_storage(cell).hidden_chunks |= {number.to_bytes(16, "big"): None for number in range(1000)}


BREAKS = [value for name, value in list(globals().items()) if name.startswith("break_")]


@pytest.fixture
def cell(make_cell):
    """One save under way, and one request that runs under a lease."""
    cell = saving_cell(make_cell)
    cell.submit(prompt(2), max_tokens=1)
    worker_runs(cell)
    cell.submit(prompt(2, kind=2), max_tokens=1, request_id="leasing")
    check_invariants(cell.state)
    assert list(cell.state.leases) == [2]
    assert len(cell.state.hidden_saves) == 1
    return cell


@pytest.mark.parametrize("broken", BREAKS)
def test_a_contradiction_is_found(cell, broken):
    """Whatever it is."""
    broken(cell)

    with pytest.raises(InvariantViolated):
        check_invariants(cell.state)
