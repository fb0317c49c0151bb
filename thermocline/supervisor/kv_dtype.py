"""Settings without effect on KV of eight bits, which nothing restores from hidden states."""

from __future__ import annotations

from collections.abc import Mapping

from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from shared.errors import ConfigError
from thermocline.supervisor.cell import Cell
from thermocline.supervisor.commands import child_settings


def kv_dtype_faults(cell: Cell, environ: Mapping[str, str]) -> list[str]:
    """Return why the way of restoring cannot be had with the type of KV; none where it can.

    Invalid settings are left to other checks.
    """
    try:
        scheduler = child_settings(SchedulerConfig, "scheduler", cell, environ)
        worker = child_settings(WorkerConfig, "worker", cell, environ)
    except ConfigError:
        return []
    if worker.kv_dtype == "auto" or scheduler.restoring not in ("hidden", "important"):
        return []
    why = "restored from hidden states" if scheduler.restoring == "hidden" else "loaded in part"
    return [f"--restoring {scheduler.restoring}: KV of eight bits cannot be {why}, so not with --kv-dtype fp8"]
