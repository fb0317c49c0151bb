"""Backups, device to host: planned with an eviction, answered by the storage, bounded by a deadline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.identities import page_identities
from services.scheduler.core.cache.pins import take_hold
from services.scheduler.core.cache.prefix_tree import PAGE_NUMBER_BYTES, Node, page_count
from services.scheduler.core.cache.residency import (
    HOST,
    copies_of,
    count_leaving,
    drop_device,
    give_host,
    host_pool,
    is_device_evictable,
    offer,
)
from services.scheduler.core.tiers.under_way import Transfer
from shared.messages.storage_plans import BackupPages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.scheduler.core.state import CellState, Storage, Worker
    from services.scheduler.core.step import Step


def backup_target(state: CellState, worker: Worker) -> Storage | None:
    """Return the storage that takes this worker's backups now, or None.

    A storage that let a deadline pass takes none until it answers.
    """
    storage = state.storage_of(worker)
    return None if storage is None or storage.late_backups else storage


def open_transfer(step: Step, worker: Worker, storage: Storage, *, stays: bool = False) -> Transfer:
    """Start a backup without nodes. Nodes that join it leave the device after it, unless it ``stays``."""
    state = step.state
    transfer_id = state.next_transfer
    state.next_transfer += 1
    timer_id = step.set_timer(f"backup.{transfer_id}", "backup", str(transfer_id), state.config.backup_deadline_ms)
    transfer = Transfer(transfer_id, storage.storage_id, worker.worker_id, [], timer_id, stays=stays)
    state.transfers[transfer_id] = transfer
    state.count("backups_started")
    return transfer


def join_transfer(state: CellState, transfer: Transfer, node: Node, host_pages: bytes) -> None:
    """Have a backup copy this node too, into these leased host pages; without pages it only leaves with it.

    Nodes join a transfer children first.
    """
    node.transfer = transfer.transfer_id
    node.backup_pages = host_pages
    transfer.nodes.append(node.id)
    _count_leaving(state, transfer, [node], 1)


def send_transfer(step: Step, transfer: Transfer) -> None:
    """Order the backup from its storage."""
    state = step.state
    storage, worker = state.storages[transfer.storage_id], state.workers[transfer.worker_id]
    nodes = [state.tree.nodes[node_id] for node_id in transfer.nodes]
    nodes = [node for node in nodes if node.backup_pages]
    order = BackupPages(
        transfer_id=transfer.transfer_id,
        worker_id=worker.worker_id,
        worker_incarnation=worker.incarnation,
        device_pages=b"".join(node.device_pages(worker.worker_id) for node in nodes),
        host_pages=b"".join(node.backup_pages for node in nodes),
        identities=b"".join(page_identities(state.tree, node) for node in nodes),
    )
    step.to_storage(storage, order)


def send_copies(step: Step, worker: Worker, storage: Storage, chosen: Sequence[tuple[Node, bytes]]) -> None:
    """Order copies of nodes, each behind its parent, into these leased host pages; the nodes stay on the device."""
    transfer = open_transfer(step, worker, storage, stays=True)
    for node, host_pages in reversed(chosen):
        join_transfer(step.state, transfer, node, host_pages)
    send_transfer(step, transfer)


def finish_backup(step: Step, transfer: Transfer, *, is_ok: bool) -> None:
    """Finish a backup that the storage answered. Nodes being evicted that are still unused leave the device."""
    state = step.state
    step.cancel_timer(transfer.timer_id)
    storage = state.storages[transfer.storage_id]
    host_pool(storage).release(transfer.held)
    is_ok = is_ok and not transfer.is_late
    storage.late_backups -= transfer.is_late
    state.count("backups_done" if is_ok else "backups_failed", 0 if transfer.is_late else 1)
    nodes = close_transfer(state, transfer)
    uncopied = {node.id: None for node in nodes if not node.backup_pages and not transfer.is_late}
    for node in reversed(nodes):
        pages, node.backup_pages = node.backup_pages, b""
        if is_ok and pages and storage.storage_id not in node.host:
            state.count("backed_up_pages", len(pages) // PAGE_NUMBER_BYTES)
            give_host(state, node, storage, pages, transfer.worker_id)
        else:
            _charge_less(state, node, storage.storage_id, pages)
            host_pool(storage).release(pages)
    if is_ok and state.pins:
        take_hold(step, storage)
    worker = state.workers.get(transfer.worker_id)
    for node in nodes:
        offer(state, node)
        # A node's earlier copy may be gone by now; copies below it would go with the node.
        is_bridge = node.id in uncopied and bool(node.children) and not copies_of(state, node)
        if worker is not None and not is_bridge and not transfer.stays:
            _leave_device(state, node, worker)


def _leave_device(state: CellState, node: Node, worker: Worker) -> None:
    """Finish the eviction for which a node was backed up, unless it was used since."""
    if is_device_evictable(state, node, worker.worker_id):
        state.count("evicted_pages_device", drop_device(state, node, worker))


def expire_backup(step: Step, transfer: Transfer) -> None:
    """Expire a backup at its deadline: no eviction waits for it, but its pages stay leased until the answer."""
    state = step.state
    state.count("backups_failed")
    nodes = [state.tree.nodes[node_id] for node_id in transfer.nodes]
    _count_leaving(state, transfer, nodes, -1)
    transfer.expire()
    state.storages[transfer.storage_id].late_backups += 1
    for node in nodes:
        _hold(state, transfer, node)


def _hold(state: CellState, transfer: Transfer, node: Node) -> None:
    """Move host pages that a backup fills for a node to the transfer, which holds them until the storage answers."""
    _charge_less(state, node, transfer.storage_id, node.backup_pages)
    transfer.held += node.backup_pages
    node.backup_pages = b""


def _charge_less(state: CellState, node: Node, storage_id: str, pages: bytes) -> None:
    """Take host pages that were leased for a copy of this node off its owner's account."""
    if node.owner and pages:
        state.quotas.charge(node.owner, f"{HOST}/{storage_id}", -(len(pages) // PAGE_NUMBER_BYTES))


def close_transfer(state: CellState, transfer: Transfer) -> list[Node]:
    """Forget a transfer; its nodes, which are returned, are not read any more."""
    nodes = [state.tree.nodes[node_id] for node_id in transfer.nodes]
    _count_leaving(state, transfer, nodes, -1)
    del state.transfers[transfer.transfer_id]
    for node in nodes:
        node.transfer = 0
    return nodes


def _count_leaving(state: CellState, transfer: Transfer, nodes: list[Node], sign: int) -> None:
    """Count nodes that join or leave a backup; see :func:`residency.lock_path` for the effect of locks."""
    worker = state.workers.get(transfer.worker_id)
    if worker is None or transfer.is_late or transfer.stays:
        return
    name = worker.worker_id
    for node in nodes:
        if name not in node.locks:
            count_leaving(state, node, worker, sign * page_count(state.tree, node))


def abandon_backups_of_worker(step: Step, worker: Worker) -> None:
    """Abandon the backups of a worker that is gone; their host pages are free after the storage's answer."""
    for transfer in step.state.transfers.values():
        if transfer.worker_id != worker.worker_id:
            continue
        for node_id in transfer.nodes:
            node = step.state.tree.nodes[node_id]
            _hold(step.state, transfer, node)
            node.transfer = 0
        transfer.worker_id, transfer.nodes = "", []


def abandon_backups_of_storage(step: Step, storage: Storage) -> None:
    """Abandon the backups to a storage that is gone with its pool; no page is given back to it."""
    state = step.state
    for transfer in list(state.transfers.values()):
        if transfer.storage_id != storage.storage_id:
            continue
        step.cancel_timer(transfer.timer_id)
        state.count("backups_failed", 0 if transfer.is_late else 1)
        for node in close_transfer(state, transfer):
            _charge_less(state, node, storage.storage_id, node.backup_pages)
            node.backup_pages = b""
            offer(state, node)
    storage.late_backups = 0
