"""Which forms of hidden states the disk holds, by the names of its chunks.

The cell is told when the storage joins. A hidden pool has one form. Chunks of another that the disk holds are not read,
which is told as long as there are any.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from services.storage.backends import ChunkBackend, Listing
from services.storage.core.chunk_index import ChunkIndex
from services.storage.tier_watch import Fault
from shared.chunks import geometry_id
from shared.hidden_forms import MOST_SHAPES, forms_among
from shared.messages.pools import KvGeometry


def shapes_of(disk: ChunkBackend | None) -> bytes:
    """Digests of the geometries of the disk's chunks, packed, 8 bytes each, those of most chunks first."""
    counts: Mapping[bytes, int] = disk.shapes() if isinstance(disk, Listing) else {}
    return b"".join(sorted(counts, key=lambda shape: (-counts[shape], shape))[:MOST_SHAPES])


class UnreadForms:
    """Forms on the disk that the hidden pool is not of."""

    def __init__(self, pool: KvGeometry, shapes: bytes) -> None:
        """``pool`` is the geometry of the hidden pool; ``shapes`` is what the storage announced."""
        width = pool.hidden or pool.kv_heads * pool.head_dim
        self._pool = pool
        self._unread = [form for form in forms_among(pool.as_kv, width, shapes) if form != pool]

    def faults(self, index: ChunkIndex) -> Iterator[Fault]:
        """Yield forms that the disk holds and that are not read. ``index`` has been filled from the disk."""
        self._unread = [form for form in self._unread if index.holds(geometry_id(form))]
        for form in self._unread:
            reason = f"the disk holds hidden states of the form {form.form}, and only {self._pool.form} is read"
            yield "hidden states", reason, "--hidden-form"
