"""Host pages to device pages, verified: what a load on demand and a promotion ahead of demand have in common.

Every page is verified before its bytes can be read by attention: its identity against the plan's, and each
layer's checksum, seeded with that identity, over the staged copy that is then written (see ``PoolHandle``). A
page that fails is not written.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.worker.kv.host_pools import HostPools
from services.worker.kv.page_writers import STAGED_PAGES, PageNumbers, PageWriter
from shared.errors import TransportError
from shared.ids import DIGEST_BYTES
from shared.memory import HostPoolView
from shared.memory.host_pool import layer_checksum
from shared.messages.base import pack_int32
from shared.messages.pools import KvGeometry
from shared.messages.worker_plans import PageLoad, PromotePages

INT32_BYTES = 4


class VerifiedCopy:
    """The pages of one order. :meth:`open` is for the compute thread; :meth:`copy` only for the transfer thread,
    because all copies stage their rows in the one buffer of the writer.

    ``reason`` says what was wrong first ("" while all is well); ``wrong`` (bool [pages]) marks what is not to be used.
    """

    def __init__(self, order: PageLoad | PromotePages, geometry: KvGeometry, device_pages: int) -> None:
        self.reason = ""
        self._storage_id = order.storage_id
        self._identities = order.identities
        self._geometry = geometry
        self._device_pages = device_pages
        self._view: HostPoolView | None = None
        self._is_whole = len(order.host_pages) % INT32_BYTES == 0 == len(order.device_pages) % INT32_BYTES
        self.host = _page_numbers(order.host_pages)
        self.device = _page_numbers(order.device_pages)
        self.wrong = np.zeros(len(self.host), dtype=bool)

    def open(self, pools: HostPools) -> None:
        """Check everything that can be checked before a byte moves."""
        count = len(self.host)
        if not self._is_whole or len(self.device) != count or len(self._identities) != count * DIGEST_BYTES:
            self.refuse("the load's lists differ in length")
            return
        try:
            view = pools.find(self._storage_id)
        except TransportError as error:
            self.refuse(error.message)
            return
        if count and not (
            0 <= self.host.min() <= self.host.max() < view.handle.pages
            and 0 <= self.device.min() <= self.device.max() < self._device_pages
        ):
            self.refuse("the load names pages outside the pools")
            return
        if len(np.unique(self.device)) != count:
            self.refuse("the load names a device page twice")
            return
        self._view = view
        wanted = np.frombuffer(self._identities, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
        self._mark((view.identities[self.host] != wanted).any(axis=1), "identity")

    @property
    def is_open(self) -> bool:
        """Whether there is anything to copy from."""
        return self._view is not None

    def copy(self, writer: PageWriter, layer: int, start: int, count: int) -> None:
        """Gather, verify and write one layer of pages ``[start, start + count)``, at most ``STAGED_PAGES``."""
        assert self._view is not None
        assert count <= STAGED_PAGES
        host = self.host[start : start + count]
        rows = writer.staging[: len(host)]
        rows[...] = self._view.pages[:, layer][host]
        sums = self._view.checksums[host, layer].tolist()
        wrong = np.zeros(len(self.host), dtype=bool)
        for row, expected in enumerate(sums):
            index = start + row
            if not self.wrong[index] and layer_checksum(rows[row], self._identity(index)) != expected:
                wrong[index] = True
        self._mark(wrong, f"checksum of layer {layer}")
        good = ~self.wrong[start : start + len(host)]
        device = self.device[start : start + len(host)]
        if good.all():
            writer.write(layer, device, len(host))
        elif good.any():
            kept = int(good.sum())
            rows[:kept] = rows[good]
            writer.write(layer, device[good], kept)

    def refuse(self, reason: str) -> None:
        """No page of this order is to be used."""
        self.wrong[:] = True
        self.reason = self.reason or reason

    @property
    def wrong_host_pages(self) -> bytes:
        """Packed int32."""
        return pack_int32(self.host[self.wrong])

    def _identity(self, index: int) -> bytes:
        return self._identities[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def _mark(self, wrong: npt.NDArray[np.bool_], reason: str) -> None:
        if wrong.any():
            self.wrong |= wrong
            self.reason = self.reason or reason


def _page_numbers(packed: bytes) -> PageNumbers:
    """Whole entries of packed int32; an order whose bytes are cut is refused, not raised over."""
    return np.frombuffer(packed, dtype="<i4", count=len(packed) // INT32_BYTES).astype(np.int32)
