"""Copies ahead of eviction: which parts of a computed sequence go to host memory and to disk at once, which later.

"through" takes a sequence when its prompt is computed and again when it ends; "selective" takes as much of it as was
reused often enough, whenever a request reuses it. "on_evict" is implemented where copies go (:mod:`tiers`,
:func:`saves.save_leaving`).

At rest: a worker that is killed takes its device's KV with it. Chunks on a disk can be fetched from there, but only
whole chunks and not in runs shorter than ``min_prefetch_tokens``. So with ``copies_at_rest``, when a worker is idle,
every whole page that it computed gets a host copy, as far as host memory has free pages: no other copy leaves for it.
The copies go in short backups, one at a time, so that a request that comes meanwhile hardly waits for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_match import match_again
from services.scheduler.core.cache.prefix_tree import Node, Path, page_count
from services.scheduler.core.cache.residency import HOST, devices_of, host_pool, split_node
from services.scheduler.core.cache.victims import TRANSFER_PAGES
from services.scheduler.core.tiers.backups import backup_target, send_copies
from services.scheduler.core.tiers.host_admission import admit_to_host
from services.scheduler.core.tiers.lending import lends_to, may_be_lent
from services.scheduler.core.tiers.saves import save_path, saves_below

if TYPE_CHECKING:
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState, Storage, Worker
    from services.scheduler.core.step import Step

PAGES_AHEAD = 1024
"""Most device pages that one storage is copying ahead of eviction: a backup that frees pages waits behind them.

A single node may be larger.
"""

MOST_ENDS = 1024
"""Most ends of computed sequences that are remembered for one worker."""

TOKENS_AT_ONCE = 4096
"""Most tokens of one backup: 0.5 GiB of an 8B model, or 20 ms of a link of 25 GB/s."""


def sequence_computed(
    step: Step, worker: Worker, request: Request, tokens: bytes, computed: int, end: Node | None
) -> None:
    """Copy and save the first ``computed`` of a request's tokens (packed), as the settings say.

    They are in the tree as far as they ever will be, on the path to ``end`` as far as that goes; with None that is not
    known. Called after prefill and at the request's end, not after single decode steps.
    """
    state = step.state
    config = state.config
    if request.sparse.span is not None:
        return  # Its computed KV is lossy, and the prefix that it read is kept already.
    if config.host_writes == "on_evict" and config.disk_writes in ("on_evict", "off"):
        return
    storage = state.storage_of(worker)
    if storage is None or not request.submit.cache.write:
        return
    to_disk = config.disk_writes in ("through", "selective") and saves_below(storage)
    to_host = config.host_writes != "on_evict"
    if not to_disk and not to_host:
        return
    namespace, pages = request.submit.namespace, computed // state.tree.page_size
    known = (0, 0) if end is None else (end.id, min(end.end, pages * state.tree.page_size))
    if to_host:
        path = match_again(state.tree, namespace, tokens, pages, *known)
        _copy_ahead(step, worker, _written(state, path, config.host_writes))
    if to_disk:  # Matched again: making room for copies may cut nodes of the path, or remove them.
        path = match_again(state.tree, namespace, tokens, pages, *known)
        save_path(step, storage, worker, _written(state, path, config.disk_writes))


def _written(state: CellState, path: Path, policy: str) -> Path:
    """Return all of a path or, under "selective", its upper part that was used often enough.

    Does not change the state.
    """
    if policy != "selective":
        return path
    for index, (node, _) in enumerate(path):
        if state.hotness.lookup(node.digest)[0] < state.config.admission_frequency:
            return path[:index]
    return path


def _copy_ahead(step: Step, worker: Worker, path: Path) -> None:
    """Back up nodes of the path that are on the device and have no copy, top first; they stay on the device."""
    state = step.state
    storage = backup_target(state, worker)
    if storage is None:
        return
    under_way = _pages_under_way(state, storage)
    chosen: list[tuple[Node, bytes]] = []
    size = 0
    for node, _ in path:
        if worker.worker_id not in node.device:
            break
        if storage.storage_id in node.host or node.transfer:
            continue
        pages = page_count(state.tree, node)
        total = under_way + size
        if (total and total + pages > PAGES_AHEAD) or size + pages > TRANSFER_PAGES:
            break
        host_pages = admit_to_host(step, storage, node)
        if host_pages is None:
            break
        chosen.append((node, host_pages))
        size += pages
    if not chosen:
        return
    state.count("copied_ahead_pages", size)
    send_copies(step, worker, storage, chosen)


def copy_to_lend(step: Step, request: Request, storage: Storage, path: Path, covered_pages: int) -> bool:
    """Have another node copy KV behind the covered pages to host memory, if only its devices have it.

    Return whether it was told to. The path must be matched again then.
    """
    state = step.state
    position = index = 0
    while index < len(path) and position < covered_pages:
        position += path[index][1]
        index += 1
    if index == len(path) or not may_be_lent(request, storage):
        return False
    node = path[index][0]
    if node.host or node.transfer:
        return False
    for name in devices_of(state, node):
        lender = state.storage_of(state.workers[name])
        if lender is not None and lends_to(lender, storage):
            state.count("copies_to_lend")
            _copy_ahead(step, state.workers[name], path[index:])
            return True
    return False


def _pages_under_way(state: CellState, storage: Storage) -> int:
    """Return how many pages this storage is copying ahead of eviction. Does not change the state."""
    ahead = [item for item in state.transfers.values() if item.stays and item.storage_id == storage.storage_id]
    return sum(len(state.tree.nodes[node_id].backup_pages) // 4 for item in ahead for node_id in item.nodes)


def note_end(state: CellState, worker: Worker, end: Node) -> None:
    """Note the end of a sequence that this worker computed: a part of it may have no host copy."""
    ends = worker.moves.uncopied
    ends.pop(end.id, None)
    ends[end.id] = None
    if len(ends) > MOST_ENDS:
        del ends[next(iter(ends))]
        state.count("ends_forgotten")


def copy_at_rest(step: Step, worker: Worker) -> bool:
    """Order one backup of nodes without a host copy, if the worker is idle and copies nothing; return whether it did.

    The sequence used last goes first, and its beginning before the rest, which no match would find without it.
    """
    state = step.state
    ends = worker.moves.uncopied
    if worker.work.running or worker.line.queue.size or _is_copying(state, worker):
        return False
    storage = backup_target(state, worker)
    if storage is None or storage.pool is None:
        return False
    most = max(1, TOKENS_AT_ONCE // state.tree.page_size)
    chosen: list[tuple[Node, bytes]] = []
    seen: dict[int, bool] = {}
    while ends and most > 0:
        end = state.tree.nodes.get(next(reversed(ends)))
        if end is not None:
            most -= _choose(step, worker, storage, end, most, chosen, seen)
        if most > 0:
            ends.popitem()
    if not chosen:
        return False
    state.count("copied_at_rest_pages", sum(page_count(state.tree, node) for node, _ in chosen))
    send_copies(step, worker, storage, chosen)
    return True


def _is_copying(state: CellState, worker: Worker) -> bool:
    return any(item.stays and item.worker_id == worker.worker_id for item in state.transfers.values())


def _has_room(state: CellState, storage: Storage, node: Node, pages: int) -> bool:
    """Return whether host memory and quota have free room for ``pages`` pages: a copy that can wait displaces none."""
    pool = f"{HOST}/{storage.storage_id}"
    is_within = not node.owner or state.quotas.excess(node.owner, pool, pages) <= 0
    return is_within and host_pool(storage).free >= pages


def _choose(
    step: Step,
    worker: Worker,
    storage: Storage,
    end: Node,
    most: int,
    chosen: list[tuple[Node, bytes]],
    seen: dict[int, bool],
) -> int:
    """Choose nodes without a copy on the path to ``end``, at most ``most`` pages; return how many pages were used up.

    ``seen`` maps nodes visited before to whether all of the path to them will have copies.
    """
    state, name = step.state, worker.worker_id
    way = []
    node = end
    while node.parent and node.id not in seen:
        way.append(node)
        node = state.tree.nodes[node.parent]
    is_kept = seen.get(node.id, True)
    size = 0
    for node in reversed(way):
        if is_kept and name in node.device and storage.storage_id not in node.host and not node.transfer:
            pages = page_count(state.tree, node)
            if size + pages > most:
                if chosen:
                    return most
                pages = most
            host_pages = None
            if _has_room(state, storage, node, pages):
                node = node if pages == page_count(state.tree, node) else split_node(state, node, pages)
                host_pages = admit_to_host(step, storage, node)
            is_kept = host_pages is not None
            if host_pages is not None:
                chosen.append((node, host_pages))
                size += pages
        elif name not in node.device:
            is_kept = False
        seen[node.id] = is_kept
    return size
