"""Layers that attend to compressed blocks of tokens beside a window (DeepSeek-V4, sections 2.3.1 and 2.3.2).

Such a layer closes a block every ``rate`` tokens and makes one entry of it. Later tokens attend to the entries, all of
them or those that an indexer chooses by entries of its own. Where blocks overlap, an entry also needs a part of the
block before. So a request that goes on needs all entries so far, the overlap, and the rows of the block that is open.

A page holds whole blocks. It keeps the entries of its blocks and the overlap as of its end; no block is open there.
Within a page the request's slot has the same for the blocks so far, and the open rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from services.worker.kv.device_pool import DevicePool
from services.worker.kv.planes import StateKept
from shared.errors import InvariantViolated, UnsupportedModel

COMPRESSED_TYPES = ("compressed_sparse_attention", "heavily_compressed_attention")
"""Types of such layers, in the library's words."""

_ALIGNED = 8
"""Tensors in a slot begin at multiples of so many bytes, so that they can be seen in any data type."""

_Placed = tuple[int, int, tuple[int, ...], torch.dtype]
"""The first byte of a tensor in a slot, its end, its shape and its data type."""


@dataclass(frozen=True, slots=True)
class Series:
    """One series of entries of ``dim`` values; a token gives ``width`` values of K and of gates.

    ``gate_dtype`` is that of gates as they come; kept overlaps have float32 ones, as the module adds its bias to them.
    """

    name: str
    dim: int
    width: int
    dtype: torch.dtype
    gate_dtype: torch.dtype

    @property
    def overlaps(self) -> bool:
        """Whether an entry needs a part of the block before."""
        return self.width == 2 * self.dim


@dataclass(frozen=True, slots=True)
class CompressedKept:
    """What a layer keeps of blocks of ``rate`` tokens, beside its rows."""

    rate: int
    series: tuple[Series, ...]

    def state(self, page_size: int) -> StateKept:
        """Return what a page keeps. Raises UnsupportedModel for pages that do not hold whole blocks."""
        if page_size % self.rate:
            raise UnsupportedModel(
                f"its layers compress {self.rate} tokens at a time, so pages hold a multiple of that, not {page_size}"
            )
        return StateKept(CompressedLayer(0, 0, self, page_size, 0).page_bytes)


@dataclass(frozen=True)
class CompressedLayer:
    """The blocks of layer ``layer`` of a model over pages of ``page_size`` tokens.

    In a plane map they are entry ``entry``, in a slot the bytes from ``first`` on.
    """

    layer: int
    entry: int
    kept: CompressedKept
    page_size: int
    first: int

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of a page's entries and overlaps."""
        return self._end(is_open=False)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a slot: the same, and the rows of an open block."""
        return self._end(is_open=True)

    def _end(self, *, is_open: bool) -> int:
        ends = (end for (_, part), (_, end, _, _) in self.places.items() if is_open or not part.startswith("open"))
        return -(-max(ends) // _ALIGNED) * _ALIGNED

    @cached_property
    def places(self) -> Mapping[tuple[str, str], _Placed]:
        """Places by series and part: ``entries``, ``overlap_kv``, ``overlap_gate``, ``open_kv`` and ``open_gate``."""
        found: dict[tuple[str, str], _Placed] = {}
        end = 0
        for name, part, shape, dtype in (*self._kept_parts(), *self._open_parts()):
            first = -(-end // _ALIGNED) * _ALIGNED
            end = first + math.prod(shape) * dtype.itemsize
            found[name, part] = (first, end, shape, dtype)
        return found

    def _kept_parts(self) -> Iterator[tuple[str, str, tuple[int, ...], torch.dtype]]:
        for each in self.kept.series:
            yield each.name, "entries", (self.page_size // self.kept.rate, each.dim), each.dtype
            if each.overlaps:
                yield each.name, "overlap_kv", (self.kept.rate, each.dim), each.dtype
                yield each.name, "overlap_gate", (self.kept.rate, each.dim), torch.float32

    def _open_parts(self) -> Iterator[tuple[str, str, tuple[int, ...], torch.dtype]]:
        for each in self.kept.series:
            yield each.name, "open_kv", (self.kept.rate - 1, each.width), each.dtype
            yield each.name, "open_gate", (self.kept.rate - 1, each.width), each.gate_dtype


class Blocks:
    """The blocks of one layer during a pass of one request, for the cache that the layer is handed.

    The names of the methods are those of the library's cache layer.
    """

    def __init__(
        self,
        layer: CompressedLayer,
        pool: DevicePool,
        pages: torch.Tensor,
        span: tuple[int, int],
        slot: torch.Tensor | None,
        wait: Callable[[], None],
    ) -> None:
        """Compute tokens ``span`` of a request in ``pages`` (int64); ``slot`` uint8 [nbytes] is its own, None for none.

        ``wait`` returns once the pages of earlier tokens are loaded.
        """
        self._layer, self._pool, self._pages, self._slot, self._wait = layer, pool, pages, slot, wait
        self._start, self._end = span
        self._open: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._overlaps: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._places = layer.places

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return the rows ``[1, n * rate, width]`` of the blocks that are whole now, and the first one's position."""
        rate = self._layer.kept.rate
        rows = self._start % rate
        if rows:
            kept_kv, kept_gate = (self._of_slot(name, part)[:rows] for part in ("open_kv", "open_gate"))
            kv, gate = torch.cat([kept_kv[None], kv], dim=1), torch.cat([kept_gate[None], gate], dim=1)
        whole = kv.shape[1] // rate * rate
        self._open[name] = kv[0, whole:], gate[0, whole:]
        return kv[:, :whole], gate[:, :whole], self._start - rows

    def update_overlap_state(
        self, name: str, chunk_kv: torch.Tensor, chunk_gate: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the overlap of the block before the new ones ``[1, n, rate, width]``; None at the beginning."""
        self._overlaps[name] = chunk_kv[0, ..., :head_dim], chunk_gate[0, ..., :head_dim]
        if self._start < self._layer.kept.rate:
            return None, None
        kept_kv, kept_gate = (self._before(name, part) for part in ("overlap_kv", "overlap_gate"))
        return kept_kv[None], kept_gate[None]

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Return all entries ``[1, blocks, dim]`` with the new ones behind; keep them in pages and slot."""
        size, rate = self._layer.page_size, self._layer.kept.rate
        entries = torch.cat([*self._entries(name), compressed[0]])
        for page in range(self._start // size, self._end // size):
            self._write_page(name, page, entries[page * size // rate : (page + 1) * size // rate])
        if self._end % size and self._slot is not None:
            self._write_slot(self._slot, name, entries[self._end // size * size // rate :])
        return entries[None]

    def _entries(self, name: str) -> list[torch.Tensor]:
        """Return the entries of earlier passes: those of whole pages, and those of the page that is begun."""
        size, rate = self._layer.page_size, self._layer.kept.rate
        first, end, shape, dtype = self._places[name, "entries"]
        found: list[torch.Tensor] = []
        whole = self._start // size
        if whole:
            self._wait()
            states = self._pool.states(self._layer.entry, self._pages[:whole])[:, first:end].contiguous()
            found.append(states.view(dtype).view(whole * shape[0], shape[1]))
        if self._start % size:
            found.append(self._of_slot(name, "entries")[: self._start % size // rate])
        return found

    def _before(self, name: str, part: str) -> torch.Tensor:
        """Return a part as of the last block before this pass: in the slot, or at the end of the page before."""
        if self._start % self._layer.page_size:
            return self._of_slot(name, part)
        self._wait()
        first, end, shape, dtype = self._places[name, part]
        page = self._pages[self._start // self._layer.page_size - 1][None]
        return self._pool.states(self._layer.entry, page)[0, first:end].contiguous().view(dtype).view(shape)

    def _overlap(self, name: str, block: int) -> Sequence[tuple[str, torch.Tensor]]:
        """Return the overlap of a block, new or the last one before, by its parts; nothing where blocks have none."""
        if (name, "overlap_kv") not in self._places or block < 0:
            return ()
        new = block - self._start // self._layer.kept.rate
        parts = ("overlap_kv", "overlap_gate")
        if new < 0:
            return [(part, self._before(name, part)) for part in parts]
        return [(part, rows[new]) for part, rows in zip(parts, self._overlaps[name], strict=True)]

    def _write_page(self, name: str, page: int, entries: torch.Tensor) -> None:
        numbers = self._pages[page][None]
        state = self._pool.states(self._layer.entry, numbers)
        last = (page + 1) * self._layer.page_size // self._layer.kept.rate - 1
        for part, rows in (("entries", entries), *self._overlap(name, last)):
            self._put(state[0], name, part, rows)
        self._pool.put_states(self._layer.entry, numbers, state)

    def _write_slot(self, slot: torch.Tensor, name: str, entries: torch.Tensor) -> None:
        # Parts are read before any is written: an overlap may stay as it is.
        overlap = self._overlap(name, self._end // self._layer.kept.rate - 1)
        open_kv, open_gate = self._open[name]
        for part, rows in (("entries", entries), *overlap, ("open_kv", open_kv), ("open_gate", open_gate)):
            self._put(slot, name, part, rows)

    def _of_slot(self, name: str, part: str) -> torch.Tensor:
        if self._slot is None:
            raise InvariantViolated(f"no slot has the blocks of a request at token {self._start}, within a page")
        first, end, shape, dtype = self._places[name, part]
        return self._slot[first:end].clone().view(dtype).view(shape)

    def _put(self, target: torch.Tensor, name: str, part: str, rows: torch.Tensor) -> None:
        first, end, shape, dtype = self._places[name, part]
        target[first:end].view(dtype).view(shape)[: len(rows)] = rows
