"""An executor driven step by step on the fake model: orders in by hand, reports collected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models

from services.worker.answer_grammars import AnswerGrammars
from services.worker.bootstrap import make_executor
from services.worker.detokenizer import Vocabulary
from services.worker.hidden_saving import HiddenSaving
from services.worker.identity import WorkerIdentity
from services.worker.inbox import Arrival, Inbox
from services.worker.kv.loads import Loads
from services.worker.kv.movers.batched import BatchedMover
from services.worker.kv.movers.protocol import PageMover
from services.worker.parallel.group_runner import GroupRunner
from services.worker.reports import Event, Report
from services.worker.restore.projection import KvProjection
from services.worker.restoring import Restoring
from services.worker.sparse_prefixes import ImportanceSettings, OpenSource, SparsePrefixes
from services.worker.step_rows import StepRows
from shared.memory import HostPoolView
from shared.messages.base import pack_int32
from shared.messages.pools import KvGeometry
from shared.messages.requests import SamplingParams
from shared.messages.tokens import TokenItem
from shared.messages.worker_events import (
    BatchDone,
    FinishedToo,
    HiddenSaved,
    LeaseRequested,
    PagesPromoted,
    RequestFinished,
    RequestPreempted,
)
from shared.messages.worker_plans import (
    AbortRequest,
    AdmitRequest,
    AttachHostPool,
    ExtendLease,
    HiddenLease,
    PageLoad,
    PreemptRequest,
    PrefillChunk,
    PromotePages,
    RestoreChunk,
    RunBatch,
    SparsePrefix,
    WorkerOrder,
)
from tests.unit.worker.fake_model import EOS, GEOMETRY, SHM_PREFIX, VOCAB_SIZE, FakeRunner, kv_of
from tests.unit.worker.pools import identity_of, page_load, page_promotion


def vocabulary() -> Vocabulary:
    """Token 20 is "a", 21 is "b" and so on; EOS is special."""
    pieces = [f"<{number}>" if number < 20 else chr(77 + number) for number in range(VOCAB_SIZE)]
    pieces[EOS] = "</s>"
    tokenizer = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token="</s>"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return Vocabulary(tokenizer)


class Driven:
    """``give`` numbers orders; ``run`` steps until there is nothing to do."""

    def __init__(
        self,
        runner: Any = None,
        words: Vocabulary | None = None,
        *,
        submit: Callable[[Callable[[], None]], object] | None = lambda work: work(),
        projection: KvProjection | None = None,
        restore_staging_bytes: int = 2**20,
        restore_timeout_s: float = 30.0,
        hidden_submit: Callable[[Callable[[], None]], object] | None = lambda work: work(),
        hidden_ring_bytes: int = 2**20,
        open_source: OpenSource | None = None,
        importance: ImportanceSettings | None = None,
        mover: PageMover | None = None,
        rows: StepRows | None = None,
        grammars: AnswerGrammars | None = None,
        lookup_tokens: int = 0,
    ) -> None:
        """``submit`` runs transfers: at once by default, on the worker's own thread when None. ``hidden_submit`` does
        so for saving them. With ``projection`` hidden states can be saved and restored, with ``open_source``
        sparse prefixes can be read. ``grammars`` are followed in threads by default. ``lookup_tokens`` allows proposals
        of prompt lookup.
        """
        self.runner = cast("Any", runner or FakeRunner())
        geometry = self.runner.geometry
        self.reports: list[Report] = []
        self.loads = Loads(
            geometry,
            self.runner.pool.pages,
            mover or BatchedMover(self.runner.pool),
            timeout_s=60,
            clock_ns=self._clock,
            submit=submit,
        )
        self.saving = HiddenSaving(
            self.runner.pool,
            projection,
            ring_bytes=hidden_ring_bytes,
            shm_prefix=SHM_PREFIX,
            submit=hidden_submit,
        )
        closed = self.runner.let_go_of_prefix if isinstance(self.runner, GroupRunner) else lambda prefix: None
        self.sparse = SparsePrefixes(self.runner.pool, open_source, self._clock, importance, closed)
        self.restoring = Restoring(
            self.runner,
            projection,
            self.saving.pools,
            staging_bytes=restore_staging_bytes,
            timeout_s=restore_timeout_s,
            clock_ns=self._clock,
        )
        self.executor = make_executor(
            WorkerIdentity(worker_id="w", incarnation="inc", node="n", model="fingerprint"),
            self.runner,
            words or vocabulary(),
            Inbox(),
            self.reports.append,
            loads=self.loads,
            saving=self.saving,
            sparse=self.sparse,
            restoring=self.restoring,
            lease_low_tokens=2,
            rows=rows,
            grammars=grammars,
            lookup_tokens=lookup_tokens,
            clock_ns=self._clock,
        )
        self._now = 0
        self._number = 0
        self._hosts: list[HostPoolView] = []

    def _clock(self) -> int:
        self._now += 1000
        return self._now

    def spend(self, time_ns: int) -> None:
        """Let time go by, as what the worker does would."""
        self._now += time_ns

    def close(self) -> None:
        self.saving.close()
        self.loads.close()
        self.restoring.close()
        for host in self._hosts:
            host.unlink()
            host.close()
        self.runner.close()

    # -- orders -----------------------------------------------------------------------------------------------

    def give(self, *orders: WorkerOrder) -> int:
        """Queue orders under the next numbers; returns the last number."""
        for order in orders:
            self._number += 1
            self.executor.inbox.put(Arrival(self._number, order, self._clock()))
        return self._number

    def run(self, most: int = 1000) -> int:
        """Step until idle; returns how many steps that took."""
        for steps in range(most):
            if not self.executor.run_one_step():
                return steps
        return most

    def host_pool(self, pages: int, *, storage_id: str = "s", geometry: KvGeometry | None = None) -> HostPoolView:
        """A host pool that is attached as ``storage_id``; with a ``geometry`` of hidden pages a hidden pool."""
        host = HostPoolView.create(SHM_PREFIX, geometry or self.runner.geometry, pages)
        self._hosts.append(host)
        self.give(AttachHostPool(storage_id=storage_id, handle=host.handle))
        return host

    # -- what came of them ------------------------------------------------------------------------------------

    @property
    def events(self) -> list[Event]:
        return [event for report in self.reports for event in report.events]

    def done(self) -> list[BatchDone]:
        return [event for event in self.events if isinstance(event, BatchDone)]

    def finished(self) -> list[RequestFinished | FinishedToo]:
        """Every end, however many of them an event tells."""
        ends: list[RequestFinished | FinishedToo] = []
        for event in self.events:
            if isinstance(event, RequestFinished):
                ends += [event, *event.others]
        return ends

    def preempted(self) -> list[RequestPreempted]:
        return [event for event in self.events if isinstance(event, RequestPreempted)]

    def promoted(self) -> list[PagesPromoted]:
        return [event for event in self.events if isinstance(event, PagesPromoted)]

    def hidden_saved(self) -> list[HiddenSaved]:
        return [event for event in self.events if isinstance(event, HiddenSaved)]

    def lease_requests(self) -> list[LeaseRequested]:
        return [event for event in self.events if isinstance(event, LeaseRequested)]

    def items(self, request_id: str = "r") -> list[TokenItem]:
        found = [item for report in self.reports for items in report.items.values() for item in items]
        return [item for item in found if item.request_id == request_id]

    def tokens(self, request_id: str = "r") -> list[int]:
        """The tokens told to the gateway, checked for gaps and repeats."""
        tokens: list[int] = []
        items = self.items(request_id)
        first = items[0].index if items else 0
        for item in items:
            assert item.index == first + len(tokens)
            tokens += item.tokens
        return tokens

    def text(self, request_id: str = "r") -> str:
        return "".join(item.text for item in self.items(request_id))


def admit(
    tokens: Sequence[int],
    pages: Sequence[int],
    *,
    request_id: str = "r",
    attempt: int = 1,
    gateway_id: str = "g",
    prompt_tokens: int | None = None,
    cached: int = 0,
    host_tokens: int = 0,
    disk_tokens: int = 0,
    params: SamplingParams | None = None,
    max_tokens: int = 8,
    hidden_lease: HiddenLease | None = None,
    sparse: SparsePrefix | None = None,
) -> AdmitRequest:
    return AdmitRequest(
        request_id=request_id,
        attempt=attempt,
        gateway_id=gateway_id,
        tokens=pack_int32(tokens),
        prompt_tokens=len(tokens) if prompt_tokens is None else prompt_tokens,
        sampling=params or SamplingParams(max_tokens=max_tokens, temperature=0),
        pages=pack_int32(pages),
        cached_tokens=cached,
        host_tokens=host_tokens,
        disk_tokens=disk_tokens,
        received_ns=1,
        accepted_ns=2,
        hidden_lease=hidden_lease,
        sparse=sparse,
    )


def chunk(start: int, end: int, *, request_id: str = "r", attempt: int = 1) -> PrefillChunk:
    return PrefillChunk(request_id=request_id, attempt=attempt, start=start, end=end)


def batch(
    *chunks: PrefillChunk,
    loads: Sequence[PageLoad] = (),
    fill_bubble: bool = False,
    restores: Sequence[RestoreChunk] = (),
    bubble_prefill: bool = False,
) -> RunBatch:
    return RunBatch(
        chunks=chunks,
        loads=tuple(loads),
        fill_bubble=fill_bubble,
        restores=tuple(restores),
        bubble_prefill=bubble_prefill,
    )


def extend(
    pages: Sequence[int], *, request_id: str = "r", attempt: int = 1, hidden_pages: Sequence[int] = ()
) -> ExtendLease:
    return ExtendLease(
        request_id=request_id, attempt=attempt, pages=pack_int32(pages), hidden_pages=pack_int32(hidden_pages)
    )


def preempt(request_id: str = "r", attempt: int = 1) -> PreemptRequest:
    return PreemptRequest(request_id=request_id, attempt=attempt)


def abort(request_id: str = "r", attempt: int = 1, *, reason: str = "cancelled") -> AbortRequest:
    return AbortRequest(request_id=request_id, attempt=attempt, reason=reason)


def back_up(host: HostPoolView, host_page: int, tokens: Sequence[int], index: int) -> None:
    """Put page ``index`` of ``tokens`` into a host page, as the model itself would have computed it."""
    size = GEOMETRY.page_size
    kv = kv_of(tokens)[index * size : (index + 1) * size]
    layer = np.concatenate((kv[:, 0].reshape(-1), kv[:, 1].reshape(-1))).view(np.uint8)
    host.pages[host_page] = np.broadcast_to(layer, host.pages[host_page].shape)
    host.seal_page(host_page, identity_of(f"{tokens[: (index + 1) * size]}"))


def load(
    tokens: Sequence[int],
    indexes: Sequence[int],
    host: Sequence[int],
    device: Sequence[int],
    *,
    request_id: str = "r",
    storage_id: str = "s",
) -> PageLoad:
    """Load pages ``indexes`` of ``tokens`` from host pages to device pages."""
    return page_load(host, device, labels_of(tokens, indexes), request_id=request_id, storage_id=storage_id)


def promote(
    tokens: Sequence[int],
    indexes: Sequence[int],
    host: Sequence[int],
    device: Sequence[int],
    *,
    promotion_id: int = 1,
    storage_id: str = "s",
) -> PromotePages:
    """Promote pages ``indexes`` of ``tokens`` from host pages to device pages."""
    return page_promotion(host, device, labels_of(tokens, indexes), promotion_id=promotion_id, storage_id=storage_id)


def labels_of(tokens: Sequence[int], indexes: Sequence[int]) -> list[str]:
    """What pages ``indexes`` of ``tokens`` are called: all tokens up to their end."""
    return [f"{tokens[: (index + 1) * GEOMETRY.page_size]}" for index in indexes]
