"""Numbered, idempotent orders from the scheduler to one storage. Subject family ``out.storage.<id>``."""

from __future__ import annotations

from shared.messages.base import Message
from shared.messages.pools import KvGeometry, PoolHandle


class CreateHostPool(Message, frozen=True):
    """Make the page-first host pool for this geometry, as many pages as fit in the host KV budget."""

    geometry: KvGeometry


class AttachDevicePool(Message, frozen=True):
    """Map a worker's device pool of this node."""

    worker_id: str
    worker_incarnation: str
    handle: PoolHandle


class DetachDevicePool(Message, frozen=True):
    """Unmap a worker's device pool. Backups of it that are still queued fail."""

    worker_id: str
    worker_incarnation: str


class BackupPages(Message, frozen=True):
    """Copy device pages to host pages and write identity and checksums; answered by ``BackupDone``.

    Both page lists are packed int32 of equal length; ``identities`` is 16 bytes a page.
    """

    transfer_id: int
    worker_id: str
    worker_incarnation: str
    device_pages: bytes
    host_pages: bytes
    identities: bytes


StorageOrder = CreateHostPool | AttachDevicePool | DetachDevicePool | BackupPages


class StoragePlan(Message, frozen=True):
    """Envelope of an order. ``number`` counts from 1 for each (storage_id, incarnation)."""

    storage_id: str
    incarnation: str
    number: int
    epoch: int
    cause: int
    order: StorageOrder
