"""Invariants of owners and their quotas, checked from scratch. For tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_tree import PAGE_NUMBER_BYTES, Node, namespace_of, page_count
from services.scheduler.core.cache.residency import (
    DEVICE,
    HOST,
    copies_of,
    is_device_evictable,
    is_host_evictable,
    leaves_with_backup,
)
from services.scheduler.core.quotas.quota_accounts import most_bytes
from services.scheduler.core.require import require
from services.scheduler.core.tiers.under_way import leased_pages

if TYPE_CHECKING:
    from services.scheduler.core.quotas.quota_accounts import Account
    from services.scheduler.core.state import CellState

Counts = dict[tuple[int, str], int]


def check_quotas(state: CellState) -> None:
    """Raise InvariantViolated if owners, their counted pages, and those above a quota contradict one another."""
    quotas = state.quotas
    require(all(number in quotas.accounts for number in state.tree.owners.values()), "an owner has no account")
    named = {account.name: number for number, account in quotas.accounts.items()}
    require(quotas.numbers == named, "accounts are found under other names")
    pages, leaving = _recount(state)
    for number, account in quotas.accounts.items():
        counted = {pool: pages.pop((number, pool)) for owner, pool in list(pages) if owner == number}
        require(account.pages == counted, f"owner {number} has {counted} and counts {account.pages}")
        counted = {pool: leaving.pop((number, pool)) for owner, pool in list(leaving) if owner == number}
        require(account.leaving == counted, f"owner {number} gives up {counted} and counts {account.leaving}")
        for pool in account.pages:
            is_above = state.quotas.excess(number, pool) > 0
            require(
                is_above == (number in quotas.above.get(pool, {})), f"owner {number} is above in {pool}: {is_above}"
            )
        for pool, order in account.orders.items():
            is_there = all(_is_in(state, node_id, pool) for node_id in order.latest)
            require(is_there, f"owner {number} offers a node that is not in {pool}")
    require(not pages and not leaving, "an owner without an account has pages")
    for pool, above in quotas.above.items():
        has_pages = all(pool in quotas.accounts[number].pages for number in above)
        require(bool(above) and has_pages, f"{pool} lists an owner as above that has no pages there")


def _is_in(state: CellState, node_id: int, pool: str) -> bool:
    node = state.tree.nodes.get(node_id)
    tier, _, name = pool.partition("/")
    return node is not None and name in (node.device if tier == DEVICE else node.host)


def _recount(state: CellState) -> tuple[Counts, Counts]:
    """Return pages of each owner in each pool, and those of devices that backups will free; zeros are left out."""
    pages: Counts = {}
    leaving: Counts = {}
    for node in state.tree.nodes.values():
        owner = state.tree.owner_of(namespace_of(state.tree, node))
        require(node.owner == owner, f"node {node.id} is of owner {node.owner}, its namespace of {owner}")
        if owner and node.parent:
            _recount_node(state, node, pages, leaving)
    for fetch in state.fetches.values():
        _add(pages, state.tree.owner_of(fetch.namespace), f"{HOST}/{fetch.storage_id}", leased_pages(fetch.pages))
    return pages, leaving


def _recount_node(state: CellState, node: Node, pages: Counts, leaving: Counts) -> None:
    owner = node.owner
    account = state.quotas.accounts[owner]
    held = page_count(state.tree, node)
    for worker_id in (*node.device, *node.loading):
        if worker_id not in state.workers:
            continue
        pool = f"{DEVICE}/{worker_id}"
        _add(pages, owner, pool, held)
        if is_device_evictable(state, node, worker_id):
            _require_offered(account, node, pool)
    for storage_id in copies_of(state, node):
        pool = f"{HOST}/{storage_id}"
        _add(pages, owner, pool, held)
        if is_host_evictable(state, node, storage_id):
            _require_offered(account, node, pool)
    if node.transfer:
        transfer = state.transfers[node.transfer]
        _add(pages, owner, f"{HOST}/{transfer.storage_id}", len(node.backup_pages) // PAGE_NUMBER_BYTES)
        worker_id = transfer.worker_id
        if worker_id not in node.locks and leaves_with_backup(state, node, worker_id):
            _add(leaving, owner, f"{DEVICE}/{worker_id}", held)


def _require_offered(account: Account, node: Node, pool: str) -> None:
    is_offered = pool in account.orders and node.id in account.orders[pool].latest
    require(is_offered or not most_bytes(account, pool), f"node {node.id} could leave {pool} unnoticed")


def _add(counts: Counts, owner: int, pool: str, pages: int) -> None:
    if owner and pages:
        counts[owner, pool] = counts.get((owner, pool), 0) + pages
