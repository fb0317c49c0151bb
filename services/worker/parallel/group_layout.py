"""How whole pages of a group are divided into parts, for models whose layers do not all keep K and V of the same heads.

Whole pages are those of a worker with one rank, by a plane map of their own (:mod:`services.worker.kv.planes`). Every
rank has a part of them, by another map: its KV heads of K and V, and all of latents and states, because each rank
computes them. *Spans* map a part's bytes to those of whole pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from services.worker.engine.probe import FoundKept
from services.worker.kv.planes import (
    HeadsKept,
    Kept,
    LatentsKept,
    LayerPlanes,
    PlaneMap,
    StateKept,
    identity_map,
    map_planes,
    rounded_map,
)
from services.worker.parallel.division import Share, kv_heads_by_layer
from shared.errors import UnsupportedModel
from shared.messages.pools import DTYPE_BYTES, KvGeometry, PartSpan, heads_span


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Pages of a group of ``ranks``: ``whole`` ones, the ``part`` of any rank, and KV heads of whole layers."""

    ranks: int
    whole: PlaneMap
    part: PlaneMap
    kv_heads: tuple[int, ...]

    @property
    def is_by_heads(self) -> bool:
        """Whether a part has the same heads of every layer, and nothing else."""
        return self.whole.is_identity

    @property
    def group_page_bytes(self) -> int:
        """Bytes of a page in all ranks together: more than in a whole page where ranks keep copies of the same."""
        return self.whole.geometry.page_bytes if self.is_by_heads else self.ranks * self.part.geometry.page_bytes

    def rounded(self) -> GroupLayout:
        """Return the same layout of K and V in eight bits. Raises UnsupportedModel as :func:`rounded_map` does."""
        return replace(self, whole=rounded_map(self.whole), part=rounded_map(self.part))

    def spans(self, rank: int) -> tuple[PartSpan, ...]:
        """Return where all bytes of a rank's part are in whole pages."""
        if self.is_by_heads:
            return (heads_span(self.whole.geometry, Share(rank, self.ranks).kv_heads(self.kv_heads[0])),)
        return tuple(self._spans(rank, range(len(self.whole.layers))))

    def read_spans(self, rank: int) -> tuple[PartSpan, ...]:
        """Return the spans of bytes that no rank before this one has."""
        if self.is_by_heads:
            return self.spans(rank) if self._is_first(rank, self.kv_heads[0]) else ()
        entries = [
            number
            for number, layer in enumerate(self.whole.layers)
            if (self._is_first(rank, self.kv_heads[number]) if isinstance(layer.kept, HeadsKept) else rank == 0)
        ]
        return tuple(self._spans(rank, entries))

    def _is_first(self, rank: int, kv_heads: int) -> bool:
        own, before = (Share(each, self.ranks).kv_heads(kv_heads) for each in (rank, max(0, rank - 1)))
        return rank == 0 or own != before

    def _spans(self, rank: int, entries: Sequence[int]) -> Iterator[PartSpan]:
        for number in entries:
            whole, part = self.whole.layers[number], self.part.layers[number]
            match whole.kept:
                case HeadsKept(dim=dim):
                    first = Share(rank, self.ranks).kv_heads(self.kv_heads[number]).start
                    yield from _of_heads(whole, part, first, dim, self.whole.geometry)
                case LatentsKept(values=values):
                    yield _span(whole.first, part.first, 1, 0, 0, values, self.whole.geometry)
                case StateKept():
                    yield from _of_states(whole, part, self.whole.geometry, self.part.geometry)
                case _:
                    pass


def group_layout(found: FoundKept, config: Any, ranks: int, page_size: int) -> GroupLayout:
    """Return the layout for a model of ``config``; a rank was found to keep ``found`` of its share.

    Where ``page_size`` is 0, one is chosen, as for a worker with one rank. Raises UnsupportedModel where a layer has
    another number of heads than the configuration says.
    """
    kv_heads = kv_heads_by_layer(config)
    kv_heads += (0,) * (len(found.kept) - len(kv_heads))  # Entries of states beside layers.
    whole = replace(
        found,
        kept=tuple(_whole(each, kv_heads[number], number, ranks, config) for number, each in enumerate(found.kept)),
    )
    planes = whole.planes(page_size)
    geometry = planes.geometry
    if planes.is_identity:
        heads = len(Share(0, ranks).kv_heads(geometry.kv_heads))
        return GroupLayout(ranks, planes, identity_map(structs.replace(geometry, kv_heads=heads)), kv_heads)
    part = map_planes(found.shared, geometry.page_size, found.dtype)
    landing = tuple(planes.last_unit(number) for number in range(len(planes.layers)))
    return GroupLayout(ranks, planes, replace(part, landing=landing), kv_heads)


def _whole(kept: Kept, kv_heads: int, layer: int, ranks: int, config: Any) -> Kept:
    if not isinstance(kept, HeadsKept):
        return kept
    mine = len(Share(0, ranks).kv_heads(kv_heads))
    if kept.heads != mine:
        raise UnsupportedModel(f"layer {layer} of {config.model_type} has {kept.heads} KV heads in a rank, not {mine}")
    return replace(kept, heads=kv_heads)


def _of_heads(
    whole: LayerPlanes, part: LayerPlanes, first_head: int, dim: int, geometry: KvGeometry
) -> Iterator[PartSpan]:
    """Yield the spans of a layer's heads from ``first_head`` on, K and V at once."""
    for there in whole.parts:
        for here in part.parts:
            start = max(there.first_head, first_head + here.first_head)
            stop = min(there.first_head + there.heads, first_head + here.first_head + here.heads)
            if start < stop:
                offset, own = (start - there.first_head) * dim, (start - first_head - here.first_head) * dim
                yield _span(there.k_plane, here.k_plane, 2, offset, own, (stop - start) * dim, geometry)


def _of_states(whole: LayerPlanes, part: LayerPlanes, geometry: KvGeometry, own: KvGeometry) -> Iterator[PartSpan]:
    """Yield the spans of a state, which is cut where planes of either map end."""
    assert isinstance(whole.kept, StateKept)
    done, sizes = 0, (geometry.half_bytes, own.half_bytes)
    while done < whole.kept.nbytes:
        step = min(whole.kept.nbytes - done, *(size - done % size for size in sizes))
        yield PartSpan(
            first=whole.first + done // sizes[0],
            own_first=part.first + done // sizes[1],
            planes=1,
            offset=done % sizes[0],
            own_offset=done % sizes[1],
            nbytes=step,
            rows=1,
        )
        done += step


def _span(first: int, own_first: int, planes: int, offset: int, own: int, values: int, of: KvGeometry) -> PartSpan:
    """Return a span of values of each token."""
    size = DTYPE_BYTES[of.dtype]
    return PartSpan(
        first=first,
        own_first=own_first,
        planes=planes,
        offset=offset * size,
        own_offset=own * size,
        nbytes=values * size,
        rows=of.page_size,
    )
