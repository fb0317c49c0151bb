"""Checks of a ``BackupPages`` order against the pools at hand.

The storage trusts no order: an order that names pages which do not exist is answered, never executed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.errors import InvalidRequest
from shared.ids import DIGEST_BYTES, split_digests
from shared.messages.pools import PoolHandle
from shared.messages.storage_plans import BackupPages


@dataclass(frozen=True, slots=True)
class Transfer:
    """A checked backup. ``device_pages`` and ``host_pages`` are int32 [n], ``identities`` has one of 16 bytes each.

    ``after`` are reads of its host pages that were ordered earlier (see ``page_hazards``).
    """

    transfer_id: int
    worker_id: str
    worker_incarnation: str
    device_pages: npt.NDArray[np.int32]
    host_pages: npt.NDArray[np.int32]
    identities: tuple[bytes, ...]
    after: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Return the number of pages to copy."""
        return len(self.identities)


def check_backup(order: BackupPages, device: PoolHandle, host: PoolHandle) -> Transfer:
    """Check and unpack ``order`` against the two pools that it names. Raises InvalidRequest, saying what is wrong."""
    if device.geometry != host.geometry:
        raise InvalidRequest(f"the pools differ in geometry: device {device.geometry}, host {host.geometry}")
    device_pages = _pages("device", order.device_pages, device.pages)
    host_pages = _pages("host", order.host_pages, host.pages)
    count = len(device_pages)
    if len(host_pages) != count or len(order.identities) != count * DIGEST_BYTES:
        raise InvalidRequest(
            f"{count} device pages, {len(host_pages)} host pages and {len(order.identities)} bytes of identities "
            f"do not belong together"
        )
    if len(np.unique(host_pages)) != count:
        raise InvalidRequest("a host page is named twice")
    identities = tuple(split_digests(order.identities))
    if bytes(DIGEST_BYTES) in identities:
        raise InvalidRequest("the all-zero identity belongs to no page")
    return Transfer(order.transfer_id, order.worker_id, order.worker_incarnation, device_pages, host_pages, identities)


def _pages(tier: str, packed: bytes, total: int) -> npt.NDArray[np.int32]:
    if not packed or len(packed) % 4:
        raise InvalidRequest(f"{len(packed)} bytes are no list of {tier} pages")
    pages = np.frombuffer(packed, dtype="<i4")
    if pages.min() < 0 or pages.max() >= total:
        raise InvalidRequest(f"{tier} pages {pages.min()} to {pages.max()} are not all among the {total} of the pool")
    return pages
