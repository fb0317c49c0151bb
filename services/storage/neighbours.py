"""Reports at once when a worker of this node has ended: the storage sees its sign of life disappear.

The report is a heartbeat of that worker which says that it is gone. It is sent on the storage's own subject, since a
broker may let only the worker publish on the worker's. A core message may be lost, and for a moment there may be no
active scheduler to hear it, so it is repeated a few times. If all are lost, the worker's own heartbeats are missed
before long, as are those of one that hangs without ending.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from shared import logs, subjects
from shared.bus.protocol import Bus
from shared.codec import encode
from shared.errors import Unavailable
from shared.memory.life import WATCHED_MOST, LifeWatch, Member
from shared.messages.status import Heartbeat

LOOK_S = 0.1

SAID_AFTER_S = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Times of the repeats after the end was seen. A standby takes over within the first of these seconds."""

DUE_MOST = WATCHED_MOST * len(SAID_AFTER_S)
"""Most pending repeats; beyond that the oldest are dropped, and missed heartbeats have to do."""

_log = logs.get_logger("storage")


class Neighbours:
    """Watches the workers on this node, and reports their ends."""

    def __init__(
        self, bus: Bus, storage_id: str, prefix: str, *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Watch the workers that share /dev/shm and ``prefix`` with the storage ``storage_id``.

        Reports go out on ``bus``, which is closed by its owner. ``clock_s`` (seconds) times their repeats.
        """
        self._bus = bus
        self._subject = subjects.heartbeat("storage", storage_id)
        self._watch = LifeWatch(prefix)
        self._clock_s = clock_s
        self._due: list[tuple[float, Member]] = []
        self._was_full = False
        self._gone: deque[Member] = deque(maxlen=WATCHED_MOST)  # The workers that ended last.

    def is_gone(self, worker_id: str, incarnation: str) -> bool:
        """Return whether this incarnation of a worker was seen to end."""
        return Member("worker", worker_id, incarnation) in self._gone

    async def run(self) -> None:
        """Look at intervals until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Find the workers that have ended since the last look, and send the reports that are due."""
        now_s = self._clock_s()
        for member in self._watch.look():
            if member.kind == "worker":
                _log.info("neighbour_gone", worker=member.id, incarnation=member.incarnation)
                self._gone.append(member)
                self._due += [(now_s + after_s, member) for after_s in SAID_AFTER_S]
        del self._due[:-DUE_MOST]
        if self._watch.is_full and not self._was_full:
            _log.warning("neighbours_unwatched", most=WATCHED_MOST, advice="heartbeats tell of the others' end")
        self._was_full = self._watch.is_full
        due = [member for at_s, member in self._due if at_s <= now_s]
        self._due = [(at_s, member) for at_s, member in self._due if at_s > now_s]
        for member in due:
            word = Heartbeat(kind=member.kind, id=member.id, incarnation=member.incarnation, is_gone=True)
            # Without a broker: the report is repeated, and the scheduler misses its heartbeats anyway.
            with suppress(Unavailable):
                await self._bus.publish(self._subject, encode(word))

    def close(self) -> None:
        """Stop watching; idempotent."""
        self._watch.close()
