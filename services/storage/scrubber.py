"""Verification of chunks on the disk; a bad one is quarantined and reported.

One call reads for about a second, at a bounded rate, in threads that yield to fetches; it returns where the next one
continues. So an operator can walk a large disk under load, and a call is always answered.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from functools import partial

from services.storage.backends import ChunkBackend, ChunkKey
from services.storage.backends.file_calls import LacksMeans
from services.storage.buffers import Buffers
from services.storage.chunk_format import read_header
from services.storage.chunk_reading import VerifiedRead
from services.storage.chunk_sealing import Cipher
from services.storage.disk_tier import DiskTier
from services.storage.sparse.format import read_fixed
from services.storage.sparse.layout import SparseLayout
from services.storage.sparse.verification import verify_copy
from services.storage.tier_events import TierEvents
from shared import logs
from shared.chunks import geometry_id
from shared.errors import IntegrityError, ThermoclineError, TransportError, Unavailable
from shared.messages.pools import KvGeometry
from shared.messages.status import ChunksVerified, VerifyChunks

MAX_CHUNKS = 4096
CALL_S = 1.0
"""Time of a call, which ``Bus.call`` waits for, two seconds by default."""
RATE_BYTES_PER_S = 256 * 2**20
READ_TIMEOUT_S = 10.0

Verify = Callable[[memoryview, ChunkKey], object]
"""Verifies that a blob is the chunk, or raises as ``VerifiedRead`` does."""

_log = logs.get_logger("storage")


class Scrubber:
    """Verifies chunks of the cell's geometries, in order of their paths. Owned by the event loop."""

    def __init__(
        self,
        disk: DiskTier,
        events: TierEvents,
        cipher: Cipher,
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Verify chunks of ``disk``, and report bad ones through ``events``; ``cipher`` opens those that are sealed.

        No chunk is verified before its geometry or layout is added. ``clock_s`` returns seconds.
        """
        self._disk = disk
        self._shapes: dict[bytes, tuple[Verify, Buffers]] = {}
        self._events = events
        self._cipher = cipher
        self._clock_s = clock_s
        self._turn = asyncio.Lock()  # The rate applies to all calls together.

    def add(self, geometry: KvGeometry, buffers: Buffers) -> None:
        """Check chunks of this geometry too, in these buffers."""
        self._shapes[geometry_id(geometry)] = (partial(self._verify_chunk, geometry), buffers)

    def add_sparse(self, layout: SparseLayout, buffers: Buffers) -> None:
        """Check sparse copies of this layout too, in these buffers."""
        self._shapes[layout.shape] = (partial(self._verify_copy, layout), buffers)

    async def verify(self, call: VerifyChunks) -> ChunksVerified:
        """Check chunks behind ``call.after``, at most ``call.max_chunks``.

        Raises Unavailable when a limited disk has no read rate left for it.
        """
        async with self._turn:
            started_s = self._clock_s()
            most = max(1, min(call.max_chunks, MAX_CHUNKS))
            keys = [key for shape in self._shapes for key in self._disk.index.keys(geometry=shape)]
            # In a thread, because sorting a large index would block the event loop.
            todo = await asyncio.to_thread(_smallest, keys, call.after, most + 1)
            checked = nbytes = 0
            last = ""
            bad: list[ChunkKey] = []
            reasons: list[str] = []
            for path, key in todo[:most]:
                if checked and self._clock_s() - started_s > CALL_S:
                    break
                if not await self._may_read(key):
                    if not checked:
                        raise Unavailable("fetches take all that the disk may be read with; ask again later")
                    break
                size, reason = await self._check(key)
                checked += 1
                nbytes += size
                if reason:
                    bad.append(key)
                    reasons.append(f"{key.identity.hex()}: {reason}")
                last = path
                await asyncio.sleep(max(0.0, started_s + nbytes / RATE_BYTES_PER_S - self._clock_s()))
            await self._events.dropped(bad)
            return ChunksVerified(
                checked=checked,
                nbytes=nbytes,
                bad=tuple(reasons),
                next_after=last if checked < len(todo) else "",
            )

    async def _may_read(self, key: ChunkKey) -> bool:
        """Wait for a turn among the disk's readers; return False where that takes longer than a call may."""
        try:
            async with asyncio.timeout(CALL_S):
                await self._disk.pace.wait(self._disk.index.nbytes_of(key))
        except TimeoutError:
            return False
        return True

    async def _check(self, key: ChunkKey) -> tuple[int, str]:
        """Check one chunk; return (bytes read, fault or "")."""
        if not self._disk.index.hold(key):
            return 0, ""
        verify, buffers = self._shapes[key.geometry]
        try:
            async with buffers.buffer(is_urgent=False) as buffer:
                nbytes = await self._disk.directories.run(
                    self._disk.directories.of(key),
                    lambda: self._read(self._disk.backend, key, verify, buffer),
                    is_urgent=False,
                    timeout_s=READ_TIMEOUT_S,
                    uses=(buffer,),
                )
                return nbytes, ""
        except IntegrityError as error:
            self._disk.quarantine(key, error)
            return 0, error.message
        except TransportError as error:
            await self._disk.unreadable(key, error)
            return 0, "" if isinstance(error, LacksMeans) else error.message
        except (ThermoclineError, OSError) as error:
            # It cannot be verified without its key.
            _log.info("chunk_not_verified", chunk=key.path, reason=str(error))
            return 0, ""
        finally:
            self._disk.index.release(key)

    def _read(self, backend: ChunkBackend, key: ChunkKey, verify: Verify, buffer: memoryview) -> int:
        nbytes = backend.get(key, buffer, timeout_s=READ_TIMEOUT_S)
        if not nbytes:
            raise IntegrityError("its file is gone", code="vanished")
        verify(buffer[:nbytes], key)
        return nbytes

    def _verify_chunk(self, geometry: KvGeometry, blob: memoryview, key: ChunkKey) -> None:
        VerifiedRead(geometry, self._cipher, read_header(blob).key_id).verify(blob, key)

    def _verify_copy(self, layout: SparseLayout, blob: memoryview, key: ChunkKey) -> None:
        verify_copy(blob, key, layout, cipher=self._cipher, key_id=read_fixed(blob, blob.nbytes).key_id)


def _smallest(keys: list[ChunkKey], after: str, most: int) -> list[tuple[str, ChunkKey]]:
    """Return the first ``most`` (path, key) behind ``after``, in order of their paths."""
    return heapq.nsmallest(most, ((path, key) for key in keys if (path := key.path) > after))
