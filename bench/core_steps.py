"""``step`` with a long queue: a cell whose workers and storage answer at once, timed input by input."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

from bench.core_times import Times
from bench.million_nodes import MillionNodes, ask, fill_pools
from services.scheduler.core import Output
from shared.codec import Input
from shared.messages.base import pack_int32
from shared.messages.cell_events import CellConfig
from shared.messages.requests import CancelRequest
from shared.messages.storage_events import BackupDone
from shared.messages.storage_plans import BackupPages, StoragePlan
from shared.messages.worker_events import BatchDone, PagesPromoted, RequestFinished, RequestPreempted
from shared.messages.worker_plans import (
    AbortRequest,
    AdmitRequest,
    PreemptRequest,
    PromotePages,
    RunBatch,
    WorkerPlan,
)

CONFIG = CellConfig(max_queued=1_000_000, max_queued_tokens=1 << 40)
"""The defaults, with a queue that only the benchmark bounds."""

FREE_FRACTION = 0.052
"""Free pages of every device pool before the steps, just above the reserve: nearly each admission must evict."""

_MEASURED = 2000
_DOCUMENT_TOKENS = 4096


class Cell:
    """Folds inputs, times each, and keeps the answers that workers and storage owe."""

    def __init__(self, nodes: MillionNodes) -> None:
        self.nodes = nodes
        self.answers: deque[Input] = deque()
        self.times: dict[str, Times] = {}
        self._admitted: dict[str, AdmitRequest] = {}
        self._number = 0

    def fold(self, message: Input, *, is_measured: bool = True) -> None:
        """One step; its outputs become answers."""
        times = self.times.setdefault(type(message).__name__, Times()) if is_measured else Times()
        for output in times.take(partial(self.nodes.fold, message)):
            self._answer(output)

    def _answer(self, output: Output) -> None:
        if isinstance(output, StoragePlan) and isinstance(output.order, BackupPages):
            self.answers.append(
                BackupDone(
                    storage_id=output.storage_id,
                    incarnation=output.incarnation,
                    transfer_id=output.order.transfer_id,
                    ok=True,
                )
            )
        if not isinstance(output, WorkerPlan):
            return
        place: dict[str, Any] = {"worker_id": output.worker_id, "incarnation": output.incarnation}
        order = output.order
        if isinstance(order, AdmitRequest):
            self._admitted[order.request_id] = order
        elif isinstance(order, PromotePages):
            self.answers.append(PagesPromoted(**place, promotion_id=order.promotion_id, ok=True))
        elif isinstance(order, PreemptRequest):
            known = self._admitted.pop(order.request_id)
            self.answers.append(
                RequestPreempted(**place, request_id=known.request_id, attempt=known.attempt, output=b"")
            )
        elif isinstance(order, AbortRequest):
            raise SystemExit("nothing that runs is cancelled here")
        elif isinstance(order, RunBatch):
            self.answers.append(BatchDone(**place, plan=output.number))
            for chunk in order.chunks:
                known = self._admitted[chunk.request_id]
                if chunk.end == len(known.tokens) // 4:
                    self.answers.append(self._end(place, self._admitted.pop(chunk.request_id)))

    def _end(self, place: dict[str, Any], known: AdmitRequest) -> RequestFinished:
        output = pack_int32(range(known.sampling.max_tokens))
        return RequestFinished(
            **place, request_id=known.request_id, attempt=known.attempt, reason="length", output=output
        )

    def submit(self, *, is_measured: bool = True) -> str:
        """A new request: two in three ask about a known document, the others are new."""
        nodes = self.nodes
        self._number += 1
        name = f"request-{self._number}"
        if self._number % 3:
            document = nodes.documents[int(nodes.random.integers(len(nodes.documents)))]
            prompt = document[: _DOCUMENT_TOKENS * 4] + nodes.tokens(int(nodes.random.integers(16, 400)))
        else:
            prompt = nodes.tokens(int(nodes.random.integers(64, 3000)))
        self.fold(ask(name, prompt), is_measured=is_measured)
        return name


def measure(nodes: MillionNodes, *, queued: int) -> dict[str, Times]:
    """Times of every step, by its input, while about ``queued`` requests wait."""
    fill_pools(nodes, FREE_FRACTION)
    cell = Cell(nodes)
    state = nodes.state
    while state.queued < queued:
        cell.submit(is_measured=False)
    for number in range(_MEASURED):
        name = cell.submit()
        if number % 20 == 0:
            cell.fold(CancelRequest(request_id=name, gateway_id="gateway-0"))
        while cell.answers and state.queued > queued:
            cell.fold(cell.answers.popleft())
    together = Times()
    for times in cell.times.values():
        together.add(times)
    return cell.times | {"all": together}
