"""What tests of nodes that share have in common: two of them, and what one has in host memory."""

from shared.messages.storage_plans import FetchChunks
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders_of
from tests.unit.scheduler.core.fetching import PAGE, prompt

A, B = "storage", "storage-b"
KEY = "5a" * 16
PLENTY = 1 << 40


def two_nodes(
    make_cell: MakeCell,
    *,
    shares: tuple[str, str] = ("engine", "engine"),
    key_id: str = "",
    kinds: tuple[int, ...] = (1,),
    handover_bytes: int = PLENTY,
    pages_of_b: int = 40,
    disk_chunks: int = 0,
    **settings: object,
) -> CellModel:
    """The first has computed prompts of three chunks of these kinds and has them in host memory; both have a worker."""
    cell = make_cell(page_size=PAGE, workers=0, host_pages=0, host_writes="through", **settings)
    cell.add_storage(A, node="node", pages=40, shares=shares[0], handover_bytes=handover_bytes, disk_chunks=disk_chunks)
    cell.add_worker("worker-a", node="node", pages=40)
    for kind in kinds:
        cell.serve(prompt(3, kind), max_tokens=1, key_id=key_id)
    cell.add_storage(
        B, node="node-b", pages=pages_of_b, shares=shares[1], handover_bytes=handover_bytes, disk_chunks=disk_chunks
    )
    cell.add_worker("worker-b", node="node-b", pages=40)
    cell.drain()
    return cell


def fetches(cell: CellModel) -> list[FetchChunks]:
    """All that were ordered."""
    return orders_of(cell, FetchChunks)
