"""What tests of state leases share: cells that keep state, and a step-by-step worker and storage."""

from shared.messages.base import unpack_int32
from shared.messages.storage_plans import SaveChunks
from shared.messages.worker_plans import AdmitRequest, ExtendLease
from tests.stateful.model_state import COSTS
from tests.unit.scheduler.core.fetching import PAGE


def saving_cell(make_cell, *, costs=COSTS, **config):
    """A cell with a disk whose storage keeps the only layer of the model as hidden states. A chunk is two pages."""
    shape = {"page_size": PAGE, "pages": 64, "host_pages": 40, "disk_chunks": 100, "state_pages": 64}
    settings = {"state_form": "0/1/0", "lease_tokens": 64, "max_batch_tokens": 1000}
    cell = make_cell(**shape | {"costs": costs} | settings | config)
    assert cell.state.storages["storage"].hidden_pool is not None
    return cell


def state_storage(cell):
    """The core's storage."""
    return cell.state.storages["storage"]


def free_pages(cell):
    """Free pages of the state pool."""
    return state_storage(cell).hidden_pool.free


def leases_given(cell):
    """Every StateLease so far; None for a request that got none."""
    return [order.state_lease for order in _orders(cell, AdmitRequest)]


def extensions(cell):
    """State pages of every ExtendLease so far."""
    return [unpack_int32(order.state_pages) for order in _orders(cell, ExtendLease)]


def saves(cell, form="state"):
    """Every save of this form so far."""
    return [order for order in _orders(cell, SaveChunks) if order.form == form]


def worker_runs(cell, name="worker-0"):
    """A worker does everything that it can and is heard; the storage does nothing."""
    worker = cell.workers[name]
    while worker.step() or worker.outbox:
        while cell.deliver(worker):
            pass


def _orders(cell, kind):
    found = [getattr(output, "order", None) for outputs in cell.outputs for output in outputs]
    return [order for order in found if isinstance(order, kind)]
