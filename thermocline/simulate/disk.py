"""A virtual disk of a node: its contents follow the real disk's rules, reads and writes take modelled time.

It does one operation after another, at its profile's bandwidth, and each order waits once for its latency. A fetch is
read in pieces, so that several share the disk and the chunks that have arrived can be used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.storage.backends import ChunkKey
from services.storage.core.chunk_index import Arrival, ChunkIndex
from shared.chunks import chunk_bytes, chunk_names, chunk_pages, chunk_tokens, geometry_id
from shared.ids import split_digests
from shared.messages import storage_plans as plans
from shared.messages.pools import KvGeometry
from thermocline.simulate.events import NS_PER_S, EventQueue, to_ns
from thermocline.simulate.profiles import HardwareProfile

PIECE_CHUNKS = 16
"""Chunks that are read before the scheduler is notified and other operations get their turn."""


@dataclass(slots=True)
class Fetched:
    """Progress of a fetch. ``missing`` is the identity of the first chunk that is not on the disk, or empty."""

    chunks: int
    is_over: bool
    missing: bytes
    nbytes: int
    seconds: float


@dataclass(slots=True)
class _Fetch:
    order: plans.FetchChunks
    keys: list[ChunkKey]
    began_ns: int
    tell: Callable[[Fetched], None]
    done: int = 0
    is_cancelled: bool = False


class VirtualDisk:
    """The disk of one node, for chunks of KV. Chunk headers are not modelled."""

    def __init__(self, tokens: int, geometry: KvGeometry, hardware: HardwareProfile, queue: EventQueue) -> None:
        """Make room for ``tokens`` tokens of KV; with 0 there is no disk, and no chunk is ever kept.

        Latency and bandwidth are those of ``hardware.disk``; the end of each operation is an event of ``queue``.
        """
        self.nbytes = tokens * geometry.token_bytes
        self.index = ChunkIndex(self.nbytes)
        self.busy_ns = 0
        self._queue = queue
        self._geometry, self._geometry_id = geometry, geometry_id(geometry)
        self._latency_ns = to_ns(hardware.disk.latency_us / 1e6)
        self._chunk_ns = to_ns(chunk_bytes(geometry) / (hardware.disk.bandwidth_gb_s * 1e9))
        self._free_ns = 0
        self._fetches: dict[int, _Fetch] = {}

    def save(self, order: plans.SaveChunks, tell: Callable[[bytes, bytes, int], None]) -> None:
        """Write the missing chunks; then call ``tell(chunks on the disk, dropped chunks, bytes written)``."""
        keys, now_s = self._keys(order.namespace, order.identities), self._now_s
        first = order.depth // chunk_tokens(self._geometry.page_size)
        parent = ChunkKey(order.namespace, self._geometry_id, order.parent) if first else None
        written: list[ChunkKey] = []
        dropped = b"".join(gone.identity for gone in self._own(order))
        for place, key in enumerate(keys, first):
            if key not in self.index and not self.index.is_arriving(key):
                room = self.index.reserve(Arrival(key, chunk_bytes(self._geometry), place, parent, order.value), now_s)
                dropped += b"".join(gone.identity for gone in room.victims)
                if room.is_granted:
                    written.append(key)
            parent = key

        def done(_: None) -> None:
            for key in written:
                self.index.add(key, self._now_s)
            durable = b"".join(key.identity for key in keys if key in self.index)
            tell(durable, dropped, len(written) * chunk_bytes(self._geometry))

        self._work(self._latency_ns + len(written) * self._chunk_ns, done)

    def fetch(self, order: plans.FetchChunks, tell: Callable[[Fetched], None]) -> None:
        """Read a run of chunks piece by piece, up to the first missing one; call ``tell`` after each piece."""
        keys = self._keys(order.namespace, order.identities)
        first = order.depth // chunk_tokens(self._geometry.page_size)
        self.index.touch(keys, first, None, self._now_s)
        fetch = _Fetch(order, keys, self._queue.now_ns, tell)
        self._fetches[order.fetch_id] = fetch
        self._read(fetch, self._latency_ns)

    def cancel(self, fetch_id: int) -> None:
        """End a fetch after the piece that is being read; do nothing for an unknown id."""
        if fetch_id in self._fetches:
            self._fetches[fetch_id].is_cancelled = True

    def pin(self, order: plans.PinChunks) -> None:
        """Pin or unpin chunks."""
        change = self.index.pin if order.is_pinned else self.index.unpin
        for name in split_digests(order.chunks):
            change(name, self._geometry_id)

    def drop(self, namespace: str) -> bytes:
        """Drop the chunks of a namespace, or with "" all; return their concatenated identities."""
        gone = self.index.keys(namespace=namespace)
        for key in gone:
            self.index.forget(key)
        return b"".join(key.identity for key in gone)

    def _own(self, order: plans.SaveChunks) -> tuple[ChunkKey, ...]:
        """Return the chunks that are dropped to keep their owner's quota."""
        if order.quota is None:
            return ()
        return self.index.own(order.namespace, order.quota.owner, order.quota.disk_bytes)

    def _read(self, fetch: _Fetch, latency_ns: int = 0) -> None:
        end = fetch.done
        most = min(len(fetch.keys), end + PIECE_CHUNKS)
        while end < most and not fetch.is_cancelled and self.index.hold(fetch.keys[end]):
            end += 1
        piece = fetch.keys[fetch.done : end]

        def done(_: None) -> None:
            for key in piece:
                self.index.release(key)
            fetch.done = end
            is_missing = end < most and not fetch.is_cancelled
            is_over = end < most or end == len(fetch.keys) or fetch.is_cancelled
            missing = fetch.keys[end].identity if is_missing else b""
            if is_over:
                del self._fetches[fetch.order.fetch_id]
            seconds = (self._queue.now_ns - fetch.began_ns) / NS_PER_S
            fetch.tell(Fetched(end, is_over, missing, end * chunk_bytes(self._geometry), seconds))
            if not is_over:
                self._read(fetch)

        self._work(latency_ns + len(piece) * self._chunk_ns, done)

    def _work(self, duration_ns: int, done: Callable[[None], None]) -> None:
        """Occupy the disk for ``duration_ns`` after its earlier work, then call ``done``."""
        start_ns = max(self._queue.now_ns, self._free_ns)
        self._free_ns = start_ns + duration_ns
        self.busy_ns += duration_ns
        self._queue.at(self._free_ns, done)

    def _keys(self, namespace: str, identities: bytes) -> list[ChunkKey]:
        names = chunk_names(identities, chunk_pages(self._geometry.page_size))
        return [ChunkKey(namespace, self._geometry_id, name) for name in names]

    @property
    def _now_s(self) -> float:
        return self._queue.now_ns / NS_PER_S
