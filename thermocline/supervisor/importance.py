"""What an operator should hear about loading by importance once a cell is up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.gateway.config import GatewayConfig
from services.storage.config import StorageConfig
from shared.config import from_command_line
from thermocline.supervisor.child import ChildSpec
from thermocline.supervisor.commands import FLAGS_FROM


def importance_notice(children: Sequence[ChildSpec], environ: Mapping[str, str]) -> str:
    """Return a line when importance is allowed and nothing could come of it; "" otherwise.

    The settings are those that gateway and storage come to by flags, ``environ`` and a settings file of their own.
    Raises ConfigError where they would.
    """
    flags = {child.name: child.argv[FLAGS_FROM:] for child in children}
    gateway = from_command_line(GatewayConfig, "gateway", flags["gateway"], environ=environ)
    storage = from_command_line(StorageConfig, "storage", flags["storage"], environ=environ)
    if gateway.importance == "off" or (storage.sparse and storage.disk_dir):
        return ""
    missing = "--sparse true" if storage.disk_dir else "--disk-dir DIR and --sparse true"
    return (
        f"Note: importance is {gateway.importance}, but the storage keeps nothing on disk that can be read in part, so "
        f"every prefix is loaded whole; add {missing}"
    )
