"""The worker's device pool: all KV that attention can read, layer-first.

Its bytes are ``[layers, 2, pages, page_size, kv_heads, head_dim]`` in one allocation, so that one handle is enough for
another process to map it: a shared segment on a machine without a GPU, one CUDA allocation exported by CUDA IPC on a
GPU. The scheduler assigns pages to requests; the pool only holds bytes, and a plane map says which layer owns which of
them (:mod:`services.worker.kv.planes`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from services.worker.kv.page_memory import PageLayout, PageMemory
from services.worker.kv.planes import LayerPlanes, PlaneMap, StateKept, identity_map
from shared.errors import ConfigError, InvariantViolated
from shared.memory.cuda_ipc import export
from shared.memory.segment import SharedSegment
from shared.messages.pools import KvGeometry, PoolHandle

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def kept_as(geometry: KvGeometry) -> tuple[torch.dtype, int]:
    """Return the type in which pools hold K and V, and the number of such values for one head of a token."""
    if geometry.is_rounded:
        return torch.uint8, geometry.head_bytes
    return TORCH_DTYPES[geometry.dtype], geometry.head_dim


class DevicePool:
    """``pages`` pages of KV. Make one with :meth:`create`; its maker closes it."""

    def __init__(
        self,
        geometry: KvGeometry,
        pages: int,
        storage: torch.Tensor,
        segment: SharedSegment | None = None,
        *,
        is_exported: bool = True,
        planes: PlaneMap | None = None,
    ) -> None:
        """Prepare; ``storage`` is uint8 ``[pages * page_bytes]``; ``segment`` is the shared memory under it, on CPU.

        A pool that is not exported, because CUDA cannot do it here, has a handle that cannot be mapped. ``planes`` is a
        map of this geometry, the identity by default.
        """
        self.geometry = geometry
        self.planes = identity_map(geometry) if planes is None else planes
        self.pages = pages
        self.device = storage.device
        self._segment = segment
        self._is_exported = is_exported
        kind, width = kept_as(geometry)
        shape = (geometry.layers, 2, pages, geometry.page_size, geometry.kv_heads, width)
        self._storage: torch.Tensor | None = storage
        self._tensor: torch.Tensor | None = storage.view(kind).view(shape)
        rows = self._tensor.view(2 * geometry.layers, pages, geometry.page_size, -1)
        self._halves = []
        for part in self.planes.parts:
            dim = width if geometry.is_rounded else part.dim
            self._halves.append(
                (_heads(rows[part.k_plane], part.heads, dim), _heads(rows[part.v_plane], part.heads, dim))
            )

    @classmethod
    def create(
        cls,
        geometry: KvGeometry,
        pages: int,
        *,
        device: str | torch.device,
        shm_prefix: str,
        is_exported: bool = True,
        planes: PlaneMap | None = None,
    ) -> DevicePool:
        """Create a zeroed pool. Raises ConfigError when it has no page or its memory is not available."""
        if pages < 1:
            raise ConfigError(f"the device pool needs room for one page of {geometry.page_bytes} bytes")
        nbytes = pages * geometry.page_bytes
        if torch.device(device).type == "cpu":
            segment = SharedSegment.create(shm_prefix, "device", nbytes)
            return cls(geometry, pages, torch.from_numpy(segment.array), segment, planes=planes)
        try:
            storage = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            return cls(geometry, pages, storage, is_exported=is_exported, planes=planes)
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"a device pool of {nbytes} bytes does not fit on {device}: {error}") from error

    @property
    def tensor(self) -> torch.Tensor:
        """All KV, ``[layers, 2, pages, page_size, kv_heads, head_dim]``; index 1 is 0 for K and 1 for V.

        Rounded KV is uint8, ``head_bytes`` in the place of ``head_dim`` (:mod:`services.worker.kv.float8`). Raises
        InvariantViolated once the pool is closed.
        """
        if self._tensor is None:
            raise InvariantViolated("the device pool is closed")
        return self._tensor

    def k(self, layer: int) -> torch.Tensor:
        """Return K of one layer, ``[pages, page_size, kv_heads, head_dim]``, a view.

        Under a map that is not the identity ``layer`` is the number of a part, whose rows need not be adjacent. Latents
        are their own K and V. Rounded KV is as in :attr:`tensor`.
        """
        return self._halves[layer][0]

    def v(self, layer: int) -> torch.Tensor:
        """Return V of one layer or part, as :meth:`k` does."""
        return self._halves[layer][1]

    def states(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Return the state of one layer in these ``pages`` (int64 [R]): uint8 [R, nbytes], a contiguous copy.

        Raises InvariantViolated for a layer that keeps no state.
        """
        planes, kept = self._state_planes(layer)
        found = planes.index_select(1, pages).transpose(0, 1).flatten(1)
        return found[:, : kept.nbytes].contiguous()

    def put_states(self, layer: int, pages: torch.Tensor, states: torch.Tensor) -> None:
        """Write ``states`` (uint8 [R, nbytes]) of one layer into ``pages`` (int64 [R], each once).

        Raises InvariantViolated for a layer that keeps no state.
        """
        planes, kept = self._state_planes(layer)
        width = planes.shape[2]
        for number, plane in enumerate(planes):
            part = states[:, number * width : min(kept.nbytes, (number + 1) * width)]
            plane[:, : part.shape[1]].index_copy_(0, pages, part)

    def rows(self, layer: int, half: int, slots: torch.Tensor) -> torch.Tensor:
        """Return K (half 0) or V (1) of one layer in these ``slots`` (int64 [T]): [T, kv_heads * head_dim], a copy."""
        return self._halves[layer][half].flatten(0, 1).flatten(1).index_select(0, slots)

    def put_kv(self, layer: int, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Write K and V ``[2, kv_heads, n, head_dim]`` of one layer into these ``slots`` (int64 [n], each once).

        For a map that is the identity, and KV that is not rounded.
        """
        self.tensor[layer].flatten(1, 2).index_copy_(1, slots, kv.transpose(1, 2))

    def _state_planes(self, layer: int) -> tuple[torch.Tensor, StateKept]:
        """Return the planes of a state, uint8 ``[planes, pages, half_bytes]``."""
        owned: LayerPlanes = self.planes.layers[layer]
        if self._storage is None or not isinstance(owned.kept, StateKept):
            raise InvariantViolated(f"the device pool is closed, or layer {layer} keeps no state")
        halves = self._storage.view(2 * self.geometry.layers, self.pages, self.geometry.half_bytes)
        return halves[owned.first : owned.first + owned.planes], owned.kept

    def bytes_view(self) -> npt.NDArray[np.uint8]:
        """Return the same memory as uint8 ``[layers, 2, pages, half_bytes]``; CPU only, for loads."""
        if self._segment is None:
            raise InvariantViolated("only a device pool in shared memory can be seen as host bytes")
        geometry = self.geometry
        return self._segment.array.reshape(geometry.layers, 2, self.pages, geometry.half_bytes)

    def memory(self) -> PageMemory:
        """Return the pool as movers see it."""
        if self._storage is None:
            raise InvariantViolated("the device pool is closed")
        layout = PageLayout.layer_first(self.geometry, self.pages)
        if self._segment is not None:
            return PageMemory(layout, array=self._segment.array)
        return PageMemory(layout, tensor=self._storage)

    def handle(self) -> PoolHandle:
        """Return a handle by which another process maps this pool.

        On CUDA every call exports the pool again: make one for each consumer. Raises TransportError where CUDA does not
        export it.
        """
        if self._storage is None:
            raise InvariantViolated("the device pool is closed")
        geometry = self.geometry
        name, ipc = "", b""
        if self._segment is not None:
            name = self._segment.name
        elif self._is_exported:
            ipc = export(self._storage.view(geometry.layers, 2, self.pages, geometry.half_bytes), torch)
        return PoolHandle(
            kind="cuda_ipc" if self._segment is None else "shm",
            layout="layer_first",
            name=name,
            nbytes=self.pages * geometry.page_bytes,
            pages=self.pages,
            geometry=geometry,
            ipc=ipc,
        )

    def close(self) -> None:
        """Release the memory; idempotent. Views that others still hold keep the mapping, not the name."""
        self._tensor = self._storage = None
        self._halves = []
        if self._segment is not None:
            self._segment.unlink()
            self._segment.close()
            self._segment = None


def _heads(plane: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    """Return the ``heads`` heads in a plane ``[pages, page_size, width]``, ``[pages, page_size, heads, dim]``."""
    pages, page_size, width = plane.shape
    # Kernels go by the stride of slots, which a slice of pages of one slot would lose.
    return plane.as_strided((pages, page_size, heads, dim), (page_size * width, width, dim, 1))
