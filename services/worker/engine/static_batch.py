"""The memory that captured decode steps read and write, and attention over it.

A CUDA graph repeats its kernels with the addresses that they had. So the inputs of a step are copied to where they were
when it was captured, and rows that a step does not have are padding: their slot is negative, so that their KV is
written nowhere, and their context is empty, so that they read one row of the pool and change nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch

from services.worker.engine.attention import AttentionCall
from services.worker.engine.captured_attention import PagedAttend
from services.worker.engine.decode_shapes import DecodeShape
from services.worker.engine.forward_meta import ForwardMeta, PagedTensors, SharedTensors, paged_tensors
from services.worker.engine.paged_step import PooledStep
from services.worker.engine.shared_prefixes import MEMBERS, most_tiles
from services.worker.engine.uploads import on_device
from services.worker.kv.device_pool import DevicePool

PADDING = -1
"""The slot of a row that is none."""


class Kernels(Protocol):
    """What is asked of ``services.worker.kernels``."""

    def kv_write(
        self, k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, slots: torch.Tensor
    ) -> None: ...

    def paged_attention(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        paged: PagedTensors,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        chunk: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def latent_write(self, rows: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor) -> None: ...

    def latent_attention(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        paged: PagedTensors,
        *,
        rank: int,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        chunk: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


class StaticBatch:
    """One memory for the graphs of all shapes; a graph of n rows has the first n.

    ids, positions, slots and last_rows int64 [rows], context int32 [rows], page_table int32 [rows, pages], cu_rows
    int32 [rows + 1], logits float32 [rows, vocab]; the rest are those of
    :class:`~services.worker.engine.forward_meta.SharedTensors`.
    """

    def __init__(self, rows: int, pages: int, vocab_size: int, device: torch.device) -> None:
        self.ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.slots = torch.full((rows,), PADDING, dtype=torch.int64, device=device)
        self.last_rows = torch.arange(rows, device=device)
        self.context = torch.zeros(rows, dtype=torch.int32, device=device)
        self.page_table = torch.zeros((rows, pages), dtype=torch.int32, device=device)
        self.cu_rows = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._shares = False
        self.row_keys = torch.zeros(rows, dtype=torch.int32, device=device)
        self.tile_rows = torch.zeros((most_tiles(rows), MEMBERS), dtype=torch.int32, device=device)
        self.tile_keys = torch.zeros(most_tiles(rows), dtype=torch.int32, device=device)
        self.logits = torch.zeros((rows, vocab_size), dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in vars(self).values() if isinstance(each, torch.Tensor))

    def fill(self, ids: torch.Tensor, positions: torch.Tensor, meta: ForwardMeta, padded_rows: int) -> None:
        """Take over a step of single rows, and make the rows behind it, up to ``padded_rows``, padding.

        What else is in the rows of padding, and in page tables behind a request's
        own pages, is of earlier steps: it names tokens and pages that exist, and is not looked at.
        """
        rows = meta.rows
        tensors = meta.paged or paged_tensors(meta.segments, meta.page_size, self.slots.device)
        ids, positions = on_device((ids, positions), self.slots.device)
        self.ids[:rows].copy_(ids)
        self.positions[:rows].copy_(positions)
        self.slots[:rows].copy_(meta.slots)
        self.context[:rows].copy_(tensors.context)
        self.page_table[:rows, : tensors.page_table.shape[1]].copy_(tensors.page_table)
        self.slots[rows:padded_rows].fill_(PADDING)
        self.context[rows:padded_rows].zero_()
        self._share(tensors.shared, rows)

    def _share(self, shared: SharedTensors | None, rows: int) -> None:
        """Take over which rows share keys. Padding shares none, and tiles behind those of the step have none."""
        if shared is None and not self._shares:
            return  # As in most steps: there is nothing to undo.
        self._shares = shared is not None
        self.row_keys.zero_()
        self.tile_keys.zero_()
        if shared is not None:
            tiles = len(shared.tile_keys)
            self.row_keys[:rows].copy_(shared.row_keys)
            self.tile_rows[:tiles].copy_(shared.tile_rows)
            self.tile_keys[:tiles].copy_(shared.tile_keys)

    def clear(self) -> None:
        """Fill with padding: a step that changes nothing in the pool."""
        self.slots.fill_(PADDING)
        self.context.zero_()
        self.row_keys.zero_()
        self.tile_keys.zero_()
        self._shares = False


def _shared_of(batch: StaticBatch, rows: int) -> SharedTensors:
    tiles = most_tiles(rows)
    return SharedTensors(
        row_keys=batch.row_keys[:rows], tile_rows=batch.tile_rows[:tiles], tile_keys=batch.tile_keys[:tiles]
    )


class StaticStep(PooledStep):
    """Attention over the first rows of a batch, by ``attend`` or else by the kernels that write K and V."""

    def __init__(
        self,
        batch: StaticBatch,
        shape: DecodeShape,
        pool: DevicePool,
        kernels: Kernels,
        attend: PagedAttend | None = None,
    ) -> None:
        self._pool, self._kernels = pool, kernels
        self._slots = batch.slots[: shape.rows]
        self.paged = PagedTensors(
            cu_rows=batch.cu_rows[: shape.rows + 1],
            context=batch.context[: shape.rows],
            page_table=batch.page_table[: shape.rows],
            max_rows=1,
            max_length=shape.length,
            # A single request shares nothing, and the launch would be for nothing.
            shared=None if shape.rows == 1 else _shared_of(batch, shape.rows),
        )
        self._attend = attend or partial(_by_kernels, kernels, self.paged)

    @property
    def slots(self) -> torch.Tensor:
        return self._slots

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.write(call)
        return self.attend_written(call)

    def write(self, call: AttentionCall) -> None:
        """Put K and V of a call into their slots."""
        k_pool, v_pool = self._pool.k(call.layer), self._pool.v(call.layer)
        key, value = call.key[0].transpose(0, 1), call.value[0].transpose(0, 1)
        if key.stride() != value.stride():  # The kernel takes them alike; K, which was rotated, may lie otherwise.
            key, value = (each.clone(memory_format=torch.contiguous_format) for each in (key, value))
        self._kernels.kv_write(key, value, k_pool, v_pool, self._slots)

    def attend_written(self, call: AttentionCall) -> torch.Tensor:
        return self._attend(
            call.query[0].transpose(0, 1),
            self._pool.k(call.layer),
            self._pool.v(call.layer),
            **call.scoring,
        )


def _by_kernels(
    kernels: Kernels,
    paged: PagedTensors,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    /,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    return kernels.paged_attention(
        q, k, v, paged, scaling=scaling, window=window, softcap=softcap, chunk=chunk, sinks=sinks
    )
