"""Whether what was read from a device was still its own: asked of the scheduler before it is kept for good.

The scheduler locks device pages while a save reads them. When it gives this storage up (it was frozen, or cut off),
it lets go of these locks, and the pages may be written anew under the hands of a storage that lives on. Such KV would
be on the disk under a right name, with checksums that agree. So before a chunk that was read from a device is written,
the scheduler is asked, after the reading, whether it still counts this incarnation among its own. A "yes" was said
later than the last byte was read, and a process is never let in again once given up, so the locks held all the while.
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
"""How long no scheduler may answer before what was read is given up: one takes over from another, or the broker is
away. It is less than the deadline of a save."""

_PAUSE_S = 0.2


class StandingCheck:
    """One question at a time answers all readers that were done with reading when it was asked."""

    def __init__(
        self, bus: Bus, storage_id: str, incarnation: str, *, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._bus = bus
        self._question = encode(GetStanding(storage_id=storage_id, incarnation=incarnation))
        self._clock_ns = clock_ns
        self._asking = asyncio.Lock()
        self._asked_ns = -1  # When the last question was asked that was answered with yes.

    async def confirm(self) -> None:
        """Return if this storage was a member of the cell after now.

        Raises TransportError when it is none any more, Unavailable when no scheduler says so in ``PATIENCE_S``.
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
        """Return when the question was asked that was answered, and the answer."""
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
