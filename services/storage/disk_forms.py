"""The forms of hidden states on the disk, by the names of its chunks.

They are announced to the cell when the storage joins. A hidden pool has one form. Chunks of other forms on the disk are
not read, which is reported as long as there are any.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.storage.backends import Directories
from services.storage.core.chunk_index import ChunkIndex
from services.storage.tier_watch import Fault
from shared.chunks import geometry_id
from shared.hidden_forms import MOST_SHAPES, forms_among
from shared.messages.pools import KvGeometry


def shapes_of(disk: Directories | None) -> bytes:
    """Return digests of the geometries of the disk's chunks, packed, 8 bytes each, the most frequent first."""
    counts = disk.shapes() if disk is not None else {}
    return b"".join(sorted(counts, key=lambda shape: (-counts[shape], shape))[:MOST_SHAPES])


class UnreadForms:
    """Forms on the disk that differ from the hidden pool's."""

    def __init__(self, pool: KvGeometry, shapes: bytes) -> None:
        """Prepare; ``pool`` is the geometry of the hidden pool; ``shapes`` is the storage's announcement."""
        width = pool.hidden or pool.kv_heads * pool.head_dim
        self._pool = pool
        self._unread = [form for form in forms_among(pool.as_kv, width, shapes) if form != pool]

    def faults(self, index: ChunkIndex) -> Iterator[Fault]:
        """Yield forms that are on the disk and are not read. ``index`` has been filled from the disk."""
        self._unread = [form for form in self._unread if index.holds(geometry_id(form))]
        for form in self._unread:
            reason = f"the disk holds hidden states of the form {form.form}, and only {self._pool.form} is read"
            yield "hidden states", reason, "--hidden-form"
