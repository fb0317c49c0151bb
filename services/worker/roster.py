"""The requests that this worker knows, and every way in which one comes and goes.

A request ends once and reports that once. An order for a request that has ended needs no answer, because its end was
reported already; an order for one that was never here is answered, so that no wait lasts forever; an order for an older
attempt is void, because the newer attempt replaced it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import cast, get_args

import numpy as np

from services.worker.admission import ModelLimits, admit
from services.worker.answer_grammars import AnswerGrammars
from services.worker.answers import Growth
from services.worker.counters import Counters
from services.worker.detokenizer import Vocabulary
from services.worker.hidden_saving import HiddenSaving
from services.worker.reports import Reporter
from services.worker.requests import RunningRequest
from services.worker.sparse_prefixes import SparsePrefixes
from shared import logs
from shared.errors import CodecError, InvalidRequest
from shared.kept_texts import KeptTexts
from shared.messages.base import count_int32, unpack_int32
from shared.messages.worker_events import FinishReason
from shared.messages.worker_plans import AbortRequest, AdmitRequest, ExtendLease, PreemptRequest

_log = logs.get_logger("worker")

ENDED_REMEMBERED = 8192
"""Ended requests remembered, to tell them from requests never here; far more than a worker runs at once."""


class Roster:
    """Used by the compute thread only. ``requests`` is in order of admission."""

    def __init__(
        self,
        limits: ModelLimits,
        vocabulary: Vocabulary,
        reporter: Reporter,
        counters: Counters,
        saving: HiddenSaving,
        sparse: SparsePrefixes,
        grammars: AnswerGrammars,
        serves_adapter: Callable[[str], bool],
    ) -> None:
        """Prepare; ``saving`` is given every hidden lease and the end of its request; ``sparse`` every end."""
        self._serves_adapter = serves_adapter
        self._grammars = grammars
        self.requests: dict[str, RunningRequest] = {}
        self._saving, self._sparse = saving, sparse
        self._limits = limits
        self._vocabulary = vocabulary
        self._reporter = reporter
        self._counters = counters
        self._ended: OrderedDict[str, int] = OrderedDict()  # Last attempt that ended here, by request id.
        self._texts = KeptTexts()

    def admit(self, told: AdmitRequest, arrived_ns: int) -> None:
        """Make a request known; a newer attempt replaces an older one. Kept texts that it refers to must be here."""
        order, fault = None, ""
        try:
            order = self._texts.take(told)
        except CodecError as error:
            fault = error.message
        known = self.requests.get(told.request_id)
        if known is not None:
            if told.attempt <= known.attempt:
                _log.warning("admission_ignored", request_id=told.request_id, attempt=told.attempt)
                self._decline_lease(told)
                return
            known.change("replace")
            self._counters.requests_replaced += 1
            self._drop(known)
        if told.adapter and not self._serves_adapter(told.adapter):
            fault = f"adapter {told.adapter} is not loaded"
        if fault:
            self._refuse(told, fault)
            return
        if order is None:
            self._miss(told)
            return
        try:
            request, growths = admit(order, self._limits, self._vocabulary, admitted_ns=arrived_ns)
        except InvalidRequest as error:
            self._refuse(order, error.message)
            return
        self.requests[request.request_id] = request
        if order.hidden_lease is not None:
            self._saving.begin(request, order.hidden_lease)
        self._counters.requests_admitted += 1
        self._reporter.recall(request, growths)
        if growths and growths[-1].finish is not None:
            # The last attempt died after its last token and before it could report its end. The gateway has that
            # token's text.
            self.finish(request, Growth("", growths[-1].finish, growths[-1].stop_match))
        elif order.sampling.grammar is not None:
            request.grammar = self._grammars.begin(order.sampling.grammar, request.answer.tokens)

    def extend(self, order: ExtendLease) -> None:
        """Grant pages to a running request; ignored for one that has ended."""
        request = self._find(order.request_id, order.attempt)
        if request is not None:
            pages = np.frombuffer(order.pages, dtype="<i4").astype(np.int32)
            if len(pages) and (pages.min() < 0 or pages.max() >= self._limits.pages):
                self.fail(request, "the lease names a page outside the pool")
                return
            request.grant(pages)
            self._saving.extend(order.request_id, order.hidden_pages)

    def preempt(self, order: PreemptRequest) -> None:
        """Forget a request and report the tokens that it has generated."""
        request = self._find(order.request_id, order.attempt)
        if request is not None:
            request.change("preempt")
            self._drop(request)
            self._counters.requests_preempted += 1
            self._reporter.preempted(order.request_id, order.attempt, request.answer.tokens)
        elif self._was_never_here(order.request_id):
            self._reporter.preempted(order.request_id, order.attempt, [])

    def abort(self, order: AbortRequest) -> None:
        """End a request for the caller; text of it that was withheld is sent."""
        reason = finish_reason(order.reason)
        request = self._find(order.request_id, order.attempt)
        if request is not None:
            self._counters.requests_aborted += 1
            error = order.reason if reason == "error" else ""
            self.finish(request, Growth(request.answer.end(reason), reason), error=error)
        elif self._was_never_here(order.request_id):
            self._reporter.finished(order.request_id, order.attempt, reason, [])

    def finish(self, request: RunningRequest, growth: Growth, *, error: str = "") -> None:
        """End a request and tell its gateway, which has not been told yet."""
        self._reporter.item(request, (), growth, error=error)
        self.close(request, growth, error=error)

    def close(self, request: RunningRequest, growth: Growth, *, error: str = "") -> None:
        """End a request whose last item has been made."""
        assert growth.finish is not None
        request.change("finish")
        self._drop(request)
        self._counters.requests_finished += 1
        self._reporter.finished(request.request_id, request.attempt, growth.finish, request.answer.tokens, error=error)

    def fail(self, request: RunningRequest, error: str) -> None:
        """End a request because the worker cannot go on with it."""
        _log.error("request_failed", request_id=request.request_id, reason=error)
        self.finish(request, Growth(request.answer.end("error"), "error"), error=error)

    def _refuse(self, order: AdmitRequest, error: str) -> None:
        _log.error("admission_refused", request_id=order.request_id, reason=error)
        self._counters.requests_refused += 1
        self._remember(order.request_id, order.attempt)
        self._decline_lease(order)
        output = unpack_int32(order.tokens)[max(0, order.prompt_tokens) :]
        self._reporter.refused(order, index=max(0, count_int32(order.tokens) - order.prompt_tokens), error=error)
        self._reporter.finished(order.request_id, order.attempt, "error", output, error=error)

    def _miss(self, order: AdmitRequest) -> None:
        """Report a missing text to the scheduler, which stops this attempt and begins another.

        The scheduler waits for an answer to that, so the request may not count as ended here.
        """
        text = 0 if order.base is None else order.base.text
        _log.error("text_missing", request_id=order.request_id, text=text, kept=len(self._texts))
        self._counters.texts_missing += 1
        self._ended.pop(order.request_id, None)
        self._decline_lease(order)
        self._reporter.text_missing(order, text)

    def _decline_lease(self, order: AdmitRequest) -> None:
        if order.hidden_lease is not None:
            self._saving.decline(order.hidden_lease)

    def _find(self, request_id: str, attempt: int) -> RunningRequest | None:
        request = self.requests.get(request_id)
        return request if request is not None and request.attempt == attempt else None

    def _was_never_here(self, request_id: str) -> bool:
        return request_id not in self.requests and request_id not in self._ended

    def _drop(self, request: RunningRequest) -> None:
        del self.requests[request.request_id]
        self._saving.end(request.request_id)
        self._sparse.end(request.request_id)
        self._remember(request.request_id, request.attempt)

    def _remember(self, request_id: str, attempt: int) -> None:
        self._ended[request_id] = attempt
        self._ended.move_to_end(request_id)
        while len(self._ended) > ENDED_REMEMBERED:
            self._ended.popitem(last=False)


def finish_reason(reason: str) -> FinishReason:
    """Return the finish reason that the caller of an aborted request sees; any other reason is a cancellation."""
    return cast(FinishReason, reason) if reason in get_args(FinishReason) else "cancelled"
