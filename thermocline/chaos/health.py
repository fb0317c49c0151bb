"""Polls from outside, a few times a second, whether each part of the cell serves."""

from __future__ import annotations

import asyncio
import time

import httpx

from shared import subjects
from shared.bus.nats_bus import connect
from shared.bus.protocol import Bus
from shared.codec import decode, encode
from shared.errors import ThermoclineError
from shared.messages.status import CellStatus, GetInventory, GetStatus, Inventory
from thermocline.chaos.plan import group_of

_POLL_S = 0.15
_CALL_S = 2.0


class Health:
    """Results of polls between :meth:`start` and :meth:`close`. Times are when polls began (``time.monotonic``)."""

    def __init__(self, base_url: str, nats_url: str) -> None:
        """Take the addresses to poll: the gateway's, and the broker's, through which the scheduler is asked."""
        self.status: CellStatus | None = None
        self.status_s = 0.0
        self.ready_s = 0.0
        self._base_url = base_url
        self._nats_url = nats_url
        self._bus: Bus | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._polled = asyncio.Condition()

    async def start(self) -> None:
        """Connect and poll from now on. Raises Unavailable."""
        self._bus = await connect((self._nats_url,), "chaos")
        self._tasks = [asyncio.create_task(self._poll_status()), asyncio.create_task(self._poll_gateway())]

    async def close(self) -> None:
        """Stop polling and disconnect from the broker."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._bus is not None:
            await self._bus.close()

    async def inventory(self, service: str, name: str) -> Inventory:
        """Return the inventory that a worker or storage reports. Raises Unavailable."""
        assert self._bus is not None
        data = await self._bus.call(subjects.rpc(service, "inventory", name), encode(GetInventory()), timeout_s=_CALL_S)
        return decode(data, Inventory)

    async def until_serving(self, target: str, since_s: float, *, not_incarnation: str = "") -> None:
        """Wait until a poll that began after ``since_s`` finds ``target`` serving; the caller bounds the wait.

        A worker or storage serves when the scheduler lists it, under another incarnation than ``not_incarnation``.
        """
        async with self._polled:
            await self._polled.wait_for(lambda: self._is_serving(target, since_s, not_incarnation))

    def incarnation(self, target: str) -> str:
        """Return the incarnation in the scheduler's latest list of a worker or storage; "" for others."""
        if self.status is None:
            return ""
        if group_of(target) == "storage":
            return self.status.storage_incarnations.get(target, "")
        return next((w.incarnation for w in self.status.workers if w.worker_id == target), "")

    def _is_serving(self, target: str, since_s: float, not_incarnation: str) -> bool:
        group = group_of(target)
        if group == "gateway":
            return self.ready_s > since_s
        if self.status_s <= since_s:
            return False
        return group in ("nats", "scheduler") or self.incarnation(target) not in ("", not_incarnation)

    async def _poll_status(self) -> None:
        assert self._bus is not None
        while True:
            began_s = time.monotonic()
            try:
                call = subjects.rpc("scheduler", "status"), encode(GetStatus())
                self.status = decode(await self._bus.call(*call, timeout_s=_CALL_S), CellStatus)
                self.status_s = began_s
            except ThermoclineError:
                pass  # It does not serve at present.
            await self._tell()

    async def _poll_gateway(self) -> None:
        async with httpx.AsyncClient(base_url=self._base_url, timeout=_CALL_S, trust_env=False) as client:
            while True:
                began_s = time.monotonic()
                try:
                    if (await client.get("/health/ready")).status_code == httpx.codes.OK:
                        self.ready_s = began_s
                except httpx.HTTPError:
                    pass  # It does not serve at present.
                await self._tell()

    async def _tell(self) -> None:
        async with self._polled:
            self._polled.notify_all()
        await asyncio.sleep(_POLL_S)
