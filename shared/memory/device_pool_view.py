"""A worker's layer-first device pool, as other processes on its node map it.

Two kinds of handle exist. ``shm``: the pool lies in a shared segment (machines without a GPU) and
:class:`DevicePoolView` maps it. ``cuda_ipc``: the pool is CUDA memory, one contiguous uint8 tensor
``[layers, 2, pages, half_bytes]``, and ``PoolHandle.ipc`` is its export (``shared.memory.cuda_ipc``), plain data. The
worker keeps the tensor alive for as long as any process maps it, and sends ``name=""``. Only processes that
import torch can map that; the storage does so in its GPU bridge. Both kinds satisfy :class:`DevicePages`.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from shared.errors import ConfigError, TransportError
from shared.memory.host_pool import check_geometry
from shared.memory.segment import SharedSegment
from shared.messages.pools import KvGeometry, PoolHandle

DeviceRun = tuple[int, int, int]
"""(first device page, first host page, count): consecutive pages on both sides."""


class DevicePages(Protocol):
    """Device pages of any memory, as copiers use them."""

    @property
    def handle(self) -> PoolHandle:
        """Handle of the pool, as its worker sent it."""

    @property
    def fault(self) -> str:
        """Why the pool cannot be read any more, or ""."""

    def copy_run(self, run: DeviceRun, into: npt.NDArray[np.uint8]) -> None:
        """Copy the pages of ``run`` into ``into``; when it returns, the bytes are there.

        ``into`` is the page-first uint8 [pages, layers, 2 * half_bytes] of a host pool. Raises TransportError when the
        device pool cannot be read.
        """

    def close(self) -> bool:
        """Unmap the pool; see ``SharedSegment.close``."""


class GatheredPages(DevicePages, Protocol):
    """Pages of a part of a device pool (``shared.memory.device_parts``)."""

    def gather(self, device: int, count: int) -> npt.NDArray[np.uint8]:
        """Return ``count`` pages from ``device`` on, page-first: uint8 [count, layers, 2, half_bytes], to read at once.

        Raises TransportError when the device pool cannot be read.
        """


def device_nbytes(geometry: KvGeometry, pages: int) -> int:
    """Return the bytes of a device pool of ``pages`` pages."""
    return pages * geometry.page_bytes


class DevicePoolView:
    """A device pool in a shared segment. ``halves`` is uint8 [layers, 2, pages, half_bytes], 0 is K and 1 is V.

    Read-only unless asked otherwise: only its worker may write KV.
    """

    def __init__(self, segment: SharedSegment, handle: PoolHandle) -> None:
        """View ``segment`` as ``handle`` describes it, unchecked; :meth:`close` closes the segment."""
        geometry = handle.geometry
        self.handle = handle
        self._segment = segment
        shape = (geometry.layers, 2, handle.pages, geometry.half_bytes)
        self.halves = segment.array[: device_nbytes(geometry, handle.pages)].reshape(shape)

    @classmethod
    def attach(cls, handle: PoolHandle, *, writable: bool = False) -> DevicePoolView:
        """Map the pool of ``handle``.

        Raises TransportError if the handle is not of a device pool in shared memory, contradicts itself, or its segment
        is missing or of another size.
        """
        if handle.kind != "shm":
            raise TransportError(f"device pool {handle.name!r} is {handle.kind} memory, which needs the GPU bridge")
        check_device_handle(handle)
        check_is_whole(handle)
        return cls(SharedSegment.attach(handle.name, handle.nbytes, writable=writable), handle)

    @property
    def geometry(self) -> KvGeometry:
        """Geometry of the pool's pages."""
        return self.handle.geometry

    @property
    def fault(self) -> str:
        """Always "": shared memory stays readable. See :class:`DevicePages`."""
        return ""

    def copy_run(self, run: DeviceRun, into: npt.NDArray[np.uint8]) -> None:
        """Copy a run in one strided copy, each row being one half of one page in one layer.

        See :class:`DevicePages`.
        """
        geometry = self.handle.geometry
        device, host, count = run
        target = into[host : host + count].reshape(count, geometry.layers, 2, geometry.half_bytes)
        target[...] = self.gather(device, count)

    def gather(self, device: int, count: int) -> npt.NDArray[np.uint8]:
        """Return a view of the pages. See :class:`GatheredPages`."""
        return self.halves[:, :, device : device + count].transpose(2, 0, 1, 3)

    def close(self) -> bool:
        """Drop the view and unmap; the view is useless afterwards. See ``SharedSegment.close``."""
        self.halves = np.empty((0,), np.uint8)
        return self._segment.close()


def check_device_handle(handle: PoolHandle) -> None:
    """Raise TransportError unless ``handle`` describes a layer-first pool and its sizes agree."""
    if handle.layout != "layer_first":
        raise TransportError(f"pool {handle.name!r} has layout {handle.layout}, which no device pool has")
    _check_geometry(handle.geometry, f"pool {handle.name!r}")
    if handle.pages < 1 or handle.nbytes < device_nbytes(handle.geometry, handle.pages):
        raise TransportError(
            f"the handle of pool {handle.name!r} contradicts itself: {handle.pages} pages of "
            f"{handle.geometry.page_bytes} bytes in {handle.nbytes} bytes"
        )
    _check_parts(handle)


def _check_geometry(geometry: KvGeometry, what: str) -> None:
    """Raise TransportError where no pool can have this geometry; ``what`` names its owner."""
    try:
        check_geometry(geometry)
    except ConfigError as error:
        raise TransportError(f"{what}: {error.message}") from error


def check_is_whole(handle: PoolHandle) -> None:
    """Raise TransportError for a pool in parts, where only a single piece can be mapped."""
    if handle.parts:
        raise TransportError(f"the device pool is that of a group of {len(handle.parts)} ranks, in as many parts")


def _check_parts(handle: PoolHandle) -> None:
    """Raise TransportError unless parts by heads have exactly all heads of a page, and spans lie within pages."""
    if not handle.parts:
        return
    if any(part.geometry is not None for part in handle.parts):
        _check_spans(handle)
    else:
        _check_heads(handle)
    for _, part in handle.part_handles():
        check_device_handle(part)


def _check_heads(handle: PoolHandle) -> None:
    heads = [range(part.first_head, part.first_head + part.kv_heads) for part in handle.parts]
    # By their bounds alone: a handle may claim any number of heads.
    covered, have_gap = 0, False
    for span in sorted(heads, key=lambda span: (span.start, span.stop)):
        have_gap = have_gap or not span or not 0 <= span.start <= covered
        covered = max(covered, span.stop)
    if have_gap or covered != handle.geometry.kv_heads:
        raise TransportError(f"the parts of a device pool with {handle.geometry.kv_heads} heads have {heads}")


def _check_spans(handle: PoolHandle) -> None:
    for number, part in enumerate(handle.parts):
        geometry = part.geometry
        if geometry is None:
            raise TransportError(f"part {number} of a device pool has heads, and others have spans")
        _check_geometry(geometry, f"part {number} of a device pool")
        odd = next((span for span in part.spans if not span.fits(handle.geometry, geometry)), None)
        if odd is not None:
            raise TransportError(f"part {number} of a device pool has {odd}, which is outside of its pages")
