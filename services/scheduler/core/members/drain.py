"""State of workers that were asked to end (see :mod:`draining`), and of nodes that hand on (see :mod:`handover`).

A node hands on when it loses its last worker or its storage. A worker's drain is a table. :func:`check_drain` and
:func:`check_node_drains` check the invariants from scratch, for tests.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from services.scheduler.core.require import require
from services.scheduler.core.waiting.fair_share import waiting_at
from shared.errors import IllegalTransition

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState, Worker


class DrainState(Enum):
    """Progress of a worker's drain. From ``released`` on, the worker is forgotten when it says that it left."""

    FINISHING = "finishing"  # Its running requests go on.
    CLEARING = "clearing"  # The requests that still ran were preempted, to go on elsewhere.
    RELEASED = "released"  # It was told that it may leave.


class DrainEvent(Enum):
    """Events that move a drain on."""

    TIME_SHORT = "time_short"  # The part of the grace for running requests is over.
    EMPTIED = "emptied"  # Nothing is running, being read, or left to be handed over.
    TIME_UP = "time_up"  # All of the grace is over.


_S, _E = DrainState, DrainEvent

DRAIN_TRANSITIONS: dict[tuple[DrainState, DrainEvent], DrainState] = {
    (_S.FINISHING, _E.TIME_SHORT): _S.CLEARING,
    (_S.FINISHING, _E.EMPTIED): _S.RELEASED,
    (_S.CLEARING, _E.EMPTIED): _S.RELEASED,
    (_S.CLEARING, _E.TIME_UP): _S.RELEASED,
}
"""Every legal move; a missing one cannot happen."""


class Drain(msgspec.Struct):
    """A worker that drains.

    ``nodes`` are ids of nodes still to be handed over, the hottest at the end. They are ranked when the drain begins,
    and once more, ``is_ranked_last``, when its last request has left and nothing is added to its device any more.
    """

    ends_ns: int  # Stream time at which it is released, whatever is left.
    timer_id: str
    state: DrainState = DrainState.FINISHING
    nodes: list[int] = []
    is_ranked_last: bool = False

    @property
    def is_over(self) -> bool:
        """Whether the worker was told that it may leave."""
        return self.state is DrainState.RELEASED

    def advance(self, event: DrainEvent) -> None:
        """Move to the state that the table gives. Raises IllegalTransition when the table has no entry."""
        try:
            self.state = DRAIN_TRANSITIONS[self.state, event]
        except KeyError as error:
            raise IllegalTransition(f"a drain that is {self.state.value} cannot take {event.value}") from error


class NodeDrain(msgspec.Struct):
    """Host copies of a node that hands on, as far as other nodes are to have them.

    ``nodes`` are ids of nodes still to be copied, the hottest at the end. When the timer fires the drain is over,
    whatever is left.
    """

    timer_id: str
    bytes_left: int  # Bytes that may still be ordered.
    nodes: list[int] = []
    refused: int = 0  # Number of paths for which no other node had room.
    is_storage_leaving: bool = False  # The storage waits for the end of the drain, and is told of it.
    failed: dict[int, None] = {}  # Last nodes of copies that did not arrive whole, to be ordered again after a pause.
    pauses: int = 0  # Number of pauses made.
    pause_timer: str = ""  # "" is no pause.

    def note_failed(self, node_id: int, nbytes: int) -> None:
        """Note a failed copy that ends with this node; ``nbytes`` of it did not arrive and may be ordered again."""
        self.failed[node_id] = None
        self.bytes_left += nbytes


def check_node_drains(state: CellState) -> None:
    """Raise InvariantViolated if a node could hand on for ever, or more bytes than it may."""
    for name, drain in state.handing.items():
        storage = state.storages.get(name)
        require(storage is not None, f"{name} hands over and is gone")
        require(storage is None or not storage.is_released, f"{name} was released and hands over")
        require(drain.timer_id in state.timers, f"{name} hands over without an end")
        require(drain.bytes_left >= 0, f"{name} hands over more than it may")
        require(not drain.pause_timer or drain.pause_timer in state.timers, f"{name} pauses for ever")


def check_drain(state: CellState, worker: Worker) -> None:
    """Raise InvariantViolated if a worker that drains is expected to do anything new, or could stay for ever."""
    drain, name = worker.drain, worker.worker_id
    if drain is None:
        return
    require(not any(True for _ in waiting_at(worker)), f"{name} drains and requests wait for it")
    require(not worker.line.load_waiters and not worker.line.cost, f"{name} drains and requests count on it")
    require(drain.is_over or drain.timer_id in state.timers, f"{name} drains without an end")
    require(not drain.is_over or not drain.nodes, f"{name} may leave and has something to hand over")
    for other in state.workers.values():
        is_asked = other.moves.neighbours.get(name, False)
        require(not (drain.is_over and is_asked), f"{other.worker_id} would still read from {name}")
