"""What tests of state leases share: cells that keep state, and a step-by-step worker and storage."""

from typing import Any

from services.scheduler.core.state import Storage
from shared.messages.base import unpack_int32
from shared.messages.storage_plans import SaveChunks
from shared.messages.worker_events import RestorationCosts
from shared.messages.worker_plans import AdmitRequest, ExtendLease, StateLease
from tests.present import present
from tests.stateful.cell_model import CellModel
from tests.stateful.model_state import COSTS
from tests.unit.scheduler.core.cell_fixtures import MakeCell, Order
from tests.unit.scheduler.core.fetching import PAGE


def saving_cell(make_cell: MakeCell, *, costs: RestorationCosts = COSTS, **config: Any) -> CellModel:
    """A cell with a disk whose storage keeps the only layer of the model as hidden states. A chunk is two pages."""
    shape = {"page_size": PAGE, "pages": 64, "host_pages": 40, "disk_chunks": 100, "state_pages": 64}
    settings = {"state_form": "0/1/0", "lease_tokens": 64, "max_batch_tokens": 1000}
    cell = make_cell(**shape | {"costs": costs} | settings | config)
    assert cell.state.storages["storage"].hidden.pool is not None
    return cell


def state_storage(cell: CellModel) -> Storage:
    """The core's storage."""
    return cell.state.storages["storage"]


def free_pages(cell: CellModel) -> int:
    """Free pages of the state pool."""
    return present(state_storage(cell).hidden.pool).free


def leases_given(cell: CellModel) -> list[StateLease | None]:
    """Every StateLease so far; None for a request that got none."""
    return [order.state_lease for order in _orders(cell, AdmitRequest)]


def extensions(cell: CellModel) -> list[list[int]]:
    """State pages of every ExtendLease so far."""
    return [unpack_int32(order.state_pages) for order in _orders(cell, ExtendLease)]


def saves(cell: CellModel, form: str = "state") -> list[SaveChunks]:
    """Every save of this form so far."""
    return [order for order in _orders(cell, SaveChunks) if order.form == form]


def worker_runs(cell: CellModel, name: str = "worker-0") -> None:
    """A worker does everything that it can and is heard; the storage does nothing."""
    worker = cell.workers[name]
    while worker.step() or worker.outbox:
        while cell.deliver(worker):
            pass


def _orders(cell: CellModel, kind: type[Order]) -> list[Order]:
    found = [getattr(output, "order", None) for outputs in cell.outputs for output in outputs]
    return [order for order in found if isinstance(order, kind)]
