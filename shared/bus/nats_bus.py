"""The bus over NATS and JetStream. ``connect`` gives a :class:`~shared.bus.protocol.Bus`.

The connection is kept for ever: nats-py reconnects with a jittered, growing wait, and where the server ended the
connection with a protocol error (after which nats-py gives up) a new client takes over with all subscriptions.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import nats.aio.client
import nats.errors

from shared import logs, subjects
from shared.bus import jetstream
from shared.bus.call_errors import ERROR_HEADER, as_call_error, decode_error, encode_error
from shared.bus.inbox import Inbox
from shared.bus.protocol import (
    Bus,
    CallHandler,
    Delivery,
    Handler,
    StreamInfo,
    StreamLimits,
    StreamMessage,
    Subscription,
)
from shared.bus.snapshot_bucket import SnapshotBucket
from shared.bus.tail import Tails
from shared.errors import PayloadTooLarge, ThermoclineError, Unavailable

RECONNECT_FIRST_S = 0.05
RECONNECT_MOST_S = 2.0
PING_S = 5.0
CLOSE_S = 5.0
FLUSH_S = 5.0

T = TypeVar("T")

_log = logs.get_logger("bus")


def reconnect_delay_s(attempt: int, chance: float) -> float:
    """Seconds before reconnect ``attempt`` (from 0), with ``chance`` in [0, 1) spreading clients out."""
    ceiling = min(RECONNECT_MOST_S, RECONNECT_FIRST_S * 2.0 ** min(attempt, 16))
    return ceiling * (0.5 + 0.5 * chance)


async def connect(urls: Sequence[str], name: str, *, timeout_s: float = 30.0) -> Bus:
    """Connect to one of ``urls`` (``nats://host:port``). Raises Unavailable when none answers in time."""
    bus = NatsBus(urls, name)
    await bus.open(timeout_s)
    return bus


class NatsBus:
    """Implements ``shared.bus.protocol.Bus``; made by :func:`connect`."""

    def __init__(self, urls: Sequence[str], name: str) -> None:
        self.max_payload = 0
        self._urls = list(urls)
        self._name = name
        self._client: Any = None
        self._is_ending = False
        self._closing = False
        self._appender = jetstream.Appender()
        self._tails = Tails()
        self._sources: dict[int, tuple[str, Inbox[Any], Callable[[Any], Any]]] = {}
        self._subscribed: dict[int, Any] = {}
        self._next_source = 0
        self._on_disconnect: list[Callable[[], None]] = []
        self._on_reconnect: list[Callable[[], None]] = []
        self._replacing: asyncio.Task[None] | None = None

    # -- the connection ---------------------------------------------------------------------------------------

    async def open(self, timeout_s: float) -> None:
        """Connect and subscribe whatever is already registered."""
        client = nats.aio.client.Client()
        try:
            # Not wait_for: in Python 3.11 that swallows a cancellation which comes together with the connection.
            async with asyncio.timeout(timeout_s):
                await client.connect(
                    self._urls,
                    name=self._name,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=RECONNECT_FIRST_S,
                    reconnect_to_server_handler=self._choose_server,
                    connect_timeout=2,
                    ping_interval=PING_S,
                    max_outstanding_pings=2,
                    flush_timeout=FLUSH_S,
                    error_cb=self._errored,
                    disconnected_cb=self._disconnected,
                    reconnected_cb=self._reconnected,
                    closed_cb=self._ended,
                )
        except TimeoutError as error:
            raise Unavailable(f"no broker answers at {', '.join(self._urls)} within {timeout_s} s") from error
        self._client = client
        self.max_payload = client.max_payload
        await self._appender.attach(client)
        for number in list(self._sources):
            await self._attach(number)
        await self._flush()

    @property
    def is_connected(self) -> bool:
        return self._client is not None and self._client.is_connected and not self._closing

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        self._on_disconnect.append(callback)

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self._on_reconnect.append(callback)

    async def flush(self) -> None:
        self._require()
        await self._translated(self._flush())

    async def _flush(self) -> None:
        # nats-py writes its PING past commands that it still buffers. The first round trip gets those out, the
        # second one comes back behind them.
        await self._client.flush(FLUSH_S)
        await self._client.flush(FLUSH_S)

    async def close(self) -> None:
        if self._is_ending:
            return
        self._is_ending = True
        for number in list(self._subscribed):
            await self._unsubscribe(number)
        # Handlers of what has arrived may still publish and append.
        inboxes = [inbox for _, inbox, _ in self._sources.values()]
        if inboxes:
            draining = [asyncio.create_task(self._finish(inbox)) for inbox in inboxes]
            _, late = await asyncio.wait(draining, timeout=CLOSE_S)
            for task in late:
                task.cancel()
            for inbox in inboxes:
                inbox.cancel()
        self._closing = True
        self._tails.break_all("closing")
        self._appender.fail_all("the bus is closing")
        if self._replacing is not None:
            self._replacing.cancel()
        try:
            if self._client is not None and self._client.is_connected:
                await self._flush()
        except (nats.errors.Error, OSError):
            pass  # What could not be flushed is lost with the connection.
        if self._client is not None:
            await self._client.close()

    @staticmethod
    async def _finish(inbox: Inbox[Any]) -> None:
        await inbox.drain()
        await inbox.close()

    def _choose_server(self, servers: list[Any], info: dict[str, Any]) -> tuple[Any, float]:
        """nats-py asks where to reconnect to, and after how many seconds."""
        least = min(server.reconnects for server in servers)
        chosen = random.choice([server for server in servers if server.reconnects == least])
        return chosen, reconnect_delay_s(least, random.random())

    async def _errored(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            for number, subscription in self._subscribed.items():
                if subscription is error.sub:
                    self._sources[number][1].drop()
        elif self._client is None or not self._client.is_connected:
            _log.debug("broker_unreachable", reason=repr(error))  # Once per attempt to connect.
        else:
            _log.warning("broker_error", reason=repr(error))

    async def _disconnected(self) -> None:
        self._appender.fail_all("the connection to the broker was lost")
        if not self._closing:
            _log.warning("broker_disconnected")
            self._tell(self._on_disconnect)

    async def _reconnected(self) -> None:
        self.max_payload = self._client.max_payload
        self._tails.break_all("reconnected")
        _log.info("broker_reconnected")
        self._tell(self._on_reconnect)

    async def _ended(self) -> None:
        """nats-py gave this client up for good."""
        is_replacing = self._replacing is not None and not self._replacing.done()
        if not self._closing and self._client is not None and not is_replacing:
            _log.error("broker_connection_ended", reason=repr(self._client.last_error))
            self._tails.break_all("connection ended")
            self._replacing = asyncio.create_task(self._replace())

    async def _replace(self) -> None:
        attempt = 0
        while not self._closing:
            await asyncio.sleep(reconnect_delay_s(attempt, random.random()))
            attempt += 1
            try:
                await self.open(RECONNECT_MOST_S)
            except (Unavailable, nats.errors.Error, OSError) as error:
                _log.warning("broker_unreachable", reason=repr(error))
                continue
            await self._reconnected()
            return

    @staticmethod
    def _tell(callbacks: list[Callable[[], None]]) -> None:
        for callback in callbacks:
            try:
                callback()
            except Exception:
                # An exception here would end nats-py's own tasks.
                _log.exception("connection_callback_failed")

    def _require(self, data: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        if not self.is_connected:
            raise Unavailable("the message broker is not connected")
        nbytes = len(data)
        if headers:
            nbytes += 14 + sum(len(key) + len(value) + 4 for key, value in headers.items())
        if nbytes > self.max_payload:
            raise PayloadTooLarge(f"a message of {nbytes} bytes exceeds the broker's {self.max_payload}")

    @staticmethod
    async def _translated(operation: Awaitable[T]) -> T:
        """Await, with errors of nats-py translated to ours."""
        try:
            return await operation
        except nats.errors.MaxPayloadError as error:
            raise PayloadTooLarge("the message exceeds the broker's max_payload") from error
        except nats.errors.NoRespondersError as error:
            raise Unavailable("nobody serves this subject") from error
        except nats.errors.TimeoutError as error:
            raise Unavailable("no answer in time") from error
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"the message broker failed: {error!r}") from error

    # -- core messages ----------------------------------------------------------------------------------------

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        self._require(data, headers)
        await self._translated(self._client.publish(subject, data, headers=dict(headers) if headers else None))

    async def subscribe(self, subject: str, handler: Handler, *, pending_limit: int = 65_536) -> Subscription:
        def delivery(message: Any) -> Delivery:
            return Delivery(message.subject, message.data, message.headers or {})

        return await self._add_source(subject, handler, delivery, pending_limit)

    async def call(self, subject: str, data: bytes, *, timeout_s: float = 2.0) -> bytes:
        self._require(data)
        reply = await self._translated(self._client.request(subject, data, timeout=timeout_s))
        if reply.headers and ERROR_HEADER in reply.headers:
            raise decode_error(reply.data)
        answer: bytes = reply.data
        return answer

    async def serve(self, subject: str, handler: CallHandler, *, at_once: int = 1) -> Subscription:
        async def answer(message: Any) -> None:
            try:
                body, headers = await handler(message.data), None
                self._require(body)
            except Exception as error:
                if not isinstance(error, ThermoclineError):
                    _log.exception("call_failed", subject=subject)
                body, headers = encode_error(as_call_error(error)), {ERROR_HEADER: "1"}
            if message.reply and self.is_connected:
                await self._translated(self._client.publish(message.reply, body, headers=headers))

        return await self._add_source(subject, answer, lambda message: message, 1024, at_once)

    async def _add_source(
        self,
        subject: str,
        handler: Callable[[Any], Awaitable[None]],
        translate: Callable[[Any], Any],
        limit: int,
        at_once: int = 1,
    ) -> Inbox[Any]:
        """Subscribe now, and again whenever a new client takes over."""
        self._require()
        self._next_source += 1
        number = self._next_source

        async def close() -> None:
            self._sources.pop(number, None)
            await self._unsubscribe(number)

        inbox: Inbox[Any] = Inbox(subject, handler, limit=limit, at_once=at_once, on_close=close)
        self._sources[number] = (subject, inbox, translate)
        try:
            await self._translated(self._attach(number))
            # When we return, the server sends us every message published from now on.
            await self._translated(self._flush())
        except Unavailable:
            await inbox.close()
            raise
        return inbox

    async def _attach(self, number: int) -> None:
        subject, inbox, translate = self._sources[number]

        async def received(message: Any) -> None:
            inbox.put(translate(message))

        self._subscribed[number] = await self._client.subscribe(subject, cb=received)

    async def _unsubscribe(self, number: int) -> None:
        subscription = self._subscribed.pop(number, None)
        try:
            if subscription is not None:
                await subscription.unsubscribe()
        except (nats.errors.Error, OSError):
            pass  # Closed or reconnecting: the server has forgotten it, or will not be told of it again.

    # -- streams ----------------------------------------------------------------------------------------------

    async def ensure_streams(self, limits: StreamLimits) -> None:
        self._require()
        inputs = jetstream.stream_config(subjects.INPUTS_STREAM, [subjects.INPUTS], limits)
        outputs = jetstream.stream_config(subjects.OUTPUTS_STREAM, [subjects.OUTPUTS], limits)
        for config in (inputs, outputs, jetstream.bucket_config(limits)):
            await jetstream.ensure_stream(self._client, config)

    async def append(self, subject: str, data: bytes, *, message_id: str = "", timeout_s: float = 5.0) -> int:
        self._require(data, {"Nats-Msg-Id": message_id} if message_id else None)
        return await self._translated(self._appender.append(subject, data, message_id, timeout_s))

    def follow(
        self, stream: str, *, from_seq: int = 1, subject: str = ">", live: bool = True
    ) -> AsyncIterator[StreamMessage]:
        return self._tails.follow(lambda: None if self._closing else self._client, stream, from_seq, subject, live=live)

    async def stream_info(self, stream: str) -> StreamInfo:
        self._require()
        return await jetstream.stream_info(self._client, stream)

    # -- the bucket -------------------------------------------------------------------------------------------

    @property
    def _bucket(self) -> SnapshotBucket:
        self._require()
        return SnapshotBucket(self._client, lambda stream, subject: self.follow(stream, subject=subject, live=False))

    async def put_object(self, name: str, data: bytes) -> None:
        await self._bucket.put(name, data)

    async def get_object(self, name: str) -> bytes | None:
        return await self._bucket.get(name)

    async def delete_object(self, name: str) -> None:
        await self._bucket.delete(name)

    async def list_objects(self) -> list[str]:
        return await self._bucket.names()
