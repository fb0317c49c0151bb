"""What KV of owners with quotas takes, by pool: plain data of a snapshot (see :mod:`quotas`).

A pool is named as its eviction policy is: ``device/<worker id>`` or ``host/<storage id>``.
"""

from __future__ import annotations

import msgspec

from services.scheduler.core.cache.eviction.lru import LruPolicy


class Account(msgspec.Struct):
    """An owner of KV: a tenant's salt, which tenants may share. Bytes are its quotas in each pool, 0 is no bound.

    ``pages`` counts what is its in each pool: on devices what the tree has there or is loading, in host pools what the
    tree has there and what is leased for copies on their way. Pages of running requests that the tree does not have
    are nobody's. ``orders`` has of each pool the nodes that may be evicted there, used longest ago first.
    """

    name: str  # ``CacheQuota.owner``.
    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    remote_bytes: int = 0
    pages: dict[str, int] = {}  # None of them is 0.
    leaving: dict[str, int] = {}  # Of devices: those that running backups will free, as ``Worker.leaving``.
    orders: dict[str, LruPolicy] = {}


class Quotas(msgspec.Struct):
    """All owners that have, or had, a quota and of which something is known; empty where nobody has one.

    Their numbers are in the tree: nodes name their owner by it, and ``PrefixTree.owners`` the owner of a namespace.
    """

    accounts: dict[int, Account] = {}
    numbers: dict[str, int] = {}  # By name.
    last: int = 0  # Number that was given last.
    above: dict[str, dict[int, None]] = {}  # By pool: who has more there than allowed, for longest first.
