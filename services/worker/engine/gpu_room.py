"""The memory of a GPU that is left for the device pool, measured by running the largest prefill that there will be.

What computing takes besides weights depends on the model, on kernels and on torch's allocator, so it is measured and
not estimated: a batch of ``--max-batch-tokens`` goes through the model over a pool that is just large enough for it.
The pool gets ``--device-memory-fraction`` of the device's memory, less the peak of that run, less what others use of
the device. The rest of the fraction is for later needs: CUDA graphs, sampling, fragments.

The arithmetic and the run are tested on a CPU with a stand-in for the memory; :class:`CudaMemory` has not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from services.worker.engine.forward_meta import ForwardMeta, Segment, pages_for
from services.worker.engine.states.running import pages_beside_slots
from services.worker.kv.device_pool import DevicePool
from services.worker.kv.planes import PlaneMap
from shared.errors import ConfigError

# torch leaves these functions without types.
_cuda: Any = torch.cuda

MIB = 2**20


class PrefillRunner(Protocol):
    """The part of ``engine.model_runner.ModelRunner`` that a measurement uses."""

    pool: DevicePool

    @property
    def slots(self) -> torch.Tensor | None:
        """States within pages, uint8 [slots + 1, nbytes]; None for a model without states."""

    @property
    def slot_bytes(self) -> int:
        """Bytes that each slot takes on the device, with what a step holds of it besides; 0 without states."""

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, meta: ForwardMeta, last_rows: torch.Tensor
    ) -> torch.Tensor:
        """Compute one step."""


RunnerOf = Callable[[DevicePool], PrefillRunner]
"""Makes a runner of the loaded model over a pool."""


class DeviceMemory(Protocol):
    """The memory of one device."""

    def start(self) -> None:
        """Forget earlier peaks."""
        ...

    def peak_bytes(self) -> int:
        """Return the most that this process has had allocated at once since :meth:`start`, weights included."""
        ...

    def foreign_bytes(self) -> int:
        """Return the bytes taken on the device besides: by other processes, the driver, communicators."""
        ...

    def total_bytes(self) -> int:
        """Return the bytes of the device's memory, in use or not."""


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """A GPU's memory, by torch's counters and the driver's. Has not run on a GPU."""

    device: torch.device

    def start(self) -> None:
        """Wait for the device, give torch's cached memory back, and forget earlier peaks."""
        _cuda.synchronize(self.device)
        _cuda.empty_cache()
        _cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        """Return torch's peak of allocated bytes since :meth:`start`, once the device has done all work."""
        _cuda.synchronize(self.device)
        return int(_cuda.max_memory_allocated(self.device))

    def foreign_bytes(self) -> int:
        """Return the bytes in use on the device that torch in this process has not reserved."""
        free, total = _cuda.mem_get_info(self.device)
        return int(total - free - _cuda.memory_reserved(self.device))

    def total_bytes(self) -> int:
        """Return the bytes of the device's memory, as the driver reports them."""
        return int(_cuda.mem_get_info(self.device)[1])


@dataclass(frozen=True, slots=True)
class RoomWish:
    """The part of a GPU that may be used, and for what: ``fraction`` of the device.

    ``tokens`` are those of the largest prefill, ``rows`` the most of its rows whose logits are computed.
    ``reserve_bytes`` are for buffers on the device that are made later.
    """

    fraction: float
    tokens: int
    rows: int = 256
    reserve_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Room:
    """The memory of a device, in bytes, by its use."""

    total: int
    foreign: int
    peak: int
    reserve: int
    fraction: float
    slot_bytes: int = 0  # Of states within pages, for each of the slots beside the pool, and of steps over them.

    @property
    def pool_bytes(self) -> int:
        """Bytes that the device pool may take; not below 0."""
        return max(0, int(self.total * self.fraction) - self.foreign - self.peak - self.reserve)

    def pages(self, page_bytes: int) -> int:
        """Return how many pages fit. Raises ConfigError, with what takes the memory, when none does."""
        pages = pages_beside_slots(self.pool_bytes, page_bytes, self.slot_bytes)
        if pages < 1:
            raise ConfigError(
                f"the GPU has no memory left for KV: of {self.total // MIB} MiB, --device-memory-fraction "
                f"{self.fraction:g} allows {int(self.total * self.fraction) // MIB}, weights and the largest prefill "
                f"take {self.peak // MIB}, others on the device {self.foreign // MIB}, buffers {self.reserve // MIB}; "
                "raise the fraction, lower --max-batch-tokens, or choose --tensor-parallel"
            )
        return pages


def measure_room(
    runner_of: RunnerOf, planes: PlaneMap, max_context: int, device: torch.device, wish: RoomWish, memory: DeviceMemory
) -> Room:
    """Run the largest prefill over a pool on ``device`` that is given back afterwards.

    ``runner_of`` makes a runner over that pool which attends in the way that was proven and will serve. Raises
    ConfigError where even that does not fit on the device. In a group every rank calls this with the same ``wish`` at
    the same time.
    """
    geometry = planes.geometry
    segments, pages = prefill_segments(wish.tokens, max_context, geometry.page_size)
    memory.start()
    try:
        pool = DevicePool.create(geometry, pages, device=device, shm_prefix="room", planes=planes)
        try:
            runner = runner_of(pool)
            slots = runner.slots
            _prefill(runner, segments, min(wish.rows, wish.tokens))
            peak = memory.peak_bytes() - pages * geometry.page_bytes - (0 if slots is None else slots.nbytes)
        finally:
            pool.close()
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a prefill of {wish.tokens} tokens does not fit on the GPU beside the weights: lower --max-batch-tokens, "
            f"or choose --tensor-parallel ({str(error).splitlines()[0]})"
        ) from error
    return Room(
        memory.total_bytes(), memory.foreign_bytes(), peak, wish.reserve_bytes, wish.fraction, runner.slot_bytes
    )


def prefill_segments(tokens: int, max_context: int, page_size: int) -> tuple[list[Segment], int]:
    """Return prompts of ``tokens`` tokens together, each in pages of its own, and the number of all pages.

    No prompt is longer than the context.
    """
    segments, pages = [], 0
    while tokens > 0:
        rows = min(tokens, max_context)
        count = pages_for(rows, page_size)
        segments.append(Segment(rows, 0, np.arange(pages, pages + count, dtype=np.int32)))
        tokens, pages = tokens - rows, pages + count
    return segments, pages


def _prefill(runner: PrefillRunner, segments: list[Segment], rows: int) -> None:
    device, total = runner.pool.device, sum(segment.rows for segment in segments)
    positions = torch.cat([torch.arange(segment.rows) for segment in segments])
    meta = ForwardMeta.build(segments, runner.pool.geometry.page_size, device)
    runner.forward(torch.zeros(total, dtype=torch.int64), positions, meta, torch.arange(total - rows, total))
