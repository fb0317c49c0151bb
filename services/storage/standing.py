"""Confirmation by the scheduler that device pages were still locked when a save read them.

The scheduler locks device pages while a save reads them. When it gives this storage up (it was frozen, or cut off), it
releases these locks, and the pages may be written again while a storage that lives on reads them. Such KV would be on
the disk under a right name, with checksums that agree. So before a chunk that was read from a device is written, the
scheduler is asked, after the reading, whether it still counts this incarnation among its own. A "yes" was given after
the last byte was read, and a process is never let in again once given up, so the locks held all the while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from shared import subjects
from shared.bus.protocol import Bus
from shared.codec import decode, encode
from shared.errors import TransportError, Unavailable
from shared.messages.status import GetStanding, Standing

PATIENCE_S = 20.0
"""How long the scheduler may be silent before read data is given up: a standby takes over, or the broker is away.

It is less than the deadline of a save.
"""

_PAUSE_S = 0.2


class StandingCheck:
    """Confirmations of this storage's membership.

    One question answers all readers that had finished reading when it was asked.
    """

    def __init__(
        self, bus: Bus, storage_id: str, incarnation: str, *, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """Ask the scheduler, over ``bus``, about this ``incarnation`` of the storage ``storage_id``.

        ``clock_ns`` must never go back: it decides whether an answer is recent enough.
        """
        self._bus = bus
        self._question = encode(GetStanding(storage_id=storage_id, incarnation=incarnation))
        self._clock_ns = clock_ns
        self._asking = asyncio.Lock()
        self._asked_ns = -1  # Time of the last question that was answered with yes.

    async def confirm(self) -> None:
        """Return if this storage was a member of the cell after the time of this call.

        Raises TransportError when it is none any more, Unavailable when no scheduler answers within ``PATIENCE_S``.
        """
        read_ns = self._clock_ns()
        async with self._asking:
            if self._asked_ns >= read_ns:
                return
            asked_ns, answer = await self._ask()
            if not answer.is_member:
                raise TransportError("the cell has given this storage up: what it read may be the KV of others")
            self._asked_ns = asked_ns

    async def _ask(self) -> tuple[int, Standing]:
        """Return the time of the question that was answered, and the answer."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + PATIENCE_S
        while True:
            asked_ns = self._clock_ns()
            try:
                answered = await self._bus.call(subjects.rpc("scheduler", "standing"), self._question)
                return asked_ns, decode(answered, Standing)
            except Unavailable:
                if loop.time() >= deadline_s:
                    raise
            await asyncio.sleep(_PAUSE_S)
