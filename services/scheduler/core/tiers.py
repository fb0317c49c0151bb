"""Making room on a device: evict what the policy names, backing it up to host memory where there is one."""

from __future__ import annotations

from services.scheduler.core.backups import (
    backup_target,
    join_transfer,
    open_transfer,
    pages_leaving,
    send_transfer,
    take_host_pages,
)
from services.scheduler.core.prefix_tree import Node, page_count
from services.scheduler.core.residency import drop_device, split_node, take_device_victim
from services.scheduler.core.state import CellState, Transfer, Worker, count, storage_of
from services.scheduler.core.turn import Turn

# Cutting a long node for every few pages would leave a chain of tiny nodes and a backup for each.
_LEAST_EVICTED_TOKENS = 256
# Bounds the size of one BackupPages message: 24 bytes a page.
_TRANSFER_PAGES = 8192


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
    transfer: Transfer | None = None
    transfer_pages = 0
    while missing > 0:
        node = take_device_victim(state, worker.worker_id)
        if node is None:
            break
        node = _trim(state, node, missing)
        size = page_count(state.tree, node)
        missing -= size
        host_pages = _backup_pages(state, node, worker, size)
        if host_pages is None:
            count(state, "evicted_pages_device", drop_device(state, node, worker))
            continue
        storage = backup_target(state, worker)
        if transfer is not None and transfer_pages + size > _TRANSFER_PAGES:
            send_transfer(turn, transfer)
            transfer = None
        if transfer is None and storage is not None:
            transfer, transfer_pages = open_transfer(turn, worker, storage), 0
        if transfer is not None:
            join_transfer(state, transfer, node, host_pages)
            transfer_pages += size
    if transfer is not None:
        send_transfer(turn, transfer)
    return worker.pool.free >= pages


def _trim(state: CellState, node: Node, pages: int) -> Node:
    """Keep the front of a victim that is much larger than what is missing; returns the part to evict."""
    least = -(-_LEAST_EVICTED_TOKENS // state.tree.page_size)
    excess = page_count(state.tree, node) - min(max(pages, least), _TRANSFER_PAGES)
    if excess > 0 and not node.transfer:
        split_node(state, node, excess)  # The lower part keeps the id.
    return node


def _backup_pages(state: CellState, node: Node, worker: Worker, size: int) -> bytes | None:
    """Host pages to back a victim up to, or None when it is to be dropped as it is."""
    storage = backup_target(state, worker)
    if storage is None or storage.storage_id in node.host or node.transfer:
        return None  # Nowhere to go, a copy is there, or another worker's backup is about to make one.
    return take_host_pages(state, storage, size)


def keep_reserve(turn: Turn, worker: Worker) -> None:
    """Evict ahead of need where eviction takes a backup's time, so that an allocation seldom waits for one."""
    if storage_of(turn.state, worker) is None:
        return
    reserve = int(worker.pool.total * turn.state.config.reserve_fraction)
    if worker.pool.free < reserve:
        make_room(turn, worker, reserve)
