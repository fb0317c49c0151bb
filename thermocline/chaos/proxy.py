"""A TCP proxy between one process and the broker, which can delay, stall, drop and refuse.

Bytes are forwarded in order and unchanged. A stalled direction is not read, so the sender's buffers fill as with a
real stall. Memory is bounded by one read per direction and connection.
"""

from __future__ import annotations

import asyncio
import socket
import struct

from thermocline.chaos.plan import Direction

_READ_BYTES = 64 * 1024
_MAX_CONNECTIONS = 64
_CONNECT_S = 2.0


class Proxy:
    """A listener for one process on a free port of the loopback interface. All times are seconds."""

    def __init__(self, name: str, target_port: int) -> None:
        """Forward for the process ``name`` to ``target_port``, the broker's; ``port`` is 0 before :meth:`start`."""
        self.name = name
        self.port = 0
        self.is_refusing = False
        self.delay_s = 0.0
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._open = {direction: asyncio.Event() for direction in ("to_broker", "from_broker")}
        for event in self._open.values():
            event.set()
        self._swallowing: set[Direction] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Address that the process gets in place of the broker's."""
        return f"nats://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen, and set ``port``."""
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0, limit=_READ_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and reset every connection."""
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stall(self, direction: Direction) -> None:
        """Hold back all bytes in that direction until :meth:`heal`; none are lost."""
        self._open[direction].clear()

    def swallow(self, direction: Direction) -> None:
        """Drop all bytes in that direction until :meth:`heal`, which resets the connections: they have lost bytes."""
        self._swallowing.add(direction)

    def cut(self) -> None:
        """Reset every connection."""
        writers, self._writers = self._writers, []
        for writer in writers:
            _reset(writer)

    def heal(self) -> None:
        """End all faults and forward again. Connections are reset if bytes may have been dropped."""
        has_lost = bool(self._swallowing)
        self._swallowing.clear()
        self.delay_s = 0.0
        self.is_refusing = False
        for event in self._open.values():
            event.set()
        if has_lost:
            self.cut()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self.is_refusing or len(self._tasks) > _MAX_CONNECTIONS:
                _reset(writer)
                return
            try:
                async with asyncio.timeout(_CONNECT_S):
                    upstream = await asyncio.open_connection("127.0.0.1", self._target_port, limit=_READ_BYTES)
            except (OSError, TimeoutError):
                _reset(writer)  # The broker is away, and the process must see that.
                return
            await self._join(reader, writer, *upstream)
        except asyncio.CancelledError:
            pass  # By :meth:`close`. Python 3.11 logs a server's task that ends as cancelled.
        finally:
            self._tasks.discard(task)

    async def _join(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        broker_reader: asyncio.StreamReader,
        broker_writer: asyncio.StreamWriter,
    ) -> None:
        """Forward both ways until either side ends; then the other ends too."""
        both = [writer, broker_writer]
        self._writers += both
        pumps = {
            asyncio.create_task(self._pump("to_broker", reader, broker_writer)),
            asyncio.create_task(self._pump("from_broker", broker_reader, writer)),
        }
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for each in both:
                _reset(each)
            self._writers = [each for each in self._writers if each not in both]

    async def _pump(self, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await self._open[direction].wait()
                data = await reader.read(_READ_BYTES)
                if not data:
                    return
                # The direction may have been stalled during the read.
                await self._open[direction].wait()
                if direction in self._swallowing:
                    continue
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # One side went away, which ends both.


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close at once, with RST in place of an orderly end, as a dead machine's network does."""
    connection = writer.get_extra_info("socket")
    if connection is not None:
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError:
            pass  # It is closed already.
    writer.transport.abort()
