"""Quotas of cached bytes: counting each owner's pages in each pool, and naming what goes first where they are too many.

Whoever has more pages in a pool than allowed is above its quota there, and its nodes go before those of anybody who is
not, whatever the pool's policy says; of one owner's nodes the one that was used longest ago. Counting costs a constant
time for each node that changes, naming a victim takes O(log n) of the owner's nodes besides one look at each owner that
is above and has nothing that could go. Where an owner has no quota nothing but its count is kept; where nobody owns
anything, nodes have no owner and nothing is done.
"""

from __future__ import annotations

from services.scheduler.core.cache.eviction import Evictable, Moment
from services.scheduler.core.cache.eviction.lru import LruPolicy
from services.scheduler.core.cache.prefix_tree import Node
from services.scheduler.core.quotas.quota_accounts import Account
from services.scheduler.core.state import CellState
from shared.errors import InvariantViolated
from shared.messages.storage_plans import DiskQuota

NOBODY = 0
"""The owner of what no quota is for."""

_DEVICE_POOLS = "device/"


def owner_of(state: CellState, namespace: str) -> int:
    """The number of who owns a namespace's KV, or :data:`NOBODY`. Does not mutate."""
    return state.tree.owners.get(namespace, NOBODY)


def disk_quota(state: CellState, namespace: str) -> DiskQuota | None:
    """What a storage is to know of who owns this namespace; None where nobody does. Does not mutate."""
    account = state.quotas.accounts.get(owner_of(state, namespace))
    if account is None:
        return None
    return DiskQuota(owner=account.name, disk_bytes=account.disk_bytes, remote_bytes=account.remote_bytes)


def most_pages(state: CellState, owner: int, pool: str) -> int | None:
    """Pages that an owner may have in a pool; None where it has no quota there. Does not mutate."""
    account = state.quotas.accounts.get(owner)
    if account is None or state.geometry is None:
        return None
    nbytes = most_bytes(account, pool)
    return nbytes // state.geometry.page_bytes if nbytes else None


def most_bytes(account: Account, pool: str) -> int:
    """An account's quota in a pool; 0 is no bound. Does not mutate."""
    return account.device_bytes if pool.startswith(_DEVICE_POOLS) else account.host_bytes


def excess(state: CellState, owner: int, pool: str, coming: int = 0) -> int:
    """Pages above an owner's quota in a pool once ``coming`` more are there and running backups have freed theirs.

    0 or less is within it. Does not mutate.
    """
    most = most_pages(state, owner, pool)
    if most is None:
        return 0
    account = state.quotas.accounts[owner]
    return account.pages.get(pool, 0) - account.leaving.get(pool, 0) + coming - most


def charge(state: CellState, owner: int, pool: str, pages: int) -> None:
    """An owner has so many pages more in a pool, or fewer."""
    _count(state.quotas.accounts[owner].pages, pool, pages)
    place(state, owner, pool)


def note_leaving(state: CellState, owner: int, pool: str, pages: int) -> None:
    """Backups will free so many of an owner's pages of a device more, or fewer."""
    _count(state.quotas.accounts[owner].leaving, pool, pages)
    place(state, owner, pool)


def place(state: CellState, owner: int, pool: str) -> None:
    """Write down whether an owner is above its quota in a pool, after a change of either."""
    above = state.quotas.above.get(pool, {})
    is_above = excess(state, owner, pool) > 0
    if is_above and owner not in above:
        state.quotas.above.setdefault(pool, above)[owner] = None
    elif not is_above and owner in above:
        del above[owner]
        if not above:
            del state.quotas.above[pool]


def offer_owned(state: CellState, node: Node, pool: str) -> None:
    """A node that somebody owns may be evicted from this pool, or has changed since it might."""
    account = state.quotas.accounts[node.owner]
    if not most_bytes(account, pool):
        return
    order = account.orders.get(pool)
    if order is None:
        order = account.orders[pool] = LruPolicy()
    order.offer(node)


def forget_unbounded_orders(account: Account) -> None:
    """An account has other quotas: where it has none, nobody asks any more which of its nodes goes first."""
    account.orders = {pool: order for pool, order in account.orders.items() if most_bytes(account, pool)}


def withdraw_owned(state: CellState, node: Node, pool: str, moment: Moment) -> None:
    """A node that somebody owns left this pool."""
    order = state.quotas.accounts[node.owner].orders.get(pool)
    if order is not None:
        order.remove(node, moment)


def coldest_owned(state: CellState, owner: int, pool: str, evictable: Evictable, moment: Moment) -> Node | None:
    """The node of an owner that goes next from a pool, None when none may. It is on offer no longer."""
    order = state.quotas.accounts[owner].orders.get(pool)
    return None if order is None else order.victim(evictable, moment)


def take_excess(
    state: CellState, pool: str, evictable: Evictable, moment: Moment, *, owner: int = NOBODY, coming: int = 0
) -> tuple[Node, int] | None:
    """A node of somebody who is above its quota in a pool, and by how many pages; None when nobody has any to give.

    ``owner``, if it is above with the pages that are ``coming`` for it, is asked first.
    """
    asked = [owner] if owner and coming and excess(state, owner, pool, coming) > 0 else []
    for other in (*asked, *state.quotas.above.get(pool, ())):
        node = coldest_owned(state, other, pool, evictable, moment)
        if node is not None:
            return node, excess(state, other, pool, coming if other == owner else 0)
    return None


def forget_pool(state: CellState, pool: str) -> None:
    """A pool is gone with all that was in it."""
    state.quotas.above.pop(pool, None)
    for account in state.quotas.accounts.values():
        _forget_pool_of(account, pool)


def _forget_pool_of(account: Account, pool: str) -> None:
    account.pages.pop(pool, None)
    account.leaving.pop(pool, None)
    account.orders.pop(pool, None)


def _count(counts: dict[str, int], pool: str, change: int) -> None:
    counted = counts.get(pool, 0) + change
    if counted < 0:
        raise InvariantViolated(f"an owner has {counted} pages in {pool}")
    if counted:
        counts[pool] = counted
    else:
        counts.pop(pool, None)
