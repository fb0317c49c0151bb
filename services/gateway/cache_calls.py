"""Operators' calls to a cell's cache, over the bus. The gateway's administration and ``thermocline cache`` share them.

Orders are inputs of the scheduler; a caller waits until they are folded, and reads the result. Every wait is bounded:
Unavailable is raised when the scheduler or a storage does not answer in time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shared import subjects
from shared.bus.protocol import Bus
from shared.codec import Input, decode, encode
from shared.errors import CallerError, InvalidRequest, NotFound, ThermoclineError, TransportError, Unavailable
from shared.ids import new_id
from shared.messages.cell_events import FlushCache, PinPrefix, UnpinPrefix
from shared.messages.explanations import Divergences, GetDivergences
from shared.messages.status import (
    CachedNode,
    CacheListing,
    CellStatus,
    ChunksVerified,
    GetInventory,
    GetStatus,
    Inventory,
    LeaseStatus,
    ListCache,
    PinStatus,
    VerifyChunks,
)

TIERS = ("device", "host", "disk", "remote")
FOLD_S = 10.0
DROP_S = 10.0
QUIET_S = 1.0
"""Chunks of a disk are deleted one by one; a drop counts as complete once their number has not changed for so long."""
POLL_S = 0.05
VERIFY_S = 30.0
"""A storage reads for about a second per call, but other callers' calls may be before this one."""
PAGE_NODES = 256
RETRY_AFTER_MS = 2_000


class PinRefused(CallerError):
    """The scheduler refused to pin a prefix; the message says why."""

    code, status = "pin_refused", 409


@dataclass(frozen=True, slots=True)
class Listing:
    """Nodes in the order of their creation, and all pins. ``next_after`` is 0 at the end."""

    nodes: list[CachedNode]
    pins: list[PinStatus]
    next_after: int = 0


@dataclass(frozen=True, slots=True)
class Flushed:
    """The known result of a flush: pages dropped from pools, chunks dropped from disks, and the status after it."""

    device_pages: int
    host_pages: int
    disk_chunks: int
    status: CellStatus


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """The result of one scrub call of a storage. ``next_after`` is "" at the end of its disk."""

    storage_id: str
    checked: int
    nbytes: int
    bad: tuple[str, ...] = ()
    next_after: str = ""


@dataclass(slots=True)
class CacheCalls:
    """Calls over one bus. ``clock`` is monotonic, in seconds; waits are bounded by ``fold_s`` and ``drop_s``."""

    bus: Bus
    fold_s: float = FOLD_S
    drop_s: float = DROP_S
    quiet_s: float = QUIET_S
    clock: Callable[[], float] = field(default=time.monotonic)

    async def status(self) -> CellStatus:
        """Return the scheduler's status of itself and its pools."""
        return decode(await self._call(subjects.rpc("scheduler", "status"), encode(GetStatus())), CellStatus)

    async def page(self, namespace: str = "", *, after: int = 0, limit: int = PAGE_NODES) -> CacheListing:
        """Return one page of the listing, of at most 1,024 nodes."""
        ask = ListCache(namespace=namespace, max_nodes=limit, after=after)
        return decode(await self._call(subjects.rpc("scheduler", "cache"), encode(ask)), CacheListing)

    async def listing(self, namespace: str = "", *, limit: int) -> Listing:
        """Return up to ``limit`` nodes, read page by page. The cell changes meanwhile: this is no snapshot."""
        nodes: list[CachedNode] = []
        after = 0
        while True:
            part = await self.page(namespace, after=after, limit=min(PAGE_NODES, limit - len(nodes)))
            nodes += part.nodes
            after = part.next_after
            if not after or len(nodes) >= limit:
                return Listing(nodes, list(part.pins), after)

    async def divergences(self, most: int) -> Divergences:
        """Return the divergence points that cost most prefill, among those that the active scheduler remembers."""
        ask = GetDivergences(most=most)
        return decode(await self._call(subjects.rpc("scheduler", "divergences"), encode(ask)), Divergences)

    async def pins(self) -> list[PinStatus]:
        """Return all pins, including those refused within the last minute."""
        return list((await self.page(limit=1)).pins)

    async def leases(self, namespace: str = "", *, limit: int = PAGE_NODES) -> list[LeaseStatus]:
        """Return the first cache leases of a namespace ("": of all), at most 1,024."""
        ask = ListCache(namespace=namespace, max_nodes=1, max_leases=limit)
        listing = decode(await self._call(subjects.rpc("scheduler", "cache"), encode(ask)), CacheListing)
        return list(listing.leases)

    async def pin(self, order: PinPrefix) -> PinStatus:
        """Set a pin; return its status, with what it holds, once it is folded. Raises PinRefused."""
        await self.fold(order, new_id(f"pin-{order.pin_id}"))
        found = next((pin for pin in await self.pins() if pin.pin_id == order.pin_id), None)
        if found is None:
            raise PinRefused("the cell holds its maximum of pins, or this one has expired already")
        if found.refusal:
            raise PinRefused(f"the pin was refused: {found.refusal}")
        return found

    async def unpin(self, pin_id: str) -> None:
        """Release a pin. Raises NotFound when none has this id."""
        if all(pin.pin_id != pin_id for pin in await self.pins()):
            raise NotFound(f"there is no pin {pin_id!r}", code="pin_not_found")
        await self.fold(UnpinPrefix(pin_id=pin_id), new_id(f"unpin-{pin_id}"))

    async def flush(self, tiers: Sequence[str], namespace: str = "") -> Flushed:
        """Drop unused KV from ``tiers``, and wait until the disks are done or ``drop_s`` is over.

        An object store is emptied in the background; its chunks are not counted.
        """
        before = await self.status()
        call_id = new_id("flush")
        after = await self.fold(FlushCache(call_id=call_id, tiers=tuple(tiers), namespace=namespace), call_id)
        if "disk" in tiers:
            after = await self._quiet(after)
        return Flushed(
            device_pages=_risen(before, after, "flushed_pages_device"),
            host_pages=_risen(before, after, "flushed_pages_host"),
            disk_chunks=max(0, before.chunks_in_all - after.chunks_in_all) if "disk" in tiers else 0,
            status=after,
        )

    async def inventories(self, storage_ids: Sequence[str]) -> dict[str, Inventory | None]:
        """Return each storage's inventory, or None for a storage that does not answer."""

        async def ask(storage_id: str) -> Inventory | None:
            try:
                subject = subjects.rpc("storage", "inventory", storage_id)
                return decode(await self.bus.call(subject, encode(GetInventory())), Inventory)
            except ThermoclineError:
                return None

        return dict(zip(storage_ids, await asyncio.gather(*map(ask, storage_ids)), strict=True))

    async def scrub(self, storage_id: str, *, after: str = "", max_chunks: int = 256) -> Scrubbed:
        """Have a storage check some of its chunks. Raises InvalidRequest when it makes no progress."""
        ask = VerifyChunks(after=after, max_chunks=max_chunks)
        data = await self._call(subjects.rpc("storage", "verify", storage_id), encode(ask), timeout_s=VERIFY_S)
        found = decode(data, ChunksVerified)
        if found.next_after and found.next_after == after:
            # Asked again, it would answer the same, for ever.
            raise InvalidRequest(f"storage {storage_id} does not get past chunk {after}")
        return Scrubbed(storage_id, found.checked, found.nbytes, found.bad, found.next_after)

    async def _call(self, subject: str, data: bytes, *, timeout_s: float = 2.0) -> bytes:
        try:
            return await self.bus.call(subject, data, timeout_s=timeout_s)
        except Unavailable as error:
            who = subject.removeprefix("tc.rpc.").rpartition(".")[0].replace(".", " ")
            raise Unavailable(f"the {who} does not answer: {error.message}", retry_after_ms=RETRY_AFTER_MS) from error

    async def fold(self, order: Input, message_id: str) -> CellStatus:
        """Store an order, wait until the scheduler has folded it, and return the status after it.

        Raises Unavailable.
        """
        try:
            seq = await self.bus.append(subjects.cell_input(), encode(order), message_id=message_id)
        except TransportError as error:
            raise Unavailable(
                f"the order could not be stored: {error.message}", retry_after_ms=RETRY_AFTER_MS
            ) from error
        try:
            async with asyncio.timeout(self.fold_s):
                while True:
                    status = await self.status()
                    if status.seq >= seq:
                        return status
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise Unavailable(
                f"the scheduler did not process the order within {self.fold_s:g} s; it stays queued",
                retry_after_ms=RETRY_AFTER_MS,
            ) from error

    async def _quiet(self, status: CellStatus) -> CellStatus:
        """Wait until the number of chunks on the disks is 0 or stops changing."""
        begun_s = changed_s = self.clock()
        while status.chunks_in_all and self.clock() - changed_s < self.quiet_s and self.clock() - begun_s < self.drop_s:
            await asyncio.sleep(POLL_S)
            latest = await self.status()
            if latest.chunks_in_all != status.chunks_in_all:
                changed_s = self.clock()
            status = latest
        return status


def _risen(before: CellStatus, after: CellStatus, name: str) -> int:
    return after.counters.get(name, 0) - before.counters.get(name, 0)
