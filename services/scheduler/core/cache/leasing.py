"""Cache leases: prefixes that callers ask to keep for a time, within their tenants' budgets.

A lease is granted when its request is admitted, where it reserves pages of the tenant's budget, and takes hold when the
request ends and what it computed is in the tree. Until its time is over, everything from the root to its deepest node
may leave a device only with a copy in a host pool, and that copy has a lock. So leases never keep a request waiting:
their pages on devices are evicted as any others are. They are lost only where the host pool cannot take a copy: it is
gone, late, or full of locked pages.

Where a budget is full, the tenant's lease that would end first gives way. Leases of all tenants and pins together lock
at most ``pin_fraction`` of a host pool.

:func:`check_cache_leases` checks the invariants from scratch, for tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from services.scheduler.core.cache.kept import MAX_RETURNS, CacheLease, PendingLeases, Return, key_name, pinned_pages
from services.scheduler.core.cache.prefix_match import match_prefix
from services.scheduler.core.cache.prefix_tree import Node, ancestors, namespace_of, page_count
from services.scheduler.core.cache.residency import forget_return, hold_leased_copy, let_go_of_leased_copies, split_node
from services.scheduler.core.require import require
from shared.ids import TOKEN_BYTES
from shared.messages.worker_plans import LeaseGrant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState
    from services.scheduler.core.step import Step
    from shared.messages.requests import Lease

MAX_LEASES = 4096
"""Leases at most in a cell, including those granted to running requests."""
MAX_LEASES_OF_REQUEST = 8
MAX_TTL_MS = 86_400_000
_PATIENCE = 6
"""Quarters of the announced time for which a session is expected back."""
_LEAST_PATIENCE_NS = 1_000_000_000
"""Time added to that."""


def grant_leases(step: Step, request: Request, reused: Sequence[Node]) -> None:
    """Grant or refuse the leases that an admitted request asks for; ``reused`` are the nodes it reuses, top first.

    Also renews leases and clears expected returns on those nodes. A repeated attempt keeps the answers of the first.
    """
    state, leases = step.state, step.state.cache_leases
    for node in reused if state.returns else ():
        if node.id in state.returns:
            state.count("returns_met")
            forget_return(state, node.id)
    if leases.nodes:
        _renew(step, request.submit.tenant, reused)
    asked = request.submit.cache.leases
    if not asked or request.request_id in leases.pending:
        return
    answers, granted = [], []
    for place, lease in enumerate(asked):
        pages = _pages_of(state, request, lease)
        refusal = _refusal(step, request, lease, pages, place, reused)
        state.count(f"cache_leases_{'refused' if refusal else 'granted'}")
        if refusal:
            answers.append(LeaseGrant(refusal=refusal))
            continue
        tokens, ttl_ms = pages * state.tree.page_size, min(lease.ttl_ms, MAX_TTL_MS)
        answers.append(LeaseGrant(tokens=tokens, expires_ns=step.time_ns + ttl_ms * 1_000_000))
        granted.append(msgspec.structs.replace(lease, tokens=tokens, ttl_ms=ttl_ms))
    granted.sort(key=lambda lease: lease.tokens)
    most = max((lease.tokens for lease in granted), default=0) // (state.tree.page_size or 1)
    tenant = request.submit.tenant
    reserved = max(0, most - _held_by(state, tenant, reused, most))
    pending = PendingLeases(tenant, tuple(granted), step.time_ns, reserved, tuple(answers))
    leases.reserve(request.request_id, pending, _budget_of(state, request))


def answers_to(state: CellState, request: Request) -> tuple[LeaseGrant, ...]:
    """Return the answers to an admitted request's leases, one to each. Changes nothing."""
    return state.cache_leases.pending[request.request_id].answers


def settle_leases(step: Step, request: Request, tokens: bytes) -> None:
    """Hold what an ended request was granted of ``tokens`` (packed int32), whose pages are in the tree."""
    state, leases = step.state, step.state.cache_leases
    if request.submit.cache.returns_in_ms > 0:
        _expect_back(step, request, tokens)
    pending = leases.take_pending(request.request_id)
    if pending is None:
        return
    page = state.tree.page_size
    for lease in pending.wanted:
        expires_ns = pending.admitted_ns + lease.ttl_ms * 1_000_000
        if expires_ns <= step.time_ns:
            state.count("cache_leases_expired")
            continue
        most = (len(tokens) // TOKEN_BYTES if lease.with_answer else lease.tokens) // page
        node = _hold_path(step, request, tokens, most, lease, expires_ns)
        if node is None:
            state.count("cache_leases_lost")


def _expect_back(step: Step, request: Request, tokens: bytes) -> None:
    """Have the path of a session whose caller announced its return evicted after nodes that no session expects.

    Within the tenant's budget for leases: beyond it, the sessions that return last are given up.
    """
    state, submit = step.state, request.submit
    path = match_prefix(state.tree, submit.namespace, tokens, len(tokens) // state.tree.page_token_bytes)
    if not path:
        return
    wait_ms = min(submit.cache.returns_in_ms, MAX_TTL_MS)
    until_ns = step.time_ns + wait_ms * 1_000_000 * _PATIENCE // 4 + _LEAST_PATIENCE_NS
    deepest, _ = path[-1]
    state.returns.pop(deepest.id, None)
    state.returns_due_ns = min(until_ns, state.returns_due_ns) if state.returns else until_ns
    state.returns[deepest.id] = Return(submit.tenant, until_ns, sum(pages for _, pages in path))
    own = {node_id: each for node_id, each in state.returns.items() if each.tenant == submit.tenant}
    taken = sum(each.pages for each in own.values())
    for node_id, each in sorted(own.items(), key=lambda item: -item[1].until_ns):
        if taken <= _budget_of(state, request) and len(state.returns) <= MAX_RETURNS:
            break
        taken -= each.pages
        state.count("returns_over_budget")
        forget_return(state, node_id)


def expire_cache_lease(step: Step, lease: CacheLease) -> None:
    """End a lease whose timer fired, or set the timer again if it was renewed meanwhile."""
    if lease.expires_ns > step.time_ns:
        _set_timer(step, lease)
        return
    step.state.count("cache_leases_expired")
    _end(step, lease)


def capacity_pages(state: CellState) -> int:
    """Return how many host pages leases and pins may lock in the cell, less those of pins. Changes nothing."""
    return sum(
        max(0, int(storage.pool.total * state.config.pin_fraction) - pinned_pages(state, storage.storage_id))
        for storage in state.storages.values()
        if storage.pool is not None
    )


def _budget_of(state: CellState, request: Request) -> int:
    """Return how many pages the tenant of a request may lease. Changes nothing."""
    return request.submit.cache.max_leased_tokens // state.tree.page_size


def _pages_of(state: CellState, request: Request, lease: Lease) -> int:
    page = state.tree.page_size
    return max(0, min(lease.tokens, request.submit.prompt_tokens)) // page if page else 0


def _refusal(step: Step, request: Request, lease: Lease, pages: int, place: int, reused: Sequence[Node]) -> str:
    """Return why a lease is not granted, or ""; makes room for it in its tenant's budget."""
    state, leases, submit = step.state, step.state.cache_leases, request.submit
    if not pages or lease.ttl_ms < 1:
        return "malformed"
    if submit.cache.max_leased_tokens < 1:
        return "no_budget"
    if place >= MAX_LEASES_OF_REQUEST or len(leases.leases) + len(leases.pending) >= MAX_LEASES:
        return "too_many"
    capacity = capacity_pages(state)
    if not capacity or not state.config.host_tier:
        return "no_host_pool"
    budget = _budget_of(state, request)
    if not _make_room(step, request, lease, budget, pages, reused):
        return "over_budget"
    account = leases.accounts.get(submit.tenant)
    left = capacity - leases.taken + (0 if account is None else account.taken)
    return "" if left >= budget or _make_room(step, request, lease, left, pages, reused) else "over_capacity"


def _make_room(step: Step, request: Request, wanted: Lease, most: int, pages: int, reused: Sequence[Node]) -> bool:
    """End a tenant's leases until a prefix of ``pages`` fits ``most`` pages beside its others; return whether it does.

    The lease with the same key goes first, then those that would end first. Leases that end on the prefix stay.
    """
    leases, tenant = step.state.cache_leases, request.submit.tenant
    key = leases.keys.get(key_name(tenant, request.submit.namespace, wanted.key)) if wanted.key else None
    account = leases.account(tenant)
    if pages + account.reserved <= most:
        on_path = dict.fromkeys(node.id for node in reused)
        while account.taken + pages - _held_by(step.state, tenant, reused, pages) > most:
            others = [
                (lease.lease_id != key, lease.expires_ns, lease.lease_id)
                for lease in leases.leases.values()
                if lease.tenant == tenant and lease.node and lease.node not in on_path
            ]
            if not others:
                break
            step.state.count("cache_leases_gave_way")
            _end(step, leases.leases[min(others)[-1]])
            account = leases.account(tenant)
    is_enough = account.taken + pages - _held_by(step.state, tenant, reused, pages) <= most
    account.most_pages = max(_budget_of(step.state, request), account.taken)
    leases.close_unused(tenant)
    return is_enough


def _held_by(state: CellState, tenant: str, path: Sequence[Node], most: int) -> int:
    """Return how many of the first ``most`` pages on a path a tenant's leases cover already. Changes nothing."""
    held = 0
    for node in path:
        entry = state.cache_leases.nodes.get(node.id)
        if entry is None or tenant not in entry.tenants:
            break
        held += page_count(state.tree, node)
    return min(held, most)


def _renew(step: Step, tenant: str, reused: Sequence[Node]) -> None:
    """Restart the time of a tenant's leases that end at one of the reused nodes."""
    leases = step.state.cache_leases
    for node in reused:
        entry = leases.nodes.get(node.id)
        for lease_id in entry.ends if entry is not None else ():
            lease = leases.leases[lease_id]
            if lease.tenant == tenant:
                step.state.count("cache_leases_renewed")
                lease.expires_ns = step.time_ns + lease.ttl_ms * 1_000_000


def _hold_path(
    step: Step, request: Request, tokens: bytes, most: int, wanted: Lease, expires_ns: int
) -> CacheLease | None:
    """Make a lease of as much of ``tokens`` as the tree has, at most ``most`` pages; return None if that is nothing."""
    state, leases, submit = step.state, step.state.cache_leases, request.submit
    before = leases.keys.get(key_name(submit.tenant, submit.namespace, wanted.key)) if wanted.key else None
    if before is not None:
        state.count("cache_leases_replaced")
        _end(step, leases.leases[before])
    account = leases.account(submit.tenant)
    account.most_pages = max(account.most_pages or _budget_of(state, request), account.taken)
    room = max(0, min(account.most_pages - account.taken, capacity_pages(state) - leases.taken))
    path: list[Node] = []
    for node, pages in match_prefix(state.tree, submit.namespace, tokens, most):
        entry = leases.nodes.get(node.id)
        is_held = entry is not None and submit.tenant in entry.tenants
        fits = pages if is_held else min(pages, room)
        if not fits:
            break
        held = split_node(state, node, fits) if fits < page_count(state.tree, node) else node
        path.append(held)
        room -= 0 if is_held else fits
        if fits < pages:
            break
    if not path:
        leases.close_unused(submit.tenant)
        return None
    lease = CacheLease(
        lease_id=leases.next_id,
        tenant=submit.tenant,
        namespace=submit.namespace,
        key=wanted.key,
        ttl_ms=wanted.ttl_ms,
        expires_ns=expires_ns,
        timer_id="",
        node=path[-1].id,
    )
    leases.next_id += 1
    leases.leases[lease.lease_id] = lease
    if lease.key:
        leases.keys[key_name(lease.tenant, lease.namespace, lease.key)] = lease.lease_id
    leases.cover(lease, [(node, page_count(state.tree, node)) for node in path])
    _set_timer(step, lease)
    for node in path:
        hold_leased_copy(state, node)
    _end_covered(step, lease, path)
    leases.nodes[lease.node].ends += (lease.lease_id,)
    return lease


def _end_covered(step: Step, lease: CacheLease, path: Sequence[Node]) -> None:
    """End leases without a key that the new one covers and outlasts."""
    leases = step.state.cache_leases
    for node in path:
        for other_id in leases.nodes[node.id].ends:
            other = leases.leases[other_id]
            if other.tenant == lease.tenant and not other.key and other.expires_ns <= lease.expires_ns:
                step.state.count("cache_leases_replaced")
                _end(step, other)


def _set_timer(step: Step, lease: CacheLease) -> None:
    delay_ms = -(-(lease.expires_ns - step.time_ns) // 1_000_000)
    name = f"cache_lease.{lease.lease_id}"
    lease.timer_id = step.set_timer(name, "cache_lease", str(lease.lease_id), delay_ms)


def _end(step: Step, lease: CacheLease) -> None:
    """End a lease; nodes that no other lease covers are evicted as any others from now on."""
    state, leases = step.state, step.state.cache_leases
    step.cancel_timer(lease.timer_id)
    del leases.leases[lease.lease_id]
    name = key_name(lease.tenant, lease.namespace, lease.key)
    if lease.key and leases.keys.get(name) == lease.lease_id:
        del leases.keys[name]
    if not lease.node:
        return
    deepest = state.tree.nodes[lease.node]
    entry = leases.nodes[deepest.id]
    entry.ends = tuple(other for other in entry.ends if other != lease.lease_id)
    for node in ancestors(state.tree, deepest):
        last = leases.uncover(lease, node, page_count(state.tree, node))
        if last is not None:
            let_go_of_leased_copies(state, node, last)
    leases.close_unused(lease.tenant)


def check_cache_leases(state: CellState) -> None:
    """Raise InvariantViolated if leases, what they cover and what counts against budgets contradict one another."""
    leases = state.cache_leases
    covered: dict[int, dict[str, int]] = {}
    ends: dict[int, set[int]] = {}
    for lease_id, lease in leases.leases.items():
        timer = state.timers.get(lease.timer_id)
        require(
            timer is not None and timer.at_ns <= lease.expires_ns + 1_000_000, f"lease {lease_id} outlives its time"
        )
        if not lease.node:
            continue
        deepest = state.tree.nodes[lease.node]
        require(namespace_of(state.tree, deepest) == lease.namespace, f"lease {lease_id} is in another namespace")
        ends.setdefault(deepest.id, set()).add(lease_id)
        for node in ancestors(state.tree, deepest):
            counts = covered.setdefault(node.id, {})
            counts[lease.tenant] = counts.get(lease.tenant, 0) + 1
    require({each: entry.tenants for each, entry in leases.nodes.items()} == covered, "leases cover other nodes")
    known_ends = {each: set(entry.ends) for each, entry in leases.nodes.items() if entry.ends}
    require(known_ends == ends, "leases end at other nodes")
    keys = {
        key_name(each.tenant, each.namespace, each.key): number for number, each in leases.leases.items() if each.key
    }
    require(leases.keys == keys, "leases have other keys")
    require(all(request_id in state.requests for request_id in leases.pending), "a grant outlives its request")
    _check_accounts(state)
    _check_locked(state)
    _check_returns(state)


def _check_accounts(state: CellState) -> None:
    leases = state.cache_leases
    pages: dict[str, int] = {}
    for node_id, entry in leases.nodes.items():
        for tenant in entry.tenants:
            pages[tenant] = pages.get(tenant, 0) + page_count(state.tree, state.tree.nodes[node_id])
    reserved: dict[str, int] = {}
    for pending in leases.pending.values():
        if pending.reserved:
            reserved[pending.tenant] = reserved.get(pending.tenant, 0) + pending.reserved
    require(
        set(leases.accounts) == {*pages, *reserved}, "tenants have accounts and no leases, or leases and no account"
    )
    for tenant, account in leases.accounts.items():
        require(account.pages == pages.get(tenant, 0), f"{tenant} leases other pages than its account says")
        require(account.reserved == reserved.get(tenant, 0), f"{tenant} has other pages reserved")
        require(account.taken <= account.most_pages, f"{tenant} leases more than its budget")
    total = sum(page_count(state.tree, state.tree.nodes[node_id]) for node_id in leases.nodes)
    require(leases.pages == total, f"{total} pages are leased and {leases.pages} counted")


def _check_returns(state: CellState) -> None:
    """Raise InvariantViolated if too many sessions are expected back, or one at a node that is gone."""
    require(len(state.returns) <= MAX_RETURNS, f"{len(state.returns)} sessions are expected back")
    require(all(node_id in state.tree.nodes for node_id in state.returns), "a session is expected back at a lost node")
    due_ns = [expected.until_ns for expected in state.returns.values()]
    require(min(due_ns, default=state.returns_due_ns) >= state.returns_due_ns, "a session is late unnoticed")


def _check_locked(state: CellState) -> None:
    locked: dict[str, int] = {}
    for node_id, entry in state.cache_leases.nodes.items():
        node = state.tree.nodes[node_id]
        for storage_id in entry.storages:
            require(storage_id in node.host, f"leases hold a copy of node {node_id} that is not there")
            locked[storage_id] = locked.get(storage_id, 0) + page_count(state.tree, node)
    counted = {name: pages for name, pages in state.cache_leases.locked.items() if pages}
    require(counted == locked, f"leases lock {locked} and count {counted}")
    for storage_id, pages in locked.items():
        pool = state.storages[storage_id].pool
        most = 0 if pool is None else pool.total
        require(pages + pinned_pages(state, storage_id) <= most, f"leases and pins lock more than {storage_id} has")
