"""A tier in this process's memory: for tests, and the model of what the others must do."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence

from services.storage.backends import ChunkEntry, ChunkKey, check_ranges
from shared.errors import CapacityError, IntegrityError, TransportError
from tests.one_directory import OneDirectory
from tests.remote_calls import RemoteCalls


class MemoryBackend(RemoteCalls, OneDirectory):
    """Keeps copies of blobs. ``max_bytes`` and ``is_reachable`` may be changed: so does the world, to real tiers."""

    name = "memory"

    def __init__(self, *, max_bytes: int) -> None:
        super().__init__()
        self.max_bytes = max_bytes
        self.is_reachable = True
        self.quarantined = 0
        self._lock = threading.Lock()
        self._blobs: dict[ChunkKey, bytes] = {}
        self._nbytes = 0
        self._is_closed = False

    def put(self, key: ChunkKey, blob: memoryview, *, stripe: int, timeout_s: float) -> bool:
        """See :class:`~services.storage.backends.ChunkBackend`."""
        with self._lock:
            self._check_open()
            if key in self._blobs:
                return False
            if self._nbytes + blob.nbytes > self.max_bytes:
                raise CapacityError(f"{self._nbytes} of {self.max_bytes} bytes are in use", code="disk_full")
            self._blobs[key] = bytes(blob)
            self._nbytes += blob.nbytes
            return True

    def get(self, key: ChunkKey, into: memoryview, *, timeout_s: float) -> int:
        """See :class:`~services.storage.backends.ChunkBackend`."""
        with self._lock:
            self._check_open()
            blob = self._blobs.get(key, b"")
        if len(blob) > into.nbytes:
            raise IntegrityError(f"chunk {key.path} has {len(blob)} bytes, not {into.nbytes}", code="wrong_layout")
        into[: len(blob)] = blob
        return len(blob)

    def shapes(self) -> Counter[bytes]:
        """See :class:`~services.storage.backends.Directories`."""
        with self._lock:
            return Counter(key.geometry for key in self._blobs)

    def read_ranges(
        self, key: ChunkKey, ranges: Sequence[tuple[int, int]], into: memoryview, *, first: int, timeout_s: float
    ) -> int:
        """See :class:`~services.storage.backends.Directories`."""
        check_ranges(ranges, into, first)
        with self._lock:
            self._check_open()
            blob = self._blobs.get(key, b"")
        for offset, nbytes in ranges if blob else ():
            if offset + nbytes > len(blob):
                raise IntegrityError(f"chunk {key.path} ends after {len(blob)} bytes", code="truncated")
            into[offset - first : offset - first + nbytes] = blob[offset : offset + nbytes]
        return len(blob)

    def replace(self, key: ChunkKey, blob: memoryview, *, timeout_s: float) -> bool:
        """See :class:`~services.storage.backends.Directories`."""
        with self._lock:
            self._check_open()
            if len(self._blobs.get(key, b"")) != blob.nbytes:
                return False
            self._blobs[key] = bytes(blob)
            return True

    def delete(self, key: ChunkKey, *, timeout_s: float) -> bool:
        """See :class:`~services.storage.backends.ChunkBackend`."""
        with self._lock:
            self._check_open()
            blob = self._blobs.pop(key, b"")
            self._nbytes -= len(blob)
            return bool(blob)

    def quarantine(self, key: ChunkKey, *, timeout_s: float) -> bool:
        """Drop a chunk that failed verification. False if the tier lacked it."""
        is_gone = self.delete(key, timeout_s=timeout_s)
        with self._lock:
            self.quarantined += is_gone
        return is_gone

    def entries(self, namespace: str = "") -> Iterator[ChunkEntry]:
        """See :class:`~services.storage.backends.ChunkBackend`."""
        with self._lock:
            self._check_open()
            found = [ChunkEntry(key, len(blob)) for key, blob in self._blobs.items()]
        yield from (entry for entry in found if not namespace or entry.key.namespace == namespace)

    def close(self) -> None:
        """See :class:`~services.storage.backends.ChunkBackend`."""
        with self._lock:
            self._is_closed = True
            self._blobs.clear()
            self._nbytes = 0

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportError("the tier is closed")
        if not self.is_reachable:
            raise TransportError("the tier cannot be reached")
