"""Making room on a device: evict what the policy names, backing it up to host memory where it is admitted there."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.core.backups import backup_target, join_transfer, open_transfer, pages_leaving, send_transfer
from services.scheduler.core.host_admission import admit_to_host
from services.scheduler.core.prefix_tree import Node, page_count
from services.scheduler.core.residency import (
    DEVICE,
    drop_device,
    is_left_bare,
    order_of,
    split_node,
    take_device_victim,
)
from services.scheduler.core.state import CellState, Storage, Transfer, Worker, count, storage_of
from services.scheduler.core.turn import Turn

# Cutting a long node for every few pages would leave a chain of tiny nodes and a backup for each.
LEAST_EVICTED_TOKENS = 256
# Bounds the size of one BackupPages or PromotePages message: 24 bytes a page.
TRANSFER_PAGES = 8192


@dataclass(slots=True)
class _Eviction:
    """The backups that one making of room leads to. ``pages`` are those of the last one.

    ``leaving`` counts, by parent, the children that leave with them, so that a chain goes in one transfer.
    """

    transfers: list[Transfer] = field(default_factory=list)
    pages: int = 0
    leaving: dict[int, int] = field(default_factory=dict)


def can_make_room(worker: Worker, pages: int) -> bool:
    """Whether eviction could ever free so many pages with what runs now. Does not mutate."""
    pool = worker.pool
    return pages <= pool.free + pool.cached - pool.locked


def make_room(turn: Turn, worker: Worker, pages: int) -> bool:
    """Evict until ``pages`` are free or will be after running backups; returns whether they are free now."""
    state = turn.state
    missing = pages - worker.pool.free
    if missing <= 0:
        return True
    missing -= pages_leaving(state, worker)
    eviction = _Eviction()
    while missing > 0:
        node = take_device_victim(state, worker.worker_id, eviction.leaving)
        if node is None:
            break
        trim(state, node, missing)
        missing -= page_count(state.tree, node)
        _evict(turn, worker, node, eviction)
    for transfer in eviction.transfers:
        send_transfer(turn, transfer)
    return worker.pool.free >= pages


def trim(state: CellState, node: Node, pages: int) -> None:
    """Cut off the front of a victim that is much larger than the pages that are missing; what is left is to go."""
    least = -(-LEAST_EVICTED_TOKENS // state.tree.page_size)
    excess = page_count(state.tree, node) - min(max(pages, least), TRANSFER_PAGES)
    if excess > 0 and not node.transfer:
        split_node(state, node, excess)  # The lower part keeps the id.


def _evict(turn: Turn, worker: Worker, node: Node, eviction: _Eviction) -> None:
    """Drop a node at once, or let it leave with a backup when it is to have a copy or its children leave with one."""
    state = turn.state
    parent_id = node.parent
    storage = backup_target(state, worker)
    pages = None
    # A node that has a copy needs none, nor one that another worker's backup is about to give one.
    if storage is not None and storage.storage_id not in node.host and not node.transfer:
        pages = admit_to_host(state, storage, node)
    if storage is not None and (pages is not None or worker.worker_id in node.below):
        join_transfer(state, _transfer_for(turn, worker, storage, eviction, pages or b""), node, pages or b"")
        eviction.leaving[parent_id] = eviction.leaving.get(parent_id, 0) + 1
    else:
        count(state, "evicted_pages_device", drop_device(state, node, worker))
    parent = state.tree.nodes.get(parent_id)
    if parent is not None and is_left_bare(parent, worker.worker_id, eviction.leaving):
        order_of(state, DEVICE, worker.worker_id).offer(parent)


def _transfer_for(turn: Turn, worker: Worker, storage: Storage, eviction: _Eviction, pages: bytes) -> Transfer:
    """The transfer that a node with these host pages (packed) joins: the last one, or a new one when that is full."""
    size = len(pages) // 4
    if not eviction.transfers or eviction.pages + size > TRANSFER_PAGES:
        eviction.transfers.append(open_transfer(turn, worker, storage))
        eviction.pages = 0
    eviction.pages += size
    return eviction.transfers[-1]


def keep_reserve(turn: Turn, worker: Worker) -> None:
    """Evict ahead of need where eviction takes a backup's time, so that an allocation seldom waits for one."""
    if storage_of(turn.state, worker) is None or turn.state.config.admission == "none":
        return
    reserve = reserved_pages(turn.state, worker)
    if worker.pool.free < reserve:
        make_room(turn, worker, reserve)


def reserved_pages(state: CellState, worker: Worker) -> int:
    """Device pages that eviction tries to keep free. Does not mutate."""
    return int(worker.pool.total * state.config.reserve_fraction)
