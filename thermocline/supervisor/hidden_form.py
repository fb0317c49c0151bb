"""Whether a cell's model, disk and memory allow the configured form of prefixes, from files and settings alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from services.scheduler.config import SchedulerConfig
from services.scheduler.core.hidden.hidden_form import form_fault, is_of_hidden
from services.storage.config import StorageConfig
from services.worker.config import WorkerConfig
from shared.errors import ConfigError
from shared.messages.pools import FLOAT8
from thermocline.supervisor.cell import Cell
from thermocline.supervisor.commands import child_settings
from thermocline.supervisor.model_demand import geometry_of, hidden_width_of


def hidden_form_faults(cell: Cell, environ: Mapping[str, str]) -> list[str]:
    """Return why prefixes cannot be kept in the form that the scheduler is configured with; none where they can.

    Settings that are invalid, and models whose files do not tell their shape, are left to other checks.
    """
    try:
        scheduler = child_settings(SchedulerConfig, "scheduler", cell, environ)
        storage = child_settings(StorageConfig, "storage", cell, environ)
        worker = child_settings(WorkerConfig, "worker", cell, environ)
        fault = obstacle_to_form(scheduler, storage, worker)
    except ConfigError:
        return []
    return [f"--hidden-form: {fault}"] if fault else []


def obstacle_to_form(scheduler: SchedulerConfig, storage: StorageConfig, worker: WorkerConfig) -> str:
    """Return why the configured form cannot be had, or "" where it can or none is configured.

    Raises ConfigError for a form or a model that cannot be read.
    """
    if scheduler.hidden_form in ("off", "auto"):
        return ""
    # Which of the wider types it is makes no difference.
    kv = geometry_of(Path(worker.model), "float32")
    if worker.kv_dtype == "fp8":
        kv = msgspec.structs.replace(kv, dtype=FLOAT8)
    fault = form_fault(scheduler.hidden_form, kv, hidden_width_of(Path(worker.model)))
    has_tiers = bool(storage.disk_dir or storage.remote)
    if not fault and has_tiers and not storage.hidden_bytes and is_of_hidden(scheduler.hidden_form):
        return f"{scheduler.hidden_form} needs room for hidden states, and --hidden-bytes is 0"
    return fault
