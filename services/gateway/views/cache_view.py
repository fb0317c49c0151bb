"""Reports of the cache for operators, over HTTP and on the command line. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from services.gateway.openai_schema.cache import CacheLease, CacheNode, CacheStats, Pin, PoolReport
from services.gateway.openai_schema.models import Shortfall
from shared.messages.base import unpack_int32
from shared.messages.pools import form_name
from shared.messages.status import CachedNode, CellStatus, Inventory, LeaseStatus, PinStatus, PoolStatus

HIT_TIERS = ("device", "neighbour", "host", "lent", "disk", "remote")


def node_view(node: CachedNode, text: str | None = None) -> CacheNode:
    """Return the report of a node; ``text`` is that of its first tokens."""
    return CacheNode(
        id=node.id,
        parent=node.parent or None,
        namespace=node.namespace,
        depth=node.depth,
        tokens=node.tokens,
        hits=node.hits,
        head=unpack_int32(node.head),
        head_text=text,
        device=node.device,
        host=node.host,
        disk=node.disk,
        hidden=node.hidden,
        pins=list(node.pins),
    )


def pin_view(pin: PinStatus) -> Pin:
    """Return the report of a pin; ``expires_at`` is in Unix seconds."""
    return Pin(
        name=pin.pin_id,
        namespace=pin.namespace,
        tokens=pin.tokens,
        held_tokens=pin.held_tokens,
        pages=pin.pages,
        expires_at=pin.expires_ns / 1e9,
        refusal=pin.refusal,
    )


def lease_view(lease: LeaseStatus) -> CacheLease:
    """Return the report of a cache lease; ``expires_at`` is in Unix seconds."""
    return CacheLease(
        tenant=lease.tenant,
        namespace=lease.namespace,
        key=lease.key,
        tokens=lease.tokens,
        ttl_s=lease.ttl_ms / 1000,
        expires_at=lease.expires_ns / 1e9,
    )


def pool_view(pool: PoolStatus) -> PoolReport:
    """Return the report of a pool's pages."""
    return PoolReport(
        owner=pool.owner,
        tier=form_name(pool.tier),
        total=pool.total,
        cached=pool.cached,
        leased=pool.leased,
        free=pool.free,
        form=pool.form,
    )


def stats_view(status: CellStatus, inventories: Mapping[str, Inventory | None]) -> CacheStats:
    """Return the scheduler's figures of the pools, and the storages' own counters."""
    return CacheStats(
        page_size=status.page_size,
        nodes=status.nodes,
        pins=status.pins,
        pinned_pages=status.pinned_pages,
        cache_leases=status.cache_leases,
        leased_pages=status.leased_pages,
        chunks=status.chunks,
        hidden_chunks=status.hidden_chunks,
        sparse_chunks=status.sparse_chunks,
        pools=[pool_view(pool) for pool in status.pools],
        hit_tokens={tier: status.counters.get(f"hit_tokens_{tier}", 0) for tier in HIT_TIERS},
        counters=dict(sorted(status.counters.items())),
        storages={name: None if found is None else dict(found.counters) for name, found in inventories.items()},
        degraded=msgspec.convert(status.degraded, list[Shortfall], from_attributes=True),
    )
