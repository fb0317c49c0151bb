"""Intake of orders on the event loop: all but the loop's own go to the compute thread."""

from __future__ import annotations

import asyncio
import time

from services.worker.ending import Ending
from services.worker.inbox import Arrival, Inbox
from services.worker.request_spans import RequestSpans
from shared.errors import InternalError, OperatorError
from shared.messages.tokens import TokenItem
from shared.messages.worker_plans import AbortRequest, AdmitRequest, Dismiss, LeaveCell, WorkerOrder, WorkerPlan


class OrderIntake:
    """Owned by the event loop. ``let_go`` is set when the scheduler has nothing left for this worker to do."""

    def __init__(self, inbox: Inbox, ending: Ending, spans: RequestSpans | None) -> None:
        """Prepare; ``spans`` traces requests."""
        self.let_go = asyncio.Event()
        self._inbox, self._ending, self._spans = inbox, ending, spans

    async def deliver(self, plan: WorkerPlan) -> None:
        """Take the next plan."""
        if isinstance(plan.order, Dismiss):
            self._ending.end(OperatorError(f"dismissed: {plan.order.reason}"))
            return
        if isinstance(plan.order, LeaveCell):
            self.let_go.set()
            return
        if self._spans is not None and isinstance(plan.order, AdmitRequest):
            self._spans.admitted(plan.order)
        self._hand_over(plan.number, plan.order)

    def abort_too_large(self, item: TokenItem) -> None:
        """End the request of an item that is too large for any message."""
        self._hand_over(0, AbortRequest(request_id=item.request_id, attempt=item.attempt, reason="error"))

    def _hand_over(self, number: int, order: WorkerOrder) -> None:
        if self._inbox.is_closed:
            return
        try:
            self._inbox.put(Arrival(number, order, time.time_ns()))
        except InternalError as error:
            self._ending.end(error)
