"""Operators' pins (:mod:`pins`) and callers' leases (:mod:`leasing`), as plain data of a snapshot.

Leases lie in tables beside the tree: a node without one costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from services.scheduler.core.cache.prefix_tree import ancestors, namespace_of
from shared.messages.requests import Lease
from shared.messages.worker_plans import LeaseGrant

if TYPE_CHECKING:
    from services.scheduler.core.cache.prefix_tree import Node
    from services.scheduler.core.state import CellState, Storage


class Pin(msgspec.Struct):
    """A prefix that an operator keeps: a host lock on every node from the root to ``node`` at this storage.

    ``node`` is 0 while nothing of it is held. ``refusal`` says why nothing is held and nothing will be.
    """

    pin_id: str
    storage_id: str
    namespace: str
    prefix: bytes  # Its tokens, packed int32.
    expires_ns: int
    timer_id: str
    node: int = 0
    pages: int = 0  # Host pages that it holds.
    chunks: bytes = b""  # Names of chunks that the storage was told to keep on its disk.
    refusal: str = ""


def is_wanted(state: CellState, storage: Storage, node: Node) -> bool:
    """Return whether a pin of this storage covers the node, which then gets a copy without admission.

    Changes nothing.
    """
    pins = [pin for pin in state.pins.values() if pin.storage_id == storage.storage_id]
    if not pins:
        return False
    path = b"".join(above.tokens for above in reversed(ancestors(state.tree, node)))
    namespace = namespace_of(state.tree, node)
    return any(pin.namespace == namespace and pin.prefix.startswith(path) for pin in pins)


def pinned_pages(state: CellState, storage_id: str) -> int:
    """Return how many host pages pins hold in this pool; a page of two pins counts twice. Changes nothing."""
    return sum(pin.pages for pin in state.pins.values() if pin.storage_id == storage_id)


class CacheLease(msgspec.Struct):
    """A prefix that a tenant keeps until ``expires_ns``: everything from the root to ``node``'s end.

    ``node`` is 0 once all of it was lost. Each use by its tenant restarts its time.
    """

    lease_id: int
    tenant: str
    namespace: str
    key: str  # ``prompt_cache_key``; "" without one.
    ttl_ms: int
    expires_ns: int
    timer_id: str
    node: int


class LeasedNode(msgspec.Struct):
    """A node that at least one lease covers.

    ``ends`` are the leases whose deepest node it is. ``storages`` are those where leases lock its host copy, with one
    lock for all of them.
    """

    tenants: dict[str, int]  # Number of leases of each tenant that cover it, at least 1.
    ends: tuple[int, ...] = ()
    storages: tuple[str, ...] = ()


class PendingLeases(msgspec.Struct):
    """Leases granted to a running request; they take hold when it ends and its pages are in the tree.

    ``reserved`` pages of the tenant's budget are kept for it until then.
    """

    tenant: str
    wanted: tuple[Lease, ...]  # As granted, the shortest first; tokens are whole pages.
    admitted_ns: int
    reserved: int
    answers: tuple[LeaseGrant, ...]  # One for each requested lease, refusals included.


class LeaseAccount(msgspec.Struct):
    """Pages that a tenant's leases take: those of leased nodes, each counted once, and those reserved."""

    pages: int = 0
    reserved: int = 0
    most_pages: int = 0  # The budget of its last request, or more where leases could not be ended.

    @property
    def taken(self) -> int:
        """Pages that count against the tenant's budget, leased or reserved."""
        return self.pages + self.reserved


class CacheLeases(msgspec.Struct):
    """All leases of a cell. Empty, and never looked into further, where no request asks for any."""

    leases: dict[int, CacheLease] = {}
    nodes: dict[int, LeasedNode] = {}
    pending: dict[str, PendingLeases] = {}  # By request.
    accounts: dict[str, LeaseAccount] = {}  # By tenant; none is empty.
    keys: dict[str, int] = {}  # The lease that has a key now, by :func:`key_name`.
    locked: dict[str, int] = {}  # Host pages locked by leases, by storage.
    pages: int = 0  # Pages of leased nodes, each counted once for all its leases.
    next_id: int = 1

    @property
    def taken(self) -> int:
        """Pages that leases hold or may come to hold; those of several tenants count for each."""
        return sum(account.taken for account in self.accounts.values())

    def account(self, tenant: str) -> LeaseAccount:
        """Return a tenant's account, opened where it has none."""
        account = self.accounts.get(tenant)
        if account is None:
            account = self.accounts[tenant] = LeaseAccount()
        return account

    def close_unused(self, tenant: str) -> None:
        """Drop the account of a tenant that has nothing leased and nothing reserved."""
        if not self.account(tenant).taken:
            del self.accounts[tenant]

    def cover(self, lease: CacheLease, path: Iterable[tuple[Node, int]]) -> None:
        """Extend a lease over these nodes, each given with its number of pages."""
        for node, pages in path:
            entry = self.nodes.get(node.id)
            if entry is None:
                entry = self.nodes[node.id] = LeasedNode({})
                self.pages += pages
            leases = entry.tenants.get(lease.tenant, 0)
            if not leases:
                self.account(lease.tenant).pages += pages
            entry.tenants[lease.tenant] = leases + 1

    def uncover(self, lease: CacheLease, node: Node, pages: int) -> LeasedNode | None:
        """Take a lease off a node; if it was the node's last one, drop and return its entry."""
        entry = self.nodes[node.id]
        leases = entry.tenants[lease.tenant] - 1
        if leases:
            entry.tenants[lease.tenant] = leases
            return None
        del entry.tenants[lease.tenant]
        self.account(lease.tenant).pages -= pages
        if entry.tenants:
            return None
        del self.nodes[node.id]
        self.pages -= pages
        return entry

    def split(self, upper: Node, lower: Node) -> None:
        """Give both parts of a split node the leases of the whole. ``lower`` keeps the id."""
        entry = self.nodes.get(lower.id)
        if entry is not None:
            self.nodes[upper.id] = LeasedNode(dict(entry.tenants), (), entry.storages)

    def lose(self, gone: Iterable[tuple[Node, int]], parent: Node | None) -> int:
        """End leases at ``parent`` whose nodes, each given with its pages, left the tree below it.

        Returns the number of leased pages that are lost.
        """
        before = self.pages
        ends: tuple[int, ...] = ()
        for node, pages in gone:
            entry = self.nodes.pop(node.id, None)
            if entry is None:
                continue
            ends += entry.ends
            self.pages -= pages
            for tenant in entry.tenants:
                self.account(tenant).pages -= pages
                self.close_unused(tenant)
            for storage_id in entry.storages:
                self.locked[storage_id] -= pages
        above = parent if parent is not None and parent.parent else None
        for lease_id in ends:
            self.leases[lease_id].node = 0 if above is None else above.id
        if ends and above is not None:
            self.nodes[above.id].ends += ends
        return before - self.pages

    def forget_storage(self, storage_id: str) -> None:
        """Drop all locks of a host pool that is gone."""
        if self.locked.pop(storage_id, None) is None:
            return
        for entry in self.nodes.values():
            if storage_id in entry.storages:
                entry.storages = tuple(name for name in entry.storages if name != storage_id)

    def reserve(self, request_id: str, pending: PendingLeases, most_pages: int) -> None:
        """Reserve the leases that were granted to a request, within its tenant's budget of ``most_pages``."""
        self.pending[request_id] = pending
        if pending.reserved:
            account = self.account(pending.tenant)
            account.reserved += pending.reserved
            account.most_pages = max(account.most_pages, most_pages)

    def take_pending(self, request_id: str) -> PendingLeases | None:
        """Remove and return what a request that ends was granted, with its reservation; None where it has no grant."""
        pending = self.pending.pop(request_id, None)
        if pending is not None and pending.reserved:
            self.account(pending.tenant).reserved -= pending.reserved
            self.close_unused(pending.tenant)
        return pending


MAX_RETURNS = 1024
"""Sessions at most that a cell expects back at a time."""


class Return(msgspec.Struct):
    """A session expected to go on behind a node, with all ``pages`` above its end, by ``until_ns`` at the latest."""

    tenant: str
    until_ns: int
    pages: int


def key_name(tenant: str, namespace: str, key: str) -> str:
    """Return the name of a tenant's ``prompt_cache_key`` within one namespace."""
    return f"{namespace}/{tenant}/{key}"
