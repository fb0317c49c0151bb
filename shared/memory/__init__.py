"""Pools in POSIX shared memory: segments, the page-first host pool, and views of layer-first device pools.

Mappings:

* the owner of a pool creates a :class:`~shared.memory.segment.SharedSegment` and sends a ``PoolHandle``;
* others attach by the handle. Unlinking removes only the name: a mapping made before stays readable until its
  last array is gone. A Detach plan ends the use of a pool, never the memory itself;
* a process that starts calls :func:`reap` first, which removes what killed processes left behind;
* a file without a pool shows that its owner lives (:mod:`~shared.memory.life`).

Nothing here imports torch. ``torch.from_numpy(view.pages)`` keeps a mapping alive, because it holds the array.
"""

from shared.memory.device_parts import DevicePartsView
from shared.memory.device_pool_view import DevicePoolView
from shared.memory.host_pool import HostPoolView, pages_for
from shared.memory.segment import SharedSegment, reap, unlink_all, unlink_own

__all__ = [
    "DevicePartsView",
    "DevicePoolView",
    "HostPoolView",
    "SharedSegment",
    "pages_for",
    "reap",
    "unlink_all",
    "unlink_own",
]
