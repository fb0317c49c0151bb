"""The device pool of a tensor-parallel group, as other processes on its node see it.

Every rank of the group has some KV heads of every page in a pool of its own. Put together they are the pages that a
worker with one rank has, byte for byte, so no tier below the device can tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from shared.memory.device_pool_view import DeviceRun, GatheredPages, check_device_handle
from shared.messages.pools import PoolHandle


class DevicePartsView:
    """Satisfies ``shared.memory.device_pool_view.DevicePages``. Used by several threads at once."""

    def __init__(self, handle: PoolHandle, parts: Sequence[tuple[range, GatheredPages]]) -> None:
        """``parts`` with the heads that are read from each."""
        self.handle = handle
        self._parts = list(parts)

    @classmethod
    def attach(cls, handle: PoolHandle, open_part: Callable[[PoolHandle], GatheredPages]) -> DevicePartsView:
        """Map every part by ``open_part``. Raises TransportError if the handle contradicts itself or a part is not
        to be had.
        """
        check_device_handle(handle)
        opened: list[tuple[range, GatheredPages]] = []
        next_head = 0
        try:
            for heads, part in handle.part_handles():
                if heads.stop > next_head:  # Heads that several ranks have are read from the first.
                    opened.append((heads, open_part(part)))
                    next_head = heads.stop
        except BaseException:
            for _, pages in opened:
                pages.close()
            raise
        return cls(handle, opened)

    @property
    def fault(self) -> str:
        """See ``DevicePages``: that of any part."""
        return next((part.fault for _, part in self._parts if part.fault), "")

    def copy_run(self, run: DeviceRun, into: npt.NDArray[np.uint8]) -> None:
        """See ``DevicePages``."""
        geometry = self.handle.geometry
        device, host, count = run
        whole = into[host : host + count].reshape(
            count, geometry.layers, 2, geometry.page_size, geometry.kv_heads, geometry.head_bytes
        )
        for heads, part in self._parts:
            target = whole[..., heads.start : heads.stop, :]
            target[...] = part.gather(device, count).reshape(target.shape)

    def close(self) -> bool:
        """Let go of every part; see ``DevicePages``."""
        closed = [pages.close() for _, pages in self._parts]  # All of them, whatever the first one says.
        return all(closed)
