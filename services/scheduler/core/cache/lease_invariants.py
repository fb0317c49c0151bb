"""What must hold of cache leases, checked from scratch. For tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.kept import MAX_RETURNS, key_name, pinned_pages
from services.scheduler.core.cache.prefix_tree import ancestors, namespace_of, page_count
from services.scheduler.core.require import require

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState


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
    """Sessions that are expected back are few, and none hangs on to a node that is not there."""
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
