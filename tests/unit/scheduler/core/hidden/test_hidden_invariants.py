"""The checks of hidden pools, leases and saves find what they are for."""

from collections.abc import Callable

import pytest

from services.scheduler.core.fold.invariants import check_invariants
from shared.errors import InvariantViolated
from tests.present import present
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, worker_runs
from tests.unit.scheduler.core.fetching import prompt
from tests.unit.scheduler.core.saving_hidden import hidden_storage, saving_cell


def break_pool(cell: CellModel) -> None:
    present(hidden_storage(cell).hidden.pool).allocate(1)


def break_ownership(cell: CellModel) -> None:
    present(hidden_storage(cell).hidden.pool).release(cell.state.leases[2].pages[:4])


def break_lease_size(cell: CellModel) -> None:
    cell.state.leases[2].pages = cell.state.leases[2].pages[4:]
    break_ownership(cell)


def break_request(cell: CellModel) -> None:
    cell.state.requests["leasing"].hidden.lease = 0


def break_other_request(cell: CellModel) -> None:
    cell.state.requests["leasing"].hidden.lease = 9


def break_lease_end(cell: CellModel) -> None:
    cell.state.leases[2].request_id = ""


def break_worker(cell: CellModel) -> None:
    cell.state.leases[2].worker_id = "nobody"


def break_storage(cell: CellModel) -> None:
    cell.state.leases[2].storage_id = "nobody"


def break_depth(cell: CellModel) -> None:
    cell.state.leases[2].depth = 1


def break_names(cell: CellModel) -> None:
    cell.state.leases[2].names = b""


def break_saving(cell: CellModel) -> None:
    hidden_storage(cell).hidden.saving[b"x" * 16] = 1


def break_twice(cell: CellModel) -> None:
    (save,) = cell.state.hidden_saves.values()
    lease = cell.state.leases[2]
    lease.names = save.names[:16]


def break_deadline(cell: CellModel) -> None:
    (save,) = cell.state.hidden_saves.values()
    del cell.state.timers[save.timer_id]


def break_late(cell: CellModel) -> None:
    hidden_storage(cell).disk.late_saves = 1


def break_save(cell: CellModel) -> None:
    (save,) = cell.state.hidden_saves.values()
    save.names = save.names[16:]


def break_pool_without_handle(cell: CellModel) -> None:
    hidden_storage(cell).hidden.handle = None


def break_settings(cell: CellModel) -> None:
    cell.state.is_configured = False


def break_order_of_pools(cell: CellModel) -> None:
    hidden_storage(cell).is_pool_requested = False


def break_catalogue(cell: CellModel) -> None:
    hidden_storage(cell).hidden.chunks |= {number.to_bytes(16, "big"): None for number in range(1000)}


BREAKS = [value for name, value in list(globals().items()) if name.startswith("break_")]


@pytest.fixture
def cell(make_cell: MakeCell) -> CellModel:
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
def test_a_contradiction_is_found(cell: CellModel, broken: Callable[..., None]) -> None:
    """Whatever it is."""
    broken(cell)

    with pytest.raises(InvariantViolated):
        check_invariants(cell.state)
