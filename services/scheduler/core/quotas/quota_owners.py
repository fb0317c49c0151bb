"""Owners of KV and their quotas, as requests name them: each says whose cache it uses and what that may take.

A quota holds from the request that states it on: quotas are changed by the next request that comes. A namespace that
has KV when its owner is first heard of is counted then, once, in proportion to its KV, and gone through again when that
owner first gets a quota. Owners with nothing left are forgotten now and then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_tree import PAGE_NUMBER_BYTES, Node, descendants_first, page_count
from services.scheduler.core.cache.residency import (
    DEVICE,
    HOST,
    copies_of,
    devices_of,
    is_device_evictable,
    is_host_evictable,
    leaves_with_backup,
)
from services.scheduler.core.quotas.quota_accounts import (
    Account,
    forget_unbounded_orders,
)
from services.scheduler.core.tiers.under_way import leased_pages
from shared.messages.requests import CacheQuota, SubmitRequest

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState

_FORGOTTEN_BEYOND = 64
_NO_BOUND = CacheQuota(owner="")


def remember_quota(state: CellState, message: SubmitRequest) -> None:
    """Note the owner of an accepted request's namespace, and what that owner's KV may take."""
    quota = message.quota
    number = state.tree.owners.get(message.namespace)
    if number is None:
        if quota is None:
            return
        number = _account_of(state, quota.owner)
        _own(state, message.namespace, number)
    account = state.quotas.accounts[number]
    if quota is not None and quota.owner != account.name:
        state.count("quotas_refused")  # A namespace comes of one salt; another quota for it is ignored.
        return
    _bound(state, number, account, quota or _NO_BOUND)
    if len(state.tree.owners) > 2 * (len(state.tree.roots) + len(state.requests)) + _FORGOTTEN_BEYOND:
        _forget_unused(state)


def _account_of(state: CellState, name: str) -> int:
    quotas = state.quotas
    number = quotas.numbers.get(name)
    if number is None:
        number = quotas.last = quotas.last + 1
        quotas.numbers[name] = number
        quotas.accounts[number] = Account(name)
    return number


def _bound(state: CellState, number: int, account: Account, quota: CacheQuota) -> None:
    """Set an account's quotas."""
    # Quotas below host memory only matter to storages, which are told with their orders.
    account.disk_bytes, account.remote_bytes = max(0, quota.disk_bytes), max(0, quota.remote_bytes)
    bounds = max(0, quota.device_bytes), max(0, quota.host_bytes)
    if bounds == (account.device_bytes, account.host_bytes):
        return
    is_bounded_anew = bool((bounds[0] and not account.device_bytes) or (bounds[1] and not account.host_bytes))
    account.device_bytes, account.host_bytes = bounds
    forget_unbounded_orders(account)
    if is_bounded_anew:
        for namespace, owner in state.tree.owners.items():
            if owner == number:
                _offer_namespace(state, namespace)
    for pool in account.pages:
        state.quotas.place(number, pool)


def _own(state: CellState, namespace: str, number: int) -> None:
    """Assign a namespace to an account from now on, with all KV that it has."""
    tree = state.tree
    tree.owners[namespace] = number
    for fetch in state.fetches.values():
        if fetch.namespace == namespace:
            state.quotas.charge(number, f"{HOST}/{fetch.storage_id}", leased_pages(fetch.pages))
    root_id = tree.roots.get(namespace)
    if root_id is None:
        return
    for node in descendants_first(tree, tree.nodes[root_id]):
        node.set_rare(owner=number)
        _count_all(state, node)
        _offer_all(state, node)


def _offer_namespace(state: CellState, namespace: str) -> None:
    root_id = state.tree.roots.get(namespace)
    if root_id is not None:
        for node in descendants_first(state.tree, state.tree.nodes[root_id]):
            _offer_all(state, node)


def _count_all(state: CellState, node: Node) -> None:
    """Charge the owner of a node, whose owner is new, for its pages in every pool."""
    owner = node.owner
    pages = page_count(state.tree, node)
    for worker_id in (*node.device, *node.loading):
        if worker_id not in state.workers:
            continue  # The worker is lost, and its pages are about to be struck.
        state.quotas.charge(owner, f"{DEVICE}/{worker_id}", pages)
    for storage_id in copies_of(state, node):
        state.quotas.charge(owner, f"{HOST}/{storage_id}", pages)
    if not node.transfer:
        return
    transfer = state.transfers[node.transfer]
    state.quotas.charge(owner, f"{HOST}/{transfer.storage_id}", len(node.backup_pages) // PAGE_NUMBER_BYTES)
    worker_id = transfer.worker_id
    if worker_id not in node.locks and leaves_with_backup(state, node, worker_id):
        state.quotas.note_leaving(owner, f"{DEVICE}/{worker_id}", pages)


def _offer_all(state: CellState, node: Node) -> None:
    """Offer a node to its owner's orders of every pool that it may leave. The pools' policies know it already."""
    for worker_id in devices_of(state, node):
        if is_device_evictable(state, node, worker_id):
            state.quotas.offer(node, f"{DEVICE}/{worker_id}")
    for storage_id in copies_of(state, node):
        if is_host_evictable(state, node, storage_id):
            state.quotas.offer(node, f"{HOST}/{storage_id}")


def _forget_unused(state: CellState) -> None:
    """Forget namespaces with neither KV nor a request, and then accounts without any."""
    tree, quotas = state.tree, state.quotas
    used = dict.fromkeys(tree.roots)
    used |= dict.fromkeys(request.submit.namespace for request in state.requests.values())
    used |= dict.fromkeys(fetch.namespace for fetch in state.fetches.values())
    tree.owners = {namespace: number for namespace, number in tree.owners.items() if namespace in used}
    kept = dict.fromkeys(tree.owners.values())
    quotas.accounts = {number: account for number, account in quotas.accounts.items() if number in kept}
    quotas.numbers = {account.name: number for number, account in quotas.accounts.items()}
