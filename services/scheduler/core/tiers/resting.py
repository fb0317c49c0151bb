"""Copies at rest: what only the device of an idle worker holds is copied to its node's host memory.

A worker that is killed takes its device's KV with it. What is on a disk comes back from there, but only in whole chunks
and not in runs shorter than ``min_prefetch_tokens``. So when a worker has nothing to do, every whole page of what it
computed gets a host copy, as far as host memory has free pages: no other copy leaves for it. The copies go in short
backups, one at a time, so that a request that comes meanwhile hardly waits for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_tree import Node, page_count
from services.scheduler.core.cache.residency import HOST, host_pool, split_node
from services.scheduler.core.tiers.backups import backup_target, send_copies
from services.scheduler.core.tiers.host_admission import admit_to_host

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState, Storage, Worker
    from services.scheduler.core.step import Step

MOST_ENDS = 1024
"""Ends of computed sequences that are remembered for one worker at the most."""

TOKENS_AT_ONCE = 4096
"""Tokens of one backup at the most: 0.5 GiB of an 8B model, or 20 ms of a link of 25 GB/s."""


def note_end(state: CellState, worker: Worker, end: Node) -> None:
    """A sequence that this worker computed ends in ``end``: a part of it may have no host copy."""
    if not (state.config.copies_at_rest and state.config.host_tier):
        return
    ends = worker.moves.uncopied
    ends.pop(end.id, None)
    ends[end.id] = None
    if len(ends) > MOST_ENDS:
        del ends[next(iter(ends))]
        state.count("ends_forgotten")


def copy_at_rest(step: Step, worker: Worker) -> bool:
    """Order one backup of what has no host copy, if the worker is idle and copies nothing; returns whether it did.

    What was used last goes first, and of a sequence its beginning, without which nothing would find the rest.
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
    """Whether nobody's copy must leave for so many pages of this node: a copy that can wait displaces none."""
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
    """Choose of the way to ``end`` what has no copy, ``most`` pages or less; returns how many of them that used up.

    ``seen`` says of nodes that were looked at whether the way to them will have copies.
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
