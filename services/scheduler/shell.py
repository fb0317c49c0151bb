"""The scheduler's loop: follow the stream, step the core, publish what it says, keep its timers.

The fold, the timers, the heartbeat monitor, the status and the snapshots are tasks of one event loop. Only the
fold touches the state; ``_folding`` keeps the others out while it is between an input and its outputs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from services.scheduler import cell_metrics, core
from services.scheduler.config import SchedulerConfig
from services.scheduler.fold import Fold, Folded
from services.scheduler.inputs_writer import append_until_stored
from services.scheduler.inspection import Inspection
from services.scheduler.liveness import Liveness
from services.scheduler.outbox import Outbox
from services.scheduler.restore import Restored, restore
from services.scheduler.snapshots import SnapshotStore, take_snapshot
from services.scheduler.timers import Timers
from shared import lifecycle, logs, subjects
from shared.bus.protocol import Bus, Delivery, StreamMessage, Subscription
from shared.codec import decode, encode
from shared.errors import CodecError, ThermoclineError, Unavailable
from shared.lifecycle import Lifecycle
from shared.messages.cell_events import CellConfigured, SchedulerStarted, TimerFired
from shared.messages.status import (
    CellStatus,
    GetStatus,
    Heartbeat,
    SnapshotTaken,
    TakeSnapshot,
)

STATUS_S = 0.5
LIVENESS_S = 0.5
CONFIRM_S = 0.2
SNAPSHOT_CHECK_S = 0.25
LONGEST_TIMER_WAIT_S = 1.0  # The wall clock may be set meanwhile.
STOP_S = 5.0

# A snapshot pauses the fold while the state is encoded; the next one waits so long that the pauses stay below
# one percent of the time.
PAUSE_RATIO = 100

_log = logs.get_logger("scheduler")


class Shell:
    """Runs one scheduler. Both clocks are arguments; ``incarnation`` is new for every process."""

    def __init__(
        self,
        bus: Bus,
        config: SchedulerConfig,
        incarnation: str,
        *,
        collector: cell_metrics.CellCollector | None = None,
        wall_clock_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.live = asyncio.Event()
        self._bus = bus
        self._config = config
        self._incarnation = incarnation
        self._collector = collector or cell_metrics.CellCollector()
        self._wall_clock_ns = wall_clock_ns
        self._monotonic_ns = monotonic_ns
        self._outbox = Outbox(bus, wall_clock_ns)
        self._store = SnapshotStore(bus)
        self._liveness = Liveness(config.heartbeat_lost_ms * 1_000_000)
        self._timers = Timers()
        self._timers_changed = asyncio.Event()
        self._folding = asyncio.Lock()
        self._snapshotting = asyncio.Lock()
        self._snapshot_seq = 0
        self._snapshot_ns = 0
        self._snapshot_pause_ns = 0
        self._started_seq = 0
        self._may_snapshot = True
        self._fold: Fold
        self._restored: Restored

    async def run(self, life: Lifecycle) -> None:
        """Restore, announce the new epoch, and go on until stopped."""
        starting = asyncio.create_task(self._start(), name="start")
        await life.watch(starting)
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
            return
        subscriptions = await self._subscribe()
        beat = lifecycle.beat(self._bus, "scheduler", self._config.id, self._incarnation, lambda: self._fold.position)
        tasks = [
            asyncio.create_task(self._follow(life), name="fold"),
            asyncio.create_task(self._keep_timers(), name="timers"),
            asyncio.create_task(self._watch_heartbeats(), name="liveness"),
            asyncio.create_task(self._publish_status(), name="status"),
            asyncio.create_task(self._confirm_outputs(), name="outputs"),
            asyncio.create_task(self._keep_snapshots(), name="snapshots"),
            asyncio.create_task(beat, name="beat"),
        ]
        try:
            await life.watch(*tasks)
        finally:
            await self._stop(tasks, subscriptions)

    async def _start(self) -> None:
        self._restored = await restore(
            self._bus, self._outbox, check_invariants_every=self._config.check_invariants_every
        )
        fold = self._fold = self._restored.fold
        self._snapshot_seq = fold.position - self._restored.replayed
        self._snapshot_ns = self._monotonic_ns()
        if self._restored.is_lost:
            await self._take_snapshot()  # From now on a restart finds where this life began.
        self._liveness.watch_state(fold.state, self._monotonic_ns())
        self._timers.apply(core.pending_timers(fold.state))
        self._bus.on_reconnect(lambda: self._liveness.excuse(self._monotonic_ns()))
        await self._announce()

    async def _announce(self) -> None:
        epoch = self._restored.highest_epoch + 1
        started = SchedulerStarted(scheduler_id=self._config.id, epoch=epoch)
        self._started_seq = await append_until_stored(self._bus, started, f"started-{self._incarnation}")
        config = self._config.cell_config()
        if not self._restored.is_configured or config != self._fold.state.config:
            await append_until_stored(self._bus, CellConfigured(config=config), f"configured-{self._incarnation}")
        _log.info("started", epoch=epoch, seq=self._started_seq)

    async def _subscribe(self) -> list[Subscription]:
        return [
            await self._bus.subscribe(subjects.HEARTBEATS, self._on_heartbeat),
            await self._bus.serve(subjects.rpc("scheduler", "status"), self._answer_status),
            *await Inspection(self._folding, lambda: self._fold.state).serve(self._bus),
            await self._bus.serve(subjects.rpc("scheduler", "snapshot"), self._answer_snapshot),
        ]

    async def _stop(self, tasks: list[asyncio.Task[None]], subscriptions: list[Subscription]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for subscription in subscriptions:
            await subscription.close()
        if not self._may_snapshot:
            return
        try:
            async with asyncio.timeout(STOP_S):
                await self._take_snapshot()
        except (TimeoutError, ThermoclineError) as error:
            # The next start folds a longer tail, that is all.
            _log.warning("no_snapshot_at_the_end", reason=repr(error))

    # -- the fold -----------------------------------------------------------------------------------------------

    async def _follow(self, life: Lifecycle) -> None:
        async for message in self._bus.follow(subjects.INPUTS_STREAM, from_seq=self._fold.position + 1):
            async with self._folding:
                folded = self._step(message)
                await self._outbox.send(folded.published)
            if self._timers.apply(folded.outputs):
                self._timers_changed.set()
            if folded.input is not None:
                self._liveness.observe(folded.input, self._monotonic_ns())
            if message.seq >= self._started_seq:
                self.live.set()
                if isinstance(folded.input, SchedulerStarted) and message.seq > self._started_seq:
                    _log.error("fenced", by=folded.input.scheduler_id, epoch=folded.input.epoch)
                    self._may_snapshot = False  # The bucket is the successor's now.
                    life.stop(lifecycle.EXIT_REFUSED)
                    return

    def _step(self, message: StreamMessage) -> Folded:
        begun_ns = self._monotonic_ns()
        try:
            folded = self._fold.apply(message)
        except Exception:
            self._may_snapshot = False  # The state may be half changed.
            _log.error("step_failed", seq=message.seq, subject=message.subject)
            raise
        cell_metrics.STEP_SECONDS.observe((self._monotonic_ns() - begun_ns) / 1e9)
        cell_metrics.INPUT_AGE_SECONDS.observe(max(0, self._wall_clock_ns() - message.time_ns) / 1e9)
        cell_metrics.INPUTS.inc()
        cell_metrics.OUTPUTS.inc(len(folded.published))
        if folded.input is None:
            cell_metrics.SKIPPED.inc()
            _log.error("input_skipped", seq=message.seq, subject=message.subject, reason=folded.fault)
        return folded

    async def _confirm_outputs(self) -> None:
        while True:
            # Also what sends again after a reconnect when no further input comes.
            await self._outbox.confirm()
            await asyncio.sleep(CONFIRM_S)

    # -- timers and heartbeats ----------------------------------------------------------------------------------

    async def _keep_timers(self) -> None:
        while True:
            self._timers_changed.clear()
            for timer_id, at_ns in self._timers.take_due(self._wall_clock_ns()):
                await append_until_stored(self._bus, TimerFired(timer_id=timer_id), f"timer-{timer_id}-{at_ns}")
            next_ns = self._timers.next_ns()
            wait_s = LONGEST_TIMER_WAIT_S
            if next_ns is not None:
                wait_s = min(wait_s, max(0.0, (next_ns - self._wall_clock_ns()) / 1e9))
            try:
                async with asyncio.timeout(wait_s):
                    await self._timers_changed.wait()
            except TimeoutError:
                pass  # The next timer may be due.

    async def _on_heartbeat(self, delivery: Delivery) -> None:
        try:
            heartbeat = decode(delivery.data, Heartbeat)
        except CodecError as error:
            _log.warning("heartbeat_unreadable", subject=delivery.subject, reason=error.message)
            return
        self._liveness.beat(heartbeat, self._monotonic_ns())

    async def _watch_heartbeats(self) -> None:
        interval_ns = int(LIVENESS_S * 1e9)
        while True:
            if not self._bus.is_connected:
                self._liveness.excuse(self._monotonic_ns())
            for message_id, lost in self._liveness.check(self._monotonic_ns(), interval_ns):
                _log.warning("heartbeats_stopped", lost=type(lost).__name__, member=message_id)
                await append_until_stored(self._bus, lost, message_id)
            await asyncio.sleep(LIVENESS_S)

    # -- status -------------------------------------------------------------------------------------------------

    async def _status(self) -> CellStatus:
        async with self._folding:
            # The position, not the last input: skipped messages count as seen.
            status = msgspec.structs.replace(core.status(self._fold.state, self._config.id), seq=self._fold.position)
        self._collector.latest = status
        return status

    async def _publish_status(self) -> None:
        while True:
            status = await self._status()
            cell_metrics.UNCONFIRMED.set(self._outbox.unconfirmed)
            try:
                await self._bus.publish(subjects.STATUS, encode(status))
            except Unavailable:
                pass  # Nobody could see it now; the next one follows.
            await asyncio.sleep(STATUS_S)

    async def _answer_status(self, data: bytes) -> bytes:
        decode(data, GetStatus)
        return encode(await self._status())

    # -- snapshots ----------------------------------------------------------------------------------------------

    async def _answer_snapshot(self, data: bytes) -> bytes:
        decode(data, TakeSnapshot)
        return encode(await self._take_snapshot())

    def _is_snapshot_due(self) -> bool:
        inputs = self._fold.position - self._snapshot_seq
        elapsed_ns = self._monotonic_ns() - self._snapshot_ns
        if inputs == 0 or elapsed_ns < PAUSE_RATIO * self._snapshot_pause_ns:
            return False
        return inputs >= self._config.snapshot_every_inputs or elapsed_ns >= self._config.snapshot_every_ms * 1_000_000

    async def _keep_snapshots(self) -> None:
        while True:
            await asyncio.sleep(SNAPSHOT_CHECK_S)
            if self._is_snapshot_due():
                try:
                    await self._take_snapshot()
                except ThermoclineError as error:
                    _log.error("snapshot_failed", code=error.code, reason=error.message)

    async def _take_snapshot(self) -> SnapshotTaken:
        async with self._snapshotting:
            async with self._folding:
                # A restart publishes nothing again that was caused before its snapshot, so it must be out by now.
                await self._outbox.confirm()
                begun_ns = self._monotonic_ns()
                snapshot = take_snapshot(self._fold)
                self._snapshot_pause_ns = self._monotonic_ns() - begun_ns
            nbytes = await self._store.put(snapshot)
            self._snapshot_seq, self._snapshot_ns = snapshot.seq, self._monotonic_ns()
        cell_metrics.SNAPSHOT_BYTES.set(nbytes)
        cell_metrics.SNAPSHOT_PAUSE_SECONDS.set(self._snapshot_pause_ns / 1e9)
        _log.info("snapshot", seq=snapshot.seq, nbytes=nbytes, pause_ms=self._snapshot_pause_ns / 1e6)
        return SnapshotTaken(seq=snapshot.seq, nbytes=nbytes)
