"""The scheduler's loop: fold the stream in either role, and take the lead when no process speaks for the cell.

Every scheduler follows the stream from its start to its end. One holds the lead (``leadership.py``) and is active
(``active.py``): it publishes its fold's outputs. The others stand by: they fold the same, publish nothing, and keep in
their outbox what the active one is not known to have published. When the lead falls free, one of them takes it, and
begins where the last one stopped publishing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from services.scheduler import cell_metrics
from services.scheduler.active import Active
from services.scheduler.claimant import Claimant
from services.scheduler.config import SchedulerConfig
from services.scheduler.divergence import Divergence
from services.scheduler.fold import Folded
from services.scheduler.fold_release import fold_release
from services.scheduler.follower import Follower
from services.scheduler.leadership import Leadership
from services.scheduler.outbox import Outbox
from shared import lifecycle, logs, subjects
from shared.bus.protocol import Bus, Delivery, StreamMessage
from shared.codec import decode
from shared.errors import CodecError, ThermoclineError, TransportError, Unavailable
from shared.lifecycle import Lifecycle
from shared.messages.status import Heartbeat
from shared.tracing import Tracer

BEHIND_S = 0.5

MISSED_LOOKS = 10
"""Looks in a row, BEHIND_S apart, that find no stream of inputs before the streams are made anew.

A broker that has just started may know its streams only after a moment.
"""

STOP_S = 5.0
"""At a stop, the longest wait for a broker that is away."""

ELECTION_S = 12.0
"""At a stop, how long a last snapshot that fails is tried again: servers elect a leader within 4 to 9 s."""

LAST_SNAPSHOT_S = 180.0
"""At a stop, the longest wait for the snapshot, which takes seconds for a million nodes: without it another release
would have to begin anew. The supervisor may be less patient.
"""

_log = logs.get_logger("scheduler")


class Shell:
    """One scheduler process. Both clocks are arguments; ``incarnation`` is new for every process."""

    def __init__(
        self,
        bus: Bus,
        config: SchedulerConfig,
        incarnation: str,
        *,
        collector: cell_metrics.CellCollector | None = None,
        release: str | None = None,
        tracer: Tracer | None = None,
        wall_clock_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """``release`` is the same for processes that fold alike; by default it is a digest of the code."""
        self.live = asyncio.Event()  # Set while this scheduler is active and its term announced.
        self.standing_by = asyncio.Event()  # Set while it could take over from where the active one is.
        self._bus = bus
        self._config = config
        self._incarnation = incarnation
        self._collector = collector or cell_metrics.CellCollector()
        self._tracer = tracer
        self._release = release or fold_release()
        self._monotonic_ns = monotonic_ns
        self._lead = Leadership(bus, incarnation, config.lead_ms, monotonic_ns)
        self._outbox = Outbox(bus, wall_clock_ns, lambda: self._lead.may_speak)
        self._follower = Follower(
            bus,
            self._outbox,
            self._lead,
            self._release,
            self._observe,
            check_invariants_every=config.check_invariants_every,
            wall_clock_ns=wall_clock_ns,
            monotonic_ns=monotonic_ns,
        )
        self._claimant = Claimant(config, incarnation, self._release, self._follower, self._outbox)
        self._divergence = Divergence(config.id, monotonic_ns)
        self._active: Active | None = None

    async def run(self, life: Lifecycle) -> None:
        """Stand by, take over, and so on until stopped."""
        self._bus.on_reconnect(self._excuse)
        heartbeats = await self._bus.subscribe(subjects.HEARTBEATS, self._on_heartbeat)
        beat = lifecycle.beat(
            self._bus,
            "scheduler",
            self._config.id,
            self._incarnation,
            lambda: self._follower.position,
            degraded=self._divergence.degraded,
        )
        following = asyncio.create_task(self._follower.run(), name="follower")
        roles = asyncio.create_task(self._take_turns(life), name="roles")
        others = [
            asyncio.create_task(self._measure(), name="measure"),
            asyncio.create_task(beat, name="beat"),
        ]
        try:
            await life.watch(following, roles, *others)
            if life.stopping.is_set():
                await roles  # Ends by itself: an active scheduler hands over.
        finally:
            for task in (following, roles, *others):
                task.cancel()
            await asyncio.wait({following, roles, *others})
            await heartbeats.close()

    # -- roles --------------------------------------------------------------------------------------------------

    async def _take_turns(self, life: Lifecycle) -> None:
        """Be standby, active, standby and so on; return when stopping."""
        stopping = asyncio.create_task(life.stopping.wait(), name="stopping")
        try:
            while not stopping.done():
                waiting = asyncio.create_task(self._stand_by(), name="stand by")
                if not await _first(waiting, stopping):
                    return
                await self._be_active(stopping)
        finally:
            stopping.cancel()

    async def _stand_by(self) -> None:
        """Return when the lead is ours."""
        was_seen = True
        while True:
            try:
                await self._lead.look()
                if not was_seen:
                    # The bus may report its reconnect only after this look: the holder was as cut off as we were.
                    self._lead.excuse()
                was_seen = True
                if await self._look_around():
                    return
            except (Unavailable, TransportError) as error:
                was_seen = False
                _log.debug("lead_not_seen", reason=error.message)
            await asyncio.sleep(self._lead.look_s)

    async def _look_around(self) -> bool:
        """Act on the record as it is now; return whether the lead was taken."""
        claim = self._lead.claim
        if self._lead.take_made_anew():
            _log.error("streams_are_others", reason="the broker lost its store", folded_to=self._follower.position)
            self._follower.begin_anew()
        if claim is not None and claim.holder != self._incarnation:
            if self._follower.start is not None and (
                not self._follower.suits(claim) or self._divergence.is_found(self._outbox.chain, claim)
            ):
                _log.warning("fold_given_up", folded_by=claim.scheduler_id, release=claim.release)
                self._follower.begin_anew()
            self._outbox.forget(claim.published)
        self._note_standing_by()
        if not self._lead.is_free:
            return False
        epoch = max(self._claimant.succeed(claim), self._lead.highest_epoch + 1)
        if not await self._lead.take(self._claimant.claim(epoch)):
            return False
        _log.info("lead_taken", epoch=epoch, behind=claim.scheduler_id if claim is not None else "")
        self._active = Active(
            self._bus,
            self._config,
            self._incarnation,
            epoch,
            self._lead,
            self._follower,
            self._outbox,
            self._collector,
            self._expect_pause,
            self._claim_now,
            monotonic_ns=self._monotonic_ns,
            tracer=self._tracer,
        )
        return True

    async def _be_active(self, stopping: asyncio.Task[bool]) -> None:
        """Serve as long as the lead is ours; at a stop take a last snapshot and release the lead."""
        active = self._active
        assert active is not None
        self.standing_by.clear()
        cell_metrics.ACTIVE.set(1)
        keeping = asyncio.create_task(self._keep_lead(active), name="lead")
        serving = asyncio.create_task(active.run(), name="active")
        announcing = asyncio.create_task(self._announce(active), name="announce")
        try:
            await asyncio.wait({keeping, serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            await _cancel(serving, announcing)
            if stopping.done() and not keeping.done() and not _failed(serving):
                await self._hand_over(active, keeping)
        finally:
            self._active = None
            self.live.clear()
            cell_metrics.ACTIVE.set(0)
            await _cancel(keeping, serving, announcing)
            if self._lead.is_ours:
                # From now on nothing is published, so the next holder may contradict what follows from later inputs.
                self._lead.lose()
                await self._lead.let_go(self._claimant.claim(active.epoch), self._follower.position)
            self._lead.lose()
            self._outbox.send_again()
        for task in (serving, keeping):
            if not task.cancelled():
                task.result()
        if self._follower.restored is not None and self._follower.restored.is_lost:
            self._follower.begin_anew()  # The successor's state may not be the one that we began with.

    async def _announce(self, active: Active) -> None:
        await active.live.wait()
        self.live.set()

    async def _keep_lead(self, active: Active) -> None:
        """Renew the lead until another process has it."""
        told: tuple[bool, str] | None = None  # A broker may be away for hours: each reason is logged once.
        while not active.is_fenced:
            try:
                if not await self._lead.renew(self._claimant.claim(active.epoch)):
                    break
                told = None
                await asyncio.sleep(self._lead.renewal_s)
            except (Unavailable, TransportError) as error:
                before, told = told, (self._lead.is_held, error.message)
                if told != before:
                    _log.warning("lead_not_renewed", held=told[0], reason=error.message)
                await asyncio.sleep(self._lead.look_s)
        self._lead.lose()
        claim = self._lead.claim
        _log.error("superseded", epoch=active.epoch, holder=claim.scheduler_id if claim is not None else "")

    async def _hand_over(self, active: Active, keeping: asyncio.Task[None]) -> None:
        """Take a snapshot of all that was folded, from which the next scheduler, of whatever release, goes on.

        ``keeping`` ends when the lead is another scheduler's, which has no use for it.
        """
        if not active.live.is_set() or not self._follower.is_sound:
            return
        self._follower.freeze()
        taking = asyncio.create_task(self._take_last(active), name="last snapshot")
        losing = asyncio.create_task(self._lose_broker(), name="broker")
        try:
            async with asyncio.timeout(LAST_SNAPSHOT_S):
                await asyncio.wait({taking, losing, keeping}, return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                raise Unavailable("the lead was lost" if keeping.done() else f"no broker for {STOP_S:g} s")
            taking.result()
        except (TimeoutError, ThermoclineError) as error:
            # The next start of this release folds a longer tail; one of another release begins anew.
            _log.warning("no_snapshot_at_the_end", reason=repr(error))
        finally:
            await _cancel(taking, losing)

    async def _take_last(self, active: Active) -> None:
        """Take a snapshot, again after failures that pass: servers elect a leader, or an answer of one is lost.

        A standby waits meanwhile, so failures that last longer than an election are final.
        """
        loop, failed_s = asyncio.get_running_loop(), 0.0
        while True:
            try:
                await active.snapshots.take()
                return
            except (Unavailable, TransportError) as error:
                failed_s = failed_s or loop.time()
                if not self._lead.is_ours or loop.time() - failed_s > ELECTION_S:
                    raise
                _log.warning("snapshot_delayed", reason=error.message)
                await asyncio.sleep(BEHIND_S)

    async def _lose_broker(self) -> None:
        """Return once the broker has been away for STOP_S."""
        loop = asyncio.get_running_loop()
        connected_s = loop.time()
        while loop.time() - connected_s < STOP_S:
            if self._bus.is_connected:
                connected_s = loop.time()
            await asyncio.sleep(STOP_S / 10)

    async def _expect_pause(self, pause_ms: int) -> None:
        """Hold the lead for ``pause_ms`` longer, because it will not be renewed meanwhile."""
        if pause_ms >= self._config.lead_ms // 10:
            await self._claim_now(pause_ms)

    async def _claim_now(self, pause_ms: int = 0) -> None:
        """Write the lead's record, whether or not it is due. Raises Unavailable or TransportError."""
        if self._active is not None:
            await self._lead.renew(self._claimant.claim(self._active.epoch, pause_ms))

    # -- what both roles do -------------------------------------------------------------------------------------

    def _observe(self, message: StreamMessage, folded: Folded) -> None:
        if self._active is not None:
            self._active.observe(message, folded)

    def _excuse(self) -> None:
        """Excuse all members: the connection is back, and none could be heard until now."""
        self._lead.excuse()
        if self._active is not None:
            self._active.liveness.excuse(self._monotonic_ns())

    async def _on_heartbeat(self, delivery: Delivery) -> None:
        if self._active is None:
            return
        try:
            heartbeat = decode(delivery.data, Heartbeat)
        except CodecError as error:
            _log.warning("heartbeat_unreadable", subject=delivery.subject, reason=error.message)
            return
        if not _is_entitled(delivery.subject, heartbeat):
            _log.warning("heartbeat_of_another", subject=delivery.subject, kind=heartbeat.kind, member=heartbeat.id)
            return
        self._active.beat(heartbeat)

    def _note_standing_by(self) -> None:
        is_ready = self._follower.restored is not None
        if is_ready and not self.standing_by.is_set():
            self.standing_by.set()
            _log.info("standing_by", seq=self._follower.position)
        elif not is_ready:
            self.standing_by.clear()

    async def _measure(self) -> None:
        """Keep the metric of how many inputs this scheduler's fold is behind; make streams that are missing anew."""
        missed = 0
        while True:
            try:
                last = (await self._bus.stream_info(subjects.INPUTS_STREAM)).last_seq
                cell_metrics.BEHIND.set(max(0, last - self._follower.position))
                missed = 0
            except Unavailable:
                missed = 0  # The figure stays as it was; that the broker is away shows elsewhere.
            except TransportError as error:
                missed += 1
                if missed % MISSED_LOOKS == 0:
                    await self._make_streams_anew(error.message)
            await asyncio.sleep(BEHIND_S)

    async def _make_streams_anew(self, reason: str) -> None:
        """Make the streams of a broker that lost its store; all schedulers then find the lead's record gone.

        One of them begins under a higher epoch, by which every other process knows that earlier numbers are void.
        """
        _log.error("streams_lost", reason=reason)
        try:
            await self._bus.ensure_streams(self._config.stream_limits())
        except (Unavailable, TransportError) as error:
            _log.warning("streams_not_made", reason=error.message)


def _is_entitled(subject: str, heartbeat: Heartbeat) -> bool:
    """Return whether the sender may say this: each process reports on itself; only a storage reports another's end."""
    if heartbeat.is_gone:
        return subject.startswith(subjects.heartbeat("storage", ""))
    return subject == subjects.heartbeat(heartbeat.kind, heartbeat.id)


async def _first(task: asyncio.Task[None], other: asyncio.Task[bool]) -> bool:
    """Wait for either; return whether ``task`` was first, and cancel it otherwise. Its exception is raised."""
    try:
        await asyncio.wait({task, other}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        await _cancel(task)


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def _failed(task: asyncio.Task[None]) -> bool:
    return not task.cancelled() and task.exception() is not None
