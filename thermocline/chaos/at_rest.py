"""Checks after the load has ended: every page, request and process has been released, on every tier."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from shared.errors import ThermoclineError
from shared.messages.pools import form_name
from shared.messages.status import CellStatus
from thermocline.chaos.cell import ChaosCell
from thermocline.chaos.health import Health
from thermocline.chaos.plan import group_of
from thermocline.chaos.processes import orphaned_segments, survivors, zombies

_POLL_S = 0.2


def unrest(status: CellStatus) -> list[str]:
    """Return descriptions of all work and leases that remain; none at rest. Pure."""
    found = [
        f"{count} {what}"
        for what, count in (
            ("queued", status.queued),
            ("running", status.running),
            ("fetches", status.fetches),
            ("saves", status.saves),
            ("deferred", status.deferred),
            ("in-queue nodes", status.in_queue_nodes),
            ("in-flight nodes", status.in_flight_nodes),
        )
        if count
    ]
    found += [
        f"{pool.owner} {form_name(pool.tier)}: {pool.leased} leased, {pool.free} free, {pool.cached} cached of "
        f"{pool.total} pages"
        for pool in status.pools
        if pool.leased or pool.free + pool.cached != pool.total
    ]
    found += [
        f"{w.worker_id}: {w.running} running, {w.waiting} waiting" for w in status.workers if w.running or w.waiting
    ]
    return found


async def leftovers(cell: ChaosCell, health: Health, dead_groups: Iterable[int], *, timeout_s: float) -> list[str]:
    """Wait until the cell is at rest; return descriptions of what is still wrong after ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    groups = list(dead_groups)
    since_s = time.monotonic()
    while True:
        wrong = await _wrong_now(cell, health, groups, since_s)
        if not wrong or time.monotonic() > deadline:
            return wrong
        await asyncio.sleep(_POLL_S)


async def _wrong_now(cell: ChaosCell, health: Health, groups: list[int], since_s: float) -> list[str]:
    if health.status is None or health.status_s < since_s:
        return ["the scheduler does not answer"]
    wrong = unrest(health.status)
    pids = cell.pids()
    wrong += [f"{name} does not run" for name in cell.names if name not in pids]
    listed = {worker.worker_id for worker in health.status.workers} | set(health.status.storages)
    holders = [name for name in cell.names if group_of(name) in ("worker", "storage")]
    wrong += [f"{name} has not joined" for name in holders if name not in listed]
    wrong += [f"shared segment {name} has no living owner" for name in orphaned_segments(cell.shm_prefix)]
    wrong += [f"process {pid} outlived the child that started it" for pid in survivors(groups, pids.values())]
    wrong += [f"process {pid} is a zombie" for pid in zombies()]
    if wrong:
        return wrong
    for name in holders:
        wrong += await _held(health, name)
    return wrong


async def _held(health: Health, name: str) -> list[str]:
    """Return descriptions of the requests that a worker or storage itself still holds."""
    try:
        inventory = await health.inventory(group_of(name), name)
    except ThermoclineError as error:
        return [f"{name} does not say what it holds: {error.message}"]
    return [f"{name} still holds request {request}" for request in inventory.requests]
