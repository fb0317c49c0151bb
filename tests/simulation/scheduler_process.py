"""The schedulers of a simulated cell: the real fold, timers and liveness. Each may die or stand still between inputs.

What is folded is remembered once. A successor that folds the same inputs again, from a snapshot or from the beginning
of the stream, has to say the same bytes; so has one that was superseded while it stood still, until it learns of it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from msgspec import structs

from services.scheduler.core import check_invariants, decode_state, encode_state, new_state, pending_timers
from services.scheduler.fold import Fold
from services.scheduler.leadership import Tail
from services.scheduler.liveness import Liveness
from services.scheduler.stream_clock import StreamClock
from services.scheduler.timers import Timers
from shared.codec import Published, encode
from shared.messages.cell_events import CellConfigured, SchedulerStarted, TimerFired
from shared.messages.gateway_notices import GatewayNotice
from shared.messages.status import Heartbeat
from shared.messages.storage_plans import StoragePlan
from tests.simulation.contents import require
from tests.simulation.process import Process
from tests.simulation.releases import deciding

if TYPE_CHECKING:
    from tests.simulation.cell import Cell

SILENCE_NS = 5_000_000_000
INTERVAL_NS = 500_000_000
FOLD_US = 30
MOST_WAKING_US = 200_000
"""After a freeze, until inputs come again."""

LONGEST_TIMER_WAIT_NS = 1_000_000_000
SNAPSHOTS_KEPT = 3


def as_bytes(output: object) -> bytes:
    """An output in a form that compares by the byte."""
    return encode(output) if isinstance(output, msgspec.Struct) else repr(output).encode()


def target_of(output: Published) -> str:
    """Whose stream of outputs it is in."""
    if isinstance(output, GatewayNotice):
        return f"gateway/{output.gateway_id}"
    if isinstance(output, StoragePlan):
        return f"storage/{output.storage_id}"
    return f"worker/{output.worker_id}"


@dataclass(frozen=True)
class Life:
    """A release folds the inputs behind ``folded_from``, from the state there or from nothing."""

    release: str
    folded_from: int
    time_ns: int
    epoch: int = 0  # Where it began from nothing, under this epoch.


@dataclass
class History:
    """What schedulers leave behind: their snapshots, and what each input led to, whoever folded it first."""

    record: list[list[bytes]] = field(default_factory=list)
    snapshots: list[tuple[int, int, bytes]] = field(default_factory=list)  # (position, time, state)
    tail: Tail | None = None  # What the last scheduler's lead says.
    lives: list[Life] = field(default_factory=list)

    def begin_anew(self, position: int) -> None:
        """Whoever comes next knows nothing of inputs up to this one, and of no snapshot."""
        self.snapshots.clear()
        del self.record[position:]
        self.record += [[] for _ in range(position - len(self.record))]

    def life_of(self, seq: int) -> Life:
        """Who folded this input in the end."""
        return [life for life in self.lives if life.folded_from < seq][-1]


class SchedulerProcess(Process):
    """One incarnation. ``fold`` is what it knew last, also after its end."""

    kind = "scheduler"

    def __init__(self, cell: Cell, incarnation: str, history: History, release: str) -> None:
        super().__init__(cell, "scheduler", incarnation)
        self.history = history
        self.release = release
        self.fold = Fold(new_state())
        self._is_waking = False
        self._outbox: deque[Published] = deque()
        self._timers = Timers()
        self._stream_clock = StreamClock()
        self._wakes_ns = 0  # When the timers are looked at next, by the virtual clock; 0 is never.
        self._liveness = Liveness(SILENCE_NS)
        self._started_seq = 0

    @property
    def is_known(self) -> bool:
        """Whether it has restored its state and speaks."""
        return self._started_seq > 0

    # Lives.

    def start(self, *, snapshots_back: int = 0) -> None:
        """Restore from the snapshot that is so many before the last, or from the whole stream where there is none.

        Without the broker a scheduler waits until it is there.
        """
        if self.is_cut_off:
            self.cell.clock.after(LONGEST_TIMER_WAIT_NS / 1_000, lambda: self.do(lambda: self.start()))
            return
        self.fold = self._find_start(snapshots_back)
        while self._fold_next():
            pass
        self._publish_all()
        self._timers, self._wakes_ns = Timers(), 0
        self._liveness.watch_state(self.fold.state, self.cell.clock.now_ns)
        self._timers.apply(pending_timers(self.fold.state))
        self._keep_timers()
        self.cell.note_start(self)
        started = SchedulerStarted(scheduler_id=self.name, epoch=self.fold.state.epoch + 1)
        assert self.history.tail is not None
        self.history.tail = structs.replace(self.history.tail, epoch=started.epoch)
        self._started_seq = self.cell.inputs.append(started, f"started-{self.incarnation}")
        if not self.fold.state.is_configured:
            self.cell.inputs.append(CellConfigured(config=self.cell.scenario.config))
        self.wake()

    def _find_start(self, snapshots_back: int) -> Fold:
        """As :func:`services.scheduler.restore.find_start` does."""
        history, tail = self.history, self.history.tail
        at = len(history.snapshots) - 1 - snapshots_back
        position, time_ns, data = history.snapshots[at] if at >= 0 else (0, 0, b"")
        while tail is not None and not tail.may_be_continued(position, self.release):
            at += 1
            if not 0 <= at < len(history.snapshots):
                return self._begin_anew(tail)
            position, time_ns, data = history.snapshots[at]
        if tail is None or tail.release != self.release:
            history.tail = Tail(self.release, position, epoch=tail.epoch if tail is not None else 0)
            history.lives.append(Life(self.release, position, time_ns))
            self.cell.seen["schedulers_that_continued_another"] += tail is not None
        else:
            history.tail = Tail(self.release, tail.folded_from, epoch=tail.epoch)
        return Fold(decode_state(data) if data else new_state(), position=position, time_ns=time_ns)

    def _begin_anew(self, tail: Tail) -> Fold:
        messages = self.cell.inputs.messages
        position = len(messages) if tail.said_to is None else tail.said_to
        time_ns = messages[position - 1].time_ns if position else 0
        self.history.begin_anew(position)
        self.history.tail = Tail(self.release, position, epoch=tail.epoch + 1)
        self.history.lives.append(Life(self.release, position, time_ns, tail.epoch + 1))
        self.cell.seen["schedulers_that_began_anew"] += 1
        state = new_state()
        state.epoch = tail.epoch + 1
        fold = Fold(state, position=position, time_ns=time_ns)
        self.history.snapshots.append((position, time_ns, encode_state(fold.state)))
        return fold

    def stop(self) -> None:
        """End in good order: what was folded is said, and a snapshot is of all that was folded."""
        if self.is_known and not self.is_cut_off:
            assert self.history.tail is not None
            self._take_snapshot()
            self.history.tail = structs.replace(self.history.tail, said_to=self.fold.position)
        self.end()

    def end(self) -> None:
        """Die between two inputs; outputs that were not published yet are lost."""
        super().end()
        self._outbox.clear()

    def thaw(self) -> None:
        """Go on. Until inputs come again it speaks and answers by what it knew when it stopped."""
        super().thaw()
        self._is_waking = True
        self.do(self.tick)
        if self.is_running and self.chance.random() < 0.5:
            self.cell.show_status(self)
        self.later(self.chance.randint(0, MOST_WAKING_US), self._folded_one)

    def reconnect(self) -> None:
        """Nobody could be heard meanwhile, and that is nobody's fault."""
        super().reconnect()
        if self.can_answer:
            self._liveness.excuse(self.cell.clock.now_ns)
            self._publish_all()
            self.wake()

    # The fold.

    def wake(self) -> None:
        """There is an input to fold."""
        if self.is_known and self.can_answer and not self._is_waking:
            self._is_waking = True
            self.cell.clock.after(FOLD_US, self._folded_one)

    def _folded_one(self) -> None:
        self._is_waking = False
        if self.can_answer and self._fold_next():
            self.later(self.chance.randint(5, 300), self._publish_all)
            if self.is_running and self.fold.position < len(self.cell.inputs.messages):
                self.wake()

    def _fold_next(self) -> bool:
        messages = self.cell.inputs.messages
        if self.fold.position >= len(messages):
            return False
        message = messages[self.fold.position]
        with deciding(self.release):
            folded = self.fold.apply(message)
        require(folded.input is not None, f"input {message.seq} cannot be decoded: {folded.fault}")
        said = [as_bytes(output) for output in folded.outputs]
        record = self.history.record
        if message.seq <= len(record):
            is_same = record[message.seq - 1] == said
            require(is_same, f"input {message.seq} leads to other outputs when it is folded again")
        else:
            record.append(said)
            self.cell.note_folded(folded.input, folded.outputs)
        if message.seq % self.cell.scenario.check_every == 0:
            check_invariants(self.fold.state)
        self._outbox.extend(folded.published)
        self._stream_clock.note(message.time_ns, self.cell.clock.now_ns)
        if self._timers.apply(folded.outputs):
            self._keep_timers()
        if folded.input is not None:
            self._liveness.observe(folded.input, self.cell.clock.now_ns)
        if isinstance(folded.input, SchedulerStarted) and 0 < self._started_seq < message.seq:
            self.cell.seen["schedulers_fenced"] += 1
            self.end()
        elif message.seq % self.cell.scenario.snapshot_every == 0:
            self._take_snapshot()
        return True

    def _take_snapshot(self) -> None:
        # A successor publishes nothing again that was caused before its snapshot, so it must be out by now.
        self._publish_all()
        data = encode_state(self.fold.state)
        self.history.snapshots.append((self.fold.position, self.fold.time_ns, data))
        self.history.snapshots.sort(key=lambda snapshot: snapshot[0])
        del self.history.snapshots[:-SNAPSHOTS_KEPT]

    # Outputs.

    def _publish_all(self) -> None:
        while self._outbox and not self.is_cut_off:
            output = self._outbox.popleft()
            target = target_of(output)
            self.cell.publish(target, self.cell.outputs.append(target, encode(output)))

    # Timers and heartbeats.

    def _keep_timers(self) -> None:
        """Have the timers looked at when the next is due by the stream's clock, and at times before."""
        next_ns = self._timers.next_ns()
        if next_ns is None:
            return
        now_ns = self.cell.clock.now_ns
        wait_ns = max(0, next_ns - self._stream_clock.read_ns(now_ns))
        at_ns = now_ns + min(wait_ns, LONGEST_TIMER_WAIT_NS)
        if not 0 < self._wakes_ns <= at_ns:
            self._wakes_ns = at_ns
            self.cell.clock.at(at_ns, lambda: self.do(lambda: self._fire(at_ns)))

    def _fire(self, at_ns: int) -> None:
        if at_ns != self._wakes_ns:
            return
        self._wakes_ns = 0
        for timer_id, due_ns in self._timers.take_due(self._stream_clock.read_ns(self.cell.clock.now_ns)):
            self.append(TimerFired(timer_id=timer_id), f"timer-{timer_id}-{due_ns}")
        self._keep_timers()

    def beat(self, heartbeat: Heartbeat) -> None:
        """A heartbeat came; one that tells of an end is looked into at once."""
        self._liveness.beat(heartbeat, self.cell.clock.now_ns)
        if heartbeat.is_gone:
            self.tick()

    def tick(self) -> None:
        """Look who is gone, and whose heartbeats have stopped."""
        if self.is_cut_off:
            self._liveness.excuse(self.cell.clock.now_ns)
        for message_id, lost in self._liveness.check(self.cell.clock.now_ns, INTERVAL_NS):
            self.cell.seen[f"lost_by_{lost.reason}"] += 1
            self.append(lost, message_id)

    def lists(self, kind: str, name: str, incarnation: str) -> bool:
        """Whether it counts this incarnation among the cell's own."""
        state = self.fold.state
        member = state.workers.get(name) if kind == "worker" else state.storages.get(name)
        return member is not None and member.incarnation == incarnation
