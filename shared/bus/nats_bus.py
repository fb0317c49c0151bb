"""The bus over NATS and JetStream. ``connect`` returns a :class:`~shared.bus.protocol.Bus`.

Core messages that the broker or we had to drop, and those of the time without a connection, are lost to a subscription.
In both cases ``on_reconnect`` is called, and readers then catch up from the streams.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import nats.errors

from shared import logs, subjects
from shared.broker import BrokerSettings
from shared.bus import answer_bucket, jetstream, kept_bucket, measures, record_bucket, requests
from shared.bus.access import Access, access_of, from_urls, is_inbox
from shared.bus.appends import Appender
from shared.bus.beats import Beats
from shared.bus.call_errors import ERROR_HEADER, as_call_error, decode_error, encode_error
from shared.bus.client import Client
from shared.bus.connection import FLUSH_S, Connection, tell
from shared.bus.hearing import Hearing
from shared.bus.inbox import Inbox
from shared.bus.protocol import (
    Bus,
    CallHandler,
    Delivery,
    Handler,
    Hearer,
    KeptRoom,
    Record,
    StreamInfo,
    StreamLimits,
    StreamMessage,
    Subscription,
)
from shared.bus.snapshot_bucket import SnapshotBucket
from shared.bus.subject_match import matches
from shared.bus.tail import Tails
from shared.errors import ConfigError, PayloadTooLarge, ThermoclineError, TransportError, Unavailable

CLOSE_S = 5.0
CONNECT_S = 30.0

_log = logs.get_logger("bus")


async def connect(urls: Sequence[str], name: str, *, timeout_s: float = CONNECT_S) -> Bus:
    """Connect to one of ``urls`` (``nats://host:port``) without further settings.

    Raises Unavailable when none answers in time, ConfigError when all refuse us.
    """
    return await _connected(from_urls(urls), name, timeout_s)


async def connect_with(settings: BrokerSettings, name: str, *, timeout_s: float = CONNECT_S) -> Bus:
    """Connect with ``settings`` and the variables with secrets.

    Raises Unavailable when no server answers in time; ConfigError when all refuse us, when one's max_payload is too
    small, or for a file that cannot be read.
    """
    return await _connected(access_of(settings, os.environ), name, timeout_s)


async def _connected(access: Access, name: str, timeout_s: float) -> Bus:
    bus = NatsBus(access, name)
    await bus.open(timeout_s)
    return bus


class NatsBus:
    """The ``shared.bus.protocol.Bus`` over one connection to the broker; made by :func:`connect`."""

    def __init__(self, access: Access, name: str) -> None:
        """Begin without a connection, which :meth:`open` makes; the broker shows it under ``name``."""
        self._connection = Connection(access, name, self)
        self._connect_beats = lambda: _connected(access, f"{name} heartbeats", CONNECT_S)
        self._beats: Beats | None = None
        self._pending_bytes = access.pending_bytes
        self._is_ending = False
        self._closing = False
        self._appender = Appender()
        self._denied: set[tuple[str, str]] = set()
        self._tails = Tails(self._denied)
        self._sources: dict[int, tuple[str, Inbox[Any] | Hearing[Any], Callable[[Any], Any]]] = {}
        self._subscribed: dict[int, Any] = {}
        self._next_source = 0
        self._on_disconnect: list[Callable[[], None]] = []
        self._on_reconnect: list[Callable[[], None]] = []

    # -- the connection ---------------------------------------------------------------------------------------

    async def open(self, timeout_s: float) -> None:
        """Connect. Raises like :func:`connect_with`."""
        await self._connection.open(timeout_s)

    @property
    def max_payload(self) -> int:
        """Largest message in bytes, headers included, by the server's word; 0 before the first connection."""
        client = self._connection.client
        return 0 if client is None else client.max_payload

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection now, and the bus is not closing."""
        return self._connection.is_connected and not self._closing

    @property
    def _client(self) -> Any:
        return self._connection.client

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Call back when the connection is lost, or a :meth:`flush` cannot prove that a message was stored."""
        self._on_disconnect.append(callback)

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Call back when the connection is restored, or a subscription that dropped messages has caught up."""
        self._on_reconnect.append(callback)

    async def flush(self) -> None:
        """Make two round trips to the server, then wait for the acknowledgements of captured messages.

        Raises Unavailable.
        """
        self._require()
        await requests.translated(_round_trip(self._client))
        try:
            await self._appender.captured(FLUSH_S)
        except Unavailable:
            # The connection may be in order, but messages sent over it are not where they belong. Publishers repeat
            # messages without proof of storage, as they do after a loss of the connection.
            tell(self._on_disconnect)
            raise

    async def close(self) -> None:
        """Unsubscribe, wait up to CLOSE_S for handlers, and disconnect; repeats return at once."""
        if self._is_ending:
            return
        self._is_ending = True
        if self._beats is not None:
            await asyncio.to_thread(self._beats.close)
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
        try:
            if self._client is not None and self._client.is_connected:
                await _round_trip(self._client)
        except (nats.errors.Error, OSError):
            pass  # Messages that could not be flushed are lost with the connection.
        await self._connection.close()

    @staticmethod
    async def _finish(inbox: Inbox[Any] | Hearing[Any]) -> None:
        await inbox.drain()
        await inbox.close()

    # -- what the connection tells ----------------------------------------------------------------------------

    async def attach(self, client: Client) -> None:
        """Subscribe all registered sources through this client, which is the connection from now on."""
        await self._appender.attach(client)
        for number in list(self._sources):
            await self._attach(client, number)
        await _round_trip(client)

    def lost(self) -> None:
        """Fail the appends that wait for acknowledgements, and call the ``on_disconnect`` callbacks."""
        self._appender.fail_all("the connection to the broker was lost")
        tell(self._on_disconnect)

    def restored(self) -> None:
        """Restart all followers of streams, and call the ``on_reconnect`` callbacks."""
        self._tails.break_all("reconnected")
        self._denied.clear()
        tell(self._on_reconnect)

    def denied(self, verb: str, subject: str) -> None:
        """Note a missing permission, and fail the appends to a subject that we may not publish to."""
        self._denied.add((verb, subject))
        if verb == "publish":
            self._appender.deny(subject)

    def _require(self, data: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        if not self.is_connected:
            raise Unavailable("the message broker is not connected")
        nbytes = len(data)
        if headers:
            nbytes += 14 + sum(len(key) + len(value) + 4 for key, value in headers.items())
        if nbytes > self.max_payload:
            raise PayloadTooLarge(f"a message of {nbytes} bytes exceeds the broker's {self.max_payload}")

    # -- core messages ----------------------------------------------------------------------------------------

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Publish a core message; in a cluster, one that TC_OUTPUTS captures is awaited by the next :meth:`flush`."""
        self._require(data, headers)
        if self._client.is_clustered and matches(subjects.OUTPUTS, subject):
            await requests.translated(self._appender.publish(subject, data, headers))
            return
        await requests.translated(self._client.publish(subject, data, headers=dict(headers) if headers else None))

    def publish_now(self, subject: str, data: bytes) -> bool:
        """Publish at once; return False without room, or in a cluster where the message has to be acknowledged."""
        self._require(data)
        if self._client.is_clustered and matches(subjects.OUTPUTS, subject):
            return False  # Such a message has to be acknowledged.
        try:
            is_published: bool = self._client.publish_now(subject, data)
        except nats.errors.Error as error:
            raise Unavailable(f"the message broker failed: {error!r}") from error
        return is_published

    async def beat(self, subject: str, data: bytes) -> None:
        """Publish a heartbeat over a connection of its own, whose thread repeats it; before that is up, over this one.

        Raises Unavailable or PayloadTooLarge.
        """
        self._require(data)
        if self._beats is None:
            self._beats = Beats(self._connect_beats)
        if not self._beats.say(subject, data):
            await self.publish(subject, data)

    async def subscribe(self, subject: str, handler: Handler, *, pending_limit: int = 65_536) -> Subscription:
        """Subscribe through an inbox bounded by ``pending_limit`` messages and the access's ``pending_bytes``.

        Raises ConfigError where the broker denies the subject.
        """
        return await self._add_source(subject, _delivery, partial(self._inbox, subject, handler, pending_limit))

    async def hear(self, subject: str, hearer: Hearer) -> Subscription:
        """Subscribe without a queue. Raises ConfigError where the broker denies the subject."""
        return await self._add_source(subject, _delivery, partial(Hearing, subject, hearer))

    async def call(self, subject: str, data: bytes, *, timeout_s: float = 2.0) -> bytes:
        """Return the reply to a request; a handler's error that came back in it is raised."""
        self._require(data)
        reply = await requests.translated(requests.request(self._client, subject, data, timeout_s))
        if reply.headers and ERROR_HEADER in reply.headers:
            raise decode_error(reply.data)
        answer: bytes = reply.data
        return answer

    async def serve(self, subject: str, handler: CallHandler, *, at_once: int = 1) -> Subscription:
        """Answer calls through an inbox of 1,024 that may wait; errors go back typed, and unknown ones are logged.

        Calls whose reply subject is no inbox are counted and dropped.
        """

        async def answer(message: Any) -> None:
            # A caller may name any reply subject, and the answer is published with our rights. It could be stored in a
            # stream to which the caller may not write.
            if message.reply and not is_inbox(message.reply):
                measures.CALLS_MISDIRECTED.inc()
                _log.debug("call_misdirected", subject=subject, reply=message.reply)
                return
            try:
                body, headers = await handler(message.data), None
                self._require(body)
            except Exception as error:
                if not isinstance(error, ThermoclineError):
                    _log.exception("call_failed", subject=subject)
                body, headers = encode_error(as_call_error(error)), {ERROR_HEADER: "1"}
            if message.reply and self.is_connected:
                await requests.translated(self._client.publish(message.reply, body, headers=headers))

        return await self._add_source(
            subject, lambda message: message, partial(self._inbox, subject, answer, 1024, at_once=at_once)
        )

    def _inbox(
        self,
        subject: str,
        handler: Callable[[Any], Awaitable[None]],
        limit: int,
        on_close: Callable[[], Awaitable[None]],
        *,
        at_once: int = 1,
    ) -> Inbox[Any]:
        return Inbox(
            subject,
            handler,
            limit=limit,
            limit_bytes=self._pending_bytes,
            at_once=at_once,
            on_close=on_close,
            on_caught_up=lambda: tell(self._on_reconnect),
        )

    async def _add_source(
        self,
        subject: str,
        translate: Callable[[Any], Any],
        make: Callable[[Callable[[], Awaitable[None]]], Inbox[Any] | Hearing[Any]],
    ) -> Inbox[Any] | Hearing[Any]:
        """Subscribe now, and again whenever a new client takes over. ``make`` gets what to await at the end."""
        self._require()
        self._next_source += 1
        number = self._next_source

        async def close() -> None:
            self._sources.pop(number, None)
            await self._unsubscribe(number)

        inbox = make(close)
        self._sources[number] = (subject, inbox, translate)
        try:
            self._denied.discard(("subscribe", subject.lower()))
            await requests.translated(self._attach(self._client, number))
            # When we return, the server sends us every message published from now on, or has denied it.
            await requests.translated(_round_trip(self._client))
            if ("subscribe", subject.lower()) in self._denied:
                raise ConfigError(f"the broker does not let us subscribe to {subject}; see the permissions of its user")
        except ThermoclineError:
            await inbox.close()
            raise
        return inbox

    async def _attach(self, client: Client, number: int) -> None:
        subject, inbox, translate = self._sources[number]

        def received(message: Any) -> None:
            # A user who may read a stream may have it delivered to any subject, also to one closed to their messages.
            # The message keeps the subject under which it was stored, and that shows it.
            if message.subject != subject and not matches(subject, message.subject):
                measures.MISDIRECTED.inc()
                _log.debug("message_misdirected", to=subject, subject=message.subject)
                return
            inbox.put(translate(message), len(message.data))

        self._subscribed[number] = await client.hear(subject, received)

    async def _unsubscribe(self, number: int) -> None:
        subscription = self._subscribed.pop(number, None)
        try:
            if subscription is not None:
                await subscription.unsubscribe()
        except (nats.errors.Error, OSError):
            pass  # Closed or reconnecting: the server has dropped it, or will not get it again.

    # -- streams ----------------------------------------------------------------------------------------------

    async def ensure_streams(self, limits: StreamLimits) -> None:
        """Create streams and buckets, or change them to ``limits``; without an answer bucket it logs a warning only.

        Raises Unavailable when the broker does not answer for a minute.
        """
        self._require()
        inputs = jetstream.stream_config(subjects.INPUTS_STREAM, [subjects.INPUTS], limits)
        outputs = jetstream.stream_config(subjects.OUTPUTS_STREAM, [subjects.OUTPUTS], limits)
        for config in (inputs, outputs, jetstream.bucket_config(limits), record_bucket.bucket_config(limits)):
            await jetstream.ensure_stream(self._client, config, jetstream.SETUP_S)
        await kept_bucket.ensure(self._client, limits)
        try:
            await jetstream.ensure_stream(self._client, answer_bucket.bucket_config(limits))
        except (ConfigError, TransportError, Unavailable) as error:
            # A cell works without it: each gateway then remembers answers for itself, and logs that.
            _log.warning("answer_bucket_missing", reason=error.message)
        if limits.replicas == 1 and len(self._client.servers) > 1:
            _log.warning("streams_have_one_copy", advice="with --stream-replicas 3 they outlive the loss of a server")

    async def append(self, subject: str, data: bytes, *, message_id: str = "", timeout_s: float = 5.0) -> int:
        """Store a message and return its sequence number.

        The header of a ``message_id`` counts against ``max_payload``.
        """
        self._require(data, {"Nats-Msg-Id": message_id} if message_id else None)
        return await requests.translated(self._appender.append(subject, data, message_id, timeout_s))

    def follow(
        self, stream: str, *, from_seq: int = 1, subject: str = ">", live: bool = True
    ) -> AsyncIterator[StreamMessage]:
        """Follow a stream by ordered consumers, which are made again after any gap or lost connection."""
        return self._tails.follow(lambda: None if self._closing else self._client, stream, from_seq, subject, live=live)

    async def stream_info(self, stream: str) -> StreamInfo:
        """Return first and last sequence and size of a stream. Raises TransportError when there is no such stream."""
        self._require()
        return await jetstream.stream_info(self._client, stream)

    # -- the bucket -------------------------------------------------------------------------------------------

    @property
    def _bucket(self) -> SnapshotBucket:
        self._require()
        return SnapshotBucket(self._client, lambda stream, subject: self.follow(stream, subject=subject, live=False))

    async def put_object(self, name: str, data: bytes) -> None:
        """Store an object in chunks of the object store. Raises Unavailable."""
        await self._bucket.put(name, data)

    async def get_object(self, name: str) -> bytes | memoryview | None:
        """Return an object whose digest was verified, or None. Raises TransportError for a damaged one."""
        return await self._bucket.get(name)

    async def delete_object(self, name: str) -> None:
        """Purge an object, and chunks of unfinished puts that are older than the oldest object."""
        await self._bucket.delete(name)

    async def list_objects(self) -> list[str]:
        """Return the names of all objects that are not deleted, sorted."""
        return await self._bucket.names()

    # -- records -----------------------------------------------------------------------------------------------

    async def read_record(self, name: str, *, timeout_s: float = 2.0) -> Record | None:
        """Return a record as the stream's leader has it, or None. Raises Unavailable or TransportError."""
        self._require()
        return await record_bucket.read(self._client, name, timeout_s)

    async def write_record(self, name: str, data: bytes, *, revision: int, timeout_s: float = 2.0) -> int | None:
        """Replace a record by compare-and-set on its sequence number; return the new one, None for a mismatch."""
        self._require(data)
        return await record_bucket.write(self._client, name, data, revision, timeout_s)

    # -- kept answers ------------------------------------------------------------------------------------------

    async def keep(self, name: str, data: bytes, *, timeout_s: float = 2.0) -> None:
        """Store a kept answer. Raises Unavailable, TransportError or PayloadTooLarge."""
        self._require(data)
        await kept_bucket.keep(self._client, name, data, timeout_s)

    async def kept(self, name: str, *, timeout_s: float = 2.0) -> bytes | None:
        """Return a kept answer as the stream's leader has it, or None. Raises Unavailable or TransportError."""
        self._require()
        return await kept_bucket.kept(self._client, name, timeout_s)

    async def kept_room(self, *, timeout_s: float = 2.0) -> KeptRoom:
        """Return how full the bucket of kept answers is. Raises Unavailable or TransportError."""
        self._require()
        return await kept_bucket.room(self._client, timeout_s)

    async def forget(self, names: str, *, timeout_s: float = 2.0) -> int:
        """Purge the kept answers whose names match; return their number. Raises Unavailable or TransportError."""
        self._require()
        return await kept_bucket.forget(self._client, names, timeout_s)

    # -- answers -----------------------------------------------------------------------------------------------

    async def read_answers(self, names: Sequence[str], *, timeout_s: float) -> dict[str, bytes | None]:
        """Return entries of the answer bucket, read directly from any replica. Raises Unavailable when none came."""
        self._require()
        return await answer_bucket.read(self._client, names, timeout_s)

    async def write_answer(self, name: str, data: bytes, *, timeout_s: float = 2.0) -> None:
        """Store an entry of the answer bucket. Raises Unavailable, TransportError or PayloadTooLarge."""
        self._require(data)
        await answer_bucket.write(self._client, name, data, timeout_s)


def _delivery(message: Any) -> Delivery:
    return Delivery(message.subject, message.data, message.headers or {})


async def _round_trip(client: Any) -> None:
    # nats-py writes its PING past commands that it still buffers. The first round trip gets those out, the second one
    # comes back behind them.
    await requests.apart(client.flush(FLUSH_S))
    await requests.apart(client.flush(FLUSH_S))
