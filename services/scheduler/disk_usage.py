"""Bytes on disks by owner, as storages say with their heartbeats: the one part of the cell's status that is no state.

The core knows chunks by name alone, and whose they are only the storages.
"""

from __future__ import annotations

import msgspec

from shared.messages.status import OWNERS_TOLD, CellStatus, Heartbeat, OwnerBytes


class DiskUsage:
    """What each storage said last. Of storages that are none of the cell's nothing is kept for longer than a status."""

    def __init__(self) -> None:
        self._by_storage: dict[str, dict[str, int]] = {}

    def note(self, heartbeat: Heartbeat) -> None:
        """Note a storage's heartbeat."""
        if heartbeat.kind == "storage" and not heartbeat.is_gone:
            self._by_storage[heartbeat.id] = heartbeat.owned_bytes

    def told(self, status: CellStatus) -> CellStatus:
        """Return the status with what the disks of its storages hold."""
        self._by_storage = {name: owned for name, owned in self._by_storage.items() if name in status.storages}
        disk: dict[str, int] = {}
        for owned in self._by_storage.values():
            for owner, nbytes in owned.items():
                disk[owner] = disk.get(owner, 0) + nbytes
        if not disk:
            return status
        rows = {row.owner: row for row in status.owner_bytes}
        for owner, nbytes in disk.items():
            # Storages may name others than the core has: then those beyond the bound are told with the rest.
            name = owner if owner in rows or len(rows) <= OWNERS_TOLD else ""
            row = rows.get(name, OwnerBytes(owner=name))
            rows[name] = msgspec.structs.replace(row, disk=row.disk + nbytes)
        return msgspec.structs.replace(status, owner_bytes=tuple(rows.values()))
