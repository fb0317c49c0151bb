"""The interface of the bus. ``shared.bus.nats_bus`` implements it, and in memory ``tests.memory_bus``.

Guarantees that the conformance suite checks for both:

* ``publish`` is at most once and never waits for a receiver; per publisher and subject, order is kept.
* ``append`` is acknowledged storage: when it returns, the message has that sequence number in its stream.
  The same ``message_id`` within two minutes is stored once and answers the first sequence.
* ``follow`` yields a stream's messages in order from a sequence on, without a gap or a repeat, across
  reconnects, and goes on with new ones until cancelled.
* ``write_record`` is compare-and-set: of several writes on top of one revision, one succeeds.
* every wait is bounded: calls time out, subscriptions have a pending limit; a message beyond it is dropped
  and counted in ``Subscription.dropped``, and ``on_reconnect`` is called when the others have been handled.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Delivery:
    """A core message as received."""

    subject: str
    data: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """A stored message. ``time_ns`` is the server's timestamp (wall clock, ns), monotonic within a stream."""

    seq: int
    time_ns: int
    subject: str
    data: bytes


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """First and last stored sequence; an empty stream has ``first_seq == last_seq + 1``."""

    first_seq: int
    last_seq: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Bounds of the two streams, and (``kept``) of the bucket of kept answers."""

    max_bytes: int = 2 * 1024**3
    max_age_s: float = 24 * 3600.0
    replicas: int = 1
    kept_entries: int = 100_000
    kept_bytes: int = 256 * 1024**2
    kept_age_s: float = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class KeptRoom:
    """How full the bucket of kept answers is, and its bounds."""

    nbytes: int
    most_bytes: int
    entries: int
    most_entries: int


@dataclass(frozen=True, slots=True)
class Record:
    """A record as read. ``revision`` grows with every write, and is never 0."""

    revision: int
    data: bytes


class Subscription(Protocol):
    """A running subscription; ``dropped`` counts messages beyond its pending limit."""

    dropped: int

    async def close(self) -> None:
        """End the subscription; running handlers finish first."""

    def cancel(self) -> None:
        """End the subscription at once and cancel running handlers."""


Handler = Callable[[Delivery], Awaitable[None]]
Hearer = Callable[[Delivery], None]
CallHandler = Callable[[bytes], Awaitable[bytes]]


class Bus(Protocol):
    """A connection to the broker; the module's docstring gives the guarantees. All errors are ``shared.errors``."""

    @property
    def max_payload(self) -> int:
        """Largest message in bytes, headers included; 0 before the first connection."""

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection now, so that a publish would not raise Unavailable."""

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Call back (on the event loop) whenever the connection, or a published message, is lost."""

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Call back (on the event loop) whenever the connection is back, or messages were dropped: catch up then."""

    async def ensure_streams(self, limits: StreamLimits) -> None:
        """Create the streams, and the buckets of snapshots, records, answers and responses, where they do not exist.

        Those that exist are changed to ``limits`` as far as none of their messages is lost.
        """

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Publish a core message. Raises PayloadTooLarge beyond ``max_payload``, Unavailable when disconnected."""

    def publish_now(self, subject: str, data: bytes) -> bool:
        """Publish before this returns, behind all earlier messages; return False where that is impossible now.

        In that case nothing was published. Raises like :meth:`publish`.
        """

    async def append(self, subject: str, data: bytes, *, message_id: str = "", timeout_s: float = 5.0) -> int:
        """Store a message in the stream that captures ``subject``; return its sequence number.

        Raises PayloadTooLarge, or Unavailable when no acknowledgement came in time (the message may or may not be
        stored; retry with the same ``message_id``).
        """

    async def beat(self, subject: str, data: bytes) -> None:
        """Publish a heartbeat, and repeat it while there is no newer one, even while the event loop is busy."""

    async def subscribe(self, subject: str, handler: Handler, *, pending_limit: int = 65_536) -> Subscription:
        """Run ``handler`` for each message, one at a time in order of arrival."""

    async def hear(self, subject: str, hearer: Hearer) -> Subscription:
        """Call ``hearer`` with each message where it is read, in order of arrival.

        It must be quick: it blocks the event loop of this process.
        """

    async def call(self, subject: str, data: bytes, *, timeout_s: float = 2.0) -> bytes:
        """Send a request and return the reply. Raises Unavailable without a listener or a reply in time."""

    async def serve(self, subject: str, handler: CallHandler, *, at_once: int = 1) -> Subscription:
        """Answer calls, at most ``at_once`` at a time, begun in order of arrival.

        A handler's ThermoclineError travels back and is raised at the caller.
        """

    def follow(
        self, stream: str, *, from_seq: int = 1, subject: str = ">", live: bool = True
    ) -> AsyncIterator[StreamMessage]:
        """Yield messages from ``from_seq`` on that match ``subject``; ends at the present last one if not ``live``."""

    async def stream_info(self, stream: str) -> StreamInfo:
        """Return first and last sequence and size of a stream. Raises TransportError when there is no such stream."""

    async def put_object(self, name: str, data: bytes) -> None:
        """Store an object in the snapshot bucket, replacing one of the same name atomically."""

    async def get_object(self, name: str) -> bytes | memoryview | None:
        """Return an object of the snapshot bucket, or None. Raises Unavailable, or TransportError for a damaged one."""

    async def delete_object(self, name: str) -> None:
        """Delete an object; a missing name is no error."""

    async def list_objects(self) -> list[str]:
        """Return the names of the objects in the snapshot bucket, sorted."""

    async def read_record(self, name: str, *, timeout_s: float = 2.0) -> Record | None:
        """Return the newest record of that name in the record bucket, or None. Raises Unavailable."""

    async def write_record(self, name: str, data: bytes, *, revision: int, timeout_s: float = 2.0) -> int | None:
        """Replace the record whose revision is ``revision`` (0: make the first one); return the new revision.

        None when it has another revision by now. Raises Unavailable when no answer came in time: then the record may be
        written or not, now or later; reading it tells.
        """

    async def keep(self, name: str, data: bytes, *, timeout_s: float = 2.0) -> None:
        """Store an entry in the bucket of kept answers, which drops its oldest entries at its bounds.

        Raises PayloadTooLarge beyond ``max_payload``, Unavailable when no answer came in time or there is no bucket.
        """

    async def kept(self, name: str, *, timeout_s: float = 2.0) -> bytes | None:
        """Return the kept answer of that name, or None. Raises Unavailable."""

    async def kept_room(self, *, timeout_s: float = 2.0) -> KeptRoom:
        """Return how full the bucket of kept answers is. Raises Unavailable, also where there is no bucket."""

    async def forget(self, names: str, *, timeout_s: float = 2.0) -> int:
        """Erase kept answers whose names match (``*`` is any one part, ``>`` the rest); return their number.

        Raises Unavailable.
        """

    async def read_answers(self, names: Sequence[str], *, timeout_s: float) -> dict[str, bytes | None]:
        """Return entries of the answer bucket, None for a missing one; late ones are left out.

        Raises Unavailable when none came within ``timeout_s``.
        """

    async def write_answer(self, name: str, data: bytes, *, timeout_s: float = 2.0) -> None:
        """Store an entry in the answer bucket. Raises Unavailable, PayloadTooLarge or TransportError."""

    async def flush(self) -> None:
        """Wait until the server has all published messages, and the streams have those that they capture.

        Raises Unavailable when that is not certain; ``on_disconnect`` has been called then, because publishers must
        repeat the messages that they cannot do without.
        """

    async def close(self) -> None:
        """Drain and disconnect. Idempotent."""
