"""The in-process twin of the NATS bus, for tests and simulations: no server, the same guarantees.

Clients that share one :class:`MemoryBroker` see one another. The broker keeps the streams and the bucket, its
clock is injected, and a client can be cut off (:meth:`MemoryBus.disconnect`) and joined again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shared import logs, subjects
from shared.bus.call_errors import as_call_error
from shared.bus.hearing import Hearing
from shared.bus.inbox import Inbox
from shared.bus.protocol import (
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
from shared.bus.subject_match import matches
from shared.errors import PayloadTooLarge, ThermoclineError, TransportError, Unavailable

DEDUPLICATION_WINDOW_NS = 120 * 10**9

_log = logs.get_logger("bus")


@dataclass
class _Stream:
    """Stored messages in order; ``messages[i].seq == first_seq + i``."""

    pattern: str
    limits: StreamLimits
    first_seq: int = 1
    nbytes: int = 0
    messages: list[StreamMessage] = field(default_factory=list)
    seen: dict[str, tuple[int, int]] = field(default_factory=dict)  # message id: (sequence, stored at)

    @property
    def last_seq(self) -> int:
        return self.first_seq + len(self.messages) - 1

    def store(self, subject: str, data: bytes, message_id: str, now_ns: int) -> int:
        """Append one message, or answer the sequence of its first copy; then apply the limits."""
        if message_id and message_id in self.seen:
            seq, stored_ns = self.seen[message_id]
            if now_ns - stored_ns < DEDUPLICATION_WINDOW_NS:
                return seq
        if self.messages:
            now_ns = max(now_ns, self.messages[-1].time_ns)  # The clock of a stream never runs backwards.
        message = StreamMessage(seq=self.last_seq + 1, time_ns=now_ns, subject=subject, data=data)
        self.messages.append(message)
        self.nbytes += len(data)
        if message_id:
            self.seen[message_id] = (message.seq, now_ns)
        while len(self.messages) > 1 and (
            self.nbytes > self.limits.max_bytes
            or now_ns - self.messages[0].time_ns > int(self.limits.max_age_s * 1e9) > 0
        ):
            self.drop_first(1)
        return message.seq

    def drop_first(self, count: int) -> None:
        """Forget the oldest messages, as retention does."""
        dropped = self.messages[:count]
        del self.messages[:count]
        self.first_seq += len(dropped)
        self.nbytes -= sum(len(message.data) for message in dropped)


class MemoryBroker:
    """What the clients have in common. ``clock`` gives wall-clock nanoseconds for stream timestamps."""

    def __init__(self, *, clock: Callable[[], int] = time.time_ns, max_payload: int = 1024 * 1024) -> None:
        self.clock = clock
        self.max_payload = max_payload
        self._streams: dict[str, _Stream] = {}
        self._objects: dict[str, bytes] | None = None
        self.records: dict[str, Record] = {}
        self._record_revisions = 0
        self._has_lost_store = False
        self._kept: dict[str, tuple[int, bytes]] = {}  # By name: when it was stored, and what. The oldest first.
        self._kept_limits: StreamLimits | None = None
        self.answers: dict[str, bytes] = {}
        self._clients: list[MemoryBus] = []
        self._stored: list[asyncio.Future[None]] = []

    def connect(self, name: str) -> MemoryBus:
        """A new client; ``name`` appears in logs only."""
        client = MemoryBus(self, name)
        self._clients.append(client)
        return client

    def drop_oldest(self, stream: str, count: int) -> None:
        """Lose the oldest messages of a stream, as its limits would."""
        self.stream(stream).drop_first(count)

    def stream(self, name: str) -> _Stream:
        if name not in self._streams:
            raise TransportError(f"there is no stream {name}")
        return self._streams[name]

    def lose_store(self) -> None:
        """Start again on an empty disk: streams, buckets and records are gone until somebody makes them."""
        self._streams, self._objects, self.records = {}, None, {}
        self._record_revisions, self._has_lost_store = 0, True

    def ensure_streams(self, limits: StreamLimits) -> None:
        self._has_lost_store = False
        self._streams.setdefault(subjects.INPUTS_STREAM, _Stream(subjects.INPUTS, limits))
        self._streams.setdefault(subjects.OUTPUTS_STREAM, _Stream(subjects.OUTPUTS, limits))
        if self._objects is None:
            self._objects = {}
        self._kept_limits = self._kept_limits or limits

    def keep_answer(self, name: str, data: bytes) -> None:
        """Store, and apply the bounds."""
        if self._kept_limits is None:
            raise Unavailable("there is no bucket of kept answers")
        self._kept.pop(name, None)
        self._kept[name] = (self.clock(), data)
        while len(self._kept) > 1 and (
            len(self._kept) > self._kept_limits.kept_entries
            or sum(len(each) for _, each in self._kept.values()) > self._kept_limits.kept_bytes
        ):
            del self._kept[next(iter(self._kept))]

    def kept_answers(self) -> dict[str, bytes]:
        """What is not too old."""
        limits = self._kept_limits
        oldest = self.clock() - int(limits.kept_age_s * 1e9) if limits is not None else 0
        self._kept = {name: entry for name, entry in self._kept.items() if entry[0] > oldest}
        return {name: data for name, (_, data) in self._kept.items()}

    def kept_room(self) -> KeptRoom:
        """How full it is."""
        if self._kept_limits is None:
            raise Unavailable("there is no bucket of kept answers")
        limits, kept = self._kept_limits, self.kept_answers()
        return KeptRoom(sum(map(len, kept.values())), limits.kept_bytes, len(kept), limits.kept_entries)

    def forget_answers(self, names: str) -> int:
        found = [name for name in self.kept_answers() if matches(names, name)]
        for name in found:
            del self._kept[name]
        return len(found)

    @property
    def objects(self) -> dict[str, bytes]:
        if self._objects is None:
            raise TransportError(f"there is no bucket {subjects.SNAPSHOT_BUCKET}")
        return self._objects

    def read_record(self, name: str) -> Record | None:
        if self._has_lost_store:
            raise Unavailable("the record bucket does not answer")
        return self.records.get(name)

    def write_record(self, name: str, data: bytes, revision: int) -> int | None:
        """Compare and set; one count of revisions serves all names."""
        known = self.read_record(name)
        if revision != (known.revision if known is not None else 0):
            return None
        self._record_revisions += 1
        self.records[name] = Record(self._record_revisions, data)
        return self._record_revisions

    def publish(self, delivery: Delivery, message_id: str = "") -> int:
        """Hand a message to every subscriber and to the stream that captures it; 0 when none does."""
        seq = 0
        for stream in self._streams.values():
            if matches(stream.pattern, delivery.subject):
                seq = stream.store(delivery.subject, delivery.data, message_id, self.clock())
        for client in self._clients:
            client.deliver(delivery)
        self.wake()
        return seq

    def server_of(self, subject: str) -> Callable[[_Call], None] | None:
        """Where a call goes, or None when nobody connected serves it."""
        for client in self._clients:
            for pattern, inbox in client.servers:
                if client.is_connected and matches(pattern, subject):
                    return inbox.put
        return None

    def forget(self, client: MemoryBus) -> None:
        if client in self._clients:
            self._clients.remove(client)

    def wake(self) -> None:
        """Let every follower look again."""
        waiting, self._stored = self._stored, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def change(self) -> None:
        """Wait for the next :meth:`wake`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stored.append(future)
        await future


@dataclass(frozen=True, slots=True)
class _Call:
    data: bytes
    answer: asyncio.Future[bytes]


class MemoryBus:
    """A client of a :class:`MemoryBroker`; implements ``shared.bus.protocol.Bus``."""

    def __init__(self, broker: MemoryBroker, name: str) -> None:
        self.name = name
        self.max_payload = broker.max_payload
        self.servers: list[tuple[str, Inbox[_Call]]] = []
        self._broker = broker
        self._connected = True
        self._is_ending = False
        self._closed = False
        self.has_room = True  # Whether what is published now need not wait.
        self._inboxes: list[tuple[str, Inbox[Delivery] | Hearing[Delivery]]] = []
        self._on_disconnect: list[Callable[[], None]] = []
        self._on_reconnect: list[Callable[[], None]] = []

    # -- the connection ---------------------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        return self._connected and not self._closed

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        self._on_disconnect.append(callback)

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self._on_reconnect.append(callback)

    def disconnect(self) -> None:
        """Cut this client off: core messages of that time are lost to it, calls and publishes fail."""
        if self._connected:
            self._connected = False
            for callback in self._on_disconnect:
                asyncio.get_running_loop().call_soon(callback)

    def reconnect(self) -> None:
        """Join it again; followers go on where they were."""
        if not self._connected:
            self._connected = True
            for callback in self._on_reconnect:
                asyncio.get_running_loop().call_soon(callback)
            self._broker.wake()

    def deliver(self, delivery: Delivery) -> None:
        """Called by the broker for every message."""
        if self.is_connected and not self._is_ending:
            for pattern, inbox in self._inboxes:
                if matches(pattern, delivery.subject):
                    inbox.put(delivery)

    async def ensure_streams(self, limits: StreamLimits) -> None:
        self._require()
        self._broker.ensure_streams(limits)

    async def flush(self) -> None:
        self._require()

    async def close(self) -> None:
        if self._is_ending:
            return
        self._is_ending = True
        # Handlers of what has arrived may still publish and append.
        for _, inbox in [*self._inboxes]:
            await inbox.drain()
            await inbox.close()
        for _, server in [*self.servers]:
            await server.close()
        self._closed = True
        self._broker.forget(self)
        self._broker.wake()

    # -- core messages ----------------------------------------------------------------------------------------

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        self._require(data)
        self._broker.publish(Delivery(subject, data, dict(headers or {})))

    def publish_now(self, subject: str, data: bytes) -> bool:
        self._require(data)
        if self.has_room:
            self._broker.publish(Delivery(subject, data, {}))
        return self.has_room

    async def beat(self, subject: str, data: bytes) -> None:
        await self.publish(subject, data)

    async def subscribe(self, subject: str, handler: Handler, *, pending_limit: int = 65_536) -> Subscription:
        self._require()

        async def forget() -> None:
            self._inboxes.remove((subject, inbox))

        inbox: Inbox[Delivery] = Inbox(subject, handler, limit=pending_limit, on_close=forget)
        self._inboxes.append((subject, inbox))
        return inbox

    async def hear(self, subject: str, hearer: Hearer) -> Subscription:
        self._require()

        async def forget() -> None:
            self._inboxes.remove((subject, hearing))

        hearing: Hearing[Delivery] = Hearing(subject, hearer, forget)
        self._inboxes.append((subject, hearing))
        return hearing

    async def call(self, subject: str, data: bytes, *, timeout_s: float = 2.0) -> bytes:
        self._require(data)
        put = self._broker.server_of(subject)
        if put is None:
            raise Unavailable(f"nobody serves {subject}")
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        put(_Call(data, answer))
        try:
            # Not wait_for: in Python 3.11 that swallows a cancellation which comes together with the answer.
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            raise Unavailable(f"no answer to {subject} within {timeout_s} s") from error

    async def serve(self, subject: str, handler: CallHandler, *, at_once: int = 1) -> Subscription:
        self._require()

        async def answer(call: _Call) -> None:
            try:
                body = await handler(call.data)
                if len(body) > self.max_payload:
                    raise PayloadTooLarge(f"the answer of {len(body)} bytes exceeds {self.max_payload}")
            except Exception as error:
                if not isinstance(error, ThermoclineError):
                    _log.exception("call_failed", subject=subject)
                if not call.answer.done():
                    call.answer.set_exception(as_call_error(error))
                return
            if not call.answer.done():
                call.answer.set_result(body)

        async def forget() -> None:
            self.servers.remove((subject, inbox))

        inbox: Inbox[_Call] = Inbox(subject, answer, limit=1024, at_once=at_once, on_close=forget)
        self.servers.append((subject, inbox))
        return inbox

    # -- answers ----------------------------------------------------------------------------------------------

    async def read_answers(self, names: Sequence[str], *, timeout_s: float) -> dict[str, bytes | None]:
        self._require()
        return {name: self._broker.answers.get(name) for name in names}

    async def write_answer(self, name: str, data: bytes, *, timeout_s: float = 2.0) -> None:
        self._require(data)
        self._broker.answers[name] = data

    # -- streams ----------------------------------------------------------------------------------------------

    async def append(self, subject: str, data: bytes, *, message_id: str = "", timeout_s: float = 5.0) -> int:
        self._require(data)
        seq = self._broker.publish(Delivery(subject, data, {}), message_id)
        if seq == 0:
            raise Unavailable(f"no stream captures {subject}")
        return seq

    async def follow(
        self, stream: str, *, from_seq: int = 1, subject: str = ">", live: bool = True
    ) -> AsyncIterator[StreamMessage]:
        stored = self._broker.stream(stream)
        end = stored.last_seq
        seq = max(from_seq, stored.first_seq)
        while live or seq <= end:
            seq = max(seq, stored.first_seq)
            if self._closed:
                raise Unavailable("the bus is closed")
            if not self._connected or seq > stored.last_seq:
                await self._broker.change()
                continue
            message = stored.messages[seq - stored.first_seq]
            seq += 1
            if matches(subject, message.subject):
                yield message

    async def stream_info(self, stream: str) -> StreamInfo:
        self._require()
        stored = self._broker.stream(stream)
        return StreamInfo(stored.first_seq, stored.last_seq, stored.nbytes)

    # -- the bucket -------------------------------------------------------------------------------------------

    async def put_object(self, name: str, data: bytes) -> None:
        self._require()
        self._broker.objects[name] = data

    async def get_object(self, name: str) -> bytes | memoryview | None:
        self._require()
        return self._broker.objects.get(name)

    async def delete_object(self, name: str) -> None:
        self._require()
        self._broker.objects.pop(name, None)

    async def list_objects(self) -> list[str]:
        self._require()
        return sorted(self._broker.objects)

    # -- records -----------------------------------------------------------------------------------------------

    async def read_record(self, name: str, *, timeout_s: float = 2.0) -> Record | None:
        self._require()
        return self._broker.read_record(name)

    async def write_record(self, name: str, data: bytes, *, revision: int, timeout_s: float = 2.0) -> int | None:
        self._require(data)
        return self._broker.write_record(name, data, revision)

    # -- kept answers ------------------------------------------------------------------------------------------

    async def keep(self, name: str, data: bytes, *, timeout_s: float = 2.0) -> None:
        self._require(data)
        self._broker.keep_answer(name, data)

    async def kept(self, name: str, *, timeout_s: float = 2.0) -> bytes | None:
        self._require()
        return self._broker.kept_answers().get(name)

    async def kept_room(self, *, timeout_s: float = 2.0) -> KeptRoom:
        self._require()
        return self._broker.kept_room()

    async def forget(self, names: str, *, timeout_s: float = 2.0) -> int:
        self._require()
        return self._broker.forget_answers(names)

    def _require(self, data: bytes = b"") -> None:
        """Raise what the real bus raises when it is disconnected or ``data`` is too long."""
        if not self.is_connected:
            raise Unavailable("the message broker is not connected")
        if len(data) > self.max_payload:
            raise PayloadTooLarge(f"a message of {len(data)} bytes exceeds the broker's {self.max_payload}")
