"""The forward passes of one step (see ``compute``): together, then without the failed requests, then one by one.

A pass is repeated without the requests whose loads have failed, without one whose sparse prefix could not be read, and,
if computing itself raised, with each request alone.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence

from services.worker import counting, losses
from services.worker.bubble import Pace
from services.worker.compute import StepComputer
from services.worker.counters import Counters
from services.worker.hidden_saving import HiddenSaving
from services.worker.importance.selection_failed import SelectionFailed
from services.worker.kv.layer_gate import LayerGate
from services.worker.kv.loads import BatchTransfer
from services.worker.kv.settled import raise_if_failed
from services.worker.outcome import Outcome
from services.worker.parallel.group_lost import GroupLost
from services.worker.requests import RunningRequest
from services.worker.step_saving import SavedStep
from services.worker.steps import Work
from shared import logs
from shared.errors import InternalError
from shared.memory.cuda_runtime import is_out_of_memory
from shared.messages.worker_plans import PageLoad

_log = logs.get_logger("worker")

LONE_FAILURES = 8
"""Consecutive failed steps of a single request after which the worker, not the requests, is to blame."""


class Passes:
    """Runs the passes of a step. Used by the compute thread only. ``requests`` are those known to the worker."""

    def __init__(
        self,
        computer: StepComputer,
        saving: HiddenSaving,
        requests: Mapping[str, RunningRequest],
        counters: Counters,
        pace: Pace,
        *,
        layers: int,
        on_refused: Callable[[str], None],
    ) -> None:
        """Prepare; ``on_refused`` is called with each request whose sparse prefix could not be read."""
        self._computer, self._saving, self._requests = computer, saving, requests
        self._counters, self._pace, self._layers = counters, pace, layers
        self._on_refused = on_refused
        self._lone_failures = 0

    def run(
        self,
        outcome: Outcome,
        work: list[Work],
        transfer: BatchTransfer | None = None,
        loads: Sequence[PageLoad] | None = None,
    ) -> None:
        """Compute ``work`` and record the results in ``outcome``. ``loads`` are the batch's, if there is one.

        A step for which the device has no memory is split into smaller ones, and so are later ones. Raises DeviceFailed
        at once if the GPU cannot be used any more, and InternalError if the device, the model or this process is broken
        rather than a request.
        """
        loads_failed = False
        with self._saving.step() as saved:
            error = self._pass(outcome, work, transfer.gate if transfer is not None else None, saved)
            if transfer is not None:
                work, loads_failed = self._take_loads(outcome, work, transfer, loads or (), saved)
        if loads_failed or _is_of_others(error, work):
            error = self._repeat(outcome, work)
        while error is not None:
            if isinstance(error, SelectionFailed):
                work = self._refuse(outcome, work, error, loads)
            elif not self._shrink(work, error):
                break
            error = self._repeat(outcome, work)
        if error is not None and work:
            self._isolate(outcome, work, error, loads)
        elif outcome.done:
            self._lone_failures = 0

    def choose_held(self) -> Outcome:
        """Choose the first tokens of requests whose grammar is compiled now; return them as an outcome."""
        return Outcome(done=self._computer.choose_held(self._requests.values()))

    def _take_loads(
        self, outcome: Outcome, work: list[Work], transfer: BatchTransfer, loads: Sequence[PageLoad], saved: SavedStep
    ) -> tuple[list[Work], bool]:
        """Wait for the loads; return the part of ``work`` that has its prefix, and whether any load failed."""
        outcome.loads = transfer.finish()
        work, gone = losses.drop_lost(outcome, work, loads, outcome.loads.lost_pages)
        losses.lose(self._requests, gone, is_load=True)
        saved.drop(outcome.lost)
        failed = bool(outcome.loads.failures) or transfer.gate.rejected is not None
        if failed:
            saved.void()
        elif not outcome.failed:
            self._pace.note_load(outcome.loads.pages, self._layers, outcome.loads.load_ns)
        return work, failed

    def _pass(self, outcome: Outcome, work: list[Work], gate: LayerGate | None, saved: SavedStep) -> Exception | None:
        """Run one pass over all of ``work``; return its exception, which voids the hidden states saved of it.

        Either way nothing of it is written any more when this returns.
        """
        try:
            if work:
                outcome.done = self._computer.compute(work, gate, saved)
        except Exception as raised:
            saved.void()
            raise_if_failed(raised)
            if not isinstance(raised, GroupLost):  # The group waits for a rank that has ended.
                # Its pages may be given to others, whose loads are on another stream.
                self._computer.settle()
            return raised
        return None

    def _repeat(self, outcome: Outcome, work: list[Work]) -> Exception | None:
        """Run another pass, when the loads are over; return its exception."""
        outcome.done = []
        if not work:
            return None
        self._count_repeat(outcome)
        with self._saving.step() as saved:
            return self._pass(outcome, work, None, saved)

    def _shrink(self, work: list[Work], error: Exception) -> bool:
        """Return whether the device lacked memory for a step of this size and smaller ones may fit.

        If so they are used from now on. Releases the failed pass's memory on the device.
        """
        if isinstance(error, GroupLost) or not is_out_of_memory(error) or not self._computer.shrink(work):
            return False
        traceback.clear_frames(error.__traceback__)
        return True

    def _refuse(
        self, outcome: Outcome, work: list[Work], error: SelectionFailed, loads: Sequence[PageLoad] | None
    ) -> list[Work]:
        """Return the part of ``work`` that goes on without the request whose prefix failed. Each call has one less."""
        refused = [item for item in work if item.request.request_id == error.name]
        if not refused:
            raise InternalError(f"a prefix failed of {error.name!r}, which is not computed") from error
        self._note_refused(outcome, refused[0], error)
        rest = [item for item in work if item is not refused[0]]
        return losses.lose_refused(self._requests, outcome, rest, loads or ())

    def _note_refused(self, outcome: Outcome, item: Work, error: SelectionFailed) -> None:
        cause = error.__cause__
        _log.warning("sparse_prefix_refused", request=error.name, reason=f"{type(cause).__name__}: {cause}")
        outcome.refused.append(item)
        self._on_refused(error.name)

    def _isolate(self, outcome: Outcome, work: list[Work], error: Exception, loads: Sequence[PageLoad] | None) -> None:
        _log.warning("step_failed", error=repr(error), requests=len(work))
        self._count_repeat(outcome)
        with self._saving.step() as saved:
            outcome.done, broken = self._computer.isolate(work, saved)
            outcome.broken = [each for each in broken if not isinstance(each[1], SelectionFailed)]
            for item, raised in broken:
                if isinstance(raised, SelectionFailed):
                    self._note_refused(outcome, item, raised)
            self._check_health(outcome, error)
            if loads is not None:
                losses.lose_with_broken(self._requests, outcome, loads)
            saved.drop(outcome.lost)

    def _check_health(self, outcome: Outcome, error: Exception) -> None:
        """Raise if the device, the model or this process is broken rather than a request."""
        if outcome.done or not outcome.broken:
            self._lone_failures = 0
            return
        self._lone_failures += 1
        if len(outcome.broken) > 1 or self._lone_failures >= LONE_FAILURES:
            raise InternalError(f"every request of a step failed: {error!r}") from error

    def _count_repeat(self, outcome: Outcome) -> None:
        outcome.is_repeated = True
        counting.count_repeat(self._counters)


def _is_of_others(error: Exception | None, work: Sequence[Work]) -> bool:
    """Return whether the failed prefix belongs to a request that is lost anyhow, because of a load it stands on."""
    return isinstance(error, SelectionFailed) and error.name not in [item.request.request_id for item in work]
