"""The memory that captured decode steps read and write, and attention over it.

A CUDA graph repeats its kernels with the same addresses. So the inputs of a step are copied to where they were
when it was captured, and rows that a step does not have are padding: their slot is negative, so that their KV is
written nowhere, and their context is empty, so that they read one row of the pool and change nothing.
"""

from __future__ import annotations

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
"""The slot of a row of padding."""


class Kernels(Protocol):
    """The kernels of ``services.worker.kernels`` that captured steps use; see there."""

    def kv_write(
        self, k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Write k and v [T, kv_heads, head_dim] to ``slots`` int64 [T] of the pools; negative ones are skipped."""

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
    ) -> torch.Tensor:
        """Return the attention output [T, heads, head_dim] for q of that shape over the paged pools."""

    def latent_write(self, rows: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor) -> None:
        """Write ``rows`` [T, 1, width] into ``slots`` int64 [T] of the pool; a negative slot is not written."""

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
    ) -> torch.Tensor:
        """Return the attention output [T, heads, rank] for q [T, heads, rank + rope] over latents."""


class StaticBatch:
    """One memory for the graphs of all shapes; a graph of n rows has the first n.

    ids, positions, slots and last_rows int64 [rows], context int32 [rows], page_table int32 [rows, pages], cu_rows
    int32 [rows + 1], logits float32 [rows, vocab]; the rest are those of
    :class:`~services.worker.engine.forward_meta.SharedTensors`.
    """

    def __init__(
        self, rows: int, pages: int, vocab_size: int, device: torch.device, *, padding_slot: int | None = None
    ) -> None:
        """Allocate the tensors for ``rows`` requests on ``device``; all rows are padding at first.

        A request has up to ``pages`` pages. For models whose layers carry states ``padding_slot`` is the slot of rows
        of padding, and ``running`` int64 [rows] has the rows' slots.
        """
        self._padding_slot = padding_slot
        self.running = None if padding_slot is None else torch.full((rows,), padding_slot, device=device)
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
        """Bytes of all tensors of the batch."""
        return sum(each.nbytes for each in vars(self).values() if isinstance(each, torch.Tensor))

    def fill(self, ids: torch.Tensor, positions: torch.Tensor, meta: ForwardMeta, padded_rows: int) -> None:
        """Copy a step of single rows into the batch, and make the rows behind it, up to ``padded_rows``, padding.

        The other fields of padding, and page tables behind a request's own pages, are left over from earlier steps:
        they name tokens and pages that exist, and are not read.
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
        if self.running is not None and self._padding_slot is not None:
            (running,) = on_device((torch.tensor([each.running for each in meta.segments]),), self.slots.device)
            self.running[:rows].copy_(running)
            self.running[rows:padded_rows].fill_(self._padding_slot)
        self._share(tensors.shared, rows)

    def _share(self, shared: SharedTensors | None, rows: int) -> None:
        """Copy which rows share keys. Padding shares none, and tiles behind those of the step are unused."""
        if shared is None and not self._shares:
            return  # Most steps: no key is shared, nor was in the step before.
        self._shares = shared is not None
        self.row_keys.zero_()
        self.tile_keys.zero_()
        if shared is not None:
            tiles = len(shared.tile_keys)
            self.row_keys[:rows].copy_(shared.row_keys)
            self.tile_rows[:tiles].copy_(shared.tile_rows)
            self.tile_keys[:tiles].copy_(shared.tile_keys)

    def clear(self) -> None:
        """Fill the batch with padding: a step that changes nothing in the pool."""
        self.slots.fill_(PADDING)
        self.context.zero_()
        if self.running is not None and self._padding_slot is not None:
            self.running.fill_(self._padding_slot)
        self.row_keys.zero_()
        self.tile_keys.zero_()
        self._shares = False


def _shared_of(batch: StaticBatch, rows: int) -> SharedTensors:
    tiles = most_tiles(rows)
    return SharedTensors(
        row_keys=batch.row_keys[:rows], tile_rows=batch.tile_rows[:tiles], tile_keys=batch.tile_keys[:tiles]
    )


class StaticStep(PooledStep):
    """Attention of a captured step over the first rows of a batch."""

    def __init__(
        self,
        batch: StaticBatch,
        shape: DecodeShape,
        pool: DevicePool,
        kernels: Kernels,
        attend: PagedAttend | None = None,
    ) -> None:
        """Read the first ``shape.rows`` rows of ``batch``, which is filled before every replay.

        Without ``attend`` the step attends by ``kernels``, which write K and V in either case.
        """
        self._pool, self._kernels = pool, kernels
        self._slots = batch.slots[: shape.rows]
        self.paged = PagedTensors(
            cu_rows=batch.cu_rows[: shape.rows + 1],
            context=batch.context[: shape.rows],
            page_table=batch.page_table[: shape.rows],
            max_rows=1,
            max_length=shape.length,
            # A single request shares nothing, so the launch would be wasted.
            shared=None if shape.rows == 1 else _shared_of(batch, shape.rows),
        )
        self._attend = attend

    @property
    def slots(self) -> torch.Tensor:
        """The slots of the rows, int64, in memory that each replay reads anew."""
        return self._slots

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Write the call's K and V into their slots, then attend."""
        self.write(call)
        return self.attend_written(call)

    def write(self, call: AttentionCall) -> None:
        """Write K and V of a call into their slots."""
        k_pool, v_pool = self._pool.k(call.layer), self._pool.v(call.layer)
        key, value = call.key[0].transpose(0, 1), call.value[0].transpose(0, 1)
        if key.stride() != value.stride():  # The kernel takes equal strides; K, which was rotated, may have others.
            key, value = (each.clone(memory_format=torch.contiguous_format) for each in (key, value))
        self._kernels.kv_write(key, value, k_pool, v_pool, self._slots)

    def attend_written(self, call: AttentionCall) -> torch.Tensor:
        """Attend over the whole pool, with the page tables of the static batch."""
        query = call.query[0].transpose(0, 1)
        k_pool, v_pool = self._pool.k(call.layer), self._pool.v(call.layer)
        if self._attend is not None:
            return self._attend(query, k_pool, v_pool, **call.scoring)
        return self._kernels.paged_attention(query, k_pool, v_pool, self.paged, **call.scoring)
