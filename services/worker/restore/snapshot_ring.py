"""Stage one of saving (HCache section 4.2.2): one batched copy per unit into host memory, beside the model's kernels.

The ring lies in /dev/shm, so that another process can map it, and is pinned where there is a GPU. A snapshot is the
saved rows of one pass in all saved units. On a GPU its copies run on a stream of their own, ordered by events
(section 5): the copy waits for the layer's input, and the allocator keeps that memory until the copy is done.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.worker.kv.device_pool import DevicePool
from services.worker.kv.pinning import cuda_pins
from services.worker.restore.hidden_shape import HiddenShape
from services.worker.restore.ring_space import RingSpace
from shared.memory.segment import SharedSegment

# torch leaves these functions without types.
_cuda: Any = torch.cuda


class Snapshot:
    """Rows of one pass in flight to the host. A :class:`~services.worker.restore.attention_inputs.HiddenSink`.

    ``rows`` uint8 [units, N, row_bytes] is complete once :meth:`wait` has returned: first the hidden states of
    ``layers``, then K and V of each of ``kv_layers``.
    """

    def __init__(
        self,
        rows: npt.NDArray[np.uint8],
        picked: Sequence[slice],
        layers: Sequence[int],
        kv_layers: Sequence[int],
        stream: Any,
    ) -> None:
        """Prepare; ``picked`` are runs of the pass's rows, N in all, in this order."""
        self.rows = rows
        self._picked = picked
        self.layers = layers
        self._index = {layer: index for index, layer in enumerate(layers)}
        self._kv_layers = kv_layers
        self._stream = stream
        self._done: Any = None
        self._units_taken = 0

    @property
    def is_whole(self) -> bool:
        """Whether every unit was taken, each once."""
        return self._units_taken == len(self.rows)

    def take(self, layer: int, hidden: torch.Tensor) -> None:
        """Copy the picked rows of one layer's hidden states to the host.

        On a GPU beside the model, on the ring's stream.
        """
        into = self._place(self._index[layer], hidden.dtype)
        parts = [hidden[part] for part in self._picked]
        if self._stream is not None:
            # Gathered on the device first, always: one copy over the link however many sequences there are, and of
            # memory that nothing writes to. A fused forward computes its next layer in that of ``hidden``.
            self._send(into, torch.cat(parts))
        elif len(parts) == 1:
            into.copy_(parts[0])
        else:
            torch.cat(parts, out=into)

    def take_kv(self, pool: DevicePool, slots: torch.Tensor) -> None:
        """Take K and V from the pool once the pass has written them; ``slots`` int64 [T] are those of its rows."""
        if not self._kv_layers:
            return
        wanted = torch.cat([slots[part] for part in self._picked])
        for number, layer in enumerate(self._kv_layers):
            for half in (0, 1):
                gathered = pool.rows(layer, half, wanted)
                into = self._place(len(self._index) + 2 * number + half, gathered.dtype)
                if self._stream is None:
                    into.copy_(gathered)
                else:
                    self._send(into, gathered)

    def wait(self) -> None:
        """Return when all taken rows are in host memory. Not for the computing thread."""
        if self._done is not None:
            self._done.synchronize()

    def _place(self, unit: int, dtype: torch.dtype) -> torch.Tensor:
        self._units_taken += 1
        return torch.from_numpy(self.rows[unit]).view(dtype)

    def _send(self, into: torch.Tensor, gathered: torch.Tensor) -> None:
        """Copy behind the current stream's work so far, on a stream of its own."""
        self._stream.wait_stream(_cuda.current_stream(gathered.device))
        with _cuda.stream(self._stream):
            into.copy_(gathered, non_blocking=True)
            self._done = self._stream.record_event()
        gathered.record_stream(self._stream)


class SnapshotRing:
    """Memory for snapshots, given back in the order in which they were taken, by another thread than takes them."""

    def __init__(
        self,
        shape: HiddenShape,
        capacity_bytes: int,
        *,
        device: torch.device,
        shm_prefix: str,
        layers: Sequence[int],
        kv_layers: Sequence[int] = (),
    ) -> None:
        """Prepare to save the hidden states of ``layers``, and KV of ``kv_layers``.

        K of the latter must be as wide as a hidden state. Raises ConfigError when there is no memory for the ring.
        """
        self.layers, self.kv_layers = tuple(layers), tuple(kv_layers)
        self.units, self.row_bytes = len(self.layers) + 2 * len(self.kv_layers), shape.row_bytes
        self._space = RingSpace(capacity_bytes)
        self._lock = threading.Lock()
        self._segment = SharedSegment.create(shm_prefix, "hidden", capacity_bytes)
        self._pins = cuda_pins(device)
        self._stream = None if device.type == "cpu" else _cuda.Stream(device=device)
        if self._pins is not None:
            try:
                self._pins.pin(self._segment.array)
            except BaseException:
                self._segment.unlink()
                raise

    @property
    def name(self) -> str:
        """Name of the shared segment."""
        return self._segment.name

    @property
    def room_rows(self) -> int:
        """Number of rows that a snapshot could hold now."""
        with self._lock:
            return self._space.largest // (self.units * self.row_bytes)

    def take(self, picked: Sequence[slice]) -> Snapshot | None:
        """Return a snapshot for these rows of one pass; None when there is no room. Never waits."""
        rows = sum(part.stop - part.start for part in picked)
        nbytes = self.units * rows * self.row_bytes
        with self._lock:
            start = self._space.take(nbytes)
        if start is None:
            return None
        area = self._segment.array[start : start + nbytes].reshape(self.units, rows, self.row_bytes)
        return Snapshot(area, picked, self.layers, self.kv_layers, self._stream)

    def give_back_oldest(self) -> None:
        """Free the oldest snapshot's memory, which may be overwritten from now on."""
        with self._lock:
            self._space.give_back_oldest()

    def close(self) -> None:
        """Release the memory; no snapshot may be in use."""
        if self._segment.is_closed:
            return
        if self._pins is not None:
            self._pins.unpin(self._segment.array)
        self._segment.unlink()
        self._segment.close()
