"""Making room on a device: evict what the policy names, backing it up to host memory where it is admitted there.

Nodes above their owner's quota go before anything else, and a few of them with every step even where no request needs
room. A request is never refused pages for a quota; the owner's own KV makes room for it first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_tree import Node, page_count
from services.scheduler.core.cache.residency import (
    drop_device,
    is_left_bare,
    offer_left_bare,
)
from services.scheduler.core.cache.victims import (
    TRANSFER_PAGES,
    take_device_excess,
    take_device_victim,
    take_overlooked_victim,
    trim,
)
from services.scheduler.core.tiers.backups import backup_target, join_transfer, open_transfer, send_transfer
from services.scheduler.core.tiers.host_admission import admit_to_host, drop_above_quotas

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState, Storage, Worker
    from services.scheduler.core.step import Step
    from services.scheduler.core.tiers.under_way import Transfer
    from shared.messages.explanations import Departure

# Bound the time of one step. Eviction ahead of need can go on with the worker's next input; eviction that a request
# waits for goes on when the backups begun for it are answered.
_NODES_AHEAD = 8
_NODES_AHEAD_IF_BUSY = 2
_MANY_ADMISSIONS = 4
_PAGES_AHEAD = 1024
_NODES_AT_ONCE = 32
# A reserve that is short is filled to 1/64 of the pool above it, so that backups are few and large.
_MARGIN_SHARE = 64


@dataclass(slots=True)
class _Eviction:
    """The backups begun while making room once. ``pages`` are those of the last one.

    ``leaving`` counts, by parent, the children that leave with them, so that a chain goes in one transfer.
    """

    transfers: list[Transfer] = field(default_factory=list)
    pages: int = 0
    leaving: dict[int, int] = field(default_factory=dict)


def make_room(step: Step, worker: Worker, pages: int, owner: int = 0) -> bool:
    """Evict until ``pages`` are free or will be after running backups; return whether they are free now.

    They are for a request in a namespace of ``owner``, whose own KV goes first if it is above its quota with them.
    Evicts a bounded number of nodes as long as a backup is in flight: the worker is served again when that is answered.
    """
    missing = pages - worker.pool.free
    if missing <= 0:
        return True
    _evict_pages(
        step, worker, missing - worker.moves.leaving, _NODES_AT_ONCE, is_needed=True, owner=owner, coming=pages
    )
    return worker.pool.free >= pages


def _evict_pages(
    step: Step, worker: Worker, missing: int, most_nodes: int, *, is_needed: bool, owner: int = 0, coming: int = 0
) -> None:
    """Evict nodes of ``missing`` pages, at most ``most_nodes``; more if they are needed and no backup is in flight.

    ``coming`` pages are for an ``owner``. Raises InvariantViolated where they are needed, and the policy names no node
    though one may leave.
    """
    state = step.state
    eviction = _Eviction()
    evicted = 0
    while missing > 0 and (evicted < most_nodes or (is_needed and not worker.moves.leaving)):
        found = None
        if state.quotas.accounts:
            found = take_device_excess(state, worker.worker_id, eviction.leaving, owner=owner, coming=coming)
        node, most = found or (take_device_victim(state, worker.worker_id, eviction.leaving), missing)
        if node is None and is_needed:
            node = take_overlooked_victim(state, worker)
        if node is None:
            break
        trim(state, node, min(missing, most))
        missing -= page_count(state.tree, node)
        evicted += 1
        _evict(step, worker, node, eviction)
    _send_all(step, eviction)


def _evict_above_quotas(step: Step, worker: Worker, *, is_busy: bool) -> bool:
    """Evict a few nodes of owners that are above their quotas on this worker; return whether there was any."""
    state = step.state
    eviction = _Eviction()
    evicted = 0
    while evicted < (_NODES_AHEAD_IF_BUSY if is_busy else _NODES_AHEAD):
        found = take_device_excess(state, worker.worker_id, eviction.leaving)
        if found is None:
            break
        node, excessive = found
        trim(state, node, excessive)
        evicted += 1
        _evict(step, worker, node, eviction)
    state.count("evicted_above_quota_nodes", evicted)
    _send_all(step, eviction)
    return evicted > 0


def keep_quotas(step: Step, worker: Worker, *, is_busy: bool) -> bool:
    """Evict some nodes above quotas on a worker and in its node's host pool; return whether the worker had any."""
    storage = step.state.storage_of(worker)
    if storage is not None:
        drop_above_quotas(step, storage)
    return _evict_above_quotas(step, worker, is_busy=is_busy)


def _send_all(step: Step, eviction: _Eviction) -> None:
    for transfer in eviction.transfers:
        send_transfer(step, transfer)


def _evict(step: Step, worker: Worker, node: Node, eviction: _Eviction) -> None:
    """Drop a node at once, or let it leave with a backup when it is to have a copy or its children leave with one."""
    state = step.state
    parent_id = node.parent
    storage = backup_target(state, worker)
    pages = None
    departure: Departure = "evicted"
    # No copy is needed where the node has one or another worker's backup is making one.
    if storage is not None and storage.storage_id not in node.host and not node.transfer:
        pages = admit_to_host(step, storage, node)
        departure = "evicted" if state.config.admission in ("all", "none") else "refused"
    if storage is not None and (pages is not None or worker.worker_id in node.below):
        join_transfer(state, _transfer_for(step, worker, storage, eviction, pages or b""), node, pages or b"")
        eviction.leaving[parent_id] = eviction.leaving.get(parent_id, 0) + 1
    elif worker.worker_id in node.locks:
        return  # A save of what it displaced reads it.
    else:
        state.count("evicted_pages_device", drop_device(state, node, worker, departure))
    parent = state.tree.nodes.get(parent_id)
    if parent is not None and is_left_bare(parent, worker.worker_id, eviction.leaving):
        offer_left_bare(state, parent, worker.worker_id)


def _transfer_for(step: Step, worker: Worker, storage: Storage, eviction: _Eviction, pages: bytes) -> Transfer:
    """Return the transfer that a node with these host pages (packed) joins: the last, or a new one if full."""
    size = len(pages) // 4
    if not eviction.transfers or eviction.pages + size > TRANSFER_PAGES:
        eviction.transfers.append(open_transfer(step, worker, storage))
        eviction.pages = 0
    eviction.pages += size
    return eviction.transfers[-1]


def keep_reserve(step: Step, worker: Worker, *, is_busy: bool, admissions: int) -> bool:
    """Evict ahead of need where eviction takes a backup's time, so that an allocation seldom waits for one.

    A few nodes at a time, fewer where the step is ``is_busy`` with a batch already, and none behind many
    ``admissions``: other inputs go on with it. Returns whether anything was to be evicted.
    """
    coming = worker.pool.free + worker.moves.leaving
    if coming >= reserved_pages(step.state, worker) or admissions >= _MANY_ADMISSIONS:
        return False
    if step.state.storage_of(worker) is None or step.state.config.admission == "none":
        return False
    most_nodes = _NODES_AHEAD_IF_BUSY if is_busy else _NODES_AHEAD
    missing = filled_reserve(step.state, worker) - coming
    _evict_pages(step, worker, min(missing, _PAGES_AHEAD), most_nodes, is_needed=False)
    return True


def reserved_pages(state: CellState, worker: Worker) -> int:
    """Return how many device pages eviction tries to keep free. Does not change the state."""
    return int(worker.pool.total * state.config.reserve_fraction)


def filled_reserve(state: CellState, worker: Worker) -> int:
    """Return the free device pages up to which a reserve that was short is filled. Does not change the state."""
    reserve = reserved_pages(state, worker)
    return reserve + min(reserve, worker.pool.total // _MARGIN_SHARE)
