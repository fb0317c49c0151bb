"""What tests of sparse prefixes share: cells whose disk can be read in part, and requests that allow it."""

from typing import Any

from services.scheduler.core.state import Storage
from shared.messages.requests import Importance
from shared.messages.worker_plans import AdmitRequest
from tests.stateful.cell_model import CellModel
from tests.stateful.model_sparse import copy_in_parts
from tests.unit.scheduler.core.cell_fixtures import MakeCell
from tests.unit.scheduler.core.fetching import PAGE, put_on_disk

QUARTER = Importance(ratio=0.25)


def sparse_cell(make_cell: MakeCell, **config: Any) -> CellModel:
    """A cell without a profile whose storage keeps chunks so that they can be read in part."""
    shape = {"page_size": PAGE, "pages": 64, "host_pages": 40, "disk_chunks": 100, "keeps_sparse": True}
    settings = {"max_batch_tokens": 1000, "prefetch_wait": "full"}
    return make_cell(**shape | settings | config)


def put_in_parts(cell: CellModel, tokens: list[int]) -> list[bytes]:
    """Let the disk hold a prompt's whole chunks in both forms, and say so; returns their names."""
    names = put_on_disk(cell, tokens)
    storage = cell.storages["storage"]
    copy_in_parts(storage)
    while cell.deliver(storage):
        pass
    return names


def answered(cell: CellModel, tokens: list[int], **options: Any) -> AdmitRequest:
    """A request is answered; returns how it was admitted last."""
    name = cell.serve(tokens, **options)
    return [order for order in cell.admitted if order.request_id == name][-1]


def storage_of(cell: CellModel) -> Storage:
    """The core's view of the storage."""
    return cell.state.storages["storage"]
