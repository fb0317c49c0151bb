"""One term of the active scheduler: take over, then fire timers, watch heartbeats, answer calls, take snapshots.

Everything here is what a standby does not do. A term ends when its task is cancelled, because another scheduler took
the lead or the process stops. While the lead has run out and no other scheduler has taken it, the term is paused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec

from services.scheduler import cell_metrics, core
from services.scheduler.config import SchedulerConfig
from services.scheduler.disk_usage import DiskUsage
from services.scheduler.fold import Folded
from services.scheduler.follower import Follower
from services.scheduler.inputs_writer import append_until_stored
from services.scheduler.inspection import AT_ONCE, Inspection
from services.scheduler.leadership import Leadership
from services.scheduler.liveness import Liveness
from services.scheduler.outbox import Outbox
from services.scheduler.quarantine import with_quarantined
from services.scheduler.request_spans import record_admissions
from services.scheduler.shortfalls import Shortfalls
from services.scheduler.snapshot_keeper import SnapshotKeeper
from services.scheduler.snapshots import SnapshotStore
from services.scheduler.stream_clock import StreamClock
from services.scheduler.timers import Timers
from services.scheduler.unused_settings import with_unused_settings
from shared import logs, subjects
from shared.bus.protocol import Bus, StreamMessage, Subscription
from shared.codec import decode, encode
from shared.errors import TransportError, Unavailable
from shared.messages.cell_events import CellConfigured, SchedulerStarted, TimerFired
from shared.messages.status import CellStatus, GetStatus, Heartbeat, TakeSnapshot
from shared.tracing import Tracer

STATUS_S = 0.5
LIVENESS_S = 0.5
CONFIRM_S = 0.2
RETRY_S = 0.1
CLOSE_S = 2.0  # At the end of a term, the longest wait for calls that are being answered.
LONGEST_TIMER_WAIT_S = 1.0  # The broker's clock may be set meanwhile.

_log = logs.get_logger("scheduler")


class Active:
    """One term, made when the lead was taken. ``epoch`` is final once ``live`` is set."""

    def __init__(
        self,
        bus: Bus,
        config: SchedulerConfig,
        incarnation: str,
        epoch: int,
        lead: Leadership,
        follower: Follower,
        outbox: Outbox,
        collector: cell_metrics.CellCollector,
        expect_pause: Callable[[int], Awaitable[None]],
        claim_now: Callable[[], Awaitable[None]],
        *,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        tracer: Tracer | None = None,
    ) -> None:
        """Prepare a term of the process ``incarnation``, which :meth:`run` begins.

        ``epoch`` is the least that the term may have. ``expect_pause`` is called with the milliseconds for which the
        lead will not be renewed. ``claim_now`` writes the lead's record at once, and raises Unavailable or
        TransportError. ``collector`` gets each status. Without a ``tracer`` no spans are recorded.
        """
        self.epoch = epoch
        self.live = asyncio.Event()  # Set once the term's own start is folded.
        self._bus = bus
        self._config = config
        self._incarnation = incarnation
        self._lead = lead
        self._claim_now = claim_now
        self._follower = follower
        self._outbox = outbox
        self.liveness = Liveness(config.heartbeat_lost_ms * 1_000_000)
        self._somebody_is_gone = asyncio.Event()
        self._disk_usage = DiskUsage()
        self._shortfalls = Shortfalls(config.heartbeat_lost_ms * 1_000_000)
        self._collector = collector
        self._tracer = tracer
        self._monotonic_ns = monotonic_ns
        self._clock = StreamClock()
        store = SnapshotStore(bus)
        self.snapshots = SnapshotKeeper(
            store, follower, outbox, config, lambda: lead.is_held, expect_pause, monotonic_ns
        )
        self._timers = Timers()
        self._timers_changed = asyncio.Event()
        self._started_seq = 0
        self._latest_start_seq = 0

    async def run(self) -> None:
        """Take over and serve until cancelled, or until a task fails; its exception is raised."""
        await self._take_over()
        subscriptions: list[Subscription] = []
        tasks = [
            asyncio.create_task(self._keep_timers(), name="timers"),
            asyncio.create_task(self._watch_heartbeats(), name="liveness"),
            asyncio.create_task(self._publish_status(), name="status"),
            asyncio.create_task(self._confirm_outputs(), name="outputs"),
            asyncio.create_task(self.snapshots.run(), name="snapshots"),
            asyncio.create_task(self._serve(subscriptions), name="calls"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await self._close(subscriptions)
            self._collector.latest = None

    async def _close(self, subscriptions: list[Subscription]) -> None:
        """End the calls. One may wait for what the next scheduler alone can do, such as publishing: it is cut off."""
        closing = [asyncio.create_task(subscription.close()) for subscription in subscriptions]
        if closing and (await asyncio.wait(closing, timeout=CLOSE_S))[1]:
            for subscription in subscriptions:
                subscription.cancel()
            await asyncio.wait(closing)

    @property
    def is_fenced(self) -> bool:
        """Whether another scheduler has announced itself in the stream after this term's start."""
        return 0 < self._started_seq < self._latest_start_seq

    def observe(self, message: StreamMessage, folded: Folded) -> None:
        """Note an input that was folded: its timers, the members it names, and a successor's start."""
        self._clock.note(message.time_ns, self._monotonic_ns())
        if folded.input is not None:
            self.liveness.observe(folded.input, self._monotonic_ns())
        if self._timers.apply(folded.outputs):
            self._timers_changed.set()
        if self._tracer is not None:
            record_admissions(self._tracer, self._follower.fold.state, folded.published)
        if isinstance(folded.input, SchedulerStarted) and folded.input.epoch >= self.epoch:
            self._latest_start_seq = message.seq

    def beat(self, heartbeat: Heartbeat) -> None:
        """Note a heartbeat; one that announces the end of a process is acted on at once."""
        self.liveness.beat(heartbeat, self._monotonic_ns())
        self._disk_usage.note(heartbeat)
        self._shortfalls.note(heartbeat, self._monotonic_ns())
        if heartbeat.is_gone:
            self._somebody_is_gone.set()

    # -- taking over --------------------------------------------------------------------------------------------

    async def _take_over(self) -> None:
        """Publish what the predecessor may not have, fold to the stream's end, and announce the term."""
        self._outbox.send_again()
        await self._say_since_when()
        await self._follower.reached(await self._last_seq())
        state, restored = self._follower.fold.state, self._follower.restored
        assert restored is not None
        self.snapshots.begin()
        self._timers.apply(core.pending_timers(state))
        self.liveness.watch_state(state, self._monotonic_ns())
        self.epoch = max(self.epoch, restored.highest_epoch + 1, state.epoch + 1)
        if restored.is_lost:
            await self._mark_the_beginning()
        started = SchedulerStarted(scheduler_id=self._config.id, epoch=self.epoch)
        term = f"{self._incarnation}-{self.epoch}"
        self._started_seq = await append_until_stored(self._bus, started, f"started-{term}")
        config = self._config.cell_config()
        if not state.is_configured or config != state.config:
            await append_until_stored(self._bus, CellConfigured(config=config), f"configured-{term}")
        _log.info("started", epoch=self.epoch, seq=self._started_seq)
        await self._follower.reached(self._started_seq)
        self.live.set()

    async def _say_since_when(self) -> None:
        """Write where this fold began into the lead's record; until then no output may be published."""
        while not self._lead.may_speak:
            if self._follower.start is None:
                await asyncio.sleep(RETRY_S)
                continue
            try:
                await self._claim_now()
            except (Unavailable, TransportError) as error:
                _log.warning("lead_not_renewed", held=self._lead.is_held, reason=error.message)
            if not self._lead.may_speak:
                await asyncio.sleep(self._lead.look_s)

    async def _last_seq(self) -> int:
        while True:
            try:
                return (await self._bus.stream_info(subjects.INPUTS_STREAM)).last_seq
            except Unavailable:
                await asyncio.sleep(RETRY_S)

    async def _mark_the_beginning(self) -> None:
        """Take a snapshot after the state was lost, so that later starts find where this fold began."""
        while True:
            try:
                await self.snapshots.take()
                return
            except Unavailable as error:
                _log.warning("snapshot_delayed", reason=error.message)
                await asyncio.sleep(RETRY_S)

    async def _may_speak(self) -> None:
        """Wait while the lead's time is over."""
        while not self._lead.is_held:  # noqa: ASYNC110 - it is a clock that ends it, not an event.
            await asyncio.sleep(self._lead.look_s)

    async def _confirm_outputs(self) -> None:
        while True:
            # This also sends again after a reconnect when no further input comes.
            await self._outbox.confirm()
            await asyncio.sleep(CONFIRM_S)

    # -- timers and heartbeats ----------------------------------------------------------------------------------

    async def _keep_timers(self) -> None:
        while True:
            self._timers_changed.clear()
            await self._may_speak()
            for timer_id, at_ns in self._timers.take_due(self._clock.read_ns(self._monotonic_ns())):
                await append_until_stored(self._bus, TimerFired(timer_id=timer_id), f"timer-{timer_id}-{at_ns}")
            next_ns = self._timers.next_ns()
            wait_s = LONGEST_TIMER_WAIT_S
            if next_ns is not None:
                wait_s = min(wait_s, max(0.0, (next_ns - self._clock.read_ns(self._monotonic_ns())) / 1e9))
            try:
                async with asyncio.timeout(wait_s):
                    await self._timers_changed.wait()
            except TimeoutError:
                pass  # The next timer may be due.

    async def _watch_heartbeats(self) -> None:
        interval_ns = int(LIVENESS_S * 1e9)
        while True:
            self._somebody_is_gone.clear()
            await self._may_speak()
            if not self._bus.is_connected:
                self.liveness.excuse(self._monotonic_ns())
            for message_id, lost in self.liveness.check(self._monotonic_ns(), interval_ns):
                _log.warning("member_lost", lost=type(lost).__name__, member=message_id, reason=lost.reason)
                await append_until_stored(self._bus, lost, message_id)
            try:
                async with asyncio.timeout(LIVENESS_S):
                    await self._somebody_is_gone.wait()
            except TimeoutError:
                pass  # A member may have been silent for too long.

    # -- calls and status ---------------------------------------------------------------------------------------

    async def _serve(self, subscriptions: list[Subscription]) -> None:
        """Answer calls until cancelled; the caller closes what is added to ``subscriptions``."""
        inspection = Inspection(self._follower.folding, self._held_state, self._follower.moved)
        handlers = [
            (subjects.rpc("scheduler", "status"), self._answer_status, 1),
            (subjects.rpc("scheduler", "snapshot"), self._answer_snapshot, 1),
            *((subject, handler, AT_ONCE) for subject, handler in inspection.handlers()),
        ]
        for subject, handler, at_once in handlers:
            while True:
                try:
                    subscriptions.append(await self._bus.serve(subject, handler, at_once=at_once))
                    break
                except Unavailable:
                    await asyncio.sleep(RETRY_S)  # The broker went away in the middle of the take-over.
        await asyncio.Event().wait()

    def _held_state(self) -> core.CellState:
        """Return the state to answer from. Raises Unavailable without the lead: another may know better by now."""
        if not self._lead.is_held:
            raise Unavailable("this scheduler is not the active one")
        if not self._follower.is_sound:
            raise Unavailable("this scheduler could not fold an input, and ends")
        return self._follower.fold.state

    async def _status(self) -> CellStatus:
        async with self._follower.folding:
            # The position, not the last input: skipped messages count as seen.
            position = self._follower.position
            state = self._held_state()
            status = msgspec.structs.replace(core.status(state, self._config.id), seq=position)
        status = self._disk_usage.told(status)
        status = self._shortfalls.told(status, self._monotonic_ns(), is_storage_wanted=state.config.host_tier)
        status = with_unused_settings(with_quarantined(status, state), state)
        self._collector.latest = status
        return status

    async def _publish_status(self) -> None:
        while True:
            await self._may_speak()
            cell_metrics.UNCONFIRMED.set(self._outbox.unconfirmed)
            try:
                await self._bus.publish(subjects.STATUS, encode(await self._status()))
            except Unavailable:
                pass  # The next status follows.
            await asyncio.sleep(STATUS_S)

    async def _answer_status(self, data: bytes) -> bytes:
        """Answer behind the outputs of all inputs that the status covers; some may have been held back."""
        decode(data, GetStatus)
        status = await self._status()
        await self._outbox.send_up_to(status.seq)
        return encode(status)

    async def _answer_snapshot(self, data: bytes) -> bytes:
        decode(data, TakeSnapshot)
        return encode(await self.snapshots.take())
