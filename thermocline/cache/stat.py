"""Show pools, disks and object stores, hit ratios by tier with rates, and counters of the cache."""

from __future__ import annotations

import argparse
import asyncio
import json
import time

import msgspec

from services.gateway.openai_schema.cache import CacheStats
from services.gateway.views.cache_view import stats_view
from shared.arguments import positive
from shared.broker import add_broker_flags, broker_of
from shared.degradations import line
from shared.sizes import size
from thermocline.cache.connection import cell
from thermocline.cache.hit_ratios import Rates, rates_of, ratio_lines, ratios_of
from thermocline.cache.tables import table

SUMMARY = "show pools, disks, hit ratios by tier, rates and counters"
SHOWN = (
    "evicted", "flushed", "promot", "host_", "backups", "loads", "saves", "saved", "fetch", "pins", "quarantined",
    "deferred", "neighbour", "hidden_", "restor", "sparse", "warming", "drain", "handed_", "lent", "raise",
    "cache_lease",
)  # fmt: skip
"""Parts of counters' names; a counter with any of them is shown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this verb."""
    add_broker_flags(parser)
    parser.add_argument(
        "--interval",
        type=_seconds,
        default=1.0,
        metavar="S",
        help="seconds over which rates are measured; 0 measures none",
    )


def _seconds(text: str) -> float:
    return 0.0 if text.strip() in ("0", "0.0") else positive(text)


async def run(arguments: argparse.Namespace) -> bool:
    """Print the status of the scheduler and of every storage, and rates over ``--interval`` seconds."""
    rates = None
    async with cell(broker_of(arguments)) as calls:
        status = await calls.status()
        if arguments.interval:
            before, looked_s = status.counters, time.monotonic()
            await asyncio.sleep(arguments.interval)
            status = await calls.status()
            rates = rates_of(before, status.counters, time.monotonic() - looked_s)
        stats = stats_view(status, await calls.inventories(status.storages))
    if arguments.json:
        told = {"ratios": ratios_of(stats.counters), "rates": rates}
        print(json.dumps(msgspec.to_builtins(stats) | msgspec.to_builtins(told)))
    else:
        print("\n".join(stat_lines(stats, rates)))
    return True


def stat_lines(stats: CacheStats, rates: Rates | None = None) -> list[str]:
    """Return the report: what is degraded, tables of pools and of lower tiers, hit ratios and counters.

    Rates are shown where they were measured.
    """
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
    lines += ["", *lower_tier_lines(stats), "", *ratio_lines(ratios_of(stats.counters), rates)]
    per_second = {} if rates is None else rates.per_second
    lines.append("")
    for name, value in stats.counters.items():
        if any(part in name for part in SHOWN) and not name.startswith("hit_"):
            rate = f" {f'{per_second[name]:,.1f}/s':>14}" if name in per_second else ""
            lines.append(f"{name:<40} {value:>16,}{rate}")
    return lines


def lower_tier_lines(stats: CacheStats) -> list[str]:
    """Return a table of each storage's disk and object store, then those with work outstanding or without an answer."""
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
