"""The planes of a page that each layer of a model owns, and their contents.

A page is a list of equal planes: plane p is half ``p % 2`` of unit ``p // 2`` of its geometry
(:class:`~shared.messages.pools.KvGeometry`), ``page_size`` rows of ``kv_heads * head_dim`` values. Code that moves,
checks and keeps pages knows nothing else. The contents of a plane are the worker's business, and this map says them.
Where all layers keep K and V of the same heads it is the identity: layer i owns planes ``2i`` (K) and ``2i + 1`` (V).

The map follows from what each layer keeps, the page size and the data type alone. It is a part of the meaning of kept
bytes, so a change of it is a change of numerics (``shared/numerics.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from shared.errors import UnsupportedModel
from shared.messages.pools import DTYPE_BYTES, FLOAT8, KvGeometry

_STATE_PLANES = 16
"""Most planes of a state for which widths of planes that fit it exactly are tried."""


@dataclass(frozen=True, slots=True)
class HeadsKept:
    """K and V of every token: ``heads`` KV heads of ``k_dim`` and ``v_dim`` values."""

    heads: int
    k_dim: int
    v_dim: int

    @property
    def dim(self) -> int:
        """Values that a head takes in a plane; the narrower of K and V is padded with zeros."""
        return max(self.k_dim, self.v_dim)

    @property
    def values(self) -> int:
        """Values of one token, without padding."""
        return self.heads * (self.k_dim + self.v_dim)


@dataclass(frozen=True, slots=True)
class LatentsKept:
    """Latents of multi-head latent attention for every token (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Normalised compressed KV of ``rank`` values, then the part of the key that all heads share, rotated, of ``rope``
    values. Behind them ``index`` values, the key by which an indexer chooses what is attended to (DeepSeek-V3.2,
    arXiv 2512.02556, section 2.1); 0 where there is none.
    """

    rank: int
    rope: int
    index: int = 0

    @property
    def values(self) -> int:
        """Values of one token."""
        return self.rank + self.rope + self.index


@dataclass(frozen=True, slots=True)
class RowsKept:
    """K and V of all heads of every token in one row, of a model that attends by code of its own.

    K of ``heads`` heads of ``k_dim`` values, V of as many of ``v_dim`` (0 where V is K), and behind them ``index``
    values, the key of an indexer as in :class:`LatentsKept`; 0 where there is none.
    """

    heads: int
    k_dim: int
    v_dim: int
    index: int = 0

    @property
    def values(self) -> int:
        """Values of one token."""
        return self.heads * (self.k_dim + self.v_dim) + self.index


@dataclass(frozen=True, slots=True)
class StateKept:
    """The state of a layer that has no K and V, ``nbytes`` raw bytes, as of the last computed token of the page."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class SharedKept:
    """Nothing of its own: the layer attends to the KV of layer ``source``."""

    source: int


@dataclass(frozen=True, slots=True)
class NothingKept:
    """Nothing, of a layer without attention or state."""


Kept = HeadsKept | LatentsKept | RowsKept | StateKept | SharedKept | NothingKept


@dataclass(frozen=True, slots=True)
class Part:
    """KV heads ``[first_head, first_head + heads)`` of a layer.

    K is in plane ``k_plane`` and V in ``v_plane``, ``dim`` values a head. Attention treats the parts of a layer as
    layers of their own, ``number`` by ``number``. Latents and rows are one part of one head, whose K and V are in the
    same plane.
    """

    number: int
    k_plane: int
    v_plane: int
    first_head: int
    heads: int
    dim: int


@dataclass(frozen=True, slots=True)
class LayerPlanes:
    """What a layer keeps, and its ``planes`` planes from ``first`` on (none for a layer without a plane of its own).

    K and V alternate: the parts of a layer with heads have two planes each.
    """

    kept: Kept
    first: int
    planes: int
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True)
class PlaneMap:
    """The planes of every layer of a model. Make one with :func:`map_planes` or :func:`identity_map`.

    ``landing`` is for a part of whole pages, which are loaded by units of their own: for each layer the last of these.
    """

    geometry: KvGeometry
    layers: tuple[LayerPlanes, ...]
    landing: tuple[int, ...] = ()

    @cached_property
    def is_identity(self) -> bool:
        """Whether layer i keeps K in plane 2i and V in plane 2i + 1, all layers alike and nothing padded."""
        geometry = self.geometry
        alike = HeadsKept(geometry.kv_heads, geometry.head_dim, geometry.head_dim)
        return (
            not self.landing
            and len(self.layers) == geometry.layers
            and all(layer.kept == alike for layer in self.layers)
        )

    @property
    def contents(self) -> str:
        """Contents of pages, for messages."""
        heads = {layer.kept for layer in self.layers if isinstance(layer.kept, HeadsKept)}
        kv = (
            "K and V"
            if len(heads) == 1 and all(each.k_dim == each.v_dim for each in heads)
            else "K and V of different sizes"
        )
        kinds = {HeadsKept: kv, RowsKept: "rows of K and V", LatentsKept: "latents", StateKept: "states"}
        found = [words for kind, words in kinds.items() if any(isinstance(each.kept, kind) for each in self.layers)]
        if any(isinstance(each.kept, LatentsKept | RowsKept) and each.kept.index for each in self.layers):
            found.append("index keys")
        return " and ".join(found)

    @property
    def width(self) -> int:
        """Values in a row of a plane."""
        return self.geometry.kv_heads * self.geometry.head_dim

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """All parts, by their numbers."""
        return tuple(part for layer in self.layers for part in layer.parts)

    def parts_of(self, layer: int) -> tuple[Part, ...]:
        """Return the parts that a layer attends to; for a layer that shares, the parts of its source."""
        kept = self.layers[layer].kept
        return self.layers[kept.source if isinstance(kept, SharedKept) else layer].parts

    def last_unit(self, layer: int) -> int:
        """Return the last unit with a plane that ``layer`` reads; -1 for a layer that reads none.

        Once it and those before have landed, the layer may be computed.
        """
        if self.landing:
            return self.landing[layer]
        kept = self.layers[layer].kept
        owned = self.layers[kept.source if isinstance(kept, SharedKept) else layer]
        return (owned.first + owned.planes - 1) // 2 if owned.planes else -1

    @property
    def content_bytes(self) -> int:
        """Bytes of a full page that are used: page_size times the values of every layer, and every state once."""
        if self.geometry.is_rounded:
            return self.geometry.page_bytes  # Scales count as content, too.
        of_tokens = HeadsKept | LatentsKept | RowsKept
        values = sum(layer.kept.values for layer in self.layers if isinstance(layer.kept, of_tokens))
        states = sum(layer.kept.nbytes for layer in self.layers if isinstance(layer.kept, StateKept))
        return self.geometry.page_size * values * DTYPE_BYTES[self.geometry.dtype] + states

    @property
    def padding_bytes(self) -> int:
        """Bytes of a page that are unused: padding, and a last plane that no layer owns."""
        return self.geometry.page_bytes - self.content_bytes


def latent_ranks(planes: PlaneMap) -> dict[int, int]:
    """Return the ranks of the parts that are latents, by their numbers."""
    return {
        part.number: layer.kept.rank
        for layer in planes.layers
        if isinstance(layer.kept, LatentsKept)
        for part in layer.parts
    }


def identity_map(geometry: KvGeometry) -> PlaneMap:
    """Return the map of a model whose layers all keep K and V of the same heads."""
    kept = HeadsKept(geometry.kv_heads, geometry.head_dim, geometry.head_dim)
    layers = (
        LayerPlanes(
            kept, 2 * layer, 2, (Part(layer, 2 * layer, 2 * layer + 1, 0, geometry.kv_heads, geometry.head_dim),)
        )
        for layer in range(geometry.layers)
    )
    return PlaneMap(geometry, tuple(layers))


def rounded_map(planes: PlaneMap) -> PlaneMap:
    """Return the map of the same model where K and V are rounded to eight bits.

    Raises UnsupportedModel where pages hold something else than K and V of the same heads in all layers.
    """
    if not planes.is_identity:
        raise UnsupportedModel(
            f"--kv-dtype fp8: its pages hold {planes.contents}, and only K and V of the same heads in all layers are "
            "rounded"
        )
    return identity_map(msgspec.structs.replace(planes.geometry, dtype=FLOAT8))


def map_planes(kept: Sequence[Kept], page_size: int, dtype: str) -> PlaneMap:
    """Return planes for layers that keep ``kept``, of the width that wastes the fewest bytes of a page.

    Among equal widths the widest is taken. Raises UnsupportedModel where no layer keeps anything.
    """
    first = kept[0] if kept else NothingKept()
    if isinstance(first, HeadsKept) and first.k_dim == first.v_dim and all(each == first for each in kept):
        return identity_map(
            KvGeometry(layers=len(kept), kv_heads=first.heads, head_dim=first.k_dim, page_size=page_size, dtype=dtype)
        )
    row_bytes = page_size * DTYPE_BYTES[dtype]  # Bytes of a plane that is one value wide.
    least = max(map(_least_width, kept), default=0)
    widths = sorted({width for each in kept for width in _widths(each, row_bytes) if width >= least})
    if not widths:
        raise UnsupportedModel("no layer keeps anything of a token, so there is nothing to cache")
    width = min(reversed(widths), key=lambda each: each * _even(sum(_planes(one, each, row_bytes) for one in kept)))
    layers = tuple(_lay_out(kept, width, row_bytes))
    units = _even(sum(layer.planes for layer in layers)) // 2
    return PlaneMap(KvGeometry(layers=units, kv_heads=1, head_dim=width, page_size=page_size, dtype=dtype), layers)


def _lay_out(kept: Sequence[Kept], width: int, row_bytes: int) -> Iterator[LayerPlanes]:
    plane = number = 0
    for each in kept:
        planes, parts = _planes(each, width, row_bytes), []
        if isinstance(each, LatentsKept | RowsKept):
            parts.append(Part(number, plane, plane, 0, 1, each.values))
        elif isinstance(each, HeadsKept):
            step = width // each.dim
            for index, head in enumerate(range(0, each.heads, step)):
                k_plane = plane + 2 * index
                heads = min(step, each.heads - head)
                parts.append(Part(number + index, k_plane, k_plane + 1, head, heads, each.dim))
        yield LayerPlanes(each, plane, planes, tuple(parts))
        plane, number = plane + planes, number + len(parts)


def _planes(kept: Kept, width: int, row_bytes: int) -> int:
    """Return the number of planes of this width that a layer needs. No head lies in two."""
    match kept:
        case HeadsKept():
            return 2 * -(-kept.heads // (width // kept.dim))
        case LatentsKept() | RowsKept():
            return 1
        case StateKept():
            return -(-kept.nbytes // (width * row_bytes))
        case _:
            return 0


def _least_width(kept: Kept) -> int:
    match kept:
        case HeadsKept():
            return kept.dim
        case LatentsKept() | RowsKept():
            return kept.values
        case _:
            return 0


def _widths(kept: Kept, row_bytes: int) -> Iterator[int]:
    """Yield widths of planes that a layer would fill completely."""
    match kept:
        case HeadsKept():
            yield from (heads * kept.dim for heads in range(1, kept.heads + 1))
        case LatentsKept() | RowsKept():
            yield kept.values
        case StateKept():
            yield from (max(1, -(-kept.nbytes // (planes * row_bytes))) for planes in range(1, _STATE_PLANES + 1))
        case _:
            return


def _even(planes: int) -> int:
    """Return the number of planes rounded up to whole units."""
    return planes + planes % 2
