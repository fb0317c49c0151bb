"""Show the pools, the disks and object stores behind them, hits by tier, and what the cache has done."""

from __future__ import annotations

import argparse
import json

import msgspec

from services.gateway.openai_schema.cache import CacheStats
from services.gateway.views.cache_view import stats_view
from shared.broker import add_broker_flags, broker_of
from shared.degradations import line
from shared.sizes import size
from thermocline.cache.connection import cell
from thermocline.cache.tables import table

SUMMARY = "show pools, disks, hits by tier, and what the cache has done"
SHOWN = (
    "evicted", "flushed", "promot", "host_", "backups", "loads", "saves", "saved", "fetch", "pins", "quarantined",
    "deferred", "neighbour", "hidden_", "restor", "sparse", "warming", "drain", "handed_", "lent", "raise",
    "cache_lease",
)  # fmt: skip
"""Counters are shown that have one of these in their names."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this verb."""
    add_broker_flags(parser)


async def run(arguments: argparse.Namespace) -> bool:
    """Print what the scheduler and every storage say."""
    async with cell(broker_of(arguments)) as calls:
        status = await calls.status()
        stats = stats_view(status, await calls.inventories(status.storages))
    print(json.dumps(msgspec.to_builtins(stats)) if arguments.json else "\n".join(stat_lines(stats)))
    return True


def stat_lines(stats: CacheStats) -> list[str]:
    """What is degraded, tables of pools and of lower tiers, then hits and counters."""
    pools = [
        (
            pool.owner,
            f"{pool.tier} {pool.form}".rstrip(),
            *(f"{count:,}" for count in (pool.total, pool.cached, pool.leased, pool.free)),
        )
        for pool in stats.pools
    ]
    lines = [f"degraded: {line(each)}" for each in stats.degraded]
    lines += table(("pool", "tier", "pages", "cached", "leased", "free"), pools)
    lines.append(
        f"{stats.nodes:,} nodes, pages of {stats.page_size} tokens, {stats.chunks:,} chunks of KV and "
        f"{stats.hidden_chunks:,} of hidden states on disks, {stats.pins:,} pins of {stats.pinned_pages:,} pages"
    )
    if stats.cache_leases:
        tokens = stats.leased_pages * stats.page_size
        lines.append(f"{stats.cache_leases:,} leases keep {tokens:,} tokens that callers asked for")
    if stats.sparse_chunks:
        lines.append(f"{stats.sparse_chunks:,} of these chunks of KV can be read in part")
    lines += ["", *lower_tier_lines(stats), "", "hits, tokens"]
    lines += [f"  {tier:<12} {tokens:>16,}" for tier, tokens in stats.hit_tokens.items()]
    shown = {name: value for name, value in stats.counters.items() if any(part in name for part in SHOWN)}
    lines += ["", *(f"{name:<40} {value:>16,}" for name, value in shown.items() if not name.startswith("hit_"))]
    return lines


def lower_tier_lines(stats: CacheStats) -> list[str]:
    """Disk and object store of each storage, as it says itself."""
    rows, silent, moving = [], [], []
    for name, counters in stats.storages.items():
        if counters is None:
            silent.append(f"storage {name} does not answer")
            continue
        if "disk_quota_bytes" in counters:
            rows.append(_disk_row(name, counters))
        if "chunks_uploaded" in counters:
            rows.append(_remote_row(name, counters))
        compared, uploads = counters.get("reconcile_outstanding", 0), counters.get("uploads_outstanding", 0)
        if compared or uploads:
            moving.append(
                f"storage {name}: {compared:,} chunks to compare with the object store, {uploads:,} to upload"
            )
    if not rows and not silent:
        return ["no storage has a disk or an object store"]
    heads = ("storage", "tier", "chunks", "size", "of", "saved", "fetched", "evicted", "quarantined")
    return (table(heads, rows) if rows else []) + moving + silent


def _disk_row(name: str, counters: dict[str, int]) -> tuple[str, ...]:
    counts = ("chunks_saved", "chunks_fetched_disk", "chunks_evicted", "chunks_quarantined")
    return (
        name,
        "disk",
        f"{counters.get('disk_chunks', 0):,}",
        size(counters.get("disk_bytes", 0)),
        size(counters["disk_quota_bytes"]),
        *(f"{counters.get(counter, 0):,}" for counter in counts),
    )


def _remote_row(name: str, counters: dict[str, int]) -> tuple[str, ...]:
    # What an object store holds in all is not known: other cells write to it too.
    uploaded, fetched = counters["chunks_uploaded"], counters.get("chunks_fetched_remote", 0)
    return (name, "remote", "-", "-", "-", f"{uploaded:,}", f"{fetched:,}", "-", "-")
