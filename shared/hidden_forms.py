"""The possible forms of a model's hidden pages (HCache 4.1.2), and those that a disk holds.

Chunks carry the digest of their geometry in their names, so a listing of names tells the forms without reading a
chunk: a model has few forms, and each is looked up by its digest.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from shared.chunks import GEOMETRY_BYTES, geometry_id
from shared.messages.pools import KvGeometry

MOST_SHAPES = 64
"""Geometries of chunks at most that a storage announces; those with most chunks come first."""


def hidden_geometry(kv: KvGeometry, absent: int, from_hidden: int, hidden: int) -> KvGeometry | None:
    """Return the geometry of hidden pages with so many layers absent and from hidden states.

    None where that is plain KV, nothing at all, or impossible. ``hidden`` is the width of the model's hidden states; 0
    where KV cannot be restored from them.
    """
    found = KvGeometry(
        layers=kv.layers,
        kv_heads=kv.kv_heads,
        head_dim=kv.head_dim,
        page_size=kv.page_size,
        dtype=kv.dtype,
        hidden=hidden if from_hidden else 0,
        absent=absent,
        from_hidden=from_hidden,
    )
    return found if found.is_hidden and not found.fault() else None


def hidden_geometries(kv: KvGeometry, hidden: int) -> Iterator[KvGeometry]:
    """Yield every geometry that hidden pages can have where KV has the geometry ``kv``.

    About layers² / 2 of them under multi-head attention.
    """
    for absent in range(kv.layers + 1):
        for from_hidden in range(kv.layers - absent + 1 if hidden else 1):
            found = hidden_geometry(kv, absent, from_hidden, hidden)
            if found is not None:
                yield found


@lru_cache(maxsize=16)
def hidden_shapes(kv: KvGeometry, hidden: int) -> dict[bytes, KvGeometry]:
    """Return the same geometries by the digests (8 bytes) in the names of chunks."""
    return {geometry_id(found): found for found in hidden_geometries(kv, hidden)}


def forms_among(kv: KvGeometry, hidden: int, shapes: bytes) -> list[KvGeometry]:
    """Return the model's forms among the digests ``shapes`` (packed, 8 bytes each), in that order."""
    known = hidden_shapes(kv, hidden)
    each = (shapes[at : at + GEOMETRY_BYTES] for at in range(0, len(shapes), GEOMETRY_BYTES))
    return [known[shape] for shape in each if shape in known]
