"""The node that leaves a pool next: one above its owner's quota, or else the policy's victim.

A victim that is much larger than the missing pages is cut, so that only its end is evicted.
"""

from __future__ import annotations

from itertools import islice
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_tree import Node, page_count
from services.scheduler.core.cache.residency import (
    DEVICE,
    HOST,
    forget_late_returns,
    is_device_evictable,
    is_host_evictable,
    is_left_bare,
    moment,
    offer,
    offer_unless_held,
    order_of,
    split_node,
)
from shared.chunks import chunk_tokens
from shared.errors import InvariantViolated

if TYPE_CHECKING:
    from collections.abc import Mapping

    from services.scheduler.core.cache.eviction import Evictable, Policy
    from services.scheduler.core.cache.prefix_tree import Path
    from services.scheduler.core.state import CellState, Storage, Worker


_NODES, _HOSTS = itemgetter(0), attrgetter("host")

NO_CHILDREN: Mapping[int, int] = {}

MOST_HELD = 256
"""Waiting requests at most for which a host pool holds copies: every victim is looked up among them."""


def take_device_victim(state: CellState, worker_id: str, leaving: Mapping[int, int] = NO_CHILDREN) -> Node | None:
    """Return the next node to leave this worker's device; only the policy changes.

    ``leaving`` counts, by parent, the children that leave with the transfers of the same eviction: a node may be named
    too if all of its children leave, and leaves after them.
    """
    return _victim(state, order_of(state, DEVICE, worker_id), _device_evictable(state, worker_id, leaving))


def take_device_excess(
    state: CellState, worker_id: str, leaving: Mapping[int, int] = NO_CHILDREN, *, owner: int = 0, coming: int = 0
) -> tuple[Node, int] | None:
    """Return a node to leave this device, as its owner is above its quota there (:func:`quotas.take_excess`)."""
    evictable = _device_evictable(state, worker_id, leaving)
    return state.quotas.take_excess(f"{DEVICE}/{worker_id}", evictable, moment(state), owner=owner, coming=coming)


def take_host_victim(state: CellState, storage_id: str, behind: str = "") -> Node | None:
    """Return the next node to leave this storage's host pool; only the policy and the held copies change.

    Copies that waiting requests hold go last, those of the last request first; none of a request up to ``behind``, if
    given.
    """
    evictable = _host_evictable(state, storage_id)
    held = state.storages[storage_id].fetching.held
    order = order_of(state, HOST, storage_id)
    if not held:
        return _victim(state, order, evictable)
    nodes = held.values()
    victim = _victim(state, order, lambda node_id: None if node_id in nodes else evictable(node_id))
    for name in reversed(held) if victim is None else ():
        if name == behind:
            break
        victim = evictable(held[name])
        if victim is not None:
            state.count("held_copies_given_up")
            break
    return victim


def hold_end(state: CellState, storage: Storage, request_id: str, path: Path) -> None:
    """Hold the deepest host copy on a waiting request's path.

    Where nodes share host memory, the deepest of at least a chunk: shorter copies do not keep those above them
    (:func:`residency.is_host_evictable`).
    """
    name, least = storage.storage_id, chunk_tokens(state.tree.page_size) if storage.shares else 0
    deepest = 0
    if any(map(_HOSTS, map(_NODES, path))):
        has_copy = (
            node.id
            for node, _ in reversed(path)
            if name in node.host and name not in node.quarantined and node.size >= least
        )
        deepest = next(has_copy, 0)
    hold(state, storage, request_id, deepest)


def hold(state: CellState, storage: Storage, request_id: str, node_id: int) -> None:
    """Hold this one host copy for a waiting request, in place of the one before; it keeps those above it.

    Node 0 reserves the request's place without a copy. Beyond MOST_HELD requests nothing is held.
    """
    held = storage.fetching.held
    if len(held) >= MOST_HELD and request_id not in held:
        return
    before = held.get(request_id, 0)
    held[request_id] = node_id
    offer_unless_held(state, storage, before)


def follow_up(storage: Storage, gone: Node) -> None:
    """Move requests that hold a copy which is about to go to the copy above it."""
    held = storage.fetching.held
    for name, node_id in held.items():
        if node_id == gone.id:
            held[name] = gone.parent


def take_host_excess(state: CellState, storage_id: str) -> tuple[Node, int] | None:
    """Return a node to leave this host pool, as its owner is above its quota there (:func:`quotas.take_excess`)."""
    return state.quotas.take_excess(f"{HOST}/{storage_id}", _host_evictable(state, storage_id), moment(state))


def take_host_victim_of(state: CellState, storage_id: str, owner: int) -> Node | None:
    """Return the owner's coldest node in this host pool, to leave for others of its own."""
    evictable = _host_evictable(state, storage_id)
    return state.quotas.coldest(owner, f"{HOST}/{storage_id}", evictable, moment(state))


def _device_evictable(state: CellState, worker_id: str, leaving: Mapping[int, int]) -> Evictable:
    def evictable(node_id: int) -> Node | None:
        node = state.tree.nodes.get(node_id)
        if node is None:
            return None
        is_next = is_device_evictable(state, node, worker_id) or is_left_bare(node, worker_id, leaving)
        return node if is_next else None

    return evictable


def _host_evictable(state: CellState, storage_id: str) -> Evictable:
    def evictable(node_id: int) -> Node | None:
        node = state.tree.nodes.get(node_id)
        return node if node is not None and is_host_evictable(state, node, storage_id) else None

    return evictable


def _victim(state: CellState, order: Policy, evictable: Evictable) -> Node | None:
    """Return the policy's victim that no session is expected to use; if none is left, the one expected last.

    Nodes that are passed over leave the policy's order, and are offered again when their time is over
    (:func:`forget_return`). Raises InvariantViolated for a policy that names a node that may not leave.
    """
    if not state.returns:
        return _checked(order, evictable, order.victim(evictable, moment(state)))
    forget_late_returns(state)
    returns = state.returns
    victim = order.victim(lambda node_id: None if node_id in returns else evictable(node_id), moment(state))
    if victim is not None:
        return _checked(order, evictable, victim)
    for node_id, _ in sorted(returns.items(), key=lambda item: -item[1].until_ns):
        victim = evictable(node_id)
        if victim is not None:
            del returns[node_id]
            state.count("returns_given_up")
            return victim
    return None


def _checked(order: Policy, evictable: Evictable, victim: Node | None) -> Node | None:
    """Return the victim. Raises InvariantViolated if the policy names one in use, whose pages are being read."""
    if victim is not None and evictable(victim.id) is not victim:
        raise InvariantViolated(f"policy {order.name!r} named node {victim.id}, which may not leave the pool")
    return victim


MOST_SEARCHED = 1024
"""Nodes that are searched at most for one that could leave, where a policy named none."""


def take_overlooked_victim(state: CellState, worker: Worker) -> Node | None:
    """Return a node to leave this device, whose policy has just named none though pages lack; None if none may leave.

    Usually the pool's counts, or a look at the newest nodes, show that all of its pages are in use or leave already.
    Otherwise the nodes that may leave are offered again, as one may not have been since a loss was struck. Raises
    InvariantViolated for a policy that still names none: the request that needs the pages would wait for ever and
    silently.
    """
    pool, name = worker.pool, worker.worker_id
    if pool.cached - pool.locked <= worker.moves.leaving:
        return None
    newest = islice(reversed(state.tree.nodes.values()), MOST_SEARCHED)
    left = [node for node in newest if is_device_evictable(state, node, name)]
    if not left:
        return None
    for node in left:
        offer(state, node)
    victim = take_device_victim(state, name)
    if victim is None:
        order = order_of(state, DEVICE, name)
        raise InvariantViolated(f"policy {order.name!r} named no node of {name}, though {len(left)} may leave")
    return victim


# Tokens at least that a victim is cut to: cuts of a few pages would leave a chain of tiny nodes, with a backup each.
LEAST_EVICTED_TOKENS = 256
# Pages at most of one BackupPages or PromotePages message: 24 bytes a page.
TRANSFER_PAGES = 8192


def trim(state: CellState, node: Node, pages: int) -> None:
    """Cut off the front of a victim that is much larger than the missing pages; the rest is to be evicted."""
    least = -(-LEAST_EVICTED_TOKENS // state.tree.page_size)
    excess = page_count(state.tree, node) - min(max(pages, least), TRANSFER_PAGES)
    if excess > 0 and not node.transfer:
        split_node(state, node, excess)  # The lower part keeps the id.
        state.count("victims_cut")
