"""What the compute thread tells the event loop: events for the stream and items for gateways."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

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
"""Outputs that one event of ended requests carries at the most, where there is more than one."""

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
    """Everything that one step, or the orders before it, brought. ``items`` are grouped by gateway."""

    step: int
    events: list[Event] = field(default_factory=list)
    items: dict[str, list[TokenItem]] = field(default_factory=dict)
    recalled: list[TokenItem] = field(default_factory=list)  # Said by earlier attempts; sent only when asked for.
    preempted: list[str] = field(default_factory=list)  # Requests that speak no more in this attempt.
    begins: bool = False  # A first token is among the items.

    @property
    def is_empty(self) -> bool:
        return not (self.events or self.items or self.recalled or self.preempted)


@dataclass(slots=True)
class BatchFigures:
    """What one batch took and moved; see the fields of ``BatchDone``."""

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
        self._who = {"worker_id": worker_id, "incarnation": incarnation}
        self.report = Report(step=0)

    def take(self, step: int, held: Collection[str] = ()) -> Report:
        """Take the report so far; a new one begins, with the ends of the requests ``held``."""
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
        self.report.events.append(
            BatchDone(
                worker_id=self._who["worker_id"],
                incarnation=self._who["incarnation"],
                plan=plan,
                failed=tuple(dict.fromkeys(failed)),
                load_failures=tuple(load_failures),
                compute_us=figures.compute_us,
                load_us=figures.load_us,
                loaded_tokens=figures.loaded_tokens,
                computed_tokens=figures.computed_tokens,
                bubble_us=figures.bubble_us,
                bubble_tokens=figures.bubble_tokens,
                stall_us=figures.stall_us,
                restored_tokens=figures.restored_tokens,
                restore_us=figures.restore_us,
                restores_refused=tuple(restores_refused),
                sparse_refused=tuple(sparse_refused),
                sparse_loaded=tuple(sparse_loaded),
            )
        )

    def pages_promoted(self, promoted: Promoted) -> None:
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
        self.report.events.append(
            HiddenSaved(**self._who, lease_id=saved.lease_id, chunks=saved.chunks, tokens=saved.tokens)
        )

    def leases_requested(self, requests: Sequence[RunningRequest]) -> None:
        """All of these, at least one, want decode room."""
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
        """Tell the scheduler of an end: in the event of the one before it, unless that is large."""
        ended = FinishedToo(
            request_id=request_id, attempt=attempt, reason=reason, output=pack_int32(output), error=error
        )  # fmt: skip
        self._add_end(self.report, ended)

    def _add_end(self, report: Report, ended: FinishedToo) -> None:
        last = report.events[-1] if report.events else None
        if isinstance(last, RequestFinished) and _output_bytes([*_ends_of(last), ended]) <= FINISHED_BYTES:
            report.events[-1] = msgspec.structs.replace(last, others=(*last.others, ended))
            return
        report.events.append(
            RequestFinished(
                worker_id=self._who["worker_id"],
                incarnation=self._who["incarnation"],
                request_id=ended.request_id,
                attempt=ended.attempt,
                reason=ended.reason,
                output=ended.output,
                error=ended.error,
            )
        )

    def preempted(self, request_id: str, attempt: int, output: list[int]) -> None:
        self.report.events.append(
            RequestPreempted(**self._who, request_id=request_id, attempt=attempt, output=pack_int32(output))
        )
        self.report.preempted.append(request_id)

    def adapter_attached(self, attached: Attached) -> None:
        self.report.events.append(
            AdapterAttached(
                worker_id=self._who["worker_id"],
                incarnation=self._who["incarnation"],
                attach_id=attached.order.attach_id,
                digest=attached.order.digest,
                fault=attached.fault,
            )
        )

    def text_missing(self, order: AdmitRequest, text: int) -> None:
        self.report.events.append(
            TextMissing(**self._who, request_id=order.request_id, attempt=order.attempt, text=text)
        )

    def recall(self, request: RunningRequest, growths: Sequence[Growth]) -> None:
        """Note what earlier attempts said, for a gateway that missed some of it and asks this worker."""
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
        """Tell the gateway that a request could not even begin."""
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
            timing=timing_of(request) if is_first else None,
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


def timing_of(request: RunningRequest) -> Timing:
    at = request.milestones
    return Timing(
        received_ns=at.received_ns,
        accepted_ns=at.accepted_ns,
        admitted_ns=at.admitted_ns,
        started_ns=at.started_ns,
        loaded_ns=at.loaded_ns,
        restored_ns=at.restored_ns,
        first_token_ns=at.first_token_ns,
    )


def _prompt_logprobs(request: RunningRequest) -> tuple[TokenLogprob | None, ...] | None:
    """One entry a prompt token; the first has none, as nothing predicts it."""
    # The first item's token is part of ``tokens`` by now.
    if request.sampling.prompt_logprobs is None or len(request.answer.tokens) != 1:
        return None
    return tuple(request.prompt_logprobs.get(position) for position in range(request.prompt_tokens))
