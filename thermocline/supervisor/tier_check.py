"""Refuses a cell with unusable tiers below host memory, before its processes start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from services.storage.config import StorageConfig
from services.storage.disk_check import tier_faults
from shared.errors import ConfigError
from thermocline.supervisor.cell import Cell
from thermocline.supervisor.commands import child_settings
from thermocline.supervisor.records import all_records


def check_tiers(cell: Cell, runs: Path, environ: Mapping[str, str]) -> None:
    """Check disk and object store; blocking. Raises ConfigError with every fault.

    For a directory that another storage holds, the message names its cell if that is one of this user's.
    """

    def whose(process: str) -> str:
        for _, record in all_records(runs):
            if any(str(child.pid) == process for child in record.children):
                return f"of the cell at {record.base_url}, whose data are in {record.data_dir}"
        return ""

    faults = tier_faults(child_settings(StorageConfig, "storage", cell, environ), whose)
    if faults:
        raise ConfigError("; ".join(faults))
