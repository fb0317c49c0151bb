"""A virtual worker: carries out plans as the real one does, in modelled time, without computing.

Orders are carried out in the order of their numbers; a ``RunBatch`` is a barrier that takes one step, in which
every decoding request gets a token too (see ``services.worker.executor``). Between batches it decodes: a run of
steps without a message to send is one event, cut short at the next step when orders arrive.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from shared.errors import InternalError
from shared.messages import worker_events as events
from shared.messages import worker_plans as plans
from thermocline.simulate.batch import BatchUnderWay, WorkerFigures, may_go_ahead, may_overtake
from thermocline.simulate.cost import (
    Costs,
    Piece,
    decode_token_s,
    hidden_after_s,
    load_s,
    overlapped_s,
    step_s,
)
from thermocline.simulate.decode_run import DecodeRun, steps_until
from thermocline.simulate.events import NS_PER_S, EventQueue, to_ns
from thermocline.simulate.link import Link
from thermocline.simulate.running import NEVER, RunningRequest


class Audience(Protocol):
    """Receiver of a worker's events: the cell around it."""

    def tell(self, messages: list[Any]) -> None:
        """Send these events to the scheduler, in this order."""

    def sampled_first(self, request_id: str) -> None:
        """Take note of a request's first token in this attempt."""

    def output_of(self, request_id: str, tokens: int) -> bytes:
        """Return the first ``tokens`` output tokens of a request, packed int32."""


class VirtualWorker:
    """One worker. ``deliver`` gives it orders; events in the queue do the rest."""

    def __init__(
        self,
        worker_id: str,
        incarnation: str,
        costs: Costs,
        link: Link,
        queue: EventQueue,
        audience: Audience,
    ) -> None:
        """Begin idle; the ends of steps are events of ``queue``, and messages go to ``audience``.

        ``costs`` gives the time of each piece of work. ``link`` is the one between its device and host memory, in the
        time of the same ``queue``.
        """
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.link = link
        self.figures = WorkerFigures()
        self.requests: dict[str, RunningRequest] = {}
        self._costs = costs
        self._queue = queue
        self._audience = audience
        self._inbox: deque[tuple[int, plans.WorkerOrder]] = deque()
        self._decoding: dict[str, RunningRequest] = {}
        self._context = 0  # Sum of the tokens of all decoding requests.
        self._steps = 0
        self._run: DecodeRun | None = None
        self._run_number = 0  # An event with another number is void.
        self._batch: BatchUnderWay | None = None
        self._ahead: BatchUnderWay | None = None  # A later batch whose step fills the bubble of ``_batch``.
        self._is_in_step = False  # In the step of a batch.
        self._said: list[Any] = []
        self._asking: list[RunningRequest] = []  # Requests for a lease that are not sent yet.

    # -- orders -----------------------------------------------------------------------------------------------

    def deliver(self, orders: list[tuple[int, plans.WorkerOrder]]) -> None:
        """Take orders, (plan number, order) in sequence; a step in progress ends first."""
        self._inbox.extend(orders)
        if self._is_in_step:
            return  # The orders wait for the batch.
        if self._run is None:
            self._go_on()
            return
        # The real worker looks for orders between two steps, those of a bubble among them.
        steps = steps_until(self._run, self._queue.now_ns)
        if steps < self._run.steps:
            self._run.steps = steps
            self._plan_end_of_run(self._run)

    def _go_on(self) -> None:
        """Carry out orders between two steps, up to the next batch; without a batch, decode."""
        while self._inbox and self._batch is None:
            number, order = self._inbox.popleft()
            if isinstance(order, plans.RunBatch):
                self._begin_batch(number, order)
            else:
                self._execute(order)
        self._post()
        if self._batch is not None:
            self._work_on(self._batch)
        elif self._decoding:
            self._begin_run(NEVER)

    def _execute(self, order: plans.WorkerOrder) -> None:
        match order:
            case plans.AdmitRequest():
                if order.request_id in self.requests:
                    raise InternalError(f"{order.request_id} was admitted twice")
                self.requests[order.request_id] = RunningRequest(order, self._costs.page_size)
            case plans.ExtendLease():
                request = self._known(order.request_id, order.attempt)
                if request is not None:
                    self._pause(request)
                    request.grant(len(order.pages) // 4, self._costs.page_size)
                    self._resume(request)
            case plans.PreemptRequest():
                request = self._known(order.request_id, order.attempt)
                if request is not None:
                    self._forget(request)
                    self._say(events.RequestPreempted, request, output=self._output(request))
            case plans.AbortRequest():
                request = self._known(order.request_id, order.attempt)
                if request is not None:
                    self._finish(request, order.reason)
            case plans.PromotePages():
                self._promote(order)
            case plans.AttachAdapter():
                self._said.append(
                    events.AdapterAttached(
                        worker_id=self.worker_id,
                        incarnation=self.incarnation,
                        attach_id=order.attach_id,
                        digest=order.digest,
                    )
                )
            case plans.DetachAdapter():
                pass
            case plans.AttachHostPool() | plans.DetachHostPool() | plans.AttachNeighbour() | plans.DetachNeighbour():
                pass  # Every link is there from the start.
            case _:
                raise InternalError(f"{self.worker_id} cannot carry out {type(order).__name__}")

    def _promote(self, order: plans.PromotePages) -> None:
        tokens = len(order.device_pages) // 4 * self._costs.page_size
        self.figures.promotions += 1
        self.figures.promoted_tokens += tokens

        def done(elapsed_ns: int) -> None:
            self._audience.tell(
                [
                    events.PagesPromoted(
                        worker_id=self.worker_id,
                        incarnation=self.incarnation,
                        promotion_id=order.promotion_id,
                        ok=True,
                        load_us=elapsed_ns // 1000,
                    )
                ]
            )

        self.link.up.copy(to_ns(load_s(self._costs, tokens)), done)

    # -- batches ----------------------------------------------------------------------------------------------

    def _begin_batch(self, number: int, order: plans.RunBatch) -> None:
        """Open a batch, start its loads, and find the time at which its step should start."""
        pages = 0
        for load in order.loads:
            request = self._known(load.request_id, load.attempt)
            # A load for a request that has left fills pages that are not read; the real worker copies them too. Pages
            # of a neighbour's device come over the same link as those of host memory.
            pages += len(load.device_pages) // 4
            if request is not None:
                request.computed = max(request.computed, request.admit.cached_tokens)
        batch = self._batch = self._open(number, order, pages * self._costs.page_size)
        if not batch.loaded_tokens:
            return
        self.link.up.load(to_ns(batch.load_s))
        if order.fill_bubble and (self._decoding or order.bubble_prefill):
            # The chunks start when their stall would be no longer than one more decode step.
            hidden_s = hidden_after_s(self._costs, self._compute_s(batch), batch.load_s)
            decode_s = step_s(self._costs, (), len(self._decoding), self._context)
            batch.fill_until_ns = batch.begun_ns + to_ns(hidden_s - decode_s)

    def _open(self, number: int, order: plans.RunBatch, loaded: int) -> BatchUnderWay:
        """Return a batch that loads ``loaded`` tokens, with the chunks that can be computed and those that failed."""
        chunks: list[tuple[RunningRequest, Piece]] = []
        failed = []
        for chunk in order.chunks:
            request = self._known(chunk.request_id, chunk.attempt)
            if request is None or request.has_sampled or chunk.start > request.computed:
                failed.append(chunk.request_id)
                continue
            request.computed = chunk.end
            chunks.append((request, (chunk.start, chunk.end)))
        return BatchUnderWay(number, order, self._queue.now_ns, chunks, failed, loaded, load_s(self._costs, loaded))

    def _work_on(self, batch: BatchUnderWay) -> None:
        """Run a later batch or decode while the batch would only wait for its loads; then run its step."""
        now_ns = self._queue.now_ns
        if now_ns < batch.fill_until_ns:
            self._ahead = self._take_ahead(batch)
            if self._ahead is not None:
                self._begin_step(self._ahead)
                return
            if self._decoding:
                self._begin_run(batch.fill_until_ns)
                return
        self._begin_step(batch)

    def _take_ahead(self, batch: BatchUnderWay) -> BatchUnderWay | None:
        """Take the next batch if it may overtake ``batch`` and its step is no longer than the stall; else None."""
        if not batch.order.bubble_prefill:
            return None
        self._overtake(batch.order)
        if not self._inbox:
            return None
        number, order = self._inbox[0]
        if not isinstance(order, plans.RunBatch) or not may_go_ahead(order, batch.order):
            return None
        pieces = [(chunk.start, chunk.end) for chunk in order.chunks]
        takes_s = step_s(self._costs, pieces, len(self._decoding), self._context)
        if takes_s > self._overlapped_s(batch)[1]:
            return None
        self._inbox.popleft()
        return self._open(number, order, 0)

    def _begin_step(self, batch: BatchUnderWay) -> None:
        wall_s, batch.stall_s = self._overlapped_s(batch)
        batch.step_begun_ns = self._queue.now_ns
        self._is_in_step = True
        self._queue.at(batch.step_begun_ns + to_ns(wall_s), self._end_batch)

    def _overlapped_s(self, batch: BatchUnderWay) -> tuple[float, float]:
        """Return (wall time, stall) in seconds of a batch's step if it began now."""
        head_start_s = (self._queue.now_ns - batch.begun_ns) / NS_PER_S
        return overlapped_s(self._costs, self._compute_s(batch), batch.load_s, head_start_s)

    def _compute_s(self, batch: BatchUnderWay) -> float:
        pieces = [piece for _, piece in batch.chunks]
        return step_s(self._costs, pieces, len(self._decoding), self._context)

    def _end_batch(self, _: None) -> None:
        batch = self._ahead or self._batch
        assert batch is not None
        self._is_in_step = False
        wall_ns = self._queue.now_ns - batch.step_begun_ns
        computed_tokens = sum(end - start for _, (start, end) in batch.chunks)
        self._count(batch, wall_ns, computed_tokens)
        self._said.append(
            events.BatchDone(
                worker_id=self.worker_id,
                incarnation=self.incarnation,
                plan=batch.number,
                failed=tuple(batch.failed),
                compute_us=wall_ns // 1000,
                load_us=to_ns(batch.load_s) // 1000,
                loaded_tokens=batch.loaded_tokens,
                computed_tokens=computed_tokens,
                bubble_us=batch.bubble_ns // 1000,
                bubble_tokens=batch.bubble_tokens,
                stall_us=to_ns(batch.stall_s) // 1000,
            )
        )
        self._advance(1)
        for request, (_start, end) in batch.chunks:
            if end == request.tokens:
                self._sample_first(request)
        if self._ahead is None:
            self._batch = None
            self._go_on()
        else:
            self._ahead = None
            self._go_on_in_bubble()

    def _count(self, batch: BatchUnderWay, wall_ns: int, computed_tokens: int) -> None:
        figures = self.figures
        figures.batches += 1
        figures.busy_s += wall_ns / NS_PER_S
        figures.stall_s += batch.stall_s
        figures.load_s += batch.load_s
        figures.bubble_s += batch.bubble_ns / NS_PER_S
        figures.bubble_tokens += batch.bubble_tokens
        figures.loaded_tokens += batch.loaded_tokens
        figures.computed_tokens += computed_tokens

    # -- decoding ---------------------------------------------------------------------------------------------

    def _begin_run(self, until_ns: int) -> None:
        """Plan a run of decode steps until a request has a message to send, or until ``until_ns``."""
        requests = len(self._decoding)
        token_s = decode_token_s(self._costs)
        first_s = step_s(self._costs, (), requests, self._context)
        steps = min(request.stop_step for request in self._decoding.values()) - self._steps
        run = DecodeRun(self._queue.now_ns, requests, first_s, token_s * requests, max(1, steps))
        if until_ns < run.end_ns(run.steps):
            run.steps = min(run.steps, steps_until(run, until_ns))
        self._run = run
        self._plan_end_of_run(run)

    def _plan_end_of_run(self, run: DecodeRun) -> None:
        self._run_number += 1
        self._queue.at(run.end_ns(run.steps), self._end_run, self._run_number)

    def _end_run(self, number: int) -> None:
        run = self._run
        if run is None or number != self._run_number:
            return
        self._run = None
        elapsed_ns = self._queue.now_ns - run.start_ns
        self.figures.busy_s += elapsed_ns / NS_PER_S
        if self._batch is not None:
            self._batch.bubble_ns += elapsed_ns
            self._batch.bubble_tokens += run.steps * run.requests
        self._advance(run.steps)
        if self._batch is not None:
            self._go_on_in_bubble()
        else:
            self._go_on()

    def _go_on_in_bubble(self) -> None:
        """Go on between two steps of a bubble: overtaking orders and messages first."""
        assert self._batch is not None
        self._overtake(self._batch.order)
        self._post()
        self._work_on(self._batch)

    def _overtake(self, batch: plans.RunBatch) -> None:
        """Carry out the next orders that may overtake the loading batch."""
        while self._inbox and may_overtake(self._inbox[0][1], batch):
            self._execute(self._inbox.popleft()[1])

    def _advance(self, steps: int) -> None:
        """Count ``steps`` tokens for every decoding request; handle those that reached their stop."""
        self._steps += steps
        self.figures.steps += steps
        self._context += steps * len(self._decoding)
        stopped = [request for request in self._decoding.values() if request.stop_step <= self._steps]
        for request in stopped:
            self._pause(request)
            self._after_token(request)

    def _sample_first(self, request: RunningRequest) -> None:
        request.has_sampled = True
        request.generated += 1
        self._audience.sampled_first(request.admit.request_id)
        self._after_token(request)

    def _after_token(self, request: RunningRequest) -> None:
        """Handle a paused request after a token: it ends, or asks for pages if low, and decodes on."""
        if request.is_over:
            self._finish(request, "length")
            return
        if request.wants_lease(self._costs.page_size):
            request.asked_lease = True
            self._asking.append(request)
        self._resume(request)

    def _resume(self, request: RunningRequest) -> None:
        """Add a request to the decoding ones if it has sampled and has room."""
        if not request.has_sampled or not request.has_room:
            return
        request.joined_step = self._steps
        request.stop_step = self._steps + max(1, request.next_stop(self._costs.page_size))
        self._decoding[request.admit.request_id] = request
        self._context += request.length

    def _pause(self, request: RunningRequest) -> None:
        """Remove a request from the decoding ones and bring ``generated`` up to date."""
        if request.joined_step < 0:
            return
        request.generated += self._steps - request.joined_step
        request.joined_step, request.stop_step = -1, NEVER
        del self._decoding[request.admit.request_id]
        self._context -= request.length

    # -- ends and messages ------------------------------------------------------------------------------------

    def _finish(self, request: RunningRequest, reason: str) -> None:
        self._forget(request)
        self._say(events.RequestFinished, request, reason=reason, output=self._output(request))

    def _forget(self, request: RunningRequest) -> None:
        self._pause(request)
        del self.requests[request.admit.request_id]

    def _output(self, request: RunningRequest) -> bytes:
        return self._audience.output_of(request.admit.request_id, request.generated)

    def _known(self, request_id: str, attempt: int) -> RunningRequest | None:
        request = self.requests.get(request_id)
        return request if request is not None and request.admit.attempt == attempt else None

    def _say(self, kind: type, request: RunningRequest, **fields: Any) -> None:
        self._said.append(
            kind(
                worker_id=self.worker_id,
                incarnation=self.incarnation,
                request_id=request.admit.request_id,
                attempt=request.admit.attempt,
                **fields,
            )
        )

    def _ask(self) -> None:
        """Ask for pages, together with requests that would ask soon; see the real worker's ``StepResults``."""
        asking = [request for request in self._asking if request.admit.request_id in self.requests]
        self._asking = []
        if not asking:
            return
        for request in self._decoding.values():
            if request.may_join_lease(self._generated(request)):
                request.asked_lease = True
                asking.append(request)
        first, *others = asking
        wanted = tuple(
            events.LeaseWanted(
                request_id=other.admit.request_id, attempt=other.admit.attempt, generated=self._generated(other)
            )
            for other in others
        )
        self._say(events.LeaseRequested, first, generated=self._generated(first), others=wanted)

    def _generated(self, request: RunningRequest) -> int:
        """Return the output tokens so far, also while the request decodes."""
        return request.generated + (self._steps - request.joined_step if request.joined_step >= 0 else 0)

    def _post(self) -> None:
        self._ask()
        if self._said:
            said, self._said = self._said, []
            self._audience.tell(said)
