"""Memory that workers of this node lend for answers: mapped when it is first named, unmapped when its name is gone.

A name is checked before it is followed: only a segment of this cell's prefix, made to be lent, is ever written to. A
segment that its owner has removed is unmapped a few seconds later, so that a worker's end frees its memory.
"""

from __future__ import annotations

import asyncio

from shared.errors import InvalidRequest, TransportError
from shared.memory import SharedSegment
from shared.memory.segment import SHM_DIRECTORY
from shared.memory.segment_name import parse_segment_name
from shared.messages.sparse_reads import BUFFER_KIND

MAPPED_MOST = 32
"""Most mapped segments; more than there are workers on one node."""

LOOK_S = 5.0
"""Interval at which the names of mapped segments are checked."""


class LentBuffers:
    """The mapped segments. Owned by the event loop."""

    def __init__(self, shm_prefix: str, *, mapped_most: int = MAPPED_MOST) -> None:
        """Map only buffers of the cell whose segments begin with ``shm_prefix``.

        At most ``mapped_most`` segments stay mapped; beyond that the least recently used one is unmapped.
        """
        self._shm_prefix = shm_prefix
        self._mapped_most = mapped_most
        self._mapped: dict[str, SharedSegment] = {}  # By name, the least recently used first.
        self._mapping = asyncio.Lock()
        self._look: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Return the number of mapped segments."""
        return len(self._mapped)

    async def memory(self, name: str, offset: int, nbytes: int) -> memoryview:
        """Return bytes ``[offset, offset + nbytes)`` of a segment, for writing.

        They stay mapped as long as the view lives. Raises InvalidRequest for a segment that was not made to be lent or
        is smaller, TransportError for one that cannot be mapped.
        """
        parsed = parse_segment_name(name)
        if parsed is None or (parsed.prefix, parsed.kind) != (self._shm_prefix, BUFFER_KIND):
            raise InvalidRequest(f"{name!r} is no buffer of this cell's workers")
        if name not in self._mapped:
            async with self._mapping:
                if name not in self._mapped:
                    self._keep(await asyncio.to_thread(_attach, name))
        segment = self._mapped.pop(name)
        self._mapped[name] = segment
        if offset < 0 or nbytes < 0 or offset + nbytes > segment.nbytes:
            raise InvalidRequest(f"{nbytes} bytes at {offset} do not lie within {name} of {segment.nbytes} bytes")
        return segment.array[offset : offset + nbytes].data

    def let_go_of_removed(self) -> None:
        """Unmap segments whose names are gone."""
        for name in [name for name in self._mapped if not (SHM_DIRECTORY / name).exists()]:
            self._mapped.pop(name).close()

    def close(self) -> None:
        """Unmap all; memory that a view still holds is unmapped with the view."""
        if self._look is not None:
            self._look.cancel()
            self._look = None
        while self._mapped:
            self._mapped.popitem()[1].close()

    def _keep(self, segment: SharedSegment) -> None:
        self._mapped[segment.name] = segment
        while len(self._mapped) > self._mapped_most:
            self._mapped.pop(next(iter(self._mapped))).close()
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self.let_go_of_removed()
        loop = asyncio.get_running_loop()
        self._look = loop.call_later(LOOK_S, self._look_again) if self._mapped else None


def _attach(name: str) -> SharedSegment:
    """Map a segment. Blocking: it touches every page."""
    try:
        nbytes = (SHM_DIRECTORY / name).stat().st_size
    except OSError as error:
        raise TransportError(f"cannot find shared segment {name}: {error.strerror}") from error
    return SharedSegment.attach(name, nbytes)
