"""The device pool of a tensor-parallel group, as other processes on its node see it.

Every rank of the group has a part of every page in a pool of its own: some KV heads, or the planes that spans list. Put
together they are the pages of a worker with one rank, byte for byte, so no tier below the device can tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from shared.memory.device_pool_view import DeviceRun, GatheredPages, check_device_handle
from shared.memory.part_spans import part_bytes, whole_bytes
from shared.messages.pools import PartSpan, PoolHandle


class DevicePartsView:
    """``shared.memory.device_pool_view.DevicePages`` over all parts. Used by several threads at once."""

    def __init__(self, handle: PoolHandle, parts: Sequence[tuple[Sequence[PartSpan], GatheredPages]]) -> None:
        """``parts`` are the open parts, each with the spans to read from it."""
        self.handle = handle
        self._parts = list(parts)

    @classmethod
    def attach(cls, handle: PoolHandle, open_part: Callable[[PoolHandle], GatheredPages]) -> DevicePartsView:
        """Map every part by ``open_part``.

        Raises TransportError if the handle contradicts itself or a part cannot be opened.
        """
        check_device_handle(handle)
        opened: list[tuple[Sequence[PartSpan], GatheredPages]] = []
        try:
            for spans, part in handle.part_handles():
                opened.append((spans, open_part(part)))
        except BaseException:
            for _, pages in opened:
                pages.close()
            raise
        return cls(handle, opened)

    @property
    def fault(self) -> str:
        """Fault of the first part that has one; "" for none. See ``DevicePages``."""
        return next((part.fault for _, part in self._parts if part.fault), "")

    def copy_run(self, run: DeviceRun, into: npt.NDArray[np.uint8]) -> None:
        """Copy a run's pages from all parts into ``into``, uint8; bytes that no part has become 0."""
        device, host, count = run
        whole = into[host : host + count].reshape(count, 2 * self.handle.geometry.layers, -1)
        if any(part.geometry is not None for part in self.handle.parts):
            whole[...] = 0  # Bytes that no part has.
        for spans, part in self._parts:
            held = part.gather(device, count)
            planes = held.reshape(count, held.shape[1] * held.shape[2], held.shape[3])
            for span in spans:
                whole_bytes(whole, span)[...] = part_bytes(planes, span)

    def close(self) -> bool:
        """Close every part; return whether all of them closed. See ``DevicePages``."""
        closed = [pages.close() for _, pages in self._parts]  # Close all, whatever the first one returns.
        return all(closed)
