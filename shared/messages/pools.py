"""Geometry and handles of KV pools."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from shared.messages.base import Message

FLOAT8: Final = "float8_e4m3fn"
"""K and V rounded to eight bits: codes for each head of a token, with a scale behind them."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FLOAT8: 1}

SCALE_BYTES: Final = 4
"""Bytes of the scale of one head of one token, little-endian float32, at a multiple of as many bytes."""

KvDtype = Literal["auto", "fp8"]
"""Type of K and V in pages, as a setting: ``auto`` is the type in which they are computed, ``fp8`` is FLOAT8."""

Layout = Literal["layer_first", "page_first"]

HIDDEN: Final = "state"
"""The form hidden by its word on the wire, as in release 0.1.0: of chunks, pools and ways to restore. It is written
nowhere else; people read :func:`form_name`."""

ChunkForm = Literal["kv", "state", "sparse"]
"""Contents of a page or chunk: the KV of all layers, or hidden states that it is restored from (``KvGeometry``).
``sparse`` is only ever a copy on a disk of a chunk of KV, in a form that can be read in parts (``sparse_reads``): there
are no such pages, and no order names it."""


def form_name(word: str) -> str:
    """Return the usual name of a form, a tier or a way to restore, given its word on the wire."""
    return "hidden" if word == HIDDEN else word


def form_word(name: str) -> str:
    """Return the word on the wire for the usual name of a form, a tier or a way to restore."""
    return HIDDEN if name == "hidden" else name


def scale_offset(head_dim: int) -> int:
    """Return where the scale of a head of ``head_dim`` codes begins, in bytes from the first code."""
    return -(-head_dim // SCALE_BYTES) * SCALE_BYTES


class KvGeometry(Message, frozen=True):
    """Shape of one page. Two pools can exchange pages only if their geometries are equal.

    A page of KV holds K and V of every layer. A hidden page (HCache 4.1) holds what KV is restored from: nothing of the
    first ``absent`` layers, which are recomputed from tokens; the hidden states (``hidden`` values a token) that the
    next ``from_hidden`` layers begin with; and KV of the rest. It consists of units: a layer's hidden states are one,
    its K and its V are one each, in the order of the layers. All units of a geometry have one size, so hidden states
    and KV share a page only where a hidden state is as wide as K: under multi-head attention.
    """

    layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    hidden: int = 0
    absent: int = 0
    from_hidden: int = 0

    @property
    def is_hidden(self) -> bool:
        """Whether pages are hidden pages."""
        return self.absent > 0 or self.from_hidden > 0

    @property
    def form(self) -> str:
        """Layers computed from tokens / from hidden states / kept as KV, as in the setting ``hidden_form``."""
        return f"{self.absent}/{self.from_hidden}/{self.loaded_layers}"

    @property
    def as_kv(self) -> KvGeometry:
        """Geometry of the KV that is restored."""
        return KvGeometry(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            dtype=self.dtype,
        )

    @property
    def half_bytes(self) -> int:
        """Bytes of K alone (or V alone) of one page in one layer: page_size * kv_heads * head_dim."""
        return self.page_size * self.kv_heads * self.head_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of K (or V) of one token in one head of one layer; of rounded ones with their scale."""
        if self.is_rounded:
            return scale_offset(self.head_dim) + SCALE_BYTES
        return self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def is_rounded(self) -> bool:
        """Whether K and V are kept as codes of eight bits with scales."""
        return self.dtype == FLOAT8

    @property
    def loaded_layers(self) -> int:
        """Number of layers with KV in a page, which are the last ones."""
        return self.layers - self.absent - self.from_hidden

    @property
    def units(self) -> int:
        """Number of pieces of a page with a checksum each: layers of K and V or, of a hidden page, see above."""
        return self.from_hidden + 2 * self.loaded_layers if self.is_hidden else self.layers

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit."""
        if not self.is_hidden:
            return 2 * self.half_bytes
        return self.page_size * self.hidden * DTYPE_BYTES[self.dtype] if self.from_hidden else self.half_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.units * self.unit_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes that a page takes for one token."""
        return self.page_bytes // self.page_size

    def fault(self) -> str:
        """Return why no pool can have this geometry, or ""."""
        sizes = (self.layers, self.kv_heads, self.head_dim, self.page_size)
        if min(sizes) < 1 or self.dtype not in DTYPE_BYTES:
            return "a size is below one or the dtype unknown"
        if min(self.hidden, self.absent, self.from_hidden) < 0 or self.units < 1:
            return "it keeps nothing"
        if bool(self.hidden) != bool(self.from_hidden) or self.loaded_layers < 0:
            return "its layers do not add up"
        if self.is_hidden and self.is_rounded:
            return "hidden states have no scales, so they are not rounded to eight bits"
        if self.from_hidden and self.loaded_layers and self.hidden != self.kv_heads * self.head_dim:
            return "hidden states are not as wide as K, so one page cannot hold both"
        return ""


class PartSpan(Message, frozen=True):
    """The place in whole pages of some bytes of a part.

    ``planes`` planes of a page from ``first`` on correspond to those of the part from ``own_first`` on: each is
    ``rows`` equal rows, in the part's pages as in whole ones, and ``nbytes`` from byte ``offset`` of a row on are the
    part's from byte ``own_offset`` of its row on. A plane is a half of a layer: plane p is half ``p % 2`` of layer ``p
    // 2``.
    """

    first: int
    own_first: int
    planes: int
    offset: int
    own_offset: int
    nbytes: int
    rows: int

    def fits(self, whole: KvGeometry, part: KvGeometry) -> bool:
        """Return whether both places lie within pages of these geometries."""
        sides = ((self.first, self.offset, whole), (self.own_first, self.own_offset, part))
        return min(self.planes, self.nbytes, self.rows) >= 1 and all(
            min(first, offset) >= 0
            and first + self.planes <= 2 * geometry.layers
            and not geometry.half_bytes % self.rows
            and offset + self.nbytes <= geometry.half_bytes // self.rows
            for first, offset, geometry in sides
        )


class PoolPart(Message, frozen=True):
    """A part of a device pool that several processes own.

    It has ``kv_heads`` heads from ``first_head`` on of every page; or, with a ``geometry``, pages of that geometry,
    whose bytes belong where ``spans`` say. It is layer-first itself, with page p of the pool as its page p. ``name``,
    ``nbytes`` and ``ipc`` are as in ``PoolHandle``.
    """

    first_head: int
    kv_heads: int
    name: str
    nbytes: int
    ipc: bytes = b""
    geometry: KvGeometry | None = None
    spans: tuple[PartSpan, ...] = ()


class PoolHandle(Message, frozen=True):
    """The description by which another process maps a pool.

    (With ``float8_e4m3fn`` a head has ``head_bytes`` bytes in the place of ``head_dim`` values.)
    layout ``layer_first``: bytes are ``[layers, 2, pages, page_size, kv_heads, head_dim]`` (device pools).
    layout ``page_first``: ``[pages, layers, 2, page_size, kv_heads, head_dim]`` (host pools; of hidden pages
    ``[pages, units, page_size, width]``), followed, from offset ``table_offset``, by the identity table ``[pages, 16]``
    uint8 and then the checksum table ``[pages, units]`` little-endian uint64 (xxh3_64 over the bytes of that page and
    unit, K then V of a layer where it holds KV alone, seeded with the low 8 bytes of the identity).
    ``kind`` is ``shm`` (``name`` is a file in /dev/shm) or ``cuda_ipc`` (``ipc`` is the exported handle).

    A device pool with ``parts`` is that of a tensor-parallel group: its pages lie in pieces, and it has no memory of
    its own. ``geometry`` is that of whole pages, ``nbytes`` the sum of the parts. Parts by heads have all heads, some
    maybe several times; of parts by spans each byte is in at most one, and bytes in none are zero.
    """

    kind: Literal["shm", "cuda_ipc"]
    layout: Layout
    name: str
    nbytes: int
    pages: int
    geometry: KvGeometry
    table_offset: int = 0
    ipc: bytes = b""
    parts: tuple[PoolPart, ...] = ()

    def part_handles(self) -> list[tuple[tuple[PartSpan, ...], PoolHandle]]:
        """Return the parts with bytes that no earlier part has.

        Each with the spans of its bytes, and the handle by which it is mapped as a pool of its own.
        """
        found, next_head = [], 0
        for part in self.parts:
            if part.geometry is not None:
                geometry, spans = part.geometry, part.spans
            else:
                geometry = msgspec.structs.replace(self.geometry, kv_heads=part.kv_heads)
                last = part.first_head + part.kv_heads
                spans = (heads_span(self.geometry, range(part.first_head, last)),) if last > next_head else ()
                next_head = max(next_head, last)
            if spans:
                handle = msgspec.structs.replace(
                    self, name=part.name, nbytes=part.nbytes, ipc=part.ipc, geometry=geometry, parts=()
                )
                found.append((spans, handle))
        return found


def heads_span(geometry: KvGeometry, heads: range) -> PartSpan:
    """Return the span of a part that has exactly these ``heads`` of every layer of pages of ``geometry``."""
    size = geometry.head_bytes
    return PartSpan(
        first=0,
        own_first=0,
        planes=2 * geometry.layers,
        offset=heads.start * size,
        own_offset=0,
        nbytes=len(heads) * size,
        rows=geometry.page_size,
    )
