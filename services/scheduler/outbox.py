"""Publishing outputs so that none is lost while the broker is away, or with the scheduler that published it first.

A core publish may die in the connection's buffers. The outbox therefore keeps every output until a round trip to the
server has confirmed it, and sends what is unconfirmed again, in order, after a reconnect. Targets drop numbers that
they have executed, so a repeat is harmless.

Without the lead the outbox is silent. A standby's keeps the outputs of its own fold until the active scheduler's lead
says that they are at the broker (:meth:`Outbox.forget`). What is left when the lead changes hands may have died with
the predecessor, and it is published first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from services.scheduler.leadership import Progress
from services.scheduler.output_chain import Mark, OutputChain
from services.scheduler.targets import target_of
from shared import logs, subjects
from shared.bus.protocol import Bus
from shared.codec import Published, encode
from shared.errors import PayloadTooLarge, Unavailable

MOST_UNCONFIRMED = 2048
"""Unconfirmed outputs from which on the fold waits for a round trip."""

MOST_KEPT = 65_536
"""Outputs of a silent outbox from which on the fold waits: only the lead's record tells it which are published."""

RETRY_S = 0.1

_log = logs.get_logger("outbox")


class _Held(NamedTuple):
    cause: int
    time_ns: int  # Timestamp of the input that caused it.
    subject: str
    body: bytes


class Outbox:
    """Publishes outputs in order while ``may_speak()`` holds. Any task may call its methods at any time."""

    def __init__(self, bus: Bus, wall_clock_ns: Callable[[], int], may_speak: Callable[[], bool]) -> None:
        """Begin with no outputs, and register with ``bus`` for lost and restored connections.

        ``may_speak`` is asked before each output. ``wall_clock_ns`` gives the time of publishing in an output's header.
        """
        self.refused = 0
        self.chain = OutputChain(Mark())
        self._bus = bus
        self._wall_clock_ns = wall_clock_ns
        self._may_speak = may_speak
        self._unconfirmed: deque[_Held] = deque()
        self._through = Progress()  # The last input whose outputs were given to send().
        self._known = Progress()  # What another scheduler published.
        self._sent = 0  # How many of the unconfirmed were given to the current connection.
        self._generation = 0
        self._publishing = asyncio.Lock()
        self._confirming = asyncio.Lock()
        bus.on_disconnect(self.send_again)
        bus.on_reconnect(self.send_again)

    @property
    def unconfirmed(self) -> int:
        """Number of outputs that the server may not have."""
        return len(self._unconfirmed)

    @property
    def published(self) -> Progress:
        """The last input up to which every output is known to be at the server."""
        if self._unconfirmed:
            first = self._unconfirmed[0]
            # No input before this one has a later timestamp.
            return Progress(first.cause - 1, first.time_ns)
        # While the fold comes up from a snapshot it is behind what its predecessor published.
        return self._known if self._known.covers(self._through.seq, self._through.time_ns) else self._through

    async def send(self, outputs: Sequence[Published], cause: int, time_ns: int) -> None:
        """Take the outputs of input ``cause``, and publish them; return at once while there is room.

        A silent outbox that is full waits until there is room again or it may speak.
        """
        bodies = [encode(output) for output in outputs]
        self.chain.add(cause, bodies)
        for output, body in zip(outputs, bodies, strict=True):
            self._unconfirmed.append(_Held(cause, time_ns, target_of(output).subject, body))
        self._through = Progress(cause, time_ns)
        self._drop_known()
        try:
            await self._publish()
        except Unavailable:
            pass  # confirm() sends it again after the reconnect.
        while len(self._unconfirmed) >= MOST_KEPT and not self._may_speak():  # noqa: ASYNC110 - the lead has no event.
            await asyncio.sleep(RETRY_S)
        if len(self._unconfirmed) >= MOST_UNCONFIRMED and self._may_speak():
            await self.confirm()

    async def send_up_to(self, seq: int) -> None:
        """Give the connection all outputs of inputs up to ``seq``, so that what is sent next arrives behind them.

        Raises Unavailable while the broker is away or this scheduler may not speak.
        """
        await self._publish()
        if self._sent < len(self._unconfirmed) and self._unconfirmed[self._sent].cause <= seq:
            raise Unavailable("outputs of this scheduler are not published yet")

    async def confirm(self) -> None:
        """Return when the server has every output given to :meth:`send` so far, however long that takes."""
        async with self._confirming:
            remaining = len(self._unconfirmed)
            while remaining and self._unconfirmed:
                try:
                    await self._publish()
                    generation, sent = self._generation, self._sent
                    if sent:
                        await self._bus.flush()
                except Unavailable:
                    sent = 0
                if not sent:
                    await asyncio.sleep(RETRY_S)
                elif generation == self._generation:
                    for _ in range(sent):
                        self._unconfirmed.popleft()
                    self._sent -= sent
                    remaining = max(0, remaining - sent)

    def forget(self, published: Progress) -> None:
        """Drop the outputs that another scheduler has published. Only for a silent outbox."""
        self._known = published
        self._drop_known()

    def clear(self, begin: Mark | None = None) -> None:
        """Drop everything: the fold begins again at a snapshot, before which everything is published.

        ``begin`` is the digest of outputs at which the snapshot was taken.
        """
        self.chain = OutputChain(begin or Mark())
        self._unconfirmed.clear()
        self._through = Progress()
        self.send_again()

    def send_again(self) -> None:
        """Count all unconfirmed outputs as not sent: the connection, or the scheduler that publishes, has changed."""
        self._generation += 1
        self._sent = 0

    async def _publish(self) -> None:
        async with self._publishing:
            while self._sent < len(self._unconfirmed) and self._may_speak():
                generation = self._generation
                held = self._unconfirmed[self._sent]
                try:
                    sent_ns = {subjects.SENT_NS_HEADER: str(self._wall_clock_ns())}
                    await self._bus.publish(held.subject, held.body, sent_ns)
                except PayloadTooLarge:
                    # Retrying cannot help. Its target notices the missing number and says so in its own log.
                    self.refused += 1
                    _log.error("output_exceeds_max_payload", subject=held.subject, nbytes=len(held.body))
                if generation == self._generation:
                    self._sent += 1

    def _drop_known(self) -> None:
        dropped = False
        while self._unconfirmed and self._known.covers(self._unconfirmed[0].cause, self._unconfirmed[0].time_ns):
            self._unconfirmed.popleft()
            dropped = True
        if dropped:
            # Nothing here was sent over this connection, unless the lead was lost in between; then it is sent again.
            self._generation += 1
            self._sent = 0
