"""Handing over and handing on: copies of KV that would be lost with a worker's device or a node's host memory.

Handing over: KV that only a leaving worker's device holds is copied to its node's host memory, or saved to disk.

The hottest goes first, by the value that keeps host copies too (:func:`heat.worth`), and with each node its ancestors,
without which no match would find it. Colder copies make room, as far as the host pool's policy names them; nodes not
worth that are saved below host memory where there is a lower tier. Another worker's device is no place for them: a load
from a neighbour belongs to a request's batch. Neighbours do read what they need themselves until the worker leaves.

Handing on: when a node loses its last worker or its storage, other nodes that can read its host memory copy from it.
Again the hottest goes first and with it all of its path, in whole chunks, to the node that has most of it; there it
displaces copies that are worth less. A storage that leaves waits for that, within the bytes and the time that it named.
A copy is a fetch like any other: it verifies what arrives, and one that fails loses nothing. A failed copy is ordered
again after a pause, because a first connection on a busy machine may take longer than a storage waits for it. So is a
copy that no node can take at the moment. A storage that leaves tries until its time is over, because what is not copied
by then is lost; while only its worker leaves, the copies stay where they are, and a few tries are enough.
"""

from __future__ import annotations

from heapq import nsmallest
from typing import TYPE_CHECKING

from services.scheduler.core.cache.heat import worth
from services.scheduler.core.cache.identities import ChunkNames
from services.scheduler.core.cache.prefix_tree import PAGE_NUMBER_BYTES, Node, ancestors, namespace_of, page_count
from services.scheduler.core.cache.residency import copies_of, devices_of, host_pool, split_node
from services.scheduler.core.cache.victims import TRANSFER_PAGES
from services.scheduler.core.members.drain import NodeDrain
from services.scheduler.core.tiers.backups import backup_target, send_copies
from services.scheduler.core.tiers.fetch_orders import KvRun, TokenSequence, begin_warming
from services.scheduler.core.tiers.host_admission import displace_cheaper
from services.scheduler.core.tiers.lending import Loan, end_of_copies, lends_to
from services.scheduler.core.tiers.save_runs import path_to
from services.scheduler.core.tiers.saves import SAVING_CHUNKS, may_save, save_path
from shared.messages.storage_plans import ReleaseStorage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.scheduler.core.cache.prefix_tree import Path
    from services.scheduler.core.members.drain import Drain
    from services.scheduler.core.state import CellState, Storage, Worker
    from services.scheduler.core.step import Step

_PAGES_AT_ONCE = 1024
"""Pages from which on a backup is sent. A single node may be larger."""

_BACKUPS_AHEAD = 2

_SAVES_AT_ONCE = 8
"""Paths that one step saves; the steps that fold the answers go on with the rest."""

HANDED_CHUNKS = 64
"""Chunks of one fetch by which a path is handed on: a longer path takes several fetches, beside which others run."""

_PATHS_AHEAD = 4
"""Fetches in flight by which a node hands on; a path of several fetches may exceed it."""

_MOST_RANKED = 1024
"""Hottest copies that a node may hand on: one step visits all of them where other nodes have them already."""

_PAUSE_MS = 500
"""First pause before failed copies are ordered again. Each further pause is twice as long."""

_LONGEST_PAUSE_MS = 2_000
"""Longest pause of a storage that leaves: its time is short, and the next try may succeed."""

_MOST_PAUSES = 5
"""Pauses of a storage that stays. Only its time limits those of a storage that leaves."""

_MOST_REFUSED = 8
"""Paths for which no node had room, after which a node stops handing on: colder paths would find none either."""


def rank_by_worth(state: CellState, worker: Worker) -> list[int]:
    """Return ids of the nodes that only this worker has, the hottest last. Visits every node of its device once.

    At most as many are named as the host pool and the saves of one storage could take in.
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
    """Order copies of the next nodes, as far as earlier copies were made; return whether anything was ordered."""
    storage = backup_target(step.state, worker)
    if storage is None:  # The node has no storage, or it lets deadlines pass.
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
    """Return whether a storage still reads this worker's device for orders whose deadline has not passed.

    Does not change the state.
    """
    name = worker.worker_id
    if any(save.worker_id == name and not save.is_late for save in state.saves.values()):
        return True
    return _backups_of(state, worker) > 0


def _backups_of(state: CellState, worker: Worker) -> int:
    name = worker.worker_id
    return sum(item.worker_id == name and not item.is_late for item in state.transfers.values())


def _on_device(state: CellState, worker: Worker) -> Iterator[Node]:
    """Yield all nodes on this worker's device, parents before children: every node there has its parent there."""
    nodes, name = state.tree.nodes, worker.worker_id
    stack = [nodes[root_id] for root_id in state.tree.roots.values()]
    while stack:
        node = stack.pop()
        if name in node.device:
            yield node
        if name in node.below:
            stack += [child for child in map(nodes.__getitem__, node.child_ids) if name in child.device]


def _is_kept(state: CellState, node: Node) -> bool:
    """Return whether another worker that stays has the node, or a storage has it in host memory."""
    if any(name not in node.quarantined for name in copies_of(state, node)):
        return True
    return any(state.workers[name].drain is None for name in devices_of(state, node))


def _is_kept_near(state: CellState, node: Node, storage: Storage) -> bool:
    """Return whether workers of the storage's node will find the node, now or once a backup in flight is made."""
    if node.transfer or (storage.storage_id in node.host and storage.storage_id not in node.quarantined):
        return True
    near = (state.workers[name] for name in devices_of(state, node))
    return any(other.drain is None and other.node == storage.node for other in near)


def _order_backup(step: Step, worker: Worker, storage: Storage, drain: Drain) -> list[Node]:
    """Order one backup of the next nodes; return nodes for which there was no room."""
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
        elif taken and taken[-1][0] is not node:  # The node was cut; its rest goes with the next backup.
            drain.nodes.append(node.id)
    if chosen:
        state.count("handed_over_pages", size)
        send_copies(step, worker, storage, chosen)
    return refused


def _take_in(
    step: Step, storage: Storage, node: Node, known: list[tuple[Node, bytes]]
) -> tuple[list[tuple[Node, bytes]], bool]:
    """Return host pages for a node and its ancestors, top first, and whether room for any of them was refused.

    ``known`` are nodes of the same backup so far. A node too large for any backup is cut, and its front is the last
    one.
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
    """Save the whole chunks on the path to a node, its own included, that are not saved yet.

    Return whether any save was ordered.
    """
    state = step.state
    if state.config.disk_writes == "off" or not may_save(storage):
        return False
    before = state.next_save
    save_path(step, storage, worker, path_to(state, node))
    return state.next_save > before


def begin_handing_on(step: Step, storage: Storage, grace_ms: int, *, is_storage_leaving: bool) -> None:
    """Have other nodes copy the hottest nodes of a storage's host memory, for at most ``grace_ms``.

    With ``is_storage_leaving``, the storage is told when that is over. A storage that leaves takes over what its last
    worker began; a repeated call changes nothing.
    """
    state, name = step.state, storage.storage_id
    known = state.handing.get(name)
    if storage.is_released or (known is not None and (known.is_storage_leaving or not is_storage_leaving)):
        return
    if known is not None:
        step.cancel_timer(known.pause_timer)
    drain = NodeDrain(
        timer_id=step.set_timer(f"hand_over.{name}.{storage.incarnation}", "hand_over", name, grace_ms),
        bytes_left=storage.handover_bytes if known is None else known.bytes_left,
        nodes=_rank_copies(state, storage)
        if any(_has_worker(state, other) for other in _readers(state, storage))
        else [],
        is_storage_leaving=is_storage_leaving,
    )
    state.handing[name] = drain
    state.count("node_drains_started")


def go_on_handing_on(step: Step) -> None:
    """Order the next copies, as far as earlier ones were made, and end drains that have nothing left."""
    state = step.state
    for name, drain in list(state.handing.items()):
        storage = state.storages[name]
        if drain.nodes and not any(_takes_copies(state, other) for other in _readers(state, storage)):
            _put_off(drain)
        while drain.nodes and _copies_under_way(state, storage) < _PATHS_AHEAD and _hand_on(step, storage, drain):
            if drain.refused >= _MOST_REFUSED:
                drain.nodes = []
        is_read = any(fetch.lender_id == name and not fetch.is_called_off for fetch in state.fetches.values())
        if not drain.nodes and not is_read and not drain.pause_timer:
            _pause_or_end(step, storage, drain)


def _pause_or_end(step: Step, storage: Storage, drain: NodeDrain) -> None:
    """Pause before failed copies are ordered again, or end a drain without any, or without time for another try."""
    state = step.state
    delay_ms = _PAUSE_MS << min(drain.pauses, _MOST_PAUSES)
    is_done = not drain.failed or not _readers(state, storage)
    if drain.is_storage_leaving:
        delay_ms = min(delay_ms, _LONGEST_PAUSE_MS)
    else:
        is_done |= drain.pauses >= _MOST_PAUSES
    if is_done:
        state.count("node_drains_done")
        _end_node_drain(step, storage, drain)
    elif drain.is_storage_leaving and step.time_ns + delay_ms * 1_000_000 >= state.timers[drain.timer_id].at_ns:
        expire_node_drain(step, storage)
    else:
        _pause(step, storage, drain, delay_ms)


def _pause(step: Step, storage: Storage, drain: NodeDrain, delay_ms: int) -> None:
    """Set a timer after which the failed copies are ordered again."""
    name = storage.storage_id
    drain.pauses += 1
    drain.pause_timer = step.set_timer(f"hand_again.{name}.{storage.incarnation}", "hand_again", name, delay_ms)
    step.state.count("node_drain_pauses")


def _put_off(drain: NodeDrain) -> None:
    """Have all nodes that are left wait for the end of the next pause, the hottest first."""
    drain.failed |= dict.fromkeys(reversed(drain.nodes))
    drain.nodes = []


def end_pause(drain: NodeDrain) -> None:
    """Queue the failed copies again, the hottest first; nodes that have arrived since are passed over later."""
    drain.nodes, drain.failed, drain.pause_timer, drain.refused = list(drain.failed)[::-1], {}, "", 0


def expire_node_drain(step: Step, storage: Storage) -> None:
    """End handing on because its time is over, or too short for another try. Copies in flight end by themselves."""
    step.state.count("node_drains_cut_short")
    _end_node_drain(step, storage, step.state.handing[storage.storage_id])


def forget_node_drain(step: Step, storage: Storage) -> None:
    """Forget the drain of a storage that is gone, and cancel its timers."""
    drain = step.state.handing.pop(storage.storage_id, None)
    if drain is not None:
        step.cancel_timer(drain.timer_id)
        step.cancel_timer(drain.pause_timer)


def _end_node_drain(step: Step, storage: Storage, drain: NodeDrain) -> None:
    forget_node_drain(step, storage)
    if drain.is_storage_leaving:
        storage.is_released = True
        step.to_storage(storage, ReleaseStorage())


def _rank_copies(state: CellState, storage: Storage) -> list[int]:
    """Return ids of the hottest nodes in a host pool, the hottest last. Visits the whole tree once."""
    name = storage.storage_id
    copies = (node for node in state.tree.nodes.values() if name in node.host)
    ranked = nsmallest(_MOST_RANKED, ((-worth(state, node), -node.last_use, node.id) for node in copies))
    return [node_id for _, _, node_id in reversed(ranked)]


def _copies_under_way(state: CellState, storage: Storage) -> int:
    name = storage.storage_id
    return sum(
        fetch.is_warming and fetch.lender_id == name and not fetch.is_called_off for fetch in state.fetches.values()
    )


def _hand_on(step: Step, storage: Storage, drain: NodeDrain) -> bool:
    """Order a copy of the next node's path, or pass over it; return False where it must wait for fetches in flight."""
    state, tree, geometry = step.state, step.state.tree, step.state.geometry
    node = tree.nodes.get(drain.nodes[-1])
    namespace = "" if node is None else namespace_of(tree, node)
    if node is None or geometry is None or storage.storage_id not in node.host or namespace in state.key_ids:
        drain.nodes.pop()
        return True
    path = path_to(state, node)
    tokens = b"".join(above.tokens for above, _ in path)
    names = ChunkNames(tree, namespace, tokens, path, node.end // tree.page_size)
    taker, covered = _taker(state, storage, path, names.count * names.pages_each)
    first = covered // names.pages_each
    most = first + drain.bytes_left // (names.pages_each * geometry.page_bytes)
    end = min(names.count, most, end_of_copies(storage, path, covered) // names.pages_each)
    if taker is None or end <= first:
        drain.nodes.pop()
        return True
    if any(names[index] in taker.fetching.chunks for index in range(first, end)):
        return False
    value, pages = worth(state, node), 0
    for start in range(first, end, HANDED_CHUNKS):
        stop = min(end, start + HANDED_CHUNKS)
        run = KvRun(names, start, stop, max(covered, start * names.pages_each))
        loan = Loan(storage, path, stop)
        pages += begin_warming(step, TokenSequence(namespace, tokens), taker, path, run, value, loan=loan)
    if not pages and taker.fetching.pages:  # There may be room once those pages have arrived.
        return False
    drain.nodes.pop()
    drain.bytes_left -= pages * geometry.page_bytes
    drain.refused += not pages
    return True


def _taker(state: CellState, storage: Storage, path: Path, pages: int) -> tuple[Storage | None, int]:
    """Return the storage with most of a path's leading ``pages`` in host memory, and how many pages it has.

    Of equals it is the one with most free pages. (None, 0) where one has all of them, or none can take them.
    """
    best: tuple[tuple[int, int], Storage] | None = None
    for other in _readers(state, storage):
        if not _takes_copies(state, other):
            continue
        covered = min(end_of_copies(other, path, 0), pages)
        if covered == pages:
            return None, 0
        rank = covered, host_pool(other).free
        if best is None or rank > best[0]:
            best = rank, other
    return (None, 0) if best is None else (best[1], best[0][0])


def _readers(state: CellState, storage: Storage) -> list[Storage]:
    """Return the other storages that can read a storage's host memory, and stay.

    They may be late with fetches, or make their pools just now, or have no worker for a moment.
    """
    return [
        other
        for other in state.storages.values()
        if lends_to(storage, other) and other.storage_id not in state.handing and not other.is_released
    ]


def _takes_copies(state: CellState, storage: Storage) -> bool:
    """Return whether a node that stays has a pool, a worker that could use copies, and keeps up with its fetches."""
    return storage.pool is not None and _has_worker(state, storage) and not storage.fetching.late


def _has_worker(state: CellState, storage: Storage) -> bool:
    return any(worker.node == storage.node and worker.drain is None for worker in state.workers.values())
