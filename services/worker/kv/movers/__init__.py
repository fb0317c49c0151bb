"""Three interchangeable movers of pages between host memory and the device pool, and how one is chosen.

:mod:`protocol` defines a mover, :mod:`services.worker.kv.page_memory` the memories that it moves between.
:mod:`per_page` is the baseline, :mod:`batched` (and :mod:`batched_cuda`) copies many rows at once, :mod:`gpu_assisted`
lets a GPU kernel read host memory. :mod:`choice` picks one.
"""

from __future__ import annotations

from services.worker.kv.device_pool import DevicePool
from services.worker.kv.movers.batched import BatchedMover
from services.worker.kv.movers.per_page import PerPageMover
from services.worker.kv.movers.protocol import MoverName, PageMover
from shared.errors import ConfigError

DEFAULT_MOVER: dict[str, MoverName] = {"cpu": "batched", "cuda": "gpu_assisted"}
"""Mover for a pool on such a device where nothing has been measured.

On a GPU the kernel comes near the link's peak whatever the size of a page (Strata section 4.2), and memory that is not
pinned is moved by ``batched``.
"""


def make_mover(pool: DevicePool, name: MoverName, *, programs: int, checks_on_device: bool = True) -> PageMover:
    """Return the mover of this name for this pool; ``programs`` and ``checks_on_device`` are for ``gpu_assisted``.

    Raises ConfigError if the pool's device has no such mover.
    """
    if name == "per_page":
        return PerPageMover(pool)
    if pool.device.type == "cpu":
        if name == "gpu_assisted":
            raise ConfigError("--mover gpu_assisted needs a device pool on a GPU")
        return BatchedMover(pool)
    from services.worker.kv.movers.batched_cuda import BatchedCudaMover

    if name == "batched":
        return BatchedCudaMover(pool)
    # Imported here because the kernel imports Triton.
    from services.worker.kv.movers.gpu_assisted import GpuAssistedMover

    return GpuAssistedMover(pool, programs=programs, unpinned=BatchedCudaMover(pool), checks_on_device=checks_on_device)
