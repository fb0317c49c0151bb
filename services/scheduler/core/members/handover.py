"""Handing over: what only a leaving worker's device holds is copied to its node's host memory, or saved to the disk.

The hottest goes first, by the value that keeps host copies too (:func:`heat.worth`), and with each node the way to it,
without which nothing would find it. Colder copies make room, as far as the host pool's policy names them; what is not
worth that is saved below host memory where there is anything. Another worker's device is no place for it: a load
from a neighbour belongs to a request's batch. Neighbours do read what they need themselves until the worker leaves.

Handing on: what host memory of a node holds that loses its last worker, or its storage, is copied by other nodes that
can read it. Again the hottest goes first and with it all of its path, in whole chunks, to the node that has most of it;
there it displaces what is worth less. A storage that leaves waits for that, within the bytes and the time that it
named. A copy is a fetch like any other: it verifies what arrives, and one that fails loses nothing. What failed is
ordered again after a pause, because a first connection on a busy machine may take longer than a storage waits for it.
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
"""Pages after which a backup is sent. A single node may be larger."""

_BACKUPS_AHEAD = 2

_SAVES_AT_ONCE = 8
"""Paths that one step has saved; the answers go on with the rest."""

HANDED_CHUNKS = 64
"""Of one fetch by which a path is handed on: a longer one takes several, which other fetches run beside."""

_PATHS_AHEAD = 4
"""Fetches by which a node hands on at once; a path of several may go beyond."""

_MOST_RANKED = 1024
"""Copies that a node may hand on, the hottest: one step looks at all of them where other nodes have them already."""

_PAUSE_MS = 500
"""Before what failed is ordered again; twice as long each time."""

_MOST_PAUSES = 5

_MOST_REFUSED = 8
"""Paths for which no node had room, after which a node stops: the colder ones would find none either."""


def rank_by_worth(state: CellState, worker: Worker) -> list[int]:
    """Ids of the nodes that only this worker has, the hottest last. Looks at all that it holds, once.

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


def begin_handing_on(step: Step, storage: Storage, grace_ms: int, *, is_storage_leaving: bool) -> None:
    """Have other nodes copy the hottest of a storage's host memory; ``is_storage_leaving`` is told when that is over.

    It is over after ``grace_ms``. A storage that leaves takes over what its last worker began; a repeated call changes
    nothing.
    """
    state, name = step.state, storage.storage_id
    known = state.handing.get(name)
    if storage.is_released or (known is not None and (known.is_storage_leaving or not is_storage_leaving)):
        return
    has_takers = any(lends_to(storage, other) and _takes_copies(state, other) for other in state.storages.values())
    if known is not None:
        step.cancel_timer(known.pause_timer)
    drain = NodeDrain(
        timer_id=step.set_timer(f"hand_over.{name}.{storage.incarnation}", "hand_over", name, grace_ms),
        bytes_left=storage.handover_bytes if known is None else known.bytes_left,
        nodes=_rank_copies(state, storage) if has_takers else [],
        is_storage_leaving=is_storage_leaving,
    )
    state.handing[name] = drain
    state.count("node_drains_started")


def go_on_handing_on(step: Step) -> None:
    """Order the next copies, as far as earlier ones were made, and end what has nothing left."""
    state = step.state
    for name, drain in list(state.handing.items()):
        storage = state.storages[name]
        while drain.nodes and _copies_under_way(state, storage) < _PATHS_AHEAD and _hand_on(step, storage, drain):
            if drain.refused >= _MOST_REFUSED:
                drain.nodes = []
        is_read = any(fetch.lender_id == name and not fetch.is_called_off for fetch in state.fetches.values())
        if drain.nodes or is_read or drain.pause_timer:
            continue
        if drain.failed and drain.pauses < _MOST_PAUSES:
            _pause(step, storage, drain)
            continue
        state.count("node_drains_done")
        _end_node_drain(step, storage, drain)


def _pause(step: Step, storage: Storage, drain: NodeDrain) -> None:
    """Order what failed a little later."""
    name, delay_ms = storage.storage_id, _PAUSE_MS << drain.pauses
    drain.pauses += 1
    drain.pause_timer = step.set_timer(f"hand_again.{name}.{storage.incarnation}", "hand_again", name, delay_ms)
    step.state.count("node_drain_pauses")


def end_pause(drain: NodeDrain) -> None:
    """Order what failed again, the hottest first; what has arrived since is passed over."""
    drain.nodes, drain.failed, drain.pause_timer = list(drain.failed)[::-1], {}, ""


def expire_node_drain(step: Step, storage: Storage) -> None:
    """Expire the time in which a node hands on. What is still under way ends by itself."""
    step.state.count("node_drains_cut_short")
    _end_node_drain(step, storage, step.state.handing[storage.storage_id])


def forget_node_drain(step: Step, storage: Storage) -> None:
    """Forget the drain of a storage that is gone."""
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
    """Ids of the hottest nodes in a host pool, the hottest last. Looks at the whole tree, once."""
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
    """Order a copy of what is next, or pass over it; False where that has to wait for what is under way."""
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
    if not pages and taker.fetching.pages:  # There may be room when that has come.
        return False
    drain.nodes.pop()
    drain.bytes_left -= pages * geometry.page_bytes
    drain.refused += not pages
    return True


def _taker(state: CellState, storage: Storage, path: Path, pages: int) -> tuple[Storage | None, int]:
    """Return the node with most of a path's leading ``pages`` in host memory, and how many; of equals the one with most
    room. None where one has all of them, or none can take them.
    """
    best: tuple[tuple[int, int], Storage] | None = None
    for other in state.storages.values():
        if not lends_to(storage, other) or not _takes_copies(state, other):
            continue
        covered = min(end_of_copies(other, path, 0), pages)
        if covered == pages:
            return None, 0
        rank = covered, host_pool(other).free
        if best is None or rank > best[0]:
            best = rank, other
    return (None, 0) if best is None else (best[1], best[0][0])


def _takes_copies(state: CellState, storage: Storage) -> bool:
    """Whether a node stays, has a worker that could use what is copied there, and keeps up with its fetches."""
    is_staying = storage.storage_id not in state.handing and not storage.is_released and storage.pool is not None
    has_worker = any(worker.node == storage.node and worker.drain is None for worker in state.workers.values())
    return is_staying and has_worker and not storage.fetching.late
