"""The scheduler of a simulated cell: the real fold, timers and liveness. It may die between any two inputs.

What it folds is remembered once. A successor that folds the same inputs again, from a snapshot or from the beginning
of the stream, has to say the same bytes.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from services.scheduler.core import check_invariants, decode_state, encode_state, new_state, pending_timers
from services.scheduler.fold import Fold
from services.scheduler.liveness import Liveness
from services.scheduler.timers import Timers
from shared.codec import Published, encode
from shared.messages.cell_events import CellConfigured, SchedulerStarted, TimerFired
from shared.messages.gateway_notices import GatewayNotice
from shared.messages.status import Heartbeat
from shared.messages.storage_plans import StoragePlan
from tests.simulation.contents import require

if TYPE_CHECKING:
    from tests.simulation.cell import Cell

SILENCE_NS = 5_000_000_000
INTERVAL_NS = 500_000_000
FOLD_US = 30


def as_bytes(output: object) -> bytes:
    """An output in a form that compares by the byte."""
    return encode(output) if hasattr(output, "__struct_fields__") else repr(output).encode()


def target_of(output: Published) -> str:
    """Whose stream of outputs it is in."""
    if isinstance(output, GatewayNotice):
        return f"gateway/{output.gateway_id}"
    if isinstance(output, StoragePlan):
        return f"storage/{output.storage_id}"
    return f"worker/{output.worker_id}"


class SchedulerProcess:
    """At most one runs at a time. ``fold`` is what the last one knew, also while none runs."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.is_running = False
        self.record: list[list[bytes]] = []  # What each input led to, whoever folded it first.
        self.snapshots: list[tuple[int, int, bytes]] = []  # (position, time, state)
        self.starts = 0
        self._life = 0
        self._is_waking = False
        self._outbox: deque[Published] = deque()
        self.fold = Fold(new_state())
        self._timers = Timers()
        self._wakes_ns = 0  # When the timers are looked at next; 0 is never.
        self._liveness = Liveness(SILENCE_NS)
        cell.inputs.on_append = self._wake

    # Lives.

    def start(self, *, snapshots_back: int = 0) -> None:
        """Restore from the snapshot that is so many before the last, or from the whole stream where there is none."""
        self._life += 1
        self.starts += 1
        at = len(self.snapshots) - 1 - snapshots_back
        if at >= 0:
            position, time_ns, data = self.snapshots[at]
            self.fold = Fold(decode_state(data), position=position, time_ns=time_ns)
        else:
            self.fold = Fold(new_state())
        self.is_running = True
        while self._fold_next():
            pass
        self._publish_all()
        self._timers, self._wakes_ns, self._liveness = Timers(), 0, Liveness(SILENCE_NS)
        self._liveness.watch_state(self.fold.state, self.cell.clock.now_ns)
        self._timers.apply(pending_timers(self.fold.state))
        self._keep_timers()
        epoch = self.fold.state.epoch + 1
        self.cell.inputs.append(SchedulerStarted(scheduler_id="scheduler", epoch=epoch), f"started-{self.starts}")
        if self.starts == 1:
            self.cell.inputs.append(CellConfigured(config=self.cell.scenario.config))

    def crash(self) -> None:
        """Die between two inputs; outputs that were not published yet are lost."""
        self._life += 1
        self.is_running = False
        self._outbox.clear()

    # The fold.

    def _wake(self) -> None:
        if self.is_running and not self._is_waking:
            self._is_waking = True
            self.cell.clock.after(FOLD_US, self._folded_one)

    def _folded_one(self) -> None:
        self._is_waking = False
        if self.is_running and self._fold_next():
            self._publish_soon()
            self._wake_for_more()

    def _wake_for_more(self) -> None:
        if self.fold.position < len(self.cell.inputs.messages):
            self._wake()

    def _fold_next(self) -> bool:
        messages = self.cell.inputs.messages
        if self.fold.position >= len(messages):
            return False
        message = messages[self.fold.position]
        folded = self.fold.apply(message)
        require(folded.input is not None, f"input {message.seq} cannot be decoded: {folded.fault}")
        said = [as_bytes(output) for output in folded.outputs]
        if message.seq <= len(self.record):
            is_same = self.record[message.seq - 1] == said
            require(is_same, f"input {message.seq} leads to other outputs when it is folded again")
        else:
            self.record.append(said)
            self.cell.note_folded(folded.input, folded.outputs)
        if message.seq % self.cell.scenario.check_every == 0:
            check_invariants(self.fold.state)
        self._outbox.extend(folded.published)
        if self._timers.apply(folded.outputs):
            self._keep_timers()
        if folded.input is not None:
            self._liveness.observe(folded.input, self.cell.clock.now_ns)
        if message.seq % self.cell.scenario.snapshot_every == 0:
            self._take_snapshot()
        return True

    def _take_snapshot(self) -> None:
        # A successor publishes nothing again that was caused before its snapshot, so it must be out by now.
        self._publish_all()
        data = encode_state(self.fold.state)
        self.snapshots.append((self.fold.position, self.fold.time_ns, data))
        del self.snapshots[:-3]

    # Outputs.

    def _publish_soon(self) -> None:
        life = self._life
        self.cell.clock.after(self.cell.chance.randint(5, 300), lambda: self._publish(life))

    def _publish(self, life: int) -> None:
        if life == self._life:
            self._publish_all()

    def _publish_all(self) -> None:
        while self._outbox:
            output = self._outbox.popleft()
            target = target_of(output)
            self.cell.publish(target, self.cell.outputs.append(target, encode(output)))

    # Timers and heartbeats.

    def _keep_timers(self) -> None:
        next_ns = self._timers.next_ns()
        if next_ns is not None and not 0 < self._wakes_ns <= next_ns:
            self._wakes_ns, life = next_ns, self._life
            self.cell.clock.at(next_ns, lambda: self._fire(life, next_ns))

    def _fire(self, life: int, due_ns: int) -> None:
        if life != self._life or due_ns != self._wakes_ns:
            return
        self._wakes_ns = 0
        for timer_id, at_ns in self._timers.take_due(self.cell.clock.now_ns):
            self.cell.inputs.append(TimerFired(timer_id=timer_id), f"timer-{timer_id}-{at_ns}")
        self._keep_timers()

    def beat(self, heartbeat: Heartbeat) -> None:
        """A heartbeat came."""
        if self.is_running:
            self._liveness.beat(heartbeat, self.cell.clock.now_ns)

    def tick(self) -> None:
        """Look whose heartbeats have stopped."""
        if self.is_running:
            for message_id, lost in self._liveness.check(self.cell.clock.now_ns, INTERVAL_NS):
                self.cell.inputs.append(lost, message_id)

    def lists(self, kind: str, name: str, incarnation: str) -> bool:
        """Whether the cell counts this incarnation among its own."""
        state = self.fold.state
        member = state.workers.get(name) if kind == "worker" else state.storages.get(name)
        return member is not None and member.incarnation == incarnation
