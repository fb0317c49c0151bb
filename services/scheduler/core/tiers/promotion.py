"""Hotness promotion (HotPrefix 3.4, Algorithm 2): hot host copies move up while requests decode.

After a batch has prefilled something, the hottest host roots (copies in host memory right below nodes on the device)
take the places of the coldest leaves of the device. The leaves are dropped at once, without a backup. Pages above the
reserve that are not in use are filled first; beyond them a plan fills only what it frees, so the device holds as much
afterwards as before. Until the worker answers, the nodes of a plan are being loaded: they are matched
by no request and not evicted. There is no deadline: a worker that lives answers, as with loads, and until then
it may still write to these pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.candidates import (
    Candidates,
    HeatRank,
    coldest_of_device,
    hottest_below,
    index_of,
    put_back,
    refresh,
    take_least,
)
from services.scheduler.core.cache.heat import coldest_together, promotion_value
from services.scheduler.core.cache.identities import page_identities
from services.scheduler.core.cache.prefix_tree import Node, page_count
from services.scheduler.core.cache.residency import (
    DEVICE,
    begin_loading,
    cancel_loading,
    drop_device,
    finish_loading,
    is_device_evictable,
    lock_host,
    prune,
    split_node,
    unlock_host,
)
from services.scheduler.core.cache.victims import LEAST_EVICTED_TOKENS, TRANSFER_PAGES, trim
from services.scheduler.core.lifecycle import RequestState
from services.scheduler.core.tiers.loads import loading_upwards, release_host
from services.scheduler.core.tiers.making_room import filled_reserve
from services.scheduler.core.tiers.under_way import Promotion
from shared.errors import InvariantViolated
from shared.messages.worker_plans import PromotePages

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState, Storage, Worker
    from services.scheduler.core.step import Step
    from shared.messages.worker_events import PagesPromoted

# Host roots that one plan moves, and that it passes over for want of enough colder leaves: each costs many look-ups.
_MOST_ROOTS = 16
_MOST_PASSED_OVER = 4


def promote(step: Step, worker: Worker) -> None:
    """Plan a promotion on this worker, if its batches have prefilled something since the last one."""
    state = step.state
    if not worker.moves.is_promotion_due or not _is_time(state, worker):
        return
    worker.moves.is_promotion_due = False
    storage = state.storage_of(worker)
    if storage is None or state.config.promotion == "off":
        return
    nodes = _choose(state, worker, storage)
    if not nodes:
        return
    promotion_id = state.next_promotion
    state.next_promotion += 1
    worker.moves.promotion = Promotion(promotion_id, storage.storage_id, [node.id for node in nodes])
    state.count("promotions_started")
    step.to_worker(
        worker,
        PromotePages(
            promotion_id=promotion_id,
            storage_id=storage.storage_id,
            host_pages=b"".join(node.host_pages(storage.storage_id) for node in nodes),
            device_pages=b"".join(node.loading_pages(worker.worker_id) for node in nodes),
            identities=b"".join(page_identities(state.tree, node) for node in nodes),
        ),
    )


def _is_time(state: CellState, worker: Worker) -> bool:
    """Return whether the worker decodes or is idle, and no request would wait longer for a copy or a page."""
    if worker.moves.promotion is not None or worker.lease_waits or any(batch.loads for batch in worker.work.batches):
        return False
    is_decoding = any(state.requests[name].state is RequestState.DECODING for name in worker.work.running)
    return is_decoding or not worker.work.batches


def _choose(state: CellState, worker: Worker, storage: Storage) -> list[Node]:
    """Choose nodes by Algorithm 2: take the hottest host roots in turn, and drop the coldest leaves for them.

    Return the nodes, which begin to load.
    """
    name = worker.worker_id
    roots = index_of(state, hottest_below(name), lambda node: _is_host_root(state, worker, storage, node))
    leaves = index_of(state, coldest_of_device(name), lambda node: is_device_evictable(state, node, name))

    def rank_of(node_id: int) -> HeatRank | None:
        return _root_rank(state, worker, storage, node_id)

    refresh(state, roots, rank_of)
    refresh(state, leaves, lambda node_id: _leaf_rank(state, worker, node_id))
    budget = _budget(state)
    # While backups free pages, a request waits for them; and the reserve is for requests, not for guesses.
    spare = 0 if worker.moves.leaving else max(0, worker.pool.free - filled_reserve(state, worker))
    chosen: list[Node] = []
    passed_over: list[tuple[HeatRank, int]] = []
    while len(chosen) < _MOST_ROOTS and len(passed_over) < _MOST_PASSED_OVER:
        found = take_least(roots, rank_of)
        if found is None:
            break
        node = state.tree.nodes[found[1]]
        size = min(page_count(state.tree, node), budget)
        is_sliver = size < page_count(state.tree, node) and size * state.tree.page_size < LEAST_EVICTED_TOKENS
        if not size or (is_sliver and chosen):
            passed_over.append(found)
            break
        if node.owner and state.quotas.excess(node.owner, f"{DEVICE}/{name}", size) > 0:
            passed_over.append(found)  # Its owner's quota has no room for it.
            continue
        freed = _drop_colder(state, worker, leaves, node, size - spare)
        if freed is None:
            passed_over.append(found)
            continue
        if size < page_count(state.tree, node):
            node = split_node(state, node, size)
        spare += freed - size
        budget -= size
        _begin(state, worker, storage, node, size)
        chosen.append(node)
    for rank, node_id in passed_over:
        put_back(roots, rank, node_id)
    return chosen


def _budget(state: CellState) -> int:
    """Return how many pages one plan may move."""
    tokens = state.config.promotion_tokens
    return min(TRANSFER_PAGES, tokens // state.tree.page_size) if tokens > 0 else TRANSFER_PAGES


def _root_rank(state: CellState, worker: Worker, storage: Storage, node_id: int) -> HeatRank | None:
    """Return the rank of a host root, hottest first; None for one that was not used again, or not lately."""
    node = state.tree.nodes.get(node_id)
    if node is None or not _is_host_root(state, worker, storage, node):
        return None
    record = state.hotness.lookup(node.digest)
    return (-promotion_value(state, node, record), -node.last_use) if all(record) else None


def _is_host_root(state: CellState, worker: Worker, storage: Storage, node: Node) -> bool:
    """Return whether a node has a usable copy in host memory and is not on the device, where its parent is."""
    name, storage_id = worker.worker_id, storage.storage_id
    if storage_id not in node.host or storage_id in node.quarantined or name in node.device or name in node.loading:
        return False
    parent = state.tree.nodes[node.parent]
    return not parent.parent or name in parent.device


def _leaf_rank(state: CellState, worker: Worker, node_id: int) -> HeatRank | None:
    """Return the rank of a leaf of the device, coldest first."""
    node = state.tree.nodes.get(node_id)
    if node is None or not is_device_evictable(state, node, worker.worker_id):
        return None
    return promotion_value(state, node), node.last_use


def _drop_colder(state: CellState, worker: Worker, leaves: Candidates, root: Node, pages: int) -> int | None:
    """Drop the coldest leaves, all strictly colder than ``root``, that free ``pages`` pages; return how many they free.

    None if too few leaves are colder. The root's parent stays. A parent whose children on the device are all dropped is
    a leaf then, and may go too.
    """
    if pages <= 0:
        return 0
    name = worker.worker_id
    value = promotion_value(state, root)

    def rank_when_bare(parent: Node, gone: int) -> HeatRank | None:
        if name not in parent.device or parent.locks.get(name) or parent.transfer or gone < parent.below[name]:
            return None
        return promotion_value(state, parent), parent.last_use

    victims = coldest_together(
        state,
        leaves,
        pages,
        rank_of=lambda node_id: _leaf_rank(state, worker, node_id),
        rank_when_bare=rank_when_bare,
        is_colder=lambda other: other < value,
        spared=(root.parent,),
    )
    if victims is None:
        return None
    freed = 0
    for victim in victims:
        trim(state, victim, pages - freed)
        freed += drop_device(state, victim, worker, "displaced")
    state.count("promotion_evicted_pages", freed)
    return freed


def _begin(state: CellState, worker: Worker, storage: Storage, node: Node, size: int) -> None:
    pages = worker.pool.allocate(size)
    if pages is None:
        raise InvariantViolated(f"a promotion of {size} pages was planned into {worker.pool.free}")
    begin_loading(state, node, worker, pages)
    lock_host(node, storage.storage_id)


def pages_promoted(step: Step, worker: Worker, message: PagesPromoted) -> None:
    """Settle a promotion that the worker carried out, or could not. An answer to any other promotion is stale."""
    state = step.state
    promotion = worker.moves.promotion
    if promotion is None or promotion.promotion_id != message.promotion_id:
        state.count("stale_inputs")
        return
    nodes = [node for node_id in promotion.nodes for node in loading_upwards(state, worker, node_id)]
    worker.moves.promotion = None
    storage = state.storages.get(promotion.storage_id)
    if message.ok:
        for node in reversed(nodes):
            node.last_use = step.seq  # Otherwise a policy that goes by last use would evict it first.
            state.count("promoted_pages", page_count(state.tree, node))
            finish_loading(state, node, worker)
            if storage is not None:
                unlock_host(state, node, storage)
        return
    state.count("promotions_failed")
    for node in nodes:
        worker.pool.release(cancel_loading(state, node, worker))
    if storage is not None:
        bad = message.bad_host_pages
        release_host(step, nodes, storage, bad[: len(bad) // 4 * 4])
    for node in nodes:
        if node.id in state.tree.nodes:
            prune(state, node)
