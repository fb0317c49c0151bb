"""Injects one fault into the running cell, and ends it where it has a duration."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from thermocline.chaos import disk_faults
from thermocline.chaos.cell import ChaosCell
from thermocline.chaos.plan import Fault


async def inject(cell: ChaosCell, fault: Fault, *, back_s: float) -> str:
    """Inject ``fault`` and wait until it is over, though not for recovery; return what was hit.

    After a kill or restart the successor must run within ``back_s`` seconds.

    Raises Unavailable if the process that died does not come back, and OSError if the system refuses.
    """
    match fault.kind:
        case "kill" | "restart":
            number = signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM
            pid = await cell.signal(fault.target, number)
            await cell.running_pid(fault.target, other_than=pid, timeout_s=back_s)
            return f"pid {pid}"
        case "stop_short" | "stop_long":
            pid = await cell.signal(fault.target, signal.SIGSTOP)
            try:
                await asyncio.sleep(fault.seconds)
            finally:
                _unless_gone(lambda: os.kill(pid, signal.SIGCONT))
            return f"pid {pid}"
        case "disk_full":
            return await _full_disk(cell, fault)
        case "flip" | "truncate" | "delete" | "swap":
            return await asyncio.to_thread(disk_faults.damage, cell.disk, fault.kind, fault.draw)
        case _:
            return await _network(cell, fault)


async def _network(cell: ChaosCell, fault: Fault) -> str:
    proxy = cell.proxies[fault.target]
    detail = ""
    match fault.kind:
        case "cut":
            proxy.cut()
        case "refuse":
            proxy.is_refusing = True
            proxy.cut()
        case "delay":
            proxy.delay_s = 0.02 + (fault.draw % 180) / 1000
            detail = f"{proxy.delay_s * 1000:.0f} ms"
        case "stall":
            proxy.stall(fault.direction)
        case "swallow":
            proxy.swallow(fault.direction)
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        proxy.heal()
    return detail


async def _full_disk(cell: ChaosCell, fault: Fault) -> str:
    pid = await cell.running_pid(fault.target)
    await asyncio.to_thread(disk_faults.fill, pid, cell.log(fault.target))
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        _unless_gone(lambda: disk_faults.make_room(pid))
    return f"pid {pid}"


def _unless_gone(undo: Callable[[], None]) -> None:
    """Undo what was done to a process, unless it has ended."""
    try:
        undo()
    except ProcessLookupError:
        pass  # It died meanwhile, and its successor never had it.
