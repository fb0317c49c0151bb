"""Handing over: what only a leaving worker's device holds is copied to its node's host memory, or saved to the disk.

The hottest goes first, by the value that keeps host copies too (:func:`heat.worth`), and with each node the way to it,
without which nothing would find it. Colder copies make room, as far as the host pool's policy names them; what is not
worth that is saved below host memory where there is anything. Another worker's device is no place for it: a load
from a neighbour belongs to a request's batch. Neighbours do read what they need themselves until the worker leaves.
"""

from __future__ import annotations

from heapq import nsmallest
from typing import TYPE_CHECKING

from services.scheduler.core.cache.heat import worth
from services.scheduler.core.cache.prefix_tree import PAGE_NUMBER_BYTES, Node, ancestors, page_count
from services.scheduler.core.cache.residency import copies_of, devices_of, host_pool, split_node
from services.scheduler.core.cache.victims import TRANSFER_PAGES
from services.scheduler.core.tiers.backups import backup_target, send_copies
from services.scheduler.core.tiers.host_admission import displace_cheaper
from services.scheduler.core.tiers.save_runs import path_to
from services.scheduler.core.tiers.saves import SAVING_CHUNKS, may_save, save_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.scheduler.core.members.drain import Drain
    from services.scheduler.core.state import CellState, Storage, Worker
    from services.scheduler.core.step import Step

_PAGES_AT_ONCE = 1024
"""Pages after which a backup is sent. A single node may be larger."""

_BACKUPS_AHEAD = 2

_SAVES_AT_ONCE = 8
"""Paths that one step has saved; the answers go on with the rest."""


def rank_by_worth(state: CellState, worker: Worker) -> list[int]:
    """Ids of the nodes that nobody but this worker has, the hottest last. Looks at all that it holds, once.

    No more are named than the host pool and the saves of one storage could take in.
    """
    storage = backup_target(state, worker)
    if storage is None:
        return []
    found = [
        (-worth(state, node), -node.last_use, node.id)
        for node in _on_device(state, worker)
        if not node.transfer and not _is_kept(state, node)
    ]
    most = host_pool(storage).total + SAVING_CHUNKS
    return [node_id for _, _, node_id in reversed(nsmallest(most, found))]


def hand_over(step: Step, worker: Worker, drain: Drain) -> bool:
    """Order copies of what is next, as far as earlier ones were made; returns whether anything was ordered."""
    storage = backup_target(step.state, worker)
    if storage is None:  # There is none, or it lets deadlines pass.
        drain.nodes = []
        return False
    saves = 0
    is_busy = False
    while drain.nodes and _backups_of(step.state, worker) < _BACKUPS_AHEAD and saves < _SAVES_AT_ONCE:
        refused = _order_backup(step, worker, storage, drain)
        for node in refused:
            saves += _save(step, worker, storage, node)
        is_busy = True
    return is_busy


def is_handing_over(state: CellState, worker: Worker) -> bool:
    """Whether a storage still reads this worker's device for orders whose deadline has not passed. Does not mutate."""
    name = worker.worker_id
    if any(save.worker_id == name and not save.is_late for save in state.saves.values()):
        return True
    return _backups_of(state, worker) > 0


def _backups_of(state: CellState, worker: Worker) -> int:
    name = worker.worker_id
    return sum(item.worker_id == name and not item.is_late for item in state.transfers.values())


def _on_device(state: CellState, worker: Worker) -> Iterator[Node]:
    """All nodes on this worker's device, from the roots down: what is there has its parent there."""
    nodes, name = state.tree.nodes, worker.worker_id
    stack = [nodes[root_id] for root_id in state.tree.roots.values()]
    while stack:
        node = stack.pop()
        if name in node.device:
            yield node
        if name in node.below:
            stack += [child for child in map(nodes.__getitem__, node.child_ids) if name in child.device]


def _is_kept(state: CellState, node: Node) -> bool:
    """Whether somebody else has the node: another worker that stays, or a storage in host memory."""
    if any(name not in node.quarantined for name in copies_of(state, node)):
        return True
    return any(state.workers[name].drain is None for name in devices_of(state, node))


def _is_kept_near(state: CellState, node: Node, storage: Storage) -> bool:
    """Whether workers of the storage's node will find it, now or when a backup is made that is under way."""
    if node.transfer or (storage.storage_id in node.host and storage.storage_id not in node.quarantined):
        return True
    near = (state.workers[name] for name in devices_of(state, node))
    return any(other.drain is None and other.node == storage.node for other in near)


def _order_backup(step: Step, worker: Worker, storage: Storage, drain: Drain) -> list[Node]:
    """Order one backup of what is next; returns nodes for which there was no room on the way to the next backup."""
    state = step.state
    chosen: list[tuple[Node, bytes]] = []
    refused: list[Node] = []
    size = 0
    while drain.nodes and size < _PAGES_AT_ONCE and len(refused) < _SAVES_AT_ONCE:
        node = state.tree.nodes.get(drain.nodes.pop())
        if node is None or worker.worker_id not in node.device or node.transfer or _is_kept(state, node):
            continue
        taken, is_refused = _take_in(step, storage, node, known=chosen)
        chosen += taken
        size += sum(len(pages) // PAGE_NUMBER_BYTES for _, pages in taken)
        if is_refused:
            refused.append(node)
        elif taken and taken[-1][0] is not node:  # It was cut, and the rest goes with the next backup.
            drain.nodes.append(node.id)
    if chosen:
        state.count("handed_over_pages", size)
        send_copies(step, worker, storage, chosen)
    return refused


def _take_in(
    step: Step, storage: Storage, node: Node, known: list[tuple[Node, bytes]]
) -> tuple[list[tuple[Node, bytes]], bool]:
    """Host pages for a node and the way to it, top first, and whether room for a part of that was refused.

    ``known`` has what goes with the same backup already. What no backup could carry is cut, and its front is the last.
    """
    state = step.state
    if state.config.admission == "none":
        return [], True
    coming = dict.fromkeys(chosen.id for chosen, _ in known)
    value = worth(state, node)
    way = ancestors(state.tree, node)[::-1]
    spared = dict.fromkeys(above.id for above in way)
    taken: list[tuple[Node, bytes]] = []
    for above in way:
        if above.id in coming or _is_kept_near(state, above, storage):
            continue
        largest = min(TRANSFER_PAGES, host_pool(storage).total)
        is_cut = page_count(state.tree, above) > largest
        part = split_node(state, above, largest) if is_cut else above
        pages = displace_cheaper(step, storage, page_count(state.tree, part), value, spared, part.owner)
        if pages is None:
            return taken, True
        taken.append((part, pages))
        if is_cut:
            break
    return taken, False


def _save(step: Step, worker: Worker, storage: Storage, node: Node) -> bool:
    """Save the whole chunks on the way to a node, its own included, that are not saved yet; returns whether any were
    ordered.
    """
    state = step.state
    if state.config.disk_writes == "off" or not may_save(storage):
        return False
    before = state.next_save
    save_path(step, storage, worker, path_to(state, node))
    return state.next_save > before
