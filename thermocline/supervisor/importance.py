"""A note for the operator of a started cell about loading by importance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.gateway.config import GatewayConfig
from services.scheduler.config import SchedulerConfig
from services.storage.config import StorageConfig
from shared.config import from_command_line
from thermocline.supervisor.child import ChildSpec
from thermocline.supervisor.commands import FLAGS_FROM


def importance_notice(children: Sequence[ChildSpec], environ: Mapping[str, str]) -> str:
    """Return a line when importance is allowed, or sparse copies are asked for, without effect; "" otherwise.

    The settings are those that the processes read from flags, ``environ`` and the settings file. Raises
    ConfigError where they are invalid.
    """
    flags = {child.name: child.argv[FLAGS_FROM:] for child in children}
    gateway = from_command_line(GatewayConfig, "gateway", flags["gateway"], environ=environ)
    storage = from_command_line(StorageConfig, "storage", flags["storage"], environ=environ)
    if storage.sparse and storage.disk_dir:
        scheduler = from_command_line(SchedulerConfig, "scheduler", flags["scheduler"], environ=environ)
        if scheduler.hidden_form in ("off", "auto"):
            return ""
        return (
            f"Note: with --hidden-form {scheduler.hidden_form} no KV is saved, so there are no sparse copies and "
            "every prefix is loaded whole; give --hidden-form auto"
        )
    if gateway.importance == "off":
        return ""
    missing = "--sparse true" if storage.disk_dir else "--disk-dir DIR and --sparse true"
    return (
        f"Note: importance is {gateway.importance}, but the storage keeps nothing on disk that can be read in part, so "
        f"every prefix is loaded whole; add {missing}"
    )
