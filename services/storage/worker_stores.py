"""Copies that a worker on a GPU makes of its own pages to the host pool, and their certain end.

The worker may write to the pages of a call for as long as the call is not answered. So a worker that is silent leaves
them in doubt: they are not allocated until it has answered a repeated call, or has ended.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection
from typing import Literal

from shared import logs, subjects
from shared.bus.protocol import Bus
from shared.codec import decode, encode
from shared.errors import ThermoclineError, TransportError
from shared.messages.page_stores import PagesStored, StorePages
from shared.messages.pools import PoolHandle

PROBE_S = 2.0
"""Longest wait for a worker's answer whether it copies."""

PROBE_AGAIN_S = 30.0
"""Interval at which a worker that does not copy is asked again. It does once the host pool is pinned, minutes later."""

ANSWER_S = 10.0
"""Longest wait for an answer; a part of a backup is copied in well under a second."""

ASK_AGAIN_S = 1.0

ENDING_S = 1.0
"""Time from the end of a worker's sign of life until the driver has surely ended its kernels, which takes milliseconds.
"""

KNOWN_MOST = 256
"""Limit on the workers whose ways are known; a node has a few, and an autoscaler gives each a new name."""

Outcome = Literal["stored", "refused", "silent"]

_log = logs.get_logger("storage")


class WorkerStores:
    """Calls to workers, and those without an answer. Owned by the event loop."""

    def __init__(
        self,
        bus: Bus,
        is_gone: Callable[[str, str], bool],
        clock_s: Callable[[], float],
        *,
        kinds: Collection[str] = ("cuda_ipc",),
        answer_s: float = ANSWER_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Prepare; ``is_gone`` returns whether this incarnation of a worker was seen to end.

        ``kinds`` are the kinds of device pools whose workers are asked.
        """
        self._bus, self._is_gone, self._clock_s = bus, is_gone, clock_s
        self._kinds, self._answer_s, self._sleep = kinds, answer_s, sleep
        # By (id, incarnation), those heard of last at the end: time before which a worker is not asked again, None for
        # one that copies.
        self._known: OrderedDict[tuple[str, str], float | None] = OrderedDict()
        self._silent: dict[tuple[str, str], int] = {}  # Number of unanswered calls by worker.

    async def serves(self, worker_id: str, device: PoolHandle, probe: StorePages) -> bool:
        """Return whether this worker copies from ``device``. ``probe`` names no pages: it leaves nothing in doubt."""
        worker = (worker_id, probe.worker_incarnation)
        if device.kind not in self._kinds or device.parts or worker in self._silent:
            return False
        not_before_s = self._known.get(worker, 0.0)
        if not_before_s is None:
            return True
        if self._clock_s() < not_before_s:
            return False
        try:
            reason = (await self._call(worker_id, probe, PROBE_S)).refused
        except ThermoclineError as error:
            reason = error.message
        self._note(worker, reason)
        return not reason

    async def store(self, worker_id: str, call: StorePages) -> Outcome:
        """Have the worker copy a call's pages.

        After ``silent`` the pages are in doubt until :meth:`settle` returns; after ``refused`` nothing was written.
        Raises TransportError when it failed and nothing is written any more.
        """
        worker = (worker_id, call.worker_incarnation)
        try:
            answer = await self._call(worker_id, call, self._answer_s)
        except ThermoclineError as error:
            self._silent[worker] = self._silent.get(worker, 0) + 1
            _log.warning("backup_in_doubt", worker=worker_id, transfer=call.transfer_id, reason=error.message)
            return "silent"
        if answer.refused:
            self._note(worker, answer.refused)
            return "refused"
        if answer.error:
            raise TransportError(f"worker {worker_id} could not copy: {answer.error}")
        return "stored"

    async def settle(self, worker_id: str, call: StorePages) -> None:
        """Return when nothing of an unanswered call is written any more."""
        worker = (worker_id, call.worker_incarnation)
        try:
            while not self._is_gone(*worker):
                try:
                    await self._call(worker_id, call, self._answer_s)
                except ThermoclineError:
                    await self._sleep(ASK_AGAIN_S)
                else:
                    return
            await self._sleep(ENDING_S)
        finally:
            self._silent[worker] -= 1
            if not self._silent[worker]:
                del self._silent[worker]

    async def _call(self, worker_id: str, call: StorePages, timeout_s: float) -> PagesStored:
        answer = await self._bus.call(subjects.rpc("worker", "store", worker_id), encode(call), timeout_s=timeout_s)
        return decode(answer, PagesStored)

    def _note(self, worker: tuple[str, str], reason: str) -> None:
        """Record whether a worker copies, or why not; its earlier incarnations are forgotten.

        So is the one heard of first beyond KNOWN_MOST: if it is still there it is asked again.
        """
        for each in [known for known in self._known if known[0] == worker[0]]:
            del self._known[each]
        self._known[worker] = self._clock_s() + PROBE_AGAIN_S if reason else None
        if len(self._known) > KNOWN_MOST:
            self._known.popitem(last=False)
        if reason:
            _log.info("backups_by_storage", worker=worker[0], reason=reason)
        else:
            _log.info("backups_by_worker", worker=worker[0])
