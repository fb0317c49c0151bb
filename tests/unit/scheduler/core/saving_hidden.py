"""What tests of hidden leases share: cells that keep hidden states, and a step-by-step worker and storage."""

from typing import Any

from services.scheduler.core.state import Storage
from shared.messages.base import unpack_int32
from shared.messages.pools import HIDDEN
from shared.messages.storage_plans import SaveChunks
from shared.messages.worker_events import RestorationCosts
from shared.messages.worker_plans import ExtendLease, HiddenLease
from tests.present import present
from tests.stateful.cell_model import CellModel
from tests.stateful.model_hidden import COSTS
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders_of
from tests.unit.scheduler.core.fetching import PAGE


def saving_cell(make_cell: MakeCell, *, costs: RestorationCosts = COSTS, **config: Any) -> CellModel:
    """A cell with a disk whose storage keeps the only layer of the model as hidden states. A chunk is two pages."""
    shape = {"page_size": PAGE, "pages": 64, "host_pages": 40, "disk_chunks": 100, "hidden_pages": 64}
    settings = {"hidden_form": "0/1/0", "lease_tokens": 64, "max_batch_tokens": 1000}
    cell = make_cell(**shape | {"costs": costs} | settings | config)
    assert cell.state.storages["storage"].hidden.pool is not None
    return cell


def hidden_storage(cell: CellModel) -> Storage:
    """The core's storage."""
    return cell.state.storages["storage"]


def free_pages(cell: CellModel) -> int:
    """Free pages of the hidden pool."""
    return present(hidden_storage(cell).hidden.pool).free


def leases_given(cell: CellModel) -> list[HiddenLease | None]:
    """Every HiddenLease so far; None for a request that got none."""
    return [order.hidden_lease for order in cell.admitted]


def extensions(cell: CellModel) -> list[list[int]]:
    """Hidden pages of every ExtendLease so far."""
    return [unpack_int32(order.hidden_pages) for order in orders_of(cell, ExtendLease)]


def saves(cell: CellModel, form: str = HIDDEN) -> list[SaveChunks]:
    """Every save of this form so far."""
    return [order for order in orders_of(cell, SaveChunks) if order.form == form]
