"""The active scheduler's snapshots: when it takes them, and how it does not lose the lead over one.

A small state is encoded at once. A large one, which takes seconds, is encoded by a copy of this process, while this one
goes on folding.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from services.scheduler import cell_metrics
from services.scheduler.apart import Apart
from services.scheduler.config import SchedulerConfig
from services.scheduler.follower import Follower
from services.scheduler.outbox import Outbox
from services.scheduler.snapshots import SnapshotStore, encode_snapshot, take_snapshot
from shared import logs
from shared.errors import InternalError, ThermoclineError, Unavailable
from shared.messages.status import SnapshotTaken

CHECK_S = 0.25
RETRY_S = 5.0
"""Wait after a snapshot that failed: the cause, such as a broker that is away, lasts, and each failure is logged as an
error.
"""

# A snapshot pauses the fold while the state is encoded; the next one waits until pauses are below one percent of the
# time.
PAUSE_RATIO = 100

# Encoding in a copy takes a core, and twice the memory of the bytes, for that time: a twentieth of the time at most.
EFFORT_RATIO = 20

LARGE_NODES = 10_000
"""Nodes of the prefix tree from which on encoding, about 3 µs a node, takes longer than a copy of the process."""

APART_S = 120.0
"""Longest wait for a copy; one that takes longer is killed."""

_log = logs.get_logger("snapshots")


class SnapshotKeeper:
    """Takes snapshots every so many inputs or milliseconds, and on request, for one term of an active scheduler."""

    def __init__(
        self,
        store: SnapshotStore,
        follower: Follower,
        outbox: Outbox,
        config: SchedulerConfig,
        is_held: Callable[[], bool],
        expect_pause: Callable[[int], Awaitable[None]],
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """``expect_pause`` is called with the expected pause in ms, before each snapshot."""
        self._store = store
        self._follower = follower
        self._outbox = outbox
        self._config = config
        self._is_held = is_held
        self._expect_pause = expect_pause
        self._monotonic_ns = monotonic_ns
        self._taking = asyncio.Lock()
        self._seq = 0
        self._taken_ns = monotonic_ns()
        self._pause_ns = 0
        self._effort_ns = 0
        self._may_copy = True  # Until the system refused a copy, or one failed.

    def begin(self) -> None:
        """Count inputs and time from the restored state, as if its snapshot was just taken."""
        restored = self._follower.restored
        self._seq = restored.seq if restored is not None else 0
        self._taken_ns = self._monotonic_ns()

    async def run(self) -> None:
        """Take a snapshot whenever one is due, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            if self._is_due():
                try:
                    await self.take()
                except ThermoclineError as error:
                    _log.error("snapshot_failed", code=error.code, reason=error.message)
                    await asyncio.sleep(RETRY_S)

    async def take(self) -> SnapshotTaken:
        """Take a snapshot now, and return its input and size.

        Raises Unavailable without the lead, since the bucket is the active scheduler's, or when the state is not sound,
        and InternalError when the copy that encodes it fails.
        """
        async with self._taking:
            await self._expect_pause(2 * self._pause_ns // 1_000_000)
            async with self._follower.folding:
                # A successor does not repeat outputs from before its snapshot, so they must be published by now.
                await self._outbox.confirm()
                if not self._is_held():
                    raise Unavailable("this scheduler is not the active one")
                if not self._follower.is_sound:
                    raise Unavailable("the state may be half changed")
                begun_ns = self._monotonic_ns()
                seq, encoded = self._follower.position, self._encode()
                self._pause_ns = self._monotonic_ns() - begun_ns
            data = await self._bytes_of(encoded)
            self._effort_ns = self._monotonic_ns() - begun_ns
            # Should the lead be over by now, the snapshot is still as good as that of any other scheduler.
            await self._store.put(seq, data)
            self._seq, self._taken_ns = seq, self._monotonic_ns()
        cell_metrics.SNAPSHOT_BYTES.set(len(data))
        cell_metrics.SNAPSHOT_PAUSE_SECONDS.set(self._pause_ns / 1e9)
        _log.info("snapshot", seq=seq, nbytes=len(data), pause_ms=self._pause_ns / 1e6)
        return SnapshotTaken(seq=seq, nbytes=len(data))

    def _encode(self) -> bytes | Apart:
        """Return the snapshot of the state as it is now, or the process that makes it."""
        fold, release = self._follower.fold, self._follower.release
        said = self._outbox.chain.latest.digest
        if self._may_copy and len(fold.state.tree.nodes) >= LARGE_NODES:
            try:
                return Apart(lambda: encode_snapshot(take_snapshot(fold, release, said)))
            except InternalError as error:
                self._copies_failed(error)
        return encode_snapshot(take_snapshot(fold, release, said))

    async def _bytes_of(self, encoded: bytes | Apart) -> bytes:
        if isinstance(encoded, bytes):
            return encoded
        try:
            return await encoded.result(APART_S)
        except InternalError as error:
            self._copies_failed(error)
            raise

    def _copies_failed(self, error: InternalError) -> None:
        """Encode in this process from now on: a long pause is better than no snapshot."""
        self._may_copy = False
        _log.error("snapshots_pause_the_fold", reason=error.message)

    def _is_due(self) -> bool:
        inputs = self._follower.position - self._seq
        elapsed_ns = self._monotonic_ns() - self._taken_ns
        if inputs == 0 or elapsed_ns < max(PAUSE_RATIO * self._pause_ns, EFFORT_RATIO * self._effort_ns):
            return False
        return inputs >= self._config.snapshot_every_inputs or elapsed_ns >= self._config.snapshot_every_ms * 1_000_000
