"""Following a stream: an ordered push consumer that is replaced whenever it may have missed a message.

Theory of operation. JetStream pushes stored messages to a subject of ours; each carries its stream sequence and a
consumer sequence that counts 1, 2, 3. A hole in the latter, a heartbeat that names a later number than we have,
silence, or a lost connection all mean the same: this consumer is useless from now on. Then :func:`follow` makes a new
one that starts behind the last message it yielded, which is why there is neither a gap nor a repeat. A read that ends
needs more: in a cluster the server that has the consumer may lack what the stream's leader has, and would end it too
early, so consumers are made until the leader itself has one. Flow control keeps what is in flight bounded: its requests
are answered in their place in the queue, that is, when everything before them has been consumed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import nats.errors

from shared import logs, subjects
from shared.bus import jetstream, measures
from shared.bus.protocol import StreamMessage
from shared.bus.subject_match import matches
from shared.errors import TransportError, Unavailable

HEARTBEAT_S = 1.0
SILENCE_S = 3.5 * HEARTBEAT_S
INACTIVE_NS = 10 * 10**9
RETRY_S = 0.1
FIRST_CREATE_S = 1.0
CREATE_GROWTH = 1.25
"""The first try to create a consumer waits FIRST_CREATE_S, each next one after a timeout this much longer.

Servers that elect a leader drop requests meanwhile, so a caller that waits long for an answer continues late; a busy
server answers late. API_TIMEOUT_S is the most.
"""
GIVE_UP_S = 30.0
"""Time without progress after which a bounded read (``live=False``) raises Unavailable.

A cluster that lost its leader elects another within 4 to 9 s, and tries once more where votes were split.
"""

CONSUMERS_AT_ONCE = 8
"""Consumers that a bounded read makes one after the other, until the stream's leader has one. Then it pauses."""

_CAPTURED = {subjects.INPUTS_STREAM: subjects.INPUTS, subjects.OUTPUTS_STREAM: subjects.OUTPUTS}

_log = logs.get_logger("bus")


@dataclass(frozen=True, slots=True)
class _Stored:
    message: StreamMessage
    pending: int  # Matching messages stored behind it when it was delivered.


@dataclass(frozen=True, slots=True)
class _FlowControl:
    reply: str


class Tail:
    """One ephemeral ordered consumer. Ends (``next`` returns None) as soon as it is broken."""

    def __init__(self, client: Any, stream: str, from_seq: int, subject: str, *, live: bool) -> None:
        """Prepare a consumer of messages from ``from_seq`` on, which :meth:`start` creates.

        ``subject`` may have wildcards, and ``>`` is every message. If not ``live``, the tail also ends once the server
        is idle, since messages that it announced have expired by then.
        """
        self._client = client
        self.stream = stream
        self._from_seq = from_seq
        self._subject = subject
        self.live = live
        self._queue: deque[_Stored | _FlowControl] = deque()
        self._wakened = asyncio.Event()
        self._broken = ""
        self._delivered = 0
        self._heard = 0.0
        self._name = ""
        self.server = ""  # That has the consumer, in a cluster.
        self._subscription: Any = None
        self._watchdog: asyncio.TimerHandle | None = None

    async def start(self, timeout_s: float) -> int:
        """Create the consumer; return how many stored messages it will deliver first. Raises Unavailable."""
        inbox = self._client.new_inbox()
        self._subscription = await self._client.hear(inbox, self._received)
        config: dict[str, Any] = {
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._from_seq,
            "deliver_subject": inbox,
            "ack_policy": "none",
            "max_deliver": 1,
            "replay_policy": "instant",
            "flow_control": True,
            "idle_heartbeat": int(HEARTBEAT_S * 1e9),
            "inactive_threshold": INACTIVE_NS,
            "mem_storage": True,
            "num_replicas": 1,
        }
        if self._subject != ">":
            config["filter_subject"] = self._subject
        # Others cannot guess the name, so they cannot delete the consumer. A filter without wildcards is in the
        # subject, too, where the server checks it against our permissions and refuses a body that differs from it.
        name = config["name"] = secrets.token_hex(8)
        verb = f"CONSUMER.CREATE.{self.stream}.{name}"
        if "*" not in self._subject and ">" not in self._subject:
            verb += f".{self._subject}"
        body = {"stream_name": self.stream, "config": config}
        answer = await jetstream.checked_request(self._client, verb, body, timeout_s=timeout_s)
        self._name = answer["name"]
        self.server = leader_in(answer)
        self._watch(asyncio.get_running_loop().time())
        return int(answer["num_pending"])

    async def next(self) -> _Stored | None:
        """Return the next stored message, or None when a new consumer is needed."""
        while True:
            while self._queue:
                item = self._queue.popleft()
                if isinstance(item, _Stored):
                    return item
                await self._answer(item.reply)
            if self._broken:
                return None
            self._wakened.clear()
            await self._wakened.wait()

    def break_off(self, reason: str) -> None:
        """End the tail, for ``reason``, once its queued messages were read."""
        if not self._broken:
            self._broken = reason
            self._wakened.set()

    async def stop(self) -> None:
        """Unsubscribe and, where the server can be reached, delete the consumer."""
        self.break_off("stopped")
        if self._watchdog is not None:
            self._watchdog.cancel()
        try:
            if self._subscription is not None:
                await self._subscription.unsubscribe()
            if self._name and self._client.is_connected:
                # Without a reply: the server forgets an inactive consumer anyway.
                await self._client.publish(f"$JS.API.CONSUMER.DELETE.{self.stream}.{self._name}", b"")
        except (nats.errors.Error, OSError):
            pass  # The connection was lost, and consumer and subscription with it.

    async def _answer(self, reply: str) -> None:
        try:
            await self._client.publish(reply, b"")
        except (nats.errors.Error, OSError):
            self.break_off("disconnected")

    def _watch(self, now: float) -> None:
        self._heard = now
        self._watchdog = asyncio.get_running_loop().call_later(SILENCE_S, self._check_silence)

    def _check_silence(self) -> None:
        loop = asyncio.get_running_loop()
        silent_s = loop.time() - self._heard
        if silent_s >= SILENCE_S:
            self.break_off("silence")
        else:
            self._watchdog = loop.call_later(SILENCE_S - silent_s, self._check_silence)

    def _received(self, message: Any) -> None:
        """Handle a message, a heartbeat or a flow-control request."""
        if self._broken:
            return
        self._heard = asyncio.get_running_loop().time()
        if not message.data and "Status" in (headers := message.headers or {}):
            self._controlled(message, headers)
            return
        fields = message.reply.split(".")
        if len(fields) < 9:
            self.break_off("not a delivery")
            return
        # $JS.ACK.[domain.account.]stream.consumer.deliveries.stream_seq.consumer_seq.time.pending[.random]
        first = 2 if len(fields) == 9 else 4
        seq, consumer_seq, time_ns, pending = (int(text) for text in fields[first + 3 : first + 7])
        if consumer_seq != self._delivered + 1:
            self.break_off("gap")
            return
        self._delivered = consumer_seq
        self._queue.append(_Stored(StreamMessage(seq, time_ns, message.subject, message.data), pending))
        self._wakened.set()

    def _controlled(self, message: Any, headers: dict[str, str]) -> None:
        if headers["Status"] != "100":
            self.break_off(headers.get("Description", headers["Status"]))
        elif message.reply:
            self._release(message.reply)
        else:
            if int(headers.get("Nats-Last-Consumer", "0")) > self._delivered:
                self.break_off("missed")
            stalled = headers.get("Nats-Consumer-Stalled")
            if stalled:
                self._release(stalled)
            elif not self.live and not self._queue:
                # Idle, though messages were expected: they expired. Count again with a new consumer.
                self.break_off("idle")

    def _release(self, subject: str) -> None:
        """Queue an answer that lets the server send more; break off where ``subject`` is none for that."""
        # Another process may have sent the message, and we would publish wherever it says.
        if not subject.startswith(f"$JS.FC.{self.stream}."):
            self.break_off("not flow control")
            return
        self._queue.append(_FlowControl(subject))
        self._wakened.set()


def leader_in(answer: dict[str, Any]) -> str:
    """Return the name of the server that leads what ``answer`` is about; "" where servers are no cluster."""
    return str((answer.get("cluster") or {}).get("leader", ""))


class _Elsewhere(Exception):
    """A consumer of a bounded read is on another server than the stream's leader, and may lack messages."""


class Tails:
    """All tails of one connection; a lost connection ends them so that each is made again."""

    def __init__(self, denied: AbstractSet[tuple[str, str]] = frozenset()) -> None:
        """Begin with no tails. ``denied`` are verbs and subjects, in lower case, that the server denies us now."""
        self._tails: dict[int, Tail] = {}
        self._denied = denied

    def break_all(self, reason: str) -> None:
        """End every tail, so that its follower makes a new consumer behind the last message it yielded."""
        for tail in list(self._tails.values()):
            tail.break_off(reason)

    async def follow(
        self, connection: Any, stream: str, from_seq: int, subject: str, *, live: bool
    ) -> AsyncIterator[StreamMessage]:
        """Yield a stream's messages, see ``shared.bus.protocol.Bus.follow``.

        ``connection()`` returns the current client, or None when closed.
        """
        loop = asyncio.get_running_loop()
        next_seq = max(1, from_seq)
        remaining: int | None = None
        progressed_s = loop.time()
        create_s = FIRST_CREATE_S
        elsewhere = 0  # Consumers in a row that another server has than the stream's leader.
        while True:
            client = connection()
            if client is None:
                raise Unavailable("the bus is closed")
            tail = Tail(client, stream, next_seq, subject, live=live)
            self._tails[id(tail)] = tail
            before, elsewhere = elsewhere, 0
            try:
                if client.is_connected:
                    timeout_s, create_s = create_s, min(CREATE_GROWTH * create_s, jetstream.API_TIMEOUT_S)
                    pending = await self._start(tail, client, timeout_s)
                    create_s = FIRST_CREATE_S
                    if not live and pending == 0:
                        return
                    remaining = pending if remaining is None else remaining
                    while (stored := await tail.next()) is not None:
                        next_seq = stored.message.seq + 1
                        remaining -= 1
                        progressed_s = loop.time()
                        if matches(_CAPTURED.get(stream, ">"), stored.message.subject):
                            yield stored.message
                        else:
                            # A user had another stream delivered into this one.
                            measures.MISDIRECTED.inc()
                            _log.warning("message_misdirected", to=stream, subject=stored.message.subject)
                        if not live and (stored.pending == 0 or remaining <= 0):
                            return
            except _Elsewhere:
                create_s, elsewhere = FIRST_CREATE_S, before + 1
            except (nats.errors.Error, OSError, Unavailable) as error:
                _log.info("follow_interrupted", stream=stream, next_seq=next_seq, reason=str(error))
            except TransportError as error:
                # A restarted server may know its streams only after a moment; before our first message it is final.
                if remaining is None:
                    raise
                _log.warning("follow_interrupted", stream=stream, next_seq=next_seq, reason=str(error))
            finally:
                del self._tails[id(tail)]
                await tail.stop()
            if not live and loop.time() - progressed_s > GIVE_UP_S:
                raise Unavailable(f"{stream} cannot be read: no progress in {GIVE_UP_S} s")
            if elsewhere % CONSUMERS_AT_ONCE == 0:
                await asyncio.sleep(RETRY_S)

    async def _start(self, tail: Tail, client: Any, timeout_s: float) -> int:
        """Start ``tail``; return how many messages it will deliver first. Raises as ``Tail.start``, and _Elsewhere."""
        leader = await self._leader_of(client, tail.stream, timeout_s) if client.is_clustered and not tail.live else ""
        try:
            pending = await tail.start(timeout_s)
        except TransportError as error:
            if not leader:
                raise
            # The stream exists, and the server that was to have the consumer has not got it yet.
            raise Unavailable(error.message) from error
        # A server that is a leaf of a cluster, and none itself, names a leader of its streams, but none of consumers.
        if leader and tail.server not in ("", leader):
            raise _Elsewhere
        return pending

    async def _leader_of(self, client: Any, stream: str, timeout_s: float) -> str:
        """Return the name of the stream's leader; "" where our user may not ask. Raises Unavailable, TransportError."""
        verb = f"STREAM.INFO.{stream}"
        permission = "publish", f"$js.api.{verb}".lower()
        if permission in self._denied:
            return ""
        try:
            answer = await jetstream.checked_request(client, verb, timeout_s=timeout_s)
            leader = leader_in(answer)
            if "cluster" in answer and not leader:
                raise Unavailable(f"{stream} has no leader")
            return leader
        except Unavailable:
            if permission not in self._denied:
                raise
            _log.warning("stream_read_unproven", stream=stream, reason=f"the broker does not let us ask for {verb}")
            return ""
