"""The sockets: one publishes numbered batches, the other sends kept ones again, as vLLM's publisher does.

A message has three parts: topic, number (8 bytes, big-endian) and payload. A client of the second socket sends the
number that it wants to begin with; it gets (number, payload) for each kept batch from there on, and (-1, b"") at the
end. A client that asks for batches that are not kept any more has everything told anew to all.
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Any, Self

from services.scheduler.kv_events.wire import Batch, encode_batch
from shared import logs
from shared.errors import ConfigError

NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)

KEPT_BATCHES, KEPT_BYTES = 10_000, 64 * 2**20
"""Of batches to be sent again; the oldest make room."""

MOST_UNREAD = 100_000
"""Messages that wait for a slow subscriber; more are dropped for it, which the numbers show."""

_log = logs.get_logger("kv-events")


class Publisher:
    """Binds both sockets while it is entered. Raises ConfigError without pyzmq, and for an address of no use."""

    def __init__(self, address: str, replay_address: str, topic: str) -> None:
        self.is_everything_wanted = False
        """Whether a client asked for what is not kept any more; to be unset when everything is told anew."""
        self._addresses = address, replay_address
        self._topic = topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._next = 0
        self._sockets: list[Any] = []

    async def __aenter__(self) -> Self:
        try:
            import zmq
            import zmq.asyncio
        except ImportError as error:
            raise ConfigError("pyzmq is not installed: pip install 'thermocline[kv-events]'") from error
        context = zmq.asyncio.Context.instance()
        for kind, address in zip((zmq.PUB, zmq.ROUTER), self._addresses, strict=True):
            if not address:
                continue
            socket = context.socket(kind)
            self._sockets.append(socket)
            socket.set_hwm(MOST_UNREAD)
            try:
                socket.bind(address)
            except zmq.ZMQError as error:
                self._close()
                raise ConfigError(f"cannot listen on {address}: {error}") from error
        self._serving = asyncio.create_task(self._serve(), name="replay") if self._addresses[1] else None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait({self._serving})
        self._close()

    @property
    def address(self) -> str:
        """Where subscribers connect to, with the port that was found free for a ``*``."""
        found: bytes = self._sockets[0].last_endpoint
        return found.decode()

    @property
    def replay_address(self) -> str:
        """The same of the second socket."""
        found: bytes = self._sockets[1].last_endpoint
        return found.decode()

    async def publish(self, batch: Batch) -> None:
        """Send a batch under the next number, and keep it."""
        number, payload = self._next, encode_batch(batch)
        self._next += 1
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > KEPT_BATCHES or (self._kept_bytes > KEPT_BYTES and len(self._kept) > 1):
            self._kept_bytes -= len(self._kept.popleft()[1])
        await self._sockets[0].send_multipart((self._topic, number.to_bytes(NUMBER_BYTES, "big"), payload))

    def begin_anew(self) -> None:
        """Keep nothing: what follows tells everything."""
        self._kept.clear()
        self._kept_bytes = 0
        self.is_everything_wanted = False

    async def _serve(self) -> None:
        socket = self._sockets[1]
        while True:
            parts = await socket.recv_multipart()
            if len(parts) != 3 or len(parts[2]) != NUMBER_BYTES:
                _log.warning("replay_request_unreadable", parts=len(parts))
                continue
            client, _, wanted = parts
            first = int.from_bytes(wanted, "big")
            if first < (self._kept[0][0] if self._kept else self._next):
                self.is_everything_wanted = True
            for number, payload in list(self._kept):
                if number >= first:
                    await socket.send_multipart((client, b"", number.to_bytes(NUMBER_BYTES, "big"), payload))
            await socket.send_multipart((client, b"", END, b""))

    def _close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self._sockets.clear()
