"""Accounts of owners with quotas: pages by pool, and which nodes go first above a quota. Plain data of a snapshot.

A pool is named as its eviction policy is: ``device/<worker id>`` or ``host/<storage id>``.

An owner with more pages in a pool than allowed is above its quota there, and its nodes are evicted before those of any
owner that is not, whatever the pool's policy says; among one owner's nodes, the least recently used goes first.
Counting costs a constant time for each node that changes. Naming a victim takes O(log n) of the owner's nodes, besides
one look at each owner that is above and has no evictable node. For an owner without a quota only the count is kept;
without quotas nodes have no owner and nothing is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from services.scheduler.core.cache.eviction.ranked import LruPolicy
from shared.errors import InvariantViolated
from shared.messages.storage_plans import DiskQuota

if TYPE_CHECKING:
    from services.scheduler.core.cache.eviction.policy import Evictable, Moment
    from services.scheduler.core.cache.prefix_tree import Node


NOBODY = 0
"""The owner of KV that no quota applies to."""

_DEVICE_POOLS = "device/"


class Account(msgspec.Struct):
    """An owner of KV: a tenant's salt, which tenants may share. Bytes are its quotas in each pool; 0 is no bound.

    ``pages`` counts its pages in each pool: on devices those that the tree has there or is loading, in host pools those
    that the tree has there and those leased for copies in flight. Pages of running requests that the tree does not have
    have no owner. ``orders`` has, for each pool, the nodes that may be evicted there, the least recently used first.
    """

    name: str  # ``CacheQuota.owner``.
    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    remote_bytes: int = 0
    pages: dict[str, int] = {}  # Never 0.
    leaving: dict[str, int] = {}  # By device pool: pages that running backups will free, as ``Worker.moves.leaving``.
    orders: dict[str, LruPolicy] = {}


class Quotas(msgspec.Struct):
    """All known owners that have, or had, a quota; empty without quotas.

    Their numbers are in the tree: nodes name their owner by it, and ``PrefixTree.owners`` the owner of a namespace.
    """

    accounts: dict[int, Account] = {}
    numbers: dict[str, int] = {}  # By name.
    last: int = 0  # The last number that was assigned.
    above: dict[str, dict[int, None]] = {}  # By pool: owners with more there than allowed, for longest first.
    page_bytes: int = 0  # KV bytes of a page of the cell's pools; 0 before the first worker.

    def disk_quota(self, owner: int) -> DiskQuota | None:
        """Return an owner's quotas below host memory, for storages; None for :data:`NOBODY`.

        Does not change the state.
        """
        account = self.accounts.get(owner)
        if account is None:
            return None
        return DiskQuota(owner=account.name, disk_bytes=account.disk_bytes, remote_bytes=account.remote_bytes)

    def most_pages(self, owner: int, pool: str) -> int | None:
        """Return how many pages an owner may have in a pool; None where it has no quota there.

        Does not change the state.
        """
        account = self.accounts.get(owner)
        if account is None or not self.page_bytes:
            return None
        nbytes = most_bytes(account, pool)
        return nbytes // self.page_bytes if nbytes else None

    def excess(self, owner: int, pool: str, coming: int = 0) -> int:
        """Return the pages above an owner's quota in a pool; 0 or less is within it.

        ``coming`` pages count as there, and pages that running backups will free as gone. Does not change the state.
        """
        most = self.most_pages(owner, pool)
        if most is None:
            return 0
        account = self.accounts[owner]
        return account.pages.get(pool, 0) - account.leaving.get(pool, 0) + coming - most

    def charge(self, owner: int, pool: str, pages: int) -> None:
        """Charge an owner for ``pages`` more pages in a pool; negative for fewer."""
        _count(self.accounts[owner].pages, pool, pages)
        self.place(owner, pool)

    def note_leaving(self, owner: int, pool: str, pages: int) -> None:
        """Note that backups will free ``pages`` more of an owner's pages of a device; negative for fewer."""
        _count(self.accounts[owner].leaving, pool, pages)
        self.place(owner, pool)

    def place(self, owner: int, pool: str) -> None:
        """Note whether an owner is above its quota in a pool, after a change of its pages or its quota."""
        above = self.above.get(pool, {})
        is_above = self.excess(owner, pool) > 0
        if is_above and owner not in above:
            self.above.setdefault(pool, above)[owner] = None
        elif not is_above and owner in above:
            del above[owner]
            if not above:
                del self.above[pool]

    def offer(self, node: Node, pool: str) -> None:
        """Offer an owned node that may be evicted from this pool, or has changed since it was offered."""
        account = self.accounts[node.owner]
        if not most_bytes(account, pool):
            return
        order = account.orders.get(pool)
        if order is None:
            order = account.orders[pool] = LruPolicy()
        order.offer(node)

    def withdraw(self, node: Node, pool: str, moment: Moment) -> None:
        """Withdraw an owned node that left this pool."""
        order = self.accounts[node.owner].orders.get(pool)
        if order is not None:
            order.remove(node, moment)

    def coldest(self, owner: int, pool: str, evictable: Evictable, moment: Moment) -> Node | None:
        """Return the node of an owner to evict next from a pool, and withdraw it; None when none may be evicted."""
        order = self.accounts[owner].orders.get(pool)
        return None if order is None else order.victim(evictable, moment)

    def take_excess(
        self, pool: str, evictable: Evictable, moment: Moment, *, owner: int = NOBODY, coming: int = 0
    ) -> tuple[Node, int] | None:
        """Return a node to evict of an owner above its quota in a pool, and the excess in pages.

        ``owner``, if it is above with the pages that are ``coming`` for it, is asked first. None when no owner above
        has a node that may be evicted.
        """
        asked = [owner] if owner and coming and self.excess(owner, pool, coming) > 0 else []
        for other in (*asked, *self.above.get(pool, ())):
            node = self.coldest(other, pool, evictable, moment)
            if node is not None:
                return node, self.excess(other, pool, coming if other == owner else 0)
        return None

    def forget_pool(self, pool: str) -> None:
        """Forget a pool that is gone with all that was in it."""
        self.above.pop(pool, None)
        for account in self.accounts.values():
            _forget_pool_of(account, pool)


def most_bytes(account: Account, pool: str) -> int:
    """Return an account's quota in a pool, in bytes; 0 is no bound. Does not change the state."""
    return account.device_bytes if pool.startswith(_DEVICE_POOLS) else account.host_bytes


def forget_unbounded_orders(account: Account) -> None:
    """Forget the orders of pools without a quota, after an account's quotas changed."""
    account.orders = {pool: order for pool, order in account.orders.items() if most_bytes(account, pool)}


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
