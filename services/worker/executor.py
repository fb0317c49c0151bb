"""Continuous batching, in the worker's compute thread: orders in, steps out.

Orders are carried out in the order of their numbers. A ``RunBatch`` is a barrier: it takes one step, and what
comes after it waits for that step. Between two steps the thread never waits for the event loop: it takes the
orders that have arrived, runs the next step, and posts a report.

One thing may happen before a batch's own step: while its loads run, the thread decodes or computes the next batch
(``bubble``). Between those steps it also carries out the orders behind the batch, up to the first that could conflict
with it (``bubble.may_overtake``). All of these count as executed only when the batch is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from services.worker import bubble, counting, losses, metrics
from services.worker.adapter_loading import AdapterLoading
from services.worker.answer_grammars import AnswerGrammars
from services.worker.counters import Counters
from services.worker.hidden_saving import HiddenSaving
from services.worker.inbox import Arrival, Inbox
from services.worker.kv.loads import BatchTransfer, Loads
from services.worker.kv.promotions import Promoted
from services.worker.lookup.prompt_lookup import PromptLookup
from services.worker.outcome import Outcome
from services.worker.passes import Passes
from services.worker.reports import Report, Reporter
from services.worker.restore.leased_pages import SavedHidden
from services.worker.restoring import Restoring
from services.worker.roster import Roster
from services.worker.sparse_prefixes import SparsePrefixes
from services.worker.step_results import StepResults
from services.worker.steps import Work, chunks, decodes
from services.worker.steps_ahead import StepsAhead
from shared.errors import InternalError
from shared.messages.pools import KvGeometry
from shared.messages.worker_plans import (
    AbortRequest,
    AdmitRequest,
    AttachAdapter,
    AttachHostPool,
    AttachNeighbour,
    DetachAdapter,
    DetachHostPool,
    DetachNeighbour,
    ExtendLease,
    PreemptRequest,
    PromotePages,
    RunBatch,
    WorkerOrder,
)


class Executor:
    """Carries out orders and runs steps, in one thread. ``post`` hands reports to the event loop and must not block."""

    def __init__(
        self,
        inbox: Inbox,
        roster: Roster,
        passes: Passes,
        results: StepResults,
        ahead: StepsAhead,
        *,
        loads: Loads,
        saving: HiddenSaving,
        sparse: SparsePrefixes,
        restoring: Restoring,
        reporter: Reporter,
        counters: Counters,
        pace: bubble.Pace,
        grammars: AnswerGrammars,
        lookup: PromptLookup | None,
        adapters: AdapterLoading,
        geometry: KvGeometry,
        post: Callable[[Report], None],
        clock_ns: Callable[[], int],
    ) -> None:
        """Prepare; ``geometry`` is the device pool's; without ``lookup`` a decode step brings one token a request."""
        self.inbox = inbox
        self.counters = counters
        self.last_executed = 0  # Number of the last completed plan.
        self._roster, self._passes, self._results, self._ahead = roster, passes, results, ahead
        self._loads, self._saving, self._sparse, self._restoring = loads, saving, sparse, restoring
        self._reporter, self._pace, self._geometry = reporter, pace, geometry
        self._grammars, self._lookup, self._adapters = grammars, lookup, adapters
        self._post_report, self._clock_ns = post, clock_ns
        self._overtaken = 0  # Number of the last order that went ahead of the batch under way.
        self._promoted: deque[Promoted] = deque()  # Filled by the transfer thread.
        self._hidden_saved: deque[SavedHidden] = deque()  # Filled by the saving thread.
        saving.answer_to(self._note_hidden_saved)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Ids of the requests known now; safe from another thread."""
        return tuple(self._roster.requests.copy())

    def run(self) -> None:
        """Step while there is work and sleep while there is none, until the inbox is closed."""
        try:
            while not self.inbox.is_closed:
                if not self.run_one_step():
                    self.inbox.wait()
            self._land()
        finally:
            self._restoring.close()
            self._grammars.close()
            self._adapters.close()
        # Hidden states saved by now outlive this worker.
        self._saving.end_all()
        self._post()

    def run_one_step(self) -> bool:
        """Carry out the orders that have arrived, up to one step; return False if there was nothing to compute.

        Orders that arrive meanwhile wait for the step under way.
        """
        if self._land():
            return True
        batch = self._apply_orders()
        for attached in self._adapters.settle():
            self._reporter.adapter_attached(attached)
        # Answers to orders do not wait for the step, which may take long.
        self._post()
        self._choose_held()
        work = decodes(self._roster.requests.values())
        if batch is None and not work:
            return False
        if batch is not None:
            self._run_batch(batch)
            self._executed(batch)
        elif not (self._ahead.begin(work) and self._land()):
            self._decode(work)
        return True

    # -- orders -----------------------------------------------------------------------------------------------

    def _apply_orders(self) -> Arrival | None:
        """Carry out all orders up to the next RunBatch; return that, or None if there is none."""
        while (arrival := self.inbox.take()) is not None:
            if isinstance(arrival.order, RunBatch):
                return arrival
            self._apply(arrival.order, arrival.arrived_ns)
            self._executed(arrival)
        return None

    def _apply(self, order: WorkerOrder, arrived_ns: int) -> None:
        match order:
            case AdmitRequest():
                self._roster.admit(order, arrived_ns)
            case ExtendLease():
                self._roster.extend(order)
            case PreemptRequest():
                self._roster.preempt(order)
            case AbortRequest():
                self._roster.abort(order)
            case PromotePages():
                self._loads.promote(order, self._promotion_ended)
            case AttachHostPool() if order.handle.geometry.is_hidden:
                self._saving.attach(order.storage_id, order.handle)
            case AttachHostPool():
                self._loads.attach(order.storage_id, order.handle)
            case DetachHostPool():
                self._loads.detach(order.storage_id)
                self._saving.detach(order.storage_id)
            case AttachNeighbour():
                self._loads.neighbours.attach(order.worker_id, order.worker_incarnation, order.handle)
            case DetachNeighbour():
                self._loads.neighbours.detach(order.worker_id, order.worker_incarnation)
            case AttachAdapter():
                self._adapters.attach(order)
            case DetachAdapter():
                self._adapters.detach(order)
            case _:
                # Dismiss is the shell's business; a RunBatch never comes here.
                raise InternalError(f"the executor cannot carry out {type(order).__name__}")

    def _promotion_ended(self, promoted: Promoted) -> None:
        """Queue an ended promotion; called on the transfer thread, or on this one where there is none."""
        self._promoted.append(promoted)
        self.inbox.wake()

    def _note_hidden_saved(self, saved: SavedHidden) -> None:
        """Queue an ended hidden lease; called on the saving thread, or on this one."""
        self._hidden_saved.append(saved)
        self.inbox.wake()

    def _executed(self, arrival: Arrival) -> None:
        self.last_executed = max(self.last_executed, arrival.number, self._overtaken)

    def _post(self) -> None:
        while self._promoted:
            promoted = self._promoted.popleft()
            counting.count_promotion(self.counters, promoted)
            self._reporter.pages_promoted(promoted)
        while self._hidden_saved:
            saved = self._hidden_saved.popleft()
            counting.count_saved(self.counters, saved)
            self._reporter.hidden_saved(saved)
        report = self._reporter.take(self.counters.steps, self._ahead.held)
        if not report.is_empty:
            self._post_report(report)

    # -- one step ---------------------------------------------------------------------------------------------

    def _choose_held(self) -> None:
        """Choose first tokens that waited for their grammar."""
        outcome = self._passes.choose_held()
        if outcome.done:
            self._results.take_in(outcome, self._clock_ns())
            self._post()

    def _decode(self, work: list[Work]) -> None:
        """Run a step without chunks."""
        started_ns = self._clock_ns()
        outcome = Outcome()
        self._passes.run(outcome, work if self._lookup is None else self._lookup.propose(work))
        if self._lookup is not None:
            self._lookup.note(outcome.done)
        self._take_in(outcome, started_ns, None)
        if not outcome.is_repeated:
            self._pace.note_decode(outcome.took_ns)

    def _land(self) -> bool:
        """Take in the step under way, if any; return False if there is none, or it brought nothing.

        The next step is launched before, where no order has to be carried out between them.
        """
        if not self._ahead.is_under_way:
            return False
        landed = self._ahead.advance(may_launch=self._has_no_news())
        if landed is None:
            counting.count_repeat(self.counters)
            return False
        outcome, started_ns = landed
        if outcome.done:
            self._take_in(outcome, started_ns, None)
            self._pace.note_decode(outcome.took_ns)
        else:  # Ended requests whose ends the step has held back.
            self._post()
        return bool(outcome.done)

    def _has_no_news(self) -> bool:
        """Return whether there is nothing to do but the next step."""
        if self.inbox.is_closed or len(self.inbox):
            return False
        if self._adapters.has_news:
            return False
        return not any(request.held_logits is not None for request in self._roster.requests.values())

    def _run_batch(self, batch: Arrival) -> None:
        """Run a batch: its loads, a bubble if it asks for one, its restorations, and the step with its chunks."""
        order = batch.order
        assert isinstance(order, RunBatch)
        started_ns = self._clock_ns()
        outcome = Outcome()
        transfer = self._loads.start(order.loads) if order.loads else None
        loading = losses.cover(self._roster.requests, order) if order.loads else frozenset()
        planned, outcome.rejected = chunks(self._roster.requests, order.chunks)
        _note_started(planned, started_ns)
        if transfer is not None and order.fill_bubble:
            outcome.bubble = self._fill_bubble(transfer, order, planned, loading)
            started_ns = self._clock_ns()
        if order.restores:
            planned = self._restore(outcome, order, planned, transfer, started_ns)
            started_ns = self._clock_ns()
            for item in outcome.restored.done:
                item.request.milestones.restored_ns = started_ns
        self._passes.run(outcome, decodes(self._roster.requests.values()) + planned, transfer, order.loads)
        for item in outcome.restored.done:
            item.request.note_restored(item.start, item.end)
        self._note_loaded(order, outcome)
        self._take_in(outcome, started_ns, batch)
        self._note_pace(outcome)

    def _note_pace(self, outcome: Outcome) -> None:
        if not outcome.is_repeated:
            rows = outcome.prefill_rows + outcome.decode_rows
            self._pace.note_step(rows, outcome.took_ns - outcome.stall_ns - outcome.sparse_ns)

    def _fill_bubble(
        self, transfer: BatchTransfer, order: RunBatch, planned: list[Work], loading: frozenset[int]
    ) -> bubble.Bubble:
        """Compute other work while the batch is only loading; carry out orders that may go ahead of it."""
        left_out = bubble.standing_on(self._roster.requests.values(), loading)

        def decoding() -> list[Work]:
            work = decodes(self._roster.requests.values())
            return [item for item in work if item.request.request_id not in left_out]

        def prefill(room_ns: float) -> bool:
            if self.inbox.is_closed:
                return False
            self._overtake(order)
            return self._run_ahead(order, loading, decoding(), room_ns)

        def decode() -> int:
            if self.inbox.is_closed:
                return 0
            self._overtake(order)
            self._choose_held()
            work, before = decoding(), self.counters.decode_tokens
            if work:
                self._decode(work)
            return self.counters.decode_tokens - before

        rows, also = sum(item.rows for item in planned), prefill if order.bubble_prefill else None
        return bubble.fill(transfer, rows, self._pace, decode, self._clock_ns, also)

    def _overtake(self, order: RunBatch) -> None:
        """Carry out the orders that may go ahead of a batch that is only loading."""
        while (ahead := self.inbox.peek()) is not None and bubble.may_overtake(ahead.order, order):
            self.inbox.take()
            self._apply(ahead.order, ahead.arrived_ns)
            self._overtaken = max(self._overtaken, ahead.number)
        self._post()

    def _run_ahead(self, order: RunBatch, loading: frozenset[int], decoding: list[Work], room_ns: float) -> bool:
        """Compute the next batch, if it may go ahead of one that loads the ``loading`` pages.

        Return whether it was computed. It may take no longer than ``room_ns``, together with one token of each of
        ``decoding``.
        """
        ahead = self.inbox.peek()
        if ahead is None or not bubble.may_go_ahead(ahead.order, order, self._roster.requests, loading):
            return False
        rows = len(decoding) + sum(chunk.end - chunk.start for chunk in ahead.order.chunks)
        if not bubble.fits(rows, room_ns, self._pace):
            return False
        self.inbox.take()
        outcome, started_ns = Outcome(), self._clock_ns()
        planned, outcome.rejected = chunks(self._roster.requests, ahead.order.chunks)
        _note_started(planned, started_ns)
        self._passes.run(outcome, decoding + planned, None, ahead.order.loads)
        self._take_in(outcome, started_ns, ahead)
        self._note_pace(outcome)
        self._overtaken = max(self._overtaken, ahead.number)
        return True

    def _restore(
        self, outcome: Outcome, order: RunBatch, planned: list[Work], transfer: BatchTransfer | None, now_ns: int
    ) -> list[Work]:
        """Carry out the batch's restorations; return the part of ``planned`` that stands on none that failed."""
        requests = self._roster.requests
        for chunk in order.restores:
            if chunk.request_id in requests:
                at = requests[chunk.request_id].milestones
                at.started_ns = at.started_ns or now_ns
        taken = [chunk.request_id for chunk in order.chunks]
        gate = transfer.gate if transfer is not None else None
        outcome.restored = self._restoring.run(requests, order.restores, taken, gate)
        return losses.lose_unrestored(requests, outcome, planned, order.loads)

    def _take_in(self, outcome: Outcome, started_ns: int, batch: Arrival | None) -> None:
        """Move a step's requests on, post the results, and count them."""
        ended_ns = self._clock_ns()
        outcome.took_ns = max(0, ended_ns - started_ns)
        outcome.sparse = self._sparse.take_in(one.work.request for one in outcome.done)
        self.counters.steps += 1
        if batch is not None:
            self.counters.batches += 1
            figures = outcome.figures(self._geometry)
            self._reporter.batch_done(
                batch.number,
                outcome.failed,
                outcome.load_failures,
                figures,
                restores_refused=outcome.restored.refused,
                sparse_refused=outcome.sparse_refused,
                sparse_loaded=[loaded.event for loaded in outcome.sparse],
            )
        self._results.take_in(outcome, ended_ns)
        # Clients wait for its tokens, and not for the counters.
        self._post()
        counting.count_step(self.counters, outcome)
        counting.count_saving(self.counters, self._saving.counts)
        metrics.RUNNING.set(len(self._roster.requests))
        metrics.QUEUED_ORDERS.set(len(self.inbox))

    def _note_loaded(self, order: RunBatch, outcome: Outcome) -> None:
        for load in order.loads:
            request = self._roster.requests.get(load.request_id)
            if request is not None and outcome.loads is not None:
                request.milestones.loaded_ns = request.milestones.loaded_ns or outcome.loads.ended_ns


def _note_started(planned: list[Work], started_ns: int) -> None:
    for item in planned:
        at = item.request.milestones
        at.started_ns = at.started_ns or started_ns
