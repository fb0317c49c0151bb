"""What storages tell the scheduler. Subject family ``in.storage.<id>``."""

from __future__ import annotations

from shared.messages.base import Message
from shared.messages.pools import PoolHandle


class StorageJoined(Message, frozen=True):
    """A storage is ready, with this many bytes for host KV. Its pools are empty."""

    storage_id: str
    incarnation: str
    node: str
    host_bytes: int


class StorageLeft(Message, frozen=True):
    """Graceful end."""

    storage_id: str
    incarnation: str


class HostPoolCreated(Message, frozen=True):
    """Answer to ``CreateHostPool``. ``handle`` is None and ``error`` says why when it could not be made."""

    storage_id: str
    incarnation: str
    handle: PoolHandle | None
    error: str = ""


class BackupDone(Message, frozen=True):
    """Answer to ``BackupPages``. When not ``ok`` none of its host pages may be used."""

    storage_id: str
    incarnation: str
    transfer_id: int
    ok: bool
    error: str = ""
    seconds: float = 0.0
