"""The scheduler and a storage as operators meet them: orders are folded, calls are answered, all by a script."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from shared import subjects
from shared.bus.protocol import Bus, Subscription
from shared.codec import decode, decode_input, encode
from shared.messages.base import pack_int32
from shared.messages.cell_events import FlushCache, PinPrefix, UnpinPrefix
from shared.messages.status import (
    CachedNode,
    CacheListing,
    ChunksVerified,
    GetInventory,
    Inventory,
    LeaseStatus,
    ListCache,
    PinStatus,
    PoolStatus,
    VerifyChunks,
)
from tests.unit.gateway.scripted_cell import cell_status

NAMESPACE = "ab" * 16
MODEL = "0123456789abcdef0123456789abcdef"


def node(number: int, parent: int = 0, *, namespace: str = NAMESPACE, **changes: object) -> CachedNode:
    """A node of 16 tokens, the ids of which are its number and more."""
    fields: dict[str, object] = {
        "id": number, "parent": parent, "namespace": namespace, "depth": 16 * parent, "tokens": 16, "hits": 2,
        "head": pack_int32(range(number, number + 3)), "device": {"worker-0": 1}, "host": {"storage-0": 1},
    }  # fmt: skip
    return CachedNode(**{**fields, **changes})  # type: ignore[arg-type]


@dataclass
class ScriptedCache:
    """``holds`` are the tokens that a pin finds in host memory, ``refusal`` why it gets none."""

    bus: Bus
    storages: tuple[str, ...] = ("storage-0",)
    nodes: list[CachedNode] = field(default_factory=list)
    disk: list[str] = field(default_factory=list)  # Names of chunks, in order.
    bad: dict[str, str] = field(default_factory=dict)
    holds: int = 32
    refusal: str = ""
    forgets_pins: bool = False
    folds: bool = True
    pins: dict[str, PinStatus] = field(default_factory=dict)
    leases: list[LeaseStatus] = field(default_factory=list)
    orders: list[object] = field(default_factory=list)
    calls: list[ListCache | VerifyChunks] = field(default_factory=list)
    seq: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    _serving: list[Subscription] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ScriptedCache:
        served = {
            subjects.rpc("scheduler", "status"): self._status,
            subjects.rpc("scheduler", "cache"): self._listing,
        }
        for storage in self.storages:
            served[subjects.rpc("storage", "inventory", storage)] = self._inventory
            served[subjects.rpc("storage", "verify", storage)] = self._verify
        self._serving = [await self.bus.serve(subject, handler) for subject, handler in served.items()]
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for serving in self._serving:
            await serving.close()

    async def _follow(self) -> None:
        async for message in self.bus.follow(subjects.INPUTS_STREAM):
            if not self.folds:
                continue
            order = decode_input(message.data)
            if isinstance(order, PinPrefix):
                self._pin(order)
            elif isinstance(order, UnpinPrefix):
                self.pins.pop(order.pin_id, None)
            elif isinstance(order, FlushCache):
                self.counters |= {"flushed_pages_device": 3, "flushed_pages_host": 2}
                if "disk" in order.tiers:
                    self.disk.clear()
            if isinstance(order, PinPrefix | UnpinPrefix | FlushCache):
                self.orders.append(order)
            self.seq = message.seq

    def _pin(self, order: PinPrefix) -> None:
        if self.forgets_pins:
            return
        tokens = len(order.tokens) // 4
        held = 0 if self.refusal else min(self.holds, tokens)
        self.pins[order.pin_id] = PinStatus(
            pin_id=order.pin_id,
            namespace=order.namespace,
            tokens=tokens,
            held_tokens=held,
            pages=held // 16,
            expires_ns=10**18 + order.ttl_ms * 10**6,
            refusal=self.refusal,
        )

    async def _status(self, data: bytes) -> bytes:
        pool = PoolStatus(owner="worker-0", tier="device", total=64, free=60, cached=4, leased=0)
        counters = {"hit_tokens_device": 96, **self.counters}
        return encode(
            cell_status(
                seq=self.seq, model=MODEL, storages=self.storages, pools=(pool,), nodes=len(self.nodes),
                counters=counters, pins=len(self.pins), chunks=len(self.disk),
            )
        )  # fmt: skip

    async def _listing(self, data: bytes) -> bytes:
        call = decode(data, ListCache)
        self.calls.append(call)
        wanted = [node for node in self.nodes if node.id > call.after and call.namespace in ("", node.namespace)]
        some = wanted[: call.max_nodes]
        return encode(
            CacheListing(
                nodes=tuple(some),
                pins=tuple(self.pins.values()),
                leases=tuple(each for each in self.leases if call.namespace in ("", each.namespace))[: call.max_leases],
                next_after=some[-1].id if len(wanted) > len(some) else 0,
            )
        )

    async def _inventory(self, data: bytes) -> bytes:
        decode(data, GetInventory)
        counters = {"disk_chunks": len(self.disk), "disk_bytes": 100, "disk_quota_bytes": 2048, "chunks_quarantined": 1}
        return encode(Inventory(id="storage-0", incarnation="one", last_plan=1, counters=counters))

    async def _verify(self, data: bytes) -> bytes:
        call = decode(data, VerifyChunks)
        self.calls.append(call)
        behind = [chunk for chunk in self.disk if chunk > call.after]
        some = behind[: call.max_chunks]
        return encode(
            ChunksVerified(
                checked=len(some),
                nbytes=1024 * len(some),
                bad=tuple(f"{chunk}: {self.bad[chunk]}" for chunk in some if chunk in self.bad),
                next_after=some[-1] if len(behind) > len(some) else "",
            )
        )
