"""Continuous batching, in the worker's compute thread: orders in, steps out.

Orders are carried out in the order of their numbers. A ``RunBatch`` is a barrier: it takes one step, and what
comes after it waits for that step. Between two steps the thread never waits for the event loop: it takes the
orders that have arrived, runs the next step, and posts a report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from services.worker import metrics
from services.worker.admission import ModelLimits
from services.worker.compute import Computed, Runner, StepComputer
from services.worker.counters import Counters
from services.worker.detokenizer import Vocabulary
from services.worker.inbox import Arrival, Inbox
from services.worker.kv.loads import BatchTransfer, LoadResult, Loads
from services.worker.reports import Report, Reporter
from services.worker.requests import RunningRequest
from services.worker.roster import Roster
from services.worker.steps import Work, chunks, decodes, pages_of, still_computable
from shared import logs
from shared.errors import InternalError
from shared.messages.base import unpack_int32
from shared.messages.worker_plans import (
    AbortRequest,
    AdmitRequest,
    AttachHostPool,
    DetachHostPool,
    ExtendLease,
    PreemptRequest,
    RunBatch,
    WorkerOrder,
)

_log = logs.get_logger("worker")

REQUEST_FAILURES = 3
"""Computations of one request that may raise in a row before it is ended with an error."""

LONE_FAILURES = 8
"""Steps of a single request that may fail in a row before the worker, not the requests, is to blame."""


@dataclass(slots=True)
class Outcome:
    """What became of a step's work. ``lost`` had no prefix after its loads failed, ``broken`` raised."""

    done: list[Computed] = field(default_factory=list)
    lost: list[Work] = field(default_factory=list)
    broken: list[tuple[Work, Exception]] = field(default_factory=list)
    loads: LoadResult | None = None


class Executor:
    """Owns everything that a step touches. ``post`` hands a report to the event loop and must not block."""

    def __init__(
        self,
        worker_id: str,
        incarnation: str,
        runner: Runner,
        vocabulary: Vocabulary,
        loads: Loads,
        post: Callable[[Report], None],
        *,
        lease_low_tokens: int,
        clock_ns: Callable[[], int],
    ) -> None:
        limits = ModelLimits(
            page_size=runner.geometry.page_size,
            pages=runner.pool.pages,
            vocab_size=runner.vocab_size,
            max_context=runner.max_context,
            eos_token_ids=tuple(runner.eos_token_ids),
        )
        self.inbox = Inbox()
        self.counters = Counters()
        self.last_executed = 0  # Number of the last plan that is done.
        self._computer = StepComputer(runner)
        self._loads = loads
        self._post_report = post
        self._lease_low_tokens = lease_low_tokens
        self._clock_ns = clock_ns
        self._reporter = Reporter(worker_id, incarnation)
        self._roster = Roster(limits, vocabulary, self._reporter, self.counters)
        self._lone_failures = 0

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Requests known now; may be called from another thread."""
        return tuple(self._roster.requests.copy())

    def run(self) -> None:
        """Until the inbox is closed: step while there is work, sleep while there is none."""
        while not self.inbox.is_closed:
            if not self.run_one_step():
                self.inbox.wait()

    def run_one_step(self) -> bool:
        """Carry out what has arrived, up to one step. False if there was nothing to compute."""
        batch = self._apply_orders()
        # Answers to orders do not wait for the step, which may take long.
        self._post()
        work = decodes(self._roster.requests.values())
        if batch is None and not work:
            return False
        self._step(batch, work)
        if batch is not None:
            self._executed(batch)
        self._post()
        return True

    # -- orders -----------------------------------------------------------------------------------------------

    def _apply_orders(self) -> Arrival | None:
        """Carry out everything up to the next RunBatch, which is returned; None if there is none."""
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
            case AttachHostPool():
                self._loads.pools.attach(order.storage_id, order.handle)
            case DetachHostPool():
                self._loads.pools.detach(order.storage_id)
            case _:
                # Dismiss is the shell's business; a RunBatch never comes here.
                raise InternalError(f"the executor cannot carry out {type(order).__name__}")

    def _executed(self, arrival: Arrival) -> None:
        self.last_executed = max(self.last_executed, arrival.number)

    def _post(self) -> None:
        report = self._reporter.take(self.counters.steps)
        if not report.is_empty:
            self._post_report(report)

    # -- one step ---------------------------------------------------------------------------------------------

    def _step(self, batch: Arrival | None, work: list[Work]) -> None:
        started_ns = self._clock_ns()
        order = batch.order if batch is not None else None
        rejected: list[str] = []
        transfer: BatchTransfer | None = None
        if isinstance(order, RunBatch):
            if order.loads:
                transfer = self._loads.start(order.loads)
                self._cover(order)
            planned, rejected = chunks(self._roster.requests, order.chunks)
            for item in planned:
                at = item.request.milestones
                at.started_ns = at.started_ns or started_ns
            work = work + planned
        outcome = self._compute(work, transfer)
        ended_ns = self._clock_ns()
        self.counters.steps += 1
        self._count(outcome, (ended_ns - started_ns) / 1e9)
        if isinstance(order, RunBatch) and batch is not None:
            self.counters.batches += 1
            self._note_loaded(order, outcome.loads)
            self._report_batch(batch.number, outcome, rejected, max(0, ended_ns - started_ns) // 1000)
        for computed in outcome.done:
            self._advance(computed, ended_ns)
        self._blame(outcome)

    def _compute(self, work: list[Work], transfer: BatchTransfer | None) -> Outcome:
        """See ``compute``: together, then without failed loads, then one by one."""
        outcome = Outcome()
        error: Exception | None = None
        if work:
            try:
                outcome.done = self._computer.compute(work, transfer.gate if transfer is not None else None)
            except Exception as raised:
                error = raised
        if transfer is not None:
            outcome.loads = transfer.finish()
            if outcome.loads.failures:
                self._lose(outcome.loads.bad_pages, from_host=True)
                work, outcome.lost = still_computable(work)
            if outcome.loads.failures or transfer.gate.rejected is not None:
                outcome.done, error = [], None
                if work:
                    self._count_repeat()
                    try:
                        outcome.done = self._computer.compute(work, None)
                    except Exception as raised:
                        error = raised
        if error is not None and work:
            _log.warning("step_failed", error=repr(error), requests=len(work))
            self._count_repeat()
            outcome.done, outcome.broken = self._computer.isolate(work)
            self._check_health(outcome, error)
        elif outcome.done:
            self._lone_failures = 0
        return outcome

    def _check_health(self, outcome: Outcome, error: Exception) -> None:
        """Raise if it is not a request that is broken but the device, the model or this process."""
        if outcome.done:
            self._lone_failures = 0
            return
        self._lone_failures += 1
        if len(outcome.broken) > 1 or self._lone_failures >= LONE_FAILURES:
            raise InternalError(f"every request of a step failed: {error!r}") from error

    def _cover(self, order: RunBatch) -> None:
        """Count on the pages that are being loaded, for requests whose chunks stand on them."""
        loaded = frozenset(page for load in order.loads for page in unpack_int32(load.device_pages))
        for chunk in order.chunks:
            request = self._roster.requests.get(chunk.request_id)
            if request is not None and not request.is_decoding and chunk.start > request.computed:
                request.extend_coverage(loaded)

    def _lose(self, bad: frozenset[int], *, but: RunningRequest | None = None, from_host: bool = False) -> None:
        """Nobody counts on these pages any more, and usage says no longer that they came ``from_host``."""
        for request in self._roster.requests.values():
            if not request.is_decoding and request is not but:
                lost = request.lose_pages(bad)
                if from_host:
                    request.host_tokens = max(0, request.host_tokens - lost)

    def _note_loaded(self, order: RunBatch, loads: LoadResult | None) -> None:
        for load in order.loads:
            request = self._roster.requests.get(load.request_id)
            if request is not None and loads is not None:
                request.milestones.loaded_ns = request.milestones.loaded_ns or loads.ended_ns

    def _report_batch(self, number: int, outcome: Outcome, rejected: list[str], compute_us: int) -> None:
        failed = [*rejected]
        failed += [item.request.request_id for item in outcome.lost]
        failed += [item.request.request_id for item, _ in outcome.broken if item.is_chunk]
        failures, load_us = [], 0
        if outcome.loads is not None:
            failures = outcome.loads.failures
            failed += outcome.loads.failed_requests
            load_us = max(0, outcome.loads.ended_ns - outcome.loads.started_ns) // 1000
        self._reporter.batch_done(number, failed, failures, compute_us, load_us)

    # -- what a step brought ----------------------------------------------------------------------------------

    def _advance(self, computed: Computed, now_ns: int) -> None:
        work, request = computed.work, computed.work.request
        request.computed = max(request.computed, work.end)
        request.compute_failures = 0
        if work.is_chunk:
            request.change("compute")
            request.computed_tokens += work.rows
            request.prompt_logprobs.update(computed.prompt_logprobs)
        if computed.sampled is None:
            return
        if computed.sampled.error is not None:
            # Its KV is right, but its parameters or its logits leave no token: trying again would not help.
            self._roster.fail(request, computed.sampled.error.message)
            return
        request.change("sample")
        at = request.milestones
        at.first_token_ns = at.first_token_ns or now_ns
        token = computed.sampled.token
        request.tokens.append(token)
        growth = request.answer.grow(token)
        self._reporter.item(request, (token,), growth, logprob=computed.sampled.logprob)
        if growth.finish is not None:
            self._roster.close(request, growth)
        elif request.needs_lease(self._lease_low_tokens):
            request.lease_requested = True
            self.counters.leases_requested += 1
            self._reporter.lease_requested(request)

    def _blame(self, outcome: Outcome) -> None:
        """Deal with work that was not computed."""
        for item in outcome.lost:
            self._lose(pages_of(item), but=item.request)
        for item, error in outcome.broken:
            request = item.request
            request.compute_failures += 1
            self.counters.compute_failures += 1
            if item.is_chunk:
                self._lose(pages_of(item), but=request)
            if not item.is_chunk or request.compute_failures >= REQUEST_FAILURES:
                self._roster.fail(request, f"{type(error).__name__}: {error}")

    # -- counting ---------------------------------------------------------------------------------------------

    def _count_repeat(self) -> None:
        self.counters.steps_repeated += 1
        metrics.STEPS_REPEATED.inc()

    def _count(self, outcome: Outcome, seconds: float) -> None:
        prefill = sum(one.work.rows for one in outcome.done if one.work.is_chunk)
        decode = sum(one.work.rows for one in outcome.done if not one.work.is_chunk)
        self.counters.prefill_tokens_computed += prefill
        self.counters.decode_tokens += decode
        metrics.STEP_SECONDS.observe(max(0.0, seconds))
        metrics.STEP_ROWS.observe(prefill + decode)
        metrics.PREFILL_TOKENS.inc(prefill)
        metrics.DECODE_TOKENS.inc(decode)
        metrics.RUNNING.set(len(self._roster.requests))
        metrics.QUEUED_ORDERS.set(len(self.inbox))
        if outcome.loads is not None:
            loads = outcome.loads
            self.counters.pages_loaded += loads.pages
            self.counters.load_bytes += loads.nbytes
            self.counters.loads_failed += len(loads.failures)
            metrics.LOAD_SECONDS.observe(max(0, loads.ended_ns - loads.started_ns) / 1e9)
            metrics.LOAD_BYTES.inc(loads.nbytes)
            metrics.LOADS_FAILED.inc(len(loads.failures))
