"""Writing down ahead of eviction: what of a computed sequence goes to host memory and to disk at once, and what later.

"through" takes a sequence when its prompt is computed and again when it ends; "selective" takes as much of it as was
reused often enough, which a request that reuses it again brings up anew. "on_evict" has its place where copies go
(:mod:`tiers`, :func:`saves.save_leaving`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_match import match_prefix
from services.scheduler.core.cache.prefix_tree import Node, Path, page_count
from services.scheduler.core.cache.victims import TRANSFER_PAGES
from services.scheduler.core.tiers.backups import backup_target, send_copies
from services.scheduler.core.tiers.host_admission import admit_to_host
from services.scheduler.core.tiers.saves import save_path, saves_below

if TYPE_CHECKING:
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState, Storage, Worker
    from services.scheduler.core.step import Step

PAGES_AHEAD = 1024
"""Device pages that one storage is copying ahead of eviction at the most: a backup that frees pages waits behind them.

A single node may be larger.
"""


def sequence_computed(step: Step, worker: Worker, request: Request, tokens: bytes, computed: int) -> None:
    """The first ``computed`` of these tokens of a request are in the tree as far as they ever will be: write them down.

    Prefill and end are such moments; single decode steps are not.
    """
    state = step.state
    config = state.config
    if request.sparse.span is not None:
        return  # What it computed is lossy, and what it stood on is being kept already.
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
    if to_host:
        path = match_prefix(state.tree, namespace, tokens, pages)
        _copy_ahead(step, worker, _written(state, path, config.host_writes))
    if to_disk:  # It is matched only now: making room for copies may cut nodes of the path, or remove them.
        path = match_prefix(state.tree, namespace, tokens, pages)
        save_path(step, storage, worker, _written(state, path, config.disk_writes))


def _written(state: CellState, path: Path, policy: str) -> Path:
    """All of a path or, under "selective", its upper part that was used often enough. Does not mutate."""
    if policy != "selective":
        return path
    for index, (node, _) in enumerate(path):
        if state.hotness.lookup(node.digest)[0] < state.config.admission_frequency:
            return path[:index]
    return path


def _copy_ahead(step: Step, worker: Worker, path: Path) -> None:
    """Back up what of the path is on the device and has no copy, top first; it stays on the device."""
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


def _pages_under_way(state: CellState, storage: Storage) -> int:
    """Pages that this storage is copying ahead of eviction. Does not mutate."""
    ahead = [item for item in state.transfers.values() if item.stays and item.storage_id == storage.storage_id]
    return sum(len(state.tree.nodes[node_id].backup_pages) // 4 for item in ahead for node_id in item.nodes)
