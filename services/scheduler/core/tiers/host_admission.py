"""Admission to host memory: which evicted nodes are worth a backup, and which copies make room (HotPrefix 3.3.2).

An owner with a quota gets no more pages than that allows: for pages beyond it the owner's own copies make room, the
least recently used first, and where they cannot the node is not admitted. Pages count as the owner's from the moment
they are leased. So an owner that displaces others' copies is within its quota with what it gets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from services.scheduler.core.cache.candidates import HeatRank, coldest_of_host, index_of, refresh
from services.scheduler.core.cache.heat import coldest_together, worth
from services.scheduler.core.cache.kept import is_wanted
from services.scheduler.core.cache.prefix_tree import Node, ancestors, page_count
from services.scheduler.core.cache.residency import (
    HOST,
    drop_host,
    host_pool,
    is_host_evictable,
    moment,
    offer,
)
from services.scheduler.core.cache.victims import (
    follow_up,
    take_host_excess,
    take_host_victim,
    take_host_victim_of,
    trim,
)
from services.scheduler.core.tiers.saves import save_leaving
from shared.errors import InvariantViolated

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from services.scheduler.core.cache.eviction import Moment
    from services.scheduler.core.state import CellState, Storage
    from services.scheduler.core.step import Step

BUILT_IN_ADMISSIONS = ("all", "none", "selective")
"""Admissions that this module implements; others are registered by name, from outside the core."""


class Admission:
    """Base of all admissions. Keeps and changes nothing between decisions, so snapshots need not hold it."""

    name = ""

    def admits(self, node: Node, pages: int, moment: Moment) -> bool:
        """Return whether ``node``, which leaves a device, gets a copy of ``pages`` pages in host memory.

        The pool's eviction policy makes room for an admitted node; others are dropped. Nodes that a cache lease or a
        pin asks for get their copy without a call of this method.
        """
        raise NotImplementedError


A = TypeVar("A", bound=type[Admission])

ADMISSIONS: dict[str, Admission] = {}
"""Registered admissions by name, without those that are built in."""


def register_admission(admission: A) -> A:
    """Add an admission under the name that its class has; a decorator. Raises ValueError when another has that name."""
    if admission.name in BUILT_IN_ADMISSIONS:
        raise ValueError(f"admission {admission.name!r} is built in")
    known = ADMISSIONS.setdefault(admission.name, admission())
    if type(known) is not admission:
        raise ValueError(f"admissions {type(known).__qualname__} and {admission.__qualname__} are {admission.name!r}")
    return admission


_MOST_PASSED_OVER = 8
_NODES_ABOVE_QUOTA = 8  # Copies above a quota that one step drops without need for room.


def admit_to_host(step: Step, storage: Storage, node: Node) -> bytes | None:
    """Return host pages for a node that leaves a device, or None when it is to be dropped without a copy.

    "selective" asks for a frequency first, and then, when the pool is full, for as much hotness as each of the coldest
    copies has that would be evicted for it (Figure 5). A registered admission decides by itself.
    """
    state = step.state
    config = state.config
    size = page_count(state.tree, node)
    pages = None
    if config.admission == "all" or node.id in state.cache_leases.nodes or is_wanted(state, storage, node):
        pages = take_host_pages(step, storage, size, node.owner)
    elif config.admission in ADMISSIONS:
        if ADMISSIONS[config.admission].admits(node, size, moment(state)):
            pages = take_host_pages(step, storage, size, node.owner)
        else:
            state.count("host_refused_admission_pages", size)
    elif config.admission == "selective":
        frequency, _ = state.hotness.lookup(node.digest)
        if frequency < config.admission_frequency:
            state.count("host_refused_frequency_pages", size)
        else:
            way = dict.fromkeys(above.id for above in ancestors(state.tree, node))
            pages = displace_colder(step, storage, size, worth(state, node), way, node.owner)
    if pages is not None:
        state.count("host_admitted_pages", size)
    return pages


def take_host_pages(step: Step, storage: Storage, pages: int, owner: int = 0, behind: str = "") -> bytes | None:
    """Return ``pages`` host pages (packed) for a backup or a fetch of an owner's KV; None when too few can be freed.

    Evicts copies above a quota and then what the pool's policy names; copies that requests waiting before ``behind``
    count on stay. May cut or remove nodes that have copies in this pool, those on a device included: match again what
    is used later.
    """
    pool = host_pool(storage)
    if pages > pool.free + pool.cached or not _make_room_within_quota(step, storage, pages, owner):
        return None
    _drop_excess(step, storage, pages)
    while pool.free < pages:
        victim = take_host_victim(step.state, storage.storage_id, behind)
        if victim is None:
            return None
        free = pool.free
        _drop_end(step, storage, victim, pages - free)
        if pool.free == free:  # A policy may name the same node for ever.
            raise InvariantViolated(f"node {victim.id} was to leave the pool of {storage.storage_id} and may not")
    return _lease(step.state, storage, pages, owner)


def displace_colder(
    step: Step, storage: Storage, pages: int, value: float, spared: Container[int], owner: int = 0
) -> bytes | None:
    """Return ``pages`` host pages for a node worth ``value``, evicting the coldest copies; None if too few may go.

    No copy worth more is evicted, and nodes of ``spared`` ids stay. Copies above a quota go first, whatever their
    worth.
    """
    state, pool = step.state, host_pool(storage)
    may_go = _worth_less(state, spared, lambda other: other <= value)
    if pages > pool.free + pool.cached or not _make_room_within_quota(step, storage, pages, owner, may_go):
        return None
    _drop_excess(step, storage, pages, spared)
    if pool.free < pages:
        name = storage.storage_id
        index = index_of(state, coldest_of_host(name), lambda other: is_host_evictable(state, other, name))

        def rank_of(node_id: int) -> HeatRank | None:
            return _rank(state, storage, node_id)

        refresh(state, index, rank_of)
        victims = coldest_together(
            state,
            index,
            pages - pool.free,
            rank_of=rank_of,
            rank_when_bare=lambda parent, gone: _rank_when_bare(state, storage, parent, gone),
            is_colder=lambda other: other <= value,
            spared=spared,
        )
        if victims is None:
            state.count("host_refused_hotness_pages", pages)
            return None
        for victim in victims:
            _drop_end(step, storage, victim, pages - pool.free)
    return _lease(state, storage, pages, owner)


def displace_cheaper(
    step: Step, storage: Storage, pages: int, value: float, spared: Container[int], owner: int = 0
) -> bytes | None:
    """Return ``pages`` host pages for a node worth ``value``, evicting what the policy names while it is worth less.

    None if that frees too few; nodes of ``spared`` ids stay. Passes over a few that are worth more and no further, so
    that it costs little in a pool that holds nothing cheaper. May cut or remove nodes as :func:`take_host_pages` does.
    """
    state, pool = step.state, host_pool(storage)
    may_go = _worth_less(state, spared, lambda other: other < value)
    if pages > pool.free + pool.cached or not _make_room_within_quota(step, storage, pages, owner, may_go):
        return None
    _drop_excess(step, storage, pages, spared)
    passed_over: list[Node] = []
    while pool.free < pages and len(passed_over) < _MOST_PASSED_OVER:
        victim = take_host_victim(state, storage.storage_id)
        if victim is None:
            break
        if may_go(victim):
            _drop_end(step, storage, victim, pages - pool.free)
        else:
            passed_over.append(victim)
    for victim in passed_over:
        offer(state, victim)
    return _lease(state, storage, pages, owner)


def drop_above_quotas(step: Step, storage: Storage) -> None:
    """Drop up to eight copies of owners that are above their quotas here: quotas were lowered, or are new."""
    for _ in range(_NODES_ABOVE_QUOTA):
        found = take_host_excess(step.state, storage.storage_id)
        if found is None:
            return
        _drop_end(step, storage, *found)


def _worth_less(state: CellState, spared: Container[int], is_less: Callable[[float], bool]) -> Callable[[Node], bool]:
    """Return a predicate: whether a copy is not spared and its worth passes ``is_less``."""
    return lambda node: node.id not in spared and is_less(worth(state, node))


def _make_room_within_quota(
    step: Step, storage: Storage, pages: int, owner: int, may_go: Callable[[Node], bool] | None = None
) -> bool:
    """Evict an owner's own copies, those that ``may_go``, until its quota has room for ``pages`` more pages.

    Return whether it has. Passes over a few that may not go and no further.
    """
    if not owner:
        return True
    state, pool = step.state, f"{HOST}/{storage.storage_id}"
    most = state.quotas.most_pages(owner, pool)
    if most is None:
        return True
    passed_over: list[Node] = []
    while pages <= most and state.quotas.excess(owner, pool, pages) > 0 and len(passed_over) < _MOST_PASSED_OVER:
        victim = take_host_victim_of(state, storage.storage_id, owner)
        if victim is None:
            break
        if may_go is None or may_go(victim):
            _drop_end(step, storage, victim, state.quotas.excess(owner, pool, pages))
        else:
            passed_over.append(victim)
    for victim in passed_over:
        offer(state, victim)
    is_within = state.quotas.excess(owner, pool, pages) <= 0
    state.count("host_refused_quota_pages", 0 if is_within else pages)
    return is_within


def _drop_excess(step: Step, storage: Storage, pages: int, spared: Container[int] = ()) -> None:
    """Evict copies that are above their owners' quotas until ``pages`` pages are free, as far as they go."""
    if not step.state.quotas.above:
        return
    pool = host_pool(storage)
    passed_over: list[Node] = []
    while pool.free < pages:
        found = take_host_excess(step.state, storage.storage_id)
        if found is None:
            break
        victim, excessive = found
        if victim.id in spared:
            passed_over.append(victim)
        else:
            _drop_end(step, storage, victim, min(excessive, pages - pool.free))
    for victim in passed_over:
        offer(step.state, victim)


def _lease(state: CellState, storage: Storage, pages: int, owner: int) -> bytes | None:
    """Return ``pages`` free pages (packed), which count as the owner's from now on; None if fewer are free."""
    leased = host_pool(storage).allocate(pages)
    if leased and owner:
        state.quotas.charge(owner, f"{HOST}/{storage.storage_id}", pages)
    return leased


def _drop_end(step: Step, storage: Storage, victim: Node, missing: int) -> None:
    """Evict a host copy, or only its end where that is much less; see :func:`trimming.trim`.

    Its chunks may have to be saved now: a later order fills these pages after they were read.
    """
    state = step.state
    if missing <= 0 or not is_host_evictable(state, victim, storage.storage_id):
        return
    trim(state, victim, missing)
    follow_up(storage, victim)
    save_leaving(step, storage, victim)
    state.count("evicted_pages_host", drop_host(state, victim, storage))


def _rank(state: CellState, storage: Storage, node_id: int) -> HeatRank | None:
    node = state.tree.nodes.get(node_id)
    if node is None or not is_host_evictable(state, node, storage.storage_id):
        return None
    return worth(state, node), node.last_use


def _rank_when_bare(state: CellState, storage: Storage, parent: Node, gone: int) -> HeatRank | None:
    """Return the rank of a copy once all of its children are gone; None where more than they hold it."""
    name = storage.storage_id
    if name not in parent.host or parent.host_locks.get(name) or parent.device or gone < len(parent.child_ids):
        return None
    return worth(state, parent), parent.last_use
