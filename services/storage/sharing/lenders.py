"""Reads of the host memory of other nodes' storages: connections to them, and memory for data in flight.

The scheduler names the lender and its pages, and keeps their copies there until the fetch is over. Bytes, identities
and checksums are read past the lender's processor; :mod:`loan_groups` verifies them here.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

from services.storage import measures
from services.storage.buffers import Buffers
from services.storage.core.fetch_check import FetchChunk
from services.storage.io_threads import IoThreads
from services.storage.sharing.engine import LateRead, TransferEngine
from services.storage.sharing.loan_groups import LentGroup, Link, bring_group, chunks_a_read, groups_of, slot_nbytes
from services.storage.staging import Staging
from shared import logs, subjects
from shared.bus.protocol import Bus
from shared.codec import decode, encode
from shared.errors import InvalidRequest, ThermoclineError, TransportError
from shared.memory import HostPoolView
from shared.messages.pools import KvGeometry
from shared.messages.sharing import OpenedPool, OpenPool
from shared.messages.storage_plans import Lender

MOST_LENDERS = 64
"""Lenders to which this storage keeps a connection; the least recently used one is replaced."""

OPEN_S = 5.0
"""Longest time for a lender to answer where its pool is."""

_log = logs.get_logger("storage")


class Lenders:
    """Connections to the storages of other nodes, and memory for reads from them. Owned by the event loop."""

    def __init__(
        self,
        bus: Bus,
        engine: TransferEngine,
        threads: IoThreads,
        *,
        staging_bytes: int,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read other storages' memory with ``engine``, which :meth:`close` ends, in ``threads``, which stay open.

        ``bus`` carries the calls that ask where a pool is. ``staging_bytes`` bounds the data in flight; :meth:`open`
        takes the memory. ``clock_s`` returns seconds.
        """
        self._bus = bus
        self._engine = engine
        self._threads = threads
        self._staging_bytes = staging_bytes
        self._clock_s = clock_s
        self._links: OrderedDict[tuple[str, str], Link] = OrderedDict()
        self._opening: dict[tuple[str, str], asyncio.Task[Link]] = {}
        self._geometry: KvGeometry | None = None
        self._staging: Staging | None = None
        self._buffers: Buffers | None = None
        self._refusal = ""  # Why memory could not be registered at the last try; "" if it was.
        self._registering = asyncio.Lock()
        self._chunks_a_read = 1
        self._late: list[tuple[memoryview, LateRead]] = []

    def open(self, geometry: KvGeometry) -> None:
        """Prepare to read into a pool of this geometry. Blocking. Raises ConfigError without room for one chunk of it.

        Memory that the engine refuses is offered again before the next read.
        """
        chunks = chunks_a_read(geometry, self._staging_bytes)
        self._staging = Staging(self._staging_bytes, slot_nbytes(geometry, chunks))
        self._geometry, self._buffers, self._chunks_a_read = geometry, Buffers(self._staging), chunks
        self._register()

    def groups(self, lender: Lender, chunks: list[FetchChunk]) -> list[LentGroup]:
        """Return the reads of one fetch. Raises InvalidRequest for an invalid order."""
        if self._geometry is None:
            raise InvalidRequest("there is no host pool yet")
        return groups_of(lender, chunks, self._chunks_a_read)

    async def connect(self, lender: Lender, left_s: Callable[[], float]) -> str:
        """Establish a connection within ``left_s()`` seconds; return "", or the error, which is never raised."""
        try:
            async with asyncio.timeout(max(0.001, left_s())):
                await self.link(lender)
        except (ThermoclineError, TimeoutError) as error:
            self.forget(lender)
            return str(error) or "the lender took too long"
        return ""

    async def bring(
        self, lender: Lender, group: LentGroup, host: HostPoolView, left_s: Callable[[], float]
    ) -> tuple[int, str]:
        """Bring one group to ``host`` within ``left_s()`` seconds.

        Return how many of its chunks arrived, and why not all of them did. Errors are never raised.
        """
        try:
            async with asyncio.timeout(max(0.001, left_s())):
                link = await self.link(lender)
            return await self._read(lender, link, group, host, left_s)
        except (ThermoclineError, TimeoutError) as error:
            self.forget(lender)
            return 0, str(error) or "the lender took too long"

    async def link(self, lender: Lender) -> Link:
        """Return the connection to this incarnation, made if there is none. Raises TransportError."""
        name = (lender.storage_id, lender.incarnation)
        found = self._links.get(name)
        if found is None:
            opening = self._opening.get(name)
            if opening is None:
                opening = asyncio.create_task(self._open_link(lender), name=f"open {lender.storage_id}")
                self._opening[name] = opening
                opening.add_done_callback(lambda _: self._opening.pop(name, None))
            found = await asyncio.shield(opening)
        else:
            self._links.move_to_end(name)
        return found

    async def _read(
        self, lender: Lender, link: Link, group: LentGroup, host: HostPoolView, left_s: Callable[[], float]
    ) -> tuple[int, str]:
        assert self._buffers is not None
        assert self._staging is not None
        self._take_back()
        if len(self._late) >= self._staging.buffers:
            raise TransportError("every buffer is held by a read that is late")
        async with asyncio.timeout(max(0.001, left_s())):
            buffer = await self._buffers.take(is_urgent=True)
        begun_s, timeout_s, late = self._clock_s(), max(0.001, left_s()), list[LateRead]()

        def bring() -> tuple[int, str]:
            try:
                return bring_group(self._engine, link, group, buffer, host, timeout_s)
            except LateRead as error:
                late.append(error)  # A fetch that was cut off waits for the end of this call, not for its exception.
                raise

        try:
            chunks, error = await self._threads.run(True, bring)
            nbytes = sum(group.chunk_bytes(host.geometry.page_bytes)[:chunks])
            measures.moved("lender", "read", nbytes, self._clock_s() - begun_s)
            return chunks, error
        except asyncio.CancelledError:
            if late:
                self.forget(lender)
            raise
        finally:
            if late:
                self._late.append((buffer, late[0]))
            else:
                self._buffers.give_back(buffer, is_urgent=True)

    def forget(self, lender: Lender) -> None:
        """Drop the connection after a failed read; the next read makes a new one."""
        measures.TIER_FAILURES.labels("lender").inc()
        link = self._links.pop((lender.storage_id, lender.incarnation), None)
        if link is not None:
            self._engine.disconnect(link.peer)

    def faults(self) -> Iterator[tuple[str, str, str]]:
        """Yield (what, why, flag) for each degradation of sharing."""
        self._take_back()
        if self._late:
            yield "sharing", f"{len(self._late)} buffers are held by reads that are late", "--share"
        if self._refusal:
            yield "sharing", f"memory to read into was refused: {self._refusal}", "--share"

    def close(self) -> None:
        """Drop all connections; no more is read."""
        for opening in self._opening.values():
            opening.cancel()
        self._engine.close()
        if self._buffers is not None:
            self._buffers.close()

    def _take_back(self) -> None:
        """Take back the buffers of late reads that are over by now."""
        late, self._late = self._late, []
        for buffer, read in late:
            if self._buffers is not None and read.is_over():
                self._buffers.give_back(buffer, is_urgent=True)
            else:
                self._late.append((buffer, read))

    async def _open_link(self, lender: Lender) -> Link:
        await self._register_again()
        call = OpenPool(engine=self._engine.name, incarnation=lender.incarnation)
        subject = subjects.rpc("storage", "pool", lender.storage_id)
        try:
            opened = decode(await self._bus.call(subject, encode(call), timeout_s=OPEN_S), OpenedPool)
        except ThermoclineError as error:
            raise TransportError(f"storage {lender.storage_id} does not share its pool: {error.message}") from error
        if opened.incarnation != lender.incarnation or opened.handle.geometry != self._geometry:
            raise TransportError(f"storage {lender.storage_id} has another pool than what was asked for")
        peer = await asyncio.to_thread(self._engine.connect, opened.metadata)
        link = Link(peer, opened.address, opened.handle)
        self._links[lender.storage_id, lender.incarnation] = link
        while len(self._links) > MOST_LENDERS:
            _, oldest = self._links.popitem(last=False)
            self._engine.disconnect(oldest.peer)
        _log.info("lender_connected", storage=lender.storage_id, pages=opened.handle.pages)
        return link

    async def _register_again(self) -> None:
        """Register memory that was refused before. Raises TransportError if it is refused again."""
        async with self._registering:
            if self._refusal:
                await asyncio.to_thread(self._register)
        if self._refusal:
            raise TransportError(f"memory to read into was refused: {self._refusal}")

    def _register(self) -> None:
        """Register the memory that reads write to, or note why that failed. Blocking."""
        assert self._staging is not None
        try:
            self._engine.register(self._staging.memory())
        except TransportError as error:
            self._refusal = error.message
            measures.TIER_FAILURES.labels("lender").inc()
            _log.warning("lenders_left_out", reason=error.message)
        else:
            self._refusal = ""
