"""Copies pages from a device pool (layer-first) to the host pool (page-first), and seals them.

Runs of pages that are consecutive on both sides are copied by one strided copy. A slice is hashed right after
it is copied, while it is still in the processor's cache. numpy and xxhash release the interpreter lock, so the
event loop goes on meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from services.storage.core.backup_check import Transfer
from shared.memory.device_pool_view import DevicePages, DeviceRun
from shared.memory.host_pool import HostPoolView

# A slice is small enough to stay in cache until it is hashed, and large enough to make calls cheap.
SLICE_BYTES = 2 * 2**20


def merge_runs(device: npt.NDArray[np.int32], host: npt.NDArray[np.int32], longest: int) -> Iterator[DeviceRun]:
    """Return runs of pages that are consecutive in both lists (int32 [n]), in order, of at most ``longest`` pages."""
    if not len(device):
        return
    breaks = np.flatnonzero((np.diff(device) != 1) | (np.diff(host) != 1)) + 1
    edges = [0, *breaks.tolist(), len(device)]
    for start, end in pairwise(edges):
        for first in range(start, end, longest):
            yield int(device[first]), int(host[first]), min(longest, end - first)


def copy_transfer(transfer: Transfer, source: DevicePages, target: HostPoolView) -> int:
    """Copy and seal every page of ``transfer``; return the bytes copied. Blocking: call it in an I/O thread.

    A page is cleared before its bytes change, so that a concurrent reader finds no identity. Raises TransportError when
    the device pool cannot be read.
    """
    longest = max(1, SLICE_BYTES // target.geometry.page_bytes)
    done = 0
    for run in merge_runs(transfer.device_pages, transfer.host_pages, longest):
        _, host, count = run
        target.clear(slice(host, host + count))
        source.copy_run(run, target.pages)
        for page, identity in zip(range(host, host + count), transfer.identities[done : done + count], strict=True):
            target.seal_page(page, identity)
        done += count
    return done * target.geometry.page_bytes
