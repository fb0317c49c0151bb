"""A step in which some requests attend over chosen tokens of their prefix, and the others over all of theirs.

It attaches where :class:`~services.worker.engine.paged_step.PagedStep` does, to the one registered attention function:
new K and V are written to the pool as ever, and only what is attended over differs. A request with an
:class:`~services.worker.importance.important_prefix.ImportantPrefix` has pages for what lies before and behind it:
page-table entries that lie within the prefix are never looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from services.worker.engine.attention import AttentionCall
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.paged_step import AttentionBackend, PagedStep
from services.worker.importance.identification import SINKS_OR_CHUNKS, Rows
from services.worker.importance.kept_kv import KeptKv
from services.worker.importance.prefix_source import token_slots
from services.worker.importance.selection_failed import SelectionFailed
from services.worker.importance.sparse_attention import attend_selected
from services.worker.kv.device_pool import DevicePool
from shared.errors import InvariantViolated


class StepPrefix(Protocol):
    """One request's prefix, as a step attends over it.

    It is an :class:`~services.worker.importance.important_prefix.ImportantPrefix`, or one rank's share of it.
    """

    @property
    def start(self) -> int:
        """First token of the prefix."""

    @property
    def end(self) -> int:
        """Token behind the last one of the prefix."""

    @property
    def name(self) -> str:
        """The name of the prefix in errors."""

    @property
    def positions(self) -> Mapping[int, torch.Tensor]:
        """Chosen tokens by layer: int64 ``[kv_heads, k]``, or ``[1, k]`` where all heads have the same."""

    @property
    def kept(self) -> KeptKv:
        """K and V of the chosen tokens."""

    def choose(self, layer: int, rows: Rows, keys: torch.Tensor, at: torch.Tensor) -> None:
        """Choose and load what ``layer`` attends over; keys ``[kv_heads, n, head_dim]`` at positions ``at``.

        In a group it may return without a choice, because all ranks have to end the pass: what the prefix's rows give
        is not used then.
        """


class ImportanceStep(PagedStep):
    """One step. ``prefixes`` are by the number of the segment in ``meta``; the rest goes to ``backend``.

    A pass over it raises SelectionFailed when a prefix cannot be chosen or read. It may then be repeated: what layers
    have chosen already stays chosen.
    """

    def __init__(
        self,
        meta: ForwardMeta,
        pool: DevicePool,
        backend: AttentionBackend,
        prefixes: Mapping[int, StepPrefix],
    ) -> None:
        """Prepare. Raises InvariantViolated where a segment begins within its prefix."""
        super().__init__(meta, pool, _ImportanceAttention(pool, backend, prefixes))


@dataclass(frozen=True, slots=True)
class _SparseSegment:
    """Rows ``[row_start, row_end)`` of the batch. Where tokens before and behind the prefix are in the pool: int64."""

    prefix: StepPrefix
    context: int
    row_start: int
    row_end: int
    before: torch.Tensor
    behind: torch.Tensor


class _ImportanceAttention:
    """The backend of an :class:`ImportanceStep`."""

    def __init__(self, pool: DevicePool, backend: AttentionBackend, prefixes: Mapping[int, StepPrefix]) -> None:
        self._pool, self._backend, self._prefixes = pool, backend, prefixes

    def for_step(self, meta: ForwardMeta) -> Callable[[AttentionCall], torch.Tensor]:
        sparse: list[_SparseSegment] = []
        plain: list[Segment] = []
        plain_rows: list[torch.Tensor] = []
        row = 0
        for number, segment in enumerate(meta.segments):
            end = row + segment.rows
            if number in self._prefixes:
                sparse.append(self._sparse(self._prefixes[number], segment, row, end, meta.page_size))
            else:
                plain.append(segment)
                plain_rows.append(torch.arange(row, end))
            row = end
        if not plain:
            return lambda call: self._attend(call, sparse)
        rows = torch.cat(plain_rows).to(self._pool.device)
        others = self._backend.for_step(ForwardMeta.build(plain, meta.page_size, self._pool.device))

        def attend(call: AttentionCall) -> torch.Tensor:
            output = self._attend(call, sparse)
            output[rows] = others(_restricted(call, rows))
            return output

        return attend

    def _sparse(self, prefix: StepPrefix, segment: Segment, row: int, end: int, page_size: int) -> _SparseSegment:
        if segment.context < prefix.end:
            raise InvariantViolated(f"rows from {segment.context} on lie before or within a prefix up to {prefix.end}")

        def slots(start: int, end: int) -> torch.Tensor:
            return torch.from_numpy(token_slots(segment.pages, page_size, start, end)).to(self._pool.device)

        before, behind = slots(0, prefix.start), slots(prefix.end, segment.length)
        return _SparseSegment(prefix, segment.context, row, end, before, behind)

    def _attend(self, call: AttentionCall, segments: list[_SparseSegment]) -> torch.Tensor:
        _, heads, count, head_dim = call.query.shape
        output = call.query.new_empty(count, heads, head_dim)
        is_served = call.sinks is None and call.chunk is None
        unserved = "" if is_served else SINKS_OR_CHUNKS
        for segment in segments:
            query = call.query[0, :, segment.row_start : segment.row_end]
            rows = Rows(query, segment.context, call.scaling, call.window, call.softcap, unserved)
            output[segment.row_start : segment.row_end] = self._attend_segment(call.layer, rows, segment)
        return output

    def _attend_segment(self, layer: int, rows: Rows, segment: _SparseSegment) -> torch.Tensor:
        prefix, first = segment.prefix, rows.first_visible()
        # What no row sees any more is left out, as the engine does it behind a window.
        before = segment.before[min(first, prefix.start) :]
        behind = segment.behind[max(0, first - prefix.end) :]
        ends = prefix.end + len(segment.behind)
        device = self._pool.device
        at_before = torch.arange(prefix.start - len(before), prefix.start, device=device)
        at_behind = torch.arange(ends - len(behind), ends, device=device)
        if layer not in prefix.positions:
            try:
                self._choose(layer, rows, prefix, torch.cat([before, behind]), torch.cat([at_before, at_behind]))
            except Exception as error:  # Whatever it is, it is one request's misfortune.
                raise SelectionFailed(prefix.name) from error
        chosen = prefix.positions.get(layer)
        if chosen is None:  # Only in a group, whose ranks end a pass together though its results are not used.
            return rows.query.new_zeros(rows.query.shape).transpose(0, 1)
        around = (at_before.expand(len(chosen), -1), chosen, at_behind.expand(len(chosen), -1))
        kv = prefix.kept.between(layer, self._pool, before, behind)
        return attend_selected(rows, kv, torch.cat(around, dim=1))

    def _choose(self, layer: int, rows: Rows, prefix: StepPrefix, slots: torch.Tensor, at: torch.Tensor) -> None:
        keys = self._pool.k(layer).flatten(0, 1).index_select(0, slots).transpose(0, 1)
        prefix.choose(layer, rows, keys, at)


def _restricted(call: AttentionCall, rows: torch.Tensor) -> AttentionCall:
    """Return the call for some rows of the batch, int64."""
    query, key, value = (tensor.index_select(2, rows) for tensor in (call.query, call.key, call.value))
    return replace(call, query=query, key=key, value=value)
