"""Bytes on disks by owner, from the heartbeats of storages: a part of the cell's status that is not in the state.

The core knows chunks by name alone; only the storages know their owners.
"""

from __future__ import annotations

import msgspec

from shared.messages.status import OWNERS_TOLD, CellStatus, Heartbeat, OwnerBytes


class DiskUsage:
    """Bytes by owner of each storage's last heartbeat; storages that have left are dropped at the next status."""

    def __init__(self) -> None:
        """Begin before the first heartbeat."""
        self._by_storage: dict[str, dict[str, int]] = {}

    def note(self, heartbeat: Heartbeat) -> None:
        """Keep the bytes by owner of a storage's heartbeat; other processes and announced ends are ignored."""
        if heartbeat.kind == "storage" and not heartbeat.is_gone:
            self._by_storage[heartbeat.id] = heartbeat.owned_bytes

    def told(self, status: CellStatus) -> CellStatus:
        """Return the status with the bytes on its storages' disks by owner."""
        self._by_storage = {name: owned for name, owned in self._by_storage.items() if name in status.storages}
        disk: dict[str, int] = {}
        for owned in self._by_storage.values():
            for owner, nbytes in owned.items():
                disk[owner] = disk.get(owner, 0) + nbytes
        if not disk:
            return status
        rows = {row.owner: row for row in status.owner_bytes}
        for owner, nbytes in disk.items():
            # Storages may name owners that the core does not have; those beyond the bound are told with the rest.
            name = owner if owner in rows or len(rows) <= OWNERS_TOLD else ""
            row = rows.get(name, OwnerBytes(owner=name))
            rows[name] = msgspec.structs.replace(row, disk=row.disk + nbytes)
        return msgspec.structs.replace(status, owner_bytes=tuple(rows.values()))
