"""The sockets: one publishes numbered batches, the other sends kept ones again, as vLLM's publisher does.

A message has three parts: topic, number (8 bytes, big-endian) and payload. A client of the second socket sends the
number that it wants to begin with; it gets (number, payload) for each kept batch from there on, and (-1, b"") at the
end. When a client asks for batches that are not kept any more, everything is announced again to all.
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
"""Bounds of the batches kept to be sent again, in batches and bytes; the oldest are dropped."""

MOST_UNREAD = 100_000
"""Most messages that wait for a slow subscriber; more are dropped for it, which the numbers show."""

MOST_PORT = 65535

_log = logs.get_logger("kv-events")


class Publisher:
    """Both sockets, bound while it is entered."""

    def __init__(self, address: str, replay_address: str, topic: str) -> None:
        """Take the addresses as ZeroMQ writes them; an empty ``replay_address`` leaves out the second socket."""
        self.is_everything_wanted = False
        """Whether a client asked for batches that are not kept any more; unset by :meth:`begin_anew`."""
        self._addresses = address, replay_address
        self._topic = topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._next = 0
        self._sockets: list[Any] = []

    async def __aenter__(self) -> Self:
        """Bind the sockets. Raises ConfigError without pyzmq, or for an address that cannot be used."""
        if not self._addresses[0]:
            raise ConfigError("the address that subscribers connect to is empty")
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
                _check_port(address)
                socket.bind(address)
            except (zmq.ZMQError, ValueError) as error:
                self._close()
                raise ConfigError(f"cannot listen on {address}: {error}") from error
        self._serving = asyncio.create_task(self._serve(), name="replay") if self._addresses[1] else None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the sockets at once; messages that still wait there are dropped."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait({self._serving})
        self._close()

    @property
    def address(self) -> str:
        """Address that subscribers connect to, with the port that was found free for a ``*``."""
        found: bytes = self._sockets[0].last_endpoint
        return found.decode()

    @property
    def replay_address(self) -> str:
        """Address of the second socket, with the port that was found free for a ``*``."""
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
        """Drop the kept batches: those that follow announce everything. Numbers go on."""
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


def _check_port(address: str) -> None:
    """Raise ValueError for a port above 65535, in whose place ZeroMQ listens on another one."""
    port = address.rpartition(":")[2]
    if address.startswith("tcp:") and port.isdecimal() and int(port) > MOST_PORT:
        raise ValueError(f"the port is above {MOST_PORT}")
