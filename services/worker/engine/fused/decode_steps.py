"""Steps of decode rows alone, in one native call: between layers no Python runs.

Python between two layers costs more than it seems to: the weights of a layer have swept the caches by the time it runs.
The calls are those that a step makes layer by layer, so its bits are the same.
"""

from __future__ import annotations

import ctypes

import torch

from services.worker.engine.forward_meta import ForwardMeta
from services.worker.engine.fused.model import FusedModel
from services.worker.engine.native_work import find_decode_work
from services.worker.kv.device_pool import DevicePool
from services.worker.native.decode import DecodeWork, NativeDecode
from services.worker.native.fused import DecodeStruct, FusedKernels, StepStruct
from shared.errors import InvariantViolated


class DecodeSteps:
    """Whole decode steps of one model over one pool, by the decode kernel of its attention."""

    def __init__(self, model: FusedModel, kernels: FusedKernels, pool: DevicePool, native: NativeDecode) -> None:
        """Keep the addresses of all layers' K and V in ``pool``, which is in host memory.

        ``native`` is compiled for the pages of ``pool`` and the heads of ``model``.
        """
        self._model, self._kernels, self._pool = model, kernels, pool
        self._attend = ctypes.cast(native.function, ctypes.c_void_p).value
        self._partial_bytes = native.partial_bytes
        self._partials = torch.empty(0, dtype=torch.uint8)
        layers = range(len(model.windows))
        halves = [half(layer).data_ptr() for layer in layers for half in (pool.k, pool.v)]
        self._pools = (ctypes.c_void_p * len(halves))(*halves)

    def compute(self, meta: ForwardMeta, step: StepStruct, qkv: torch.Tensor) -> None:
        """Take the rows of ``step``, all of them decode rows without a gate, through all layers.

        ``qkv`` is room for [rows, (query_heads + 2 kv_heads) * head_dim].
        """
        model = self._model
        self._pool.tensor  # noqa: B018  Raises when the pool is closed, to whose memory there are pointers here.
        works = {window: _work(meta, window) for window in set(model.windows)}
        items = max(len(work.items) for work in works.values())
        if self._partials.numel() < items * self._partial_bytes:
            self._partials = torch.empty(2 * items * self._partial_bytes, dtype=torch.uint8)
        structs = {window: self._struct(work) for window, work in works.items()}
        decodes = (ctypes.c_void_p * len(model.windows))(
            *(ctypes.addressof(structs[window]) for window in model.windows)
        )
        attended = torch.empty(meta.rows, model.query_heads * model.head_dim, dtype=self._kernels.dtype)
        self._kernels.decode_step(
            model.shape,
            model.layers[0],
            len(model.windows),
            ctypes.addressof(step),
            decodes,
            self._pools,
            qkv.data_ptr(),
            attended.data_ptr(),
        )

    def _struct(self, work: DecodeWork) -> DecodeStruct:
        """Return the structure, valid as long as ``work`` is."""
        return DecodeStruct(
            self._attend,
            work.tables.ctypes.data,
            work.segments.ctypes.data,
            work.items.ctypes.data,
            self._partials.data_ptr(),
            len(work.segments),
            len(work.items),
            self._model.scaling,
        )


def _work(meta: ForwardMeta, window: int | None) -> DecodeWork:
    work = find_decode_work(meta, window)
    if work is None:
        raise InvariantViolated("a step without a decode row is no decode step")
    return work
