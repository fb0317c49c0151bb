"""A note for the operator of a started cell about loading by importance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from services.gateway.config import GatewayConfig
from services.scheduler.config import SchedulerConfig
from services.scheduler.core.hidden.hidden_form import is_of_hidden
from services.scheduler.core.sparse.sparse_prefixes import READING_IN_PART
from services.storage.config import StorageConfig
from services.worker.config import WorkerConfig
from shared.config import from_command_line
from shared.errors import ConfigError
from thermocline.supervisor.child import ChildSpec
from thermocline.supervisor.commands import FLAGS_FROM, service_of
from thermocline.supervisor.hidden_form import obstacle_to_form


def importance_notice(children: Sequence[ChildSpec], environ: Mapping[str, str]) -> str:
    """Return a line when importance is allowed, or sparse copies are asked for, without effect; "" otherwise.

    The settings are those that the processes read from flags, ``environ`` and the settings file. Raises
    ConfigError where they are invalid.
    """
    flags = {service_of(child): child.argv[FLAGS_FROM:] for child in children}
    gateway = from_command_line(GatewayConfig, "gateway", flags["gateway"], environ=environ)
    storage = from_command_line(StorageConfig, "storage", flags["storage"], environ=environ)
    if storage.sparse and storage.disk_dir:
        scheduler = from_command_line(SchedulerConfig, "scheduler", flags["scheduler"], environ=environ)
        worker = from_command_line(WorkerConfig, "worker", flags["worker"], environ=environ)
        reason = next(_reasons(scheduler, storage, worker), "")
        return f"Note: {reason}" if reason else ""
    if gateway.importance == "off":
        return ""
    missing = "--sparse true" if storage.disk_dir else "--disk-dir DIR and --sparse true"
    return (
        f"Note: importance is {gateway.importance}, but the storage keeps nothing on disk that can be read in part, so "
        f"every prefix is loaded whole; add {missing}"
    )


def _reasons(scheduler: SchedulerConfig, storage: StorageConfig, worker: WorkerConfig) -> Iterator[str]:
    """Yield why no prefix is read in part though the storage is to keep sparse copies."""
    if not scheduler.prefix_caching:
        yield "with --prefix-caching false every prompt is computed whole, and no prefix is read in part"
    if scheduler.restoring not in READING_IN_PART:
        yield f"with --restoring {scheduler.restoring} no prefix is read in part; give --restoring planned"
    if is_of_hidden(scheduler.hidden_form) and _can_be_had(scheduler, storage, worker):
        yield (
            f"with --hidden-form {scheduler.hidden_form} no KV is saved, so there are no sparse copies and every "
            "prefix is loaded whole; give --hidden-form auto"
        )
    if scheduler.disk_writes == "off":
        yield "disk_writes is off, so only KV that the disk holds already is read in part; set it to through"
    if not worker.sparse_buffer_bytes:
        yield "sparse_buffer_bytes is 0, so workers read every prefix whole; leave it at its default"
    if worker.kv_dtype == "fp8":
        yield "with --kv-dtype fp8 every prefix is loaded whole; give --kv-dtype auto"


def _can_be_had(scheduler: SchedulerConfig, storage: StorageConfig, worker: WorkerConfig) -> bool:
    try:
        return not obstacle_to_form(scheduler, storage, worker)
    except ConfigError:  # The model's files do not tell its shape.
        return True
