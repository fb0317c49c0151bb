"""A step's description for attention: which rows of the flattened batch belong to which request, and where their KV is.

A step is one flattened, unpadded batch ``[T]``: segment after segment, each the next ``rows`` tokens of one request,
whether a prefill chunk or a single decode token. Everything here is computed once per step; nothing is computed per
layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from services.worker.engine.key_splits import SPLIT_KEYS
from services.worker.engine.shared_prefixes import DecodeRow, SharedTiles, most_tiles, shared_tiles
from services.worker.engine.uploads import upload
from shared.errors import InvariantViolated


@dataclass(frozen=True, slots=True)
class Segment:
    """``rows`` new tokens of one request at positions ``context .. context + rows - 1``.

    ``pages`` is its page table (int32): entry i holds tokens ``[i * page_size, (i + 1) * page_size)``. It covers
    ``context + rows`` tokens at least; further entries are ignored. ``running`` is the slot of the request's layer
    states within a page, for models that have them, see :mod:`services.worker.engine.states`; -1 is none. ``adapter``
    is the digest of the request's LoRA adapter, "" for the base model alone.
    """

    rows: int
    context: int
    pages: npt.NDArray[np.int32]
    running: int = -1
    adapter: str = ""

    @property
    def length(self) -> int:
        """Tokens of the request after the step."""
        return self.context + self.rows


class LayerGate(Protocol):
    """A gate before a layer's attention, until the step's loads of that layer from host memory are complete."""

    def wait(self, layer: int) -> None:
        """Return when the layer's loads are complete. An error that it raises ends the forward pass."""


@dataclass(frozen=True, slots=True)
class SharedTensors:
    """Keys that single rows of a step share (:mod:`~services.worker.engine.shared_prefixes`), on the device.

    row_keys int32 [S]: how many of a segment's first keys a tile attends to for it; tile_rows int32 [tiles, MEMBERS];
    tile_keys int32 [tiles], 0 for an unused tile. ``tiles`` is the same on the host, None in a captured step.
    """

    row_keys: torch.Tensor
    tile_rows: torch.Tensor
    tile_keys: torch.Tensor
    tiles: SharedTiles | None = None


@dataclass(frozen=True, slots=True)
class PagedTensors:
    """The step as the GPU kernel reads it, on the device: ``S`` segments.

    cu_rows int32 [S + 1]: where each segment's rows begin in the batch; context int32 [S]; page_table int32 [S,
    max_pages], rows padded with 0. ``max_rows`` and ``max_length`` size the kernel's grid. ``shared`` is None where
    sharing does not pay.
    """

    cu_rows: torch.Tensor
    context: torch.Tensor
    page_table: torch.Tensor
    max_rows: int
    max_length: int
    shared: SharedTensors | None = None


@dataclass(frozen=True, slots=True)
class ForwardMeta:
    """One step, ready for every layer. Build it with :meth:`build`.

    slots: int64 [T] on the device, the pool slot (page * page_size + offset) of every new token. ``first_slot``
    is the first of them if they are consecutive, which makes the write one plain copy; else -1.
    """

    segments: tuple[Segment, ...]
    rows: int
    page_size: int
    slots: torch.Tensor
    first_slot: int
    gate: LayerGate | None = None
    paged: PagedTensors | None = field(default=None, repr=False)

    @classmethod
    def build(
        cls,
        segments: Sequence[Segment],
        page_size: int,
        device: str | torch.device,
        gate: LayerGate | None = None,
    ) -> ForwardMeta:
        """Build the tables. Raises InvariantViolated if a segment is empty or its page table too short."""
        if all(segment.rows == 1 for segment in segments):  # A step that only decodes.
            slots = np.array([_slot(segment, page_size) for segment in segments], dtype=np.int64)
        else:
            slots = np.concatenate([_slots(segment, page_size) for segment in segments])
        rows = len(slots)
        consecutive = int(slots[-1]) - int(slots[0]) == rows - 1 and bool((np.diff(slots) == 1).all())
        device = torch.device(device)
        paged = None
        if device.type == "cpu":
            on_device = torch.from_numpy(slots)
        else:
            tables, tiles = _tables(segments, page_size)
            on_device, *sent = upload([slots, *tables], device)
            paged = _paged(segments, sent, tiles)
        return cls(
            segments=tuple(segments),
            rows=rows,
            page_size=page_size,
            slots=on_device,
            first_slot=int(slots[0]) if consecutive else -1,
            gate=gate,
            paged=paged,
        )


def pages_for(tokens: int, page_size: int) -> int:
    """Return how many pages ``tokens`` tokens need."""
    return -(-tokens // page_size)


def _check(segment: Segment, page_size: int) -> None:
    if segment.rows < 1 or segment.context < 0:
        raise InvariantViolated(f"a segment of {segment.rows} rows at {segment.context} cannot be computed")
    if len(segment.pages) * page_size < segment.length:
        raise InvariantViolated(f"{len(segment.pages)} pages do not hold {segment.length} tokens")


def _slot(segment: Segment, page_size: int) -> int:
    """Return the pool slot of the one row of a segment."""
    _check(segment, page_size)
    page, offset = divmod(segment.context, page_size)
    return int(segment.pages[page]) * page_size + offset


def _slots(segment: Segment, page_size: int) -> npt.NDArray[np.int64]:
    if segment.rows == 1:  # Decode, the commonest segment by far; four times faster than the general case.
        return np.array([_slot(segment, page_size)], dtype=np.int64)
    _check(segment, page_size)
    positions = np.arange(segment.context, segment.length, dtype=np.int64)
    return segment.pages[positions // page_size].astype(np.int64) * page_size + positions % page_size


def paged_tensors(segments: Sequence[Segment], page_size: int, device: torch.device) -> PagedTensors:
    """Return a step of these segments as the kernels read it; steps that are built for a GPU have it already."""
    tables, tiles = _tables(segments, page_size)
    return _paged(segments, upload(tables, device), tiles)


def _tables(segments: Sequence[Segment], page_size: int) -> tuple[list[npt.NDArray[np.int32]], SharedTiles | None]:
    """Return the arrays of ``PagedTensors`` and of ``SharedTensors``, and the tiles of shared keys.

    The arrays are row offsets, contexts and the page table, and where rows share keys the three of ``SharedTensors``,
    which are made from the tiles.
    """
    counts = [pages_for(segment.length, page_size) for segment in segments]
    table = np.zeros((len(segments), max(counts)), dtype=np.int32)
    for row, (segment, count) in enumerate(zip(segments, counts, strict=True)):
        table[row, :count] = segment.pages[:count]
    cu_rows = np.zeros(len(segments) + 1, dtype=np.int32)
    np.cumsum([segment.rows for segment in segments], out=cu_rows[1:])
    tables = [cu_rows, np.array([segment.context for segment in segments], dtype=np.int32), table]
    tiles = tiles_of(segments, page_size)
    if tiles is not None:
        tables += [tiles.row_keys(len(segments)), tiles.tile_rows, tiles.tile_keys]
    return tables, tiles


def _paged(segments: Sequence[Segment], tensors: Sequence[torch.Tensor], tiles: SharedTiles | None) -> PagedTensors:
    cu_rows, context, table, *shared = tensors
    return PagedTensors(
        cu_rows=cu_rows,
        context=context,
        page_table=table,
        max_rows=max(segment.rows for segment in segments),
        max_length=max(segment.length for segment in segments),
        shared=SharedTensors(shared[0], shared[1], shared[2], tiles) if shared else None,
    )


def tiles_of(segments: Sequence[Segment], page_size: int) -> SharedTiles | None:
    """Return which single rows of a step share keys, in no more tiles than its graphs have, or None."""
    rows = [
        DecodeRow(number, segment.length, segment.pages)
        for number, segment in enumerate(segments)
        if segment.rows == 1 and segment.length > SPLIT_KEYS
    ]
    return shared_tiles(rows, page_size, most_tiles(len(segments))) if len(rows) > 1 else None


def host_tiles(meta: ForwardMeta) -> SharedTiles | None:
    """Return which single rows of a step share keys, on the host; for a step built for a CPU, find them here."""
    if meta.paged is None:
        return tiles_of(meta.segments, meta.page_size)
    return None if meta.paged.shared is None else meta.paged.shared.tiles
