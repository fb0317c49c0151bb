"""What every simulated process is: it may crash, freeze for a while, and be started again as a new incarnation."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING

from shared.codec import Input, Published
from shared.membership import Listing
from shared.messages.storage_events import StorageJoined
from shared.messages.worker_events import WorkerJoined
from shared.plan_order import PlanOrder
from tests.simulation.virtual_clock import Action

if TYPE_CHECKING:
    from tests.simulation.cell import Cell

REREAD_US = 20_000
"""After so long what is missing is read from the stream (again)."""


class Process:
    """An incarnation. What it does later it does not do once it has crashed; what falls into a freeze follows after."""

    kind = ""

    def __init__(self, cell: Cell, name: str, incarnation: str) -> None:
        self.cell = cell
        self.name = name
        self.incarnation = incarnation
        self.chance = random.Random(f"{cell.scenario.seed}/{incarnation}")
        self.is_running = True
        self.is_frozen = False
        self.is_cut_off = cell.is_broker_away
        self._listing = Listing()
        self._stored_seq = 0  # Of its last event, as far as it knows.
        self._frozen: deque[Action] = deque()
        self._unsent: deque[tuple[Input, str]] = deque()

    @property
    def can_answer(self) -> bool:
        """Whether somebody who asks it something gets an answer."""
        return self.is_running and not self.is_frozen and not self.is_cut_off

    def later(self, delay_us: float, action: Action) -> None:
        """Do something after a while."""
        self.cell.clock.after(delay_us, lambda: self.do(action))

    def do(self, action: Action) -> None:
        """Do something now, after a freeze, or never if the process has ended."""
        if not self.is_running:
            return
        if self.is_frozen:
            self._frozen.append(action)
        else:
            action()

    def say(self, message: Input) -> None:
        """Append an event to the inputs, in order; what is not on its way when the process crashes is lost with it."""
        # A second join of one incarnation would be a process that rose from the dead: the stream knows its id.
        is_join = isinstance(message, WorkerJoined | StorageJoined)
        self.cell.link.send(
            f"in/{self.incarnation}",
            lambda: self.do(lambda: self.append(message)),
            may_be_lost=False,
            may_repeat=not is_join,
        )

    def append(self, message: Input, message_id: str = "") -> None:
        """Append an event to the inputs now, or once the broker can be reached again."""
        if self.is_cut_off:
            self._unsent.append((message, message_id))
        else:
            self._stored_seq = self.cell.inputs.append(message, message_id)

    def cut_off(self) -> None:
        """Lose the connection to the broker, and work on: core messages are lost, events wait."""
        self.is_cut_off = True

    def reconnect(self) -> None:
        """Have the connection again, unless there is no broker: what waited is said, what was missed is looked for."""
        if self.cell.is_broker_away or not self.is_cut_off:
            return
        self.is_cut_off = False
        while self._unsent and self.is_running:
            self.append(*self._unsent.popleft())
        self.do(self.catch_up)

    def see_status(self, *, is_listed: bool, epoch: int, seq: int) -> None:
        """The cell's status came. Who learns that it was given up ends, and is started again."""
        if self._listing.see(is_listed=is_listed, epoch=epoch, seq=seq, stored_seq=self._stored_seq):
            self.cell.seen["members_that_learnt_their_end"] += 1
            self.end()
            self.cell.restart(self)

    def freeze(self) -> None:
        """Stand still, heartbeats included."""
        self.is_frozen = True

    def thaw(self) -> None:
        """Go on where it stopped. Everything that came meanwhile is there at once."""
        self.is_frozen = False
        while self._frozen and self.is_running and not self.is_frozen:
            self._frozen.popleft()()

    def end(self) -> None:
        """Do nothing any more."""
        self.is_running = False
        self._frozen.clear()

    def catch_up(self) -> None:
        """Look in the stream of outputs for what was missed."""

    def tick(self) -> None:
        """Twice a second."""


class Receiver:
    """Numbered plans of one incarnation: heard if all goes well, else read from the stream of outputs."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._order: PlanOrder[Published] = PlanOrder(process.incarnation)  # type: ignore[type-var]
        self._read_to = 0
        self._is_reading = False
        self.target = f"{process.kind}/{process.name}"

    def hear(self, plan: Published) -> list[Published]:
        """A plan came; returns those that are due."""
        repeated = self._order.counts.repeated
        due = self._order.offer(plan)
        self._process.cell.seen["plans_repeated"] += self._order.counts.repeated - repeated
        if self._order.missing is not None and not self._is_reading:
            self._is_reading = True
            self._process.later(REREAD_US, self._read_soon)
        return due

    def read(self) -> list[Published]:
        """Everything in the stream that was not read yet; returns the plans that are due."""
        said = self._process.cell.outputs.said.get(self.target, [])
        due: list[Published] = []
        for plan in said[self._read_to :]:
            due += self._order.offer(plan)
        # What is held may be said again by a newer scheduler, so nothing is skipped before all is in order.
        if self._order.missing is None:
            self._read_to = len(said)
        return due

    def _read_soon(self) -> None:
        self._is_reading = False
        self._process.catch_up()
        if self._order.missing is not None:
            self._is_reading = True
            self._process.later(REREAD_US, self._read_soon)
