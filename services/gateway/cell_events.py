"""The cell's status as server-sent events, about once a second for as long as a client reads.

They are made from the status that the scheduler publishes anyway, so watchers cost it nothing. While it is silent, the
events are errors in OpenAI's shape that say so.
"""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
from starlette.background import BackgroundTask
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway import sse
from services.gateway.cell import FRESH_S
from services.gateway.disconnect import DisconnectWatch
from services.gateway.gateway import Gateway
from services.gateway.pending import RETRY_AFTER_MS, Slots
from services.gateway.views.cell_view import cell_view
from shared.errors import Unavailable

PERIOD_S = 1.0
SILENT_S = (FRESH_S, 10, 30, 60, 300, 900, 3600)
"""Times of silence that are told. Between two of them the error is the same, so that watchers need not repeat it."""


class CellEvents(Response):
    """A stream of status events. Ends when the client goes or reads too slowly, or when this gateway shuts down.

    Holds one of ``slots`` from its creation to its end.
    """

    background: BackgroundTask | None = None

    def __init__(self, gateway: Gateway, slots: Slots, period_s: float = PERIOD_S) -> None:
        """Take a slot. Raises TooManyConnections when there is none."""
        slots.take(1)
        self.status_code = 200
        self.raw_headers = list(sse.HEADERS)
        self._gateway = gateway
        self._slots = slots
        self._period_s = period_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send one event per period until the client goes or the gateway drains, then give the slot back."""
        gone = asyncio.Event()
        watch = DisconnectWatch(receive, gone.set)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while not gone.is_set() and not self._gateway.cell.is_draining:
                await self._send(send, cell_event(self._gateway))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._period_s):
                        await gone.wait()
            await self._send(send, b"", more=False)
        except TimeoutError:
            return  # A client that reads nothing is disconnected; the next reader of its connection sees it end.
        finally:
            watch.close()
            self._slots.give_back(1)

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        async with asyncio.timeout(self._gateway.config.send_timeout_ms / 1000):
            await send({"type": "http.response.body", "body": data, "more_body": more})


def cell_event(gateway: Gateway) -> bytes:
    """Return one event: the last status, or an error that names the process that is away."""
    cell = gateway.cell
    age_s = gateway.clock() - cell.heard_s
    if not gateway.bus.is_connected:
        return _away("broker_away", f"gateway {gateway.gateway_id} has no connection to the message broker")
    if cell.status is None:
        return _away("scheduler_away", "no scheduler has been heard of")
    if age_s > FRESH_S:
        told_s = max(step for step in SILENT_S if step <= age_s)
        message = f"scheduler {cell.status.scheduler_id} was last heard of more than {told_s:.0f} s ago"
        return _away("scheduler_away", message)
    now_ms = gateway.wall_ns() // 1_000_000
    report = cell_view(cell.status, gateway.callers.owners, age_s, models=gateway.model_names(), now_ms=now_ms)
    return sse.event(msgspec.json.encode(report))


def _away(code: str, message: str) -> bytes:
    return sse.error_event(Unavailable(message, code=code, retry_after_ms=RETRY_AFTER_MS))
