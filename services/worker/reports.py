"""Reports of the compute thread to the event loop: events for the stream and items for gateways."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.worker.adapter_loading import Attached
from services.worker.answers import Growth
from services.worker.kv.promotions import Promoted
from services.worker.requests import RunningRequest
from services.worker.restore.leased_pages import SavedHidden
from shared.messages.base import pack_int32
from shared.messages.tokens import Timing, TokenItem, TokenLogprob, Usage
from shared.messages.worker_events import (
    AdapterAttached,
    BatchDone,
    FinishedToo,
    FinishReason,
    HiddenSaved,
    LeaseRequested,
    LeaseWanted,
    LoadFailure,
    PagesPromoted,
    RequestFinished,
    RequestPreempted,
    SparseLoaded,
    TextMissing,
)
from shared.messages.worker_plans import AdmitRequest

FINISHED_BYTES = 65_536
"""Most bytes of outputs in one event of ended requests, unless it has only one."""

Event = (
    BatchDone
    | LeaseRequested
    | PagesPromoted
    | RequestFinished
    | RequestPreempted
    | HiddenSaved
    | TextMissing
    | AdapterAttached
)


@dataclass(slots=True)
class Report:
    """Results of one step, or of the orders before it. ``items`` are grouped by gateway."""

    step: int
    events: list[Event] = field(default_factory=list)
    items: dict[str, list[TokenItem]] = field(default_factory=dict)
    recalled: list[TokenItem] = field(default_factory=list)  # Output of earlier attempts; sent only when asked for.
    preempted: list[str] = field(default_factory=list)  # Requests whose attempt here ended without a last item.
    begins: bool = False  # A first token is among the items.

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to deliver."""
        return not (self.events or self.items or self.recalled or self.preempted)


class BatchFigures(msgspec.Struct):
    """Times and counts of one batch; see the fields of ``BatchDone``."""

    compute_us: int = 0
    load_us: int = 0
    loaded_tokens: int = 0
    computed_tokens: int = 0
    bubble_us: int = 0
    bubble_tokens: int = 0
    stall_us: int = 0
    restored_tokens: int = 0
    restore_us: int = 0


class Reporter:
    """Fills reports in the name of one incarnation. Used by the compute thread only."""

    def __init__(self, worker_id: str, incarnation: str) -> None:
        """Begin with an empty report; ``worker_id`` and ``incarnation`` go into every event."""
        self._who: dict[str, Any] = {"worker_id": worker_id, "incarnation": incarnation}
        self.report = Report(step=0)

    def take(self, step: int, held: Collection[str] = ()) -> Report:
        """Return the report so far and begin a new one; the ends of the requests ``held`` stay for the new one."""
        report, self.report = self.report, Report(step=step)
        report.step = step
        if held:
            self._hold_ends(report, held)
        return report

    def _hold_ends(self, report: Report, held: Collection[str]) -> None:
        events, report.events = report.events, []
        for event in events:
            if isinstance(event, RequestFinished):
                for end in _ends_of(event):
                    self._add_end(self.report if end.request_id in held else report, end)
            else:
                report.events.append(event)

    def batch_done(
        self,
        plan: int,
        failed: list[str],
        load_failures: list[LoadFailure],
        figures: BatchFigures,
        *,
        restores_refused: Sequence[str] = (),
        sparse_refused: Sequence[str] = (),
        sparse_loaded: Sequence[SparseLoaded] = (),
    ) -> None:
        """Report a completed batch to the scheduler; each id in ``failed`` is named once."""
        self.report.events.append(
            BatchDone(
                **self._who,
                plan=plan,
                failed=tuple(dict.fromkeys(failed)),
                load_failures=tuple(load_failures),
                **msgspec.structs.asdict(figures),
                restores_refused=tuple(restores_refused),
                sparse_refused=tuple(sparse_refused),
                sparse_loaded=tuple(sparse_loaded),
            )
        )

    def pages_promoted(self, promoted: Promoted) -> None:
        """Report the end of a promotion, good or not, with the time of its copies."""
        self.report.events.append(
            PagesPromoted(
                **self._who,
                promotion_id=promoted.promotion_id,
                ok=promoted.is_ok,
                bad_host_pages=promoted.bad_host_pages,
                load_us=max(0, promoted.ended_ns - promoted.started_ns) // 1000,
            )
        )

    def hidden_saved(self, saved: SavedHidden) -> None:
        """Report the end of a hidden lease with the chunks that it saved."""
        self.report.events.append(
            HiddenSaved(**self._who, lease_id=saved.lease_id, chunks=saved.chunks, tokens=saved.tokens)
        )

    def leases_requested(self, requests: Sequence[RunningRequest]) -> None:
        """Ask for decode room for all of these requests, at least one."""
        first, *others = requests
        self.report.events.append(
            LeaseRequested(
                **self._who,
                request_id=first.request_id,
                attempt=first.attempt,
                generated=len(first.answer.tokens),
                others=tuple(
                    LeaseWanted(request_id=other.request_id, attempt=other.attempt, generated=len(other.answer.tokens))
                    for other in others
                ),
            )
        )

    def finished(self, request_id: str, attempt: int, reason: FinishReason, output: list[int], error: str = "") -> None:
        """Report the end of a request: in the same event as the one before it, unless that is large."""
        ended = FinishedToo(
            request_id=request_id, attempt=attempt, reason=reason, output=pack_int32(output), error=error
        )  # fmt: skip
        self._add_end(self.report, ended)

    def _add_end(self, report: Report, ended: FinishedToo) -> None:
        last = report.events[-1] if report.events else None
        if isinstance(last, RequestFinished) and _output_bytes([*_ends_of(last), ended]) <= FINISHED_BYTES:
            report.events[-1] = msgspec.structs.replace(last, others=(*last.others, ended))
            return
        report.events.append(RequestFinished(**self._who, **msgspec.structs.asdict(ended)))

    def preempted(self, request_id: str, attempt: int, output: list[int]) -> None:
        """Report a preempted request with its output tokens; the event loop retires it."""
        self.report.events.append(
            RequestPreempted(**self._who, request_id=request_id, attempt=attempt, output=pack_int32(output))
        )
        self.report.preempted.append(request_id)

    def adapter_attached(self, attached: Attached) -> None:
        """Report whether an adapter is served now, or why not."""
        order = attached.order
        self.report.events.append(
            AdapterAttached(
                **self._who,
                attach_id=order.attach_id,
                digest=order.digest,
                fault=attached.fault,
                lacks_room=attached.lacks_room,
            )
        )

    def text_missing(self, order: AdmitRequest, text: int) -> None:
        """Report that an admission refers to a kept text, by its number, which is not here."""
        self.report.events.append(
            TextMissing(**self._who, request_id=order.request_id, attempt=order.attempt, text=text)
        )

    def recall(self, request: RunningRequest, growths: Sequence[Growth]) -> None:
        """Note the output of earlier attempts, for a gateway that missed some of it and asks this worker."""
        for index, growth in enumerate(growths):
            self.report.recalled.append(
                TokenItem(
                    request_id=request.request_id,
                    attempt=request.attempt,
                    index=index,
                    tokens=(request.answer.tokens[index],),
                    text=growth.text,
                )
            )

    def refused(self, order: AdmitRequest, *, index: int, error: str) -> None:
        """Tell the gateway that a request could not be admitted."""
        item = TokenItem(
            request_id=order.request_id, attempt=order.attempt, index=index, tokens=(), finish="error", error=error
        )
        self.report.items.setdefault(order.gateway_id, []).append(item)

    def item(
        self,
        request: RunningRequest,
        tokens: tuple[int, ...],
        growth: Growth,
        *,
        logprob: TokenLogprob | None = None,
        error: str = "",
    ) -> None:
        """Tell the gateway of new tokens, or of the end."""
        is_first = request.items_sent == 0
        has_usage = is_first or growth.finish is not None
        item = TokenItem(
            request_id=request.request_id,
            attempt=request.attempt,
            index=len(request.answer.tokens) - len(tokens),
            tokens=tokens,
            text=growth.text,
            logprobs=() if logprob is None else (logprob,),
            prompt_logprobs=_prompt_logprobs(request) if is_first and tokens else None,
            finish=growth.finish,
            stop_match=growth.stop_match,
            error=error,
            usage=usage_of(request) if has_usage else None,
            timing=Timing(**msgspec.structs.asdict(request.milestones)) if is_first else None,
        )
        request.items_sent += 1
        self.report.begins |= is_first and bool(tokens)
        self.report.items.setdefault(request.gateway_id, []).append(item)


def _ends_of(event: RequestFinished) -> list[FinishedToo]:
    first = FinishedToo(
        request_id=event.request_id, attempt=event.attempt, reason=event.reason, output=event.output, error=event.error
    )
    return [first, *event.others]


def _output_bytes(ends: Sequence[FinishedToo]) -> int:
    return sum(len(each.output) + len(each.error) for each in ends)


def usage_of(request: RunningRequest) -> Usage:
    """Return the request's tokens by origin so far, for its first and last item."""
    return Usage(
        device_tokens=request.device_tokens,
        host_tokens=request.host_tokens,
        disk_tokens=request.disk_tokens,
        remote_tokens=request.remote_tokens,
        neighbour_tokens=request.neighbour_tokens,
        hidden_tokens=request.hidden_tokens,
        computed_tokens=request.computed_tokens,
        sparse_tokens=request.sparse_tokens,
        importance=request.importance,
        leases=request.leases,
        lent_tokens=request.lent_tokens,
    )


def _prompt_logprobs(request: RunningRequest) -> tuple[TokenLogprob | None, ...] | None:
    """Return one entry for each prompt token; the first is None, as nothing predicts it."""
    # The first item's token is part of ``tokens`` by now.
    if request.sampling.prompt_logprobs is None or len(request.answer.tokens) != 1:
        return None
    return tuple(request.prompt_logprobs.get(position) for position in range(request.prompt_tokens))
