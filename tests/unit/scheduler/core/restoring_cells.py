"""What tests of restorations share: cells that keep hidden states, and hidden states that are on a disk already."""

from typing import Any

from msgspec import structs

from services.scheduler.core.cache.page_pool import PagePool
from shared.messages.pools import HIDDEN
from shared.messages.storage_events import ChunksListed
from shared.messages.worker_events import RestorationCosts
from shared.messages.worker_plans import RestoreChunk, RunBatch
from tests.present import present
from tests.stateful.cell_model import CellModel
from tests.stateful.model_hidden import COSTS
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders_of
from tests.unit.scheduler.core.fetching import PAGE, chunks_of

SLOW_DISK = structs.replace(COSTS, token_us=0.001, hidden_us=0.0001)
"""Of a worker that computes faster than any disk reads."""


def restoring_cell(
    make_cell: MakeCell, *, costs: RestorationCosts = COSTS, hidden_pages: int = 64, **config: Any
) -> CellModel:
    """A cell with a disk whose storage keeps the only layer of the model as hidden states."""
    shape = {"page_size": PAGE, "pages": 64, "host_pages": 40, "disk_chunks": 100, "hidden_pages": hidden_pages}
    settings = {"hidden_form": "0/1/0", "disk_writes": "off", "max_batch_tokens": 1000, "prefetch_wait": "full"}
    cell = make_cell(**shape | {"costs": costs} | settings | config)
    assert cell.state.storages["storage"].hidden.pool is not None
    return cell


def put_hidden(cell: CellModel, tokens: list[int], *, chunks: int | None = None) -> list[bytes]:
    """Let the disk hold hidden states of a prompt's first whole chunks, and say so; returns their names."""
    found = dict(list(chunks_of(tokens).items())[:chunks])
    cell.hidden_disks["storage"].chunks.update(found)
    for pages in found.values():
        cell.ever_computed.update(page.identity() for page in pages)
    incarnation = cell.storages["storage"].incarnation
    cell.feed(
        ChunksListed(storage_id="storage", incarnation=incarnation, chunks=b"".join(found), form=HIDDEN),
    )
    return list(found)


def put_hidden_in_store(cell: CellModel, tokens: list[int], *, chunks: int | None = None) -> None:
    """Let the object store hold hidden states of a prompt's first whole chunks; nobody is told."""
    found = dict(list(chunks_of(tokens).items())[:chunks])
    cell.hidden_remote.chunks.update(found)
    for pages in found.values():
        cell.ever_computed.update(page.identity() for page in pages)


def storage_obeys(cell: CellModel) -> None:
    """The storage carries out what it was ordered so far; its fetches have brought nothing yet."""
    while cell.storages["storage"].step():
        pass


def bring(cell: CellModel, chunks: int) -> None:
    """The storage brings so many chunks more, and says so after each."""
    storage_obeys(cell)
    for _ in range(chunks):
        cell.storages["storage"].fetch()
        while cell.deliver(cell.storages["storage"]):
            pass


def bring_at_once(cell: CellModel, chunks: int) -> None:
    """The storage brings so many chunks more, and says so once."""
    storage_obeys(cell)
    cell.storages["storage"].fetch(chunks=chunks)
    cell.deliver(cell.storages["storage"])


def restores(cell: CellModel) -> list[RestoreChunk]:
    """Every RestoreChunk that was ordered, in order."""
    return [restore for order in orders_of(cell, RunBatch) for restore in order.restores]


def hidden_pool(cell: CellModel) -> PagePool:
    """The core's pool of hidden pages."""
    return present(cell.state.storages["storage"].hidden.pool)


def rot_hidden(cell: CellModel) -> None:
    """No hidden page of the storage is what was saved any more."""
    for page in present(cell.storages["storage"].hidden_pool).memory.values():
        page.is_corrupt = True
