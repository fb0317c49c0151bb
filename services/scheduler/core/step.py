"""One step of the fold: the input with its place and time, its outputs, and the state while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from shared.codec import Input, Published
from shared.messages.gateway_notices import GatewayNotice, GatewayWord
from shared.messages.storage_plans import StorageOrder, StoragePlan
from shared.messages.worker_plans import WorkerOrder, WorkerPlan

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState, Storage, Worker

MOST_GATEWAYS = 4096
"""Gateways at most whose notices are numbered on. A name is of one incarnation, and a gateway after so many others has
ended."""

TimerKind = Literal[
    "deadline",
    "deferral",
    "prefetch",
    "resume",
    "backup",
    "save",
    "hidden_lease",
    "fetch",
    "hidden_fetch",
    "pin",
    "cache_lease",
    "reads",
    "drain",
    "strike",
    "flush",
    "renew",
    "hand_over",
    "hand_again",
    "adapter",
]
"""Purposes of the core's timers; :mod:`timers` has a handler for each."""


@dataclass(frozen=True, slots=True)
class Stamped:
    """An input as the stream stored it.

    ``seq`` is its sequence number there, which orders everything; ``time_ns`` is the server's timestamp (wall
    clock, ns), which is the only clock that the core knows.
    """

    seq: int
    time_ns: int
    input: Input


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Append ``TimerFired(timer_id)`` to the stream once its clock reaches ``at_ns``; set again, it moves."""

    timer_id: str
    at_ns: int


@dataclass(frozen=True, slots=True)
class CancelTimer:
    """Forget a timer. One that has fired already is harmless: the core ignores what it no longer waits for."""

    timer_id: str


Output = Published | SetTimer | CancelTimer
"""Results of a step: numbered plans and notices to publish, and timers for the shell to keep."""


class Timer(msgspec.Struct):
    """A timer that the shell keeps. ``subject`` is the id of the thing that it is for."""

    at_ns: int
    kind: TimerKind
    subject: str


class Step:
    """The outputs of one input while they are made, with its sequence number and time."""

    __slots__ = ("outputs", "seq", "state", "time_ns", "touched")

    def __init__(self, state: CellState, seq: int, time_ns: int) -> None:
        """Begin without outputs; ``state`` is changed in place. ``time_ns`` is the stamp of input ``seq``."""
        self.state = state
        self.seq = seq
        self.time_ns = time_ns
        self.outputs: list[Output] = []
        self.touched: dict[str, None] = {}  # Workers that may have something new to do.

    def touch(self, worker_id: str) -> None:
        """Mark a worker that may be able to take on more after a change."""
        self.touched[worker_id] = None

    def to_worker(self, worker: Worker, order: WorkerOrder) -> int:
        """Send an order to a worker; return the plan's number."""
        worker.number += 1
        self._publish_to_worker(worker.worker_id, worker.incarnation, worker.number, order)
        return worker.number

    def to_stranger(self, worker_id: str, incarnation: str, order: WorkerOrder) -> None:
        """Send an order to a worker that does not join: its first and last plan."""
        self._publish_to_worker(worker_id, incarnation, 1, order)

    def _publish_to_worker(self, worker_id: str, incarnation: str, number: int, order: WorkerOrder) -> None:
        self.outputs.append(
            WorkerPlan(
                worker_id=worker_id,
                incarnation=incarnation,
                number=number,
                epoch=self.state.epoch,
                cause=self.seq,
                order=order,
            )
        )

    def to_storage(self, storage: Storage, order: StorageOrder) -> None:
        """Send an order to a storage, as its next plan."""
        storage.number += 1
        self.outputs.append(
            StoragePlan(
                storage_id=storage.storage_id,
                incarnation=storage.incarnation,
                number=storage.number,
                epoch=self.state.epoch,
                cause=self.seq,
                order=order,
            )
        )

    def to_gateway(self, gateway_id: str, word: GatewayWord) -> None:
        """Send a notice to a gateway. Beyond MOST_GATEWAYS the one that got none for longest is forgotten."""
        gateways = self.state.gateways
        number = gateways.pop(gateway_id, 0) + 1
        gateways[gateway_id] = number
        if len(gateways) > MOST_GATEWAYS:
            del gateways[next(iter(gateways))]
        self.outputs.append(
            GatewayNotice(gateway_id=gateway_id, number=number, epoch=self.state.epoch, cause=self.seq, word=word)
        )

    def set_timer(self, timer_id: str, kind: TimerKind, subject: str, delay_ms: int) -> str:
        """Start a timer that ends ``delay_ms`` after this step's time; return its id."""
        at_ns = self.time_ns + delay_ms * 1_000_000
        self.state.timers[timer_id] = Timer(at_ns=at_ns, kind=kind, subject=subject)
        self.outputs.append(SetTimer(timer_id, at_ns))
        return timer_id

    def cancel_timer(self, timer_id: str) -> None:
        """Stop a timer if it still runs."""
        if self.state.timers.pop(timer_id, None) is not None:
            self.outputs.append(CancelTimer(timer_id))
