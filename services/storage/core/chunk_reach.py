"""The chunks that can be used: those whose predecessors are all there, each in some form.

A saved chunk counts as usable whatever is on the disk, because its predecessors may be on a higher tier. It is **cut
off** when one of them is lost, or was not found at a start, until that is there again.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Generic, Protocol, TypeVar

from services.storage.core.chunk_links import ChunkLinks
from shared.ids import DIGEST_BYTES


class Reachable(Protocol):
    """A chunk in the index."""

    is_cut_off: bool


ChunkT = TypeVar("ChunkT", bound=Reachable)


class ChunkReach(Generic[ChunkT]):
    """Reachability of an index's chunks, by name (identity, then geometry), given those arriving and the links."""

    def __init__(self, chunks: Mapping[bytes, ChunkT], arrivals: Container[bytes], links: ChunkLinks) -> None:
        """Refer to the index's own ``chunks``, ``arrivals`` and ``links``, which the index keeps up to date.

        Only the chunks' ``is_cut_off`` is changed here.
        """
        self._chunks = chunks
        self._arrivals = arrivals
        self._links = links
        self._geometries: dict[bytes, int] = {}  # Number of chunks of each geometry.

    def count(self, geometry: bytes, change: int) -> None:
        """Change the number of a geometry's chunks by ``change``."""
        counted = self._geometries.get(geometry, 0) + change
        if counted:
            self._geometries[geometry] = counted
        else:
            self._geometries.pop(geometry, None)

    def is_reached(self, parent: bytes) -> bool:
        """Return whether a chunk that continues ``parent`` ("" is none) can be used."""
        if not parent or parent in self._arrivals:
            return True
        forms = (self._chunks.get(name) for name in self._forms(parent))
        return any(chunk is not None and not chunk.is_cut_off for chunk in forms)

    def came(self, name: bytes) -> dict[bytes, ChunkT]:
        """Note a present chunk: those behind it are no longer cut off. Return the chunks for which that changed."""
        return self._turn(name, is_cut_off=False)

    def went(self, name: bytes) -> dict[bytes, ChunkT]:
        """Note a missing chunk: those behind it are cut off, unless another form of it is there. Return them."""
        return self._turn(name, is_cut_off=True)

    def _turn(self, name: bytes, *, is_cut_off: bool) -> dict[bytes, ChunkT]:
        turned: dict[bytes, ChunkT] = {}
        waiting = [name]
        while waiting:
            above = waiting.pop()
            if is_cut_off and self.is_reached(above):
                continue
            for form in dict.fromkeys((above, *self._forms(above))):
                for child in self._links.of(form):
                    chunk = self._chunks.get(child)
                    if chunk is not None and chunk.is_cut_off != is_cut_off:
                        chunk.is_cut_off = is_cut_off
                        turned[child] = chunk
                        waiting.append(child)
        return turned

    def _forms(self, name: bytes) -> list[bytes]:
        """Return the names of a chunk in all its forms."""
        return [name[:DIGEST_BYTES] + geometry for geometry in self._geometries]
