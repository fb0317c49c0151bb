"""Delivery of the compute thread's reports: events to the inputs stream, items to gateways and retained outputs."""

from __future__ import annotations

from services.worker.ending import Ending
from services.worker.identity import WorkerIdentity
from services.worker.reports import Report
from services.worker.request_spans import RequestSpans
from services.worker.retained import RetainedOutputs
from services.worker.token_sender import TokenSender
from shared.errors import InternalError
from shared.event_outbox import EventOutbox
from shared.messages.tokens import TokenBatch


class ReportDelivery:
    """Owned by the event loop."""

    def __init__(
        self,
        identity: WorkerIdentity,
        outbox: EventOutbox,
        tokens: TokenSender,
        retained: RetainedOutputs,
        ending: Ending,
        spans: RequestSpans | None,
    ) -> None:
        """Prepare; ``spans`` traces requests."""
        self._who, self._outbox, self._tokens = identity, outbox, tokens
        self._retained, self._ending, self._spans = retained, ending, spans

    def take(self, report: Report) -> None:
        """Send one report's events and items; never waits."""
        if self._spans is not None:
            # Before the tokens leave: the gateway may end its span as soon as it has them.
            self._spans.reported(report)
        for item in report.recalled:
            self._retained.recall(item)
        for gateway_id, items in report.items.items():
            for item in items:
                self._retained.add(item)
            batch = TokenBatch(
                worker_id=self._who.worker_id,
                incarnation=self._who.incarnation,
                step=report.step,
                items=tuple(items),
            )
            self._tokens.put(gateway_id, batch)
        # Behind the tokens, because clients wait for those.
        try:
            for event in report.events:
                self._outbox.put(event)
        except InternalError as error:
            self._ending.end(error)
            return
        for request_id in report.preempted:
            self._retained.retire(request_id)
